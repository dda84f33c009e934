"""Any policy as a press: what kvpress's pipeline and its evaluation take."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

import kvpolicy
from kvpolicy import Policy
from kvpolicy.errors import PolicyError, SettingError, UnsupportedModelError
from kvpolicy.report import Report
from kvpolicy.session.decoder import arguments, cache_in, find_decoders
from kvpolicy.session.layers import lengths
from kvpolicy.store.settings import Plain
from kvpolicy_kvpress.kept import release
from kvpolicy_kvpress.make import kvpress


@dataclass(init=False, repr=False)
class PolicyPress(kvpress().BasePress):  # type: ignore[misc]
    """A policy as a press of kvpress.

    Inside ``with press(model):`` the policy runs as in any session. At the end of the block every cache that was read
    into becomes one that needs no session: it holds what was kept and no more, and its length is the number of slots of
    its longest head, as after any press. Whoever reads on gives the positions, as kvpress's pipeline does.

    Args:
        policy: a policy, or what `kvpolicy.load` takes: a name, a path, a mapping.
        overrides: settings over those of the policy, as of `kvpolicy.load`.

    Raises:
        PolicyError: when the policy evicts while decoding, or holds slots in another store than `plain`.

    >>> from kvpolicy_kvpress import PolicyPress
    >>> press = PolicyPress("ecokv-snapkv", budget=512)
    >>> press
    PolicyPress('ecokv-snapkv', tokens=512)
    >>> press.compression_ratio = 0.75
    >>> press
    PolicyPress('ecokv-snapkv', keep=0.25)
    """

    policy: Policy

    def __init__(self, policy: Policy | str | Path | Mapping[str, Any], **overrides: Any) -> None:
        if isinstance(policy, Policy) and not overrides:
            self.policy = policy
        else:
            self.policy = kvpolicy.load(policy.to_dict() if isinstance(policy, Policy) else policy, **overrides)
        self.report: Report | None = None
        here = f"PolicyPress of policy '{self.policy.name}'"
        if self.policy.decode is not None:
            raise PolicyError(
                f"{here}: expected a policy without `decode`, as a press is over when decoding begins: use "
                "policy.on(model)"
            )
        if not isinstance(self.policy.store, Plain):
            raise PolicyError(
                f"{here}: expected `store: plain`, as its cache is left to other code, got '{self.policy.store.name}': "
                "use policy.on(model)"
            )

    def __repr__(self) -> str:
        budget = self.policy.budget
        size = f"tokens={budget.tokens}" if budget.keep is None else f"keep={budget.keep}"
        return f"PolicyPress({self.policy.name!r}, {size})"

    @property
    def compression_ratio(self) -> float:
        """The share evicted: of a budget in tokens, what the last run evicted, nan where none has read anything.

        Setting it replaces the budget, ``keep`` being what it leaves.

        Raises:
            SettingError: when it is set to anything but a number in [0, 1).
        """
        if self.policy.budget.keep is not None:
            return 1 - self.policy.budget.keep
        records = [] if self.report is None else self.report.layers.values()
        seen = sum(record.seen * len(row) for record in records for row in record.kept)
        return 1 - sum(sum(row) for record in records for row in record.kept) / seen if seen else math.nan

    @compression_ratio.setter
    def compression_ratio(self, ratio: float) -> None:
        if not isinstance(ratio, Real) or isinstance(ratio, bool) or not 0 <= ratio < 1:
            raise SettingError(
                "PolicyPress", [(("compression_ratio",), "value_error", "expected a share in [0, 1)", ratio)]
            )
        # As written: 1 - 0.9 is a little less than 0.1.
        keep = float(1 - Fraction(str(ratio)))
        self.policy = replace(self.policy, budget=replace(self.policy.budget, tokens=None, keep=keep))

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[None]:
        """Run `model` under the policy; caches read into are on their own afterwards.

        Raises:
            UnsupportedModelError: when the policy cannot act on the model, some layer does not keep all tokens, or
                another press acts on the model too.
        """
        decoder = _decoder(model)
        caches: dict[int, weakref.ref[DynamicCache]] = {}

        def alone(*_: Any) -> None:
            self._require_alone(decoder)

        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            cache = cache_in(arguments(decoder, args, kwargs))
            if cache is not None:
                caches[id(cache)] = weakref.ref(cache)

        session = self.policy.on(model)
        handles = decoder.register_forward_pre_hook(alone), decoder.register_forward_hook(note, with_kwargs=True)
        try:
            with session:
                yield
        finally:
            for handle in handles:
                handle.remove()
            self.report = session.report
            for cache in (one() for one in caches.values()):
                # A pass that failed may have left its layers with tokens that others have not.
                if cache is not None and len(lengths(cache)) == 1:
                    release(cache, decoder)

    def _require_alone(self, decoder: PreTrainedModel) -> None:
        """Raise when another press has hooks on the modules of `decoder`."""
        hooks = (hook for module in decoder.modules() for hook in module._forward_hooks.values())
        owners = (getattr(hook, "__self__", None) for hook in hooks)
        other = next((owner for owner in owners if isinstance(owner, kvpress().BasePress)), None)
        if other is not None:
            self._refuse(f"{type(other).__name__} too, which would evict from the same cache")

    def _refuse(self, got: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{self!r}: expected to be the only press on a model or in a pipeline, got {got}: join scores with a "
            "combiner of kvpolicy, where a press is `{type: kvpress, press: ...}`"
        )

    def compress(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a policy decides for a whole model."""
        self._refuse("a place inside another press")

    forward_hook = compress


def _decoder(model: PreTrainedModel) -> PreTrainedModel:
    found = find_decoders(model)
    if len(found) > 1:
        raise UnsupportedModelError(f"PolicyPress: expected one decoder, got {len(found)} in {type(model).__name__}")
    kinds = [type(layer) for layer in DynamicCache(config=found[0].config).layers]
    others = [index for index, kind in enumerate(kinds) if kind is not DynamicLayer]
    if others:
        raise UnsupportedModelError(
            f"PolicyPress: expected layers that keep every token, as the cache is given one length, got "
            f"{kinds[others[0]].__name__} in layers {others}: use policy.on(model)"
        )
    return found[0]
