import torch
from kvpolicy_example import NormDiversity

from kvpolicy.functional import score


def test_the_key_of_another_length_scores_highest() -> None:
    keys = torch.tensor([[[[3.0], [-3.0], [9.0]]]])
    assert score(NormDiversity(), None, keys, keys).argmax() == 2
