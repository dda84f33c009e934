import torch
from kvpolicy_example import NormDiversity

from kvpolicy.functional import score
from kvpolicy.testing import parametrize_with_checks


@parametrize_with_checks([NormDiversity(), NormDiversity(on="values")])
def test_it_keeps_the_contract_of_a_scorer(check) -> None:
    check()


def test_the_key_of_another_length_scores_highest() -> None:
    keys = torch.tensor([[[[3.0], [-3.0], [9.0]]]])
    assert score(NormDiversity(), None, keys, keys).argmax() == 2
