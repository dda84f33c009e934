"""What a bench has read is shared by policies, and changes nothing but how often the model reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from test_calls import asking
from test_context import OTHER, POLICIES, policy_of, tokens
from transformers import PreTrainedModel

import kvpolicy
from kvpolicy.eval import readings
from kvpolicy.eval.readings import Readings
from kvpolicy.testing.architectures.build import Case
from kvpolicy.testing.architectures.build import tiny_model as latent
from kvpolicy.testing.models import tiny

TEXT = tokens(1, 64)


@contextmanager
def passes(model: PreTrainedModel) -> Iterator[list[int]]:
    """Yield what grows by the length of each forward pass of the model."""
    found: list[int] = []

    def count(module: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        found.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    yield found
    hook.remove()


def test_policies_share_one_pass() -> None:
    model = tiny()
    held = Readings(model)
    with passes(model) as found:
        for policy in (POLICIES["dense"], POLICIES["ragged"], POLICIES["full"], POLICIES["quantized"]):
            got = held.compress(policy, "text", TEXT)
            assert got.policy is policy
            want = policy.compress(model, TEXT)
            assert found.pop() == 64
            assert got.report.to_dict()["layers"] == want.report.to_dict()["layers"]
    # Dense reads 8 queries; ragged reads 32, so that the text is read once more.
    assert found == [64, 64]


def test_texts_and_questions_have_passes_of_their_own() -> None:
    model, policy = tiny(), POLICIES["dense"]
    held = Readings(model)
    with passes(model) as found:
        for _ in range(2):
            held.compress(policy, "one", TEXT)
            held.compress(policy, "other", tokens(1, 50))
            held.compress(policy, "asked", TEXT, OTHER)
        assert found == [64, 50, 64 + 9 - 1]
        held.clear()
        held.compress(policy, "one", TEXT)
    assert found[3:] == [64]


def test_no_more_is_held_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, policy = tiny(), POLICIES["dense"]
    held = Readings(model)
    monkeypatch.setattr(readings, "LIMIT", kvpolicy.read(model, TEXT, policies=[policy]).bytes)
    with passes(model) as found:
        for key in ("one", "other", "one", "other"):
            assert held.compress(policy, key, TEXT).report.bytes == policy.compress(model, TEXT).report.bytes
            found.pop()
    assert found == [64, 64, 64]


def test_what_cannot_share_reads_alone() -> None:
    model, called = tiny(), asking()
    derives = latent(Case("text", "deepseek_v3", "DeepseekV3ForCausalLM"))
    # That keys are derived shows only once they are read. Older releases of transformers cache the keys themselves.
    many = 3 if kvpolicy.read(derives, TEXT, policies=[POLICIES["dense"]]).derived else 1
    for one, policy, often in (
        (model, called, 2),
        (derives, POLICIES["dense"], many),
        (derives, policy_of("ada-kv"), many),
    ):
        held = Readings(one)
        with passes(one) as found:
            got = [held.compress(policy, "text", TEXT).report.to_dict()["layers"] for _ in range(2)]
        assert len(found) == often
        want = policy.compress(one, TEXT).report.to_dict()["layers"]
        assert got == [want, want]
