"""`Listening`: what stands beside a decoder while it reads, where a policy needs more than keys, values and queries."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from kvpolicy.policy import Policy
from kvpolicy.rotary import RotaryRecorder
from kvpolicy.session.calls import CallWatch
from kvpolicy.session.change import ChangeWatch
from kvpolicy.session.facts import BeforeRope
from kvpolicy.session.layers import evictable_layers
from kvpolicy.session.repetition import Repeater


@dataclass(frozen=True)
class Listening:
    """Each is there where the policy needs it, else None.

    Args:
        before_rope: takes keys back to before RoPE.
        calls: reads what attention modules are called with.
        repeat: has the model repeat the prompt.
        change: sees how little each layer's attention changes.
    """

    before_rope: BeforeRope | None = None
    calls: CallWatch | None = None
    repeat: Repeater | None = None
    change: ChangeWatch | None = None

    @property
    def listeners(self) -> list[RotaryRecorder | CallWatch | ChangeWatch]:
        """Those that hook the decoder's modules."""
        recorder = None if self.before_rope is None else self.before_rope.recorder
        return [each for each in (recorder, self.calls, self.change) if each is not None]


def listening_to(decoder: PreTrainedModel, policy: Policy) -> Listening:
    """Return what `policy` needs of `decoder`, but for keys before RoPE, which need a pass of it."""
    needs = policy.needs
    if policy.trivial:
        return Listening()
    return Listening(
        calls=CallWatch(decoder, evictable_layers(decoder.config)) if needs.call else None,
        repeat=Repeater(decoder, needs.repetition) if needs.repetition else None,
        change=ChangeWatch(decoder) if needs.change else None,
    )
