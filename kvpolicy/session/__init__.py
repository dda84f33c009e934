"""Sessions: a model run under a policy, and restored exactly.

A hook before each forward pass of the model's decoder puts evicting layers into an empty cache; the attention function
calls back once a layer has attended, and the slots that the policy does not keep are freed there and then.
"""

from __future__ import annotations

import kvpolicy.compat  # noqa: F401  (first: it says so where transformers is too old for the rest)

# isort: split
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvpolicy import attend
from kvpolicy.errors import InactiveSessionError, PolicyError, UnsupportedModelError
from kvpolicy.policy import Policy
from kvpolicy.report import Report
from kvpolicy.rotary import RotaryRecorder
from kvpolicy.session.bound import Bound
from kvpolicy.session.calls import CallWatch
from kvpolicy.session.change import ChangeWatch
from kvpolicy.session.decoder import arguments, cache_in, cache_name, find_decoders, uses_cache
from kvpolicy.session.facts import BeforeRope
from kvpolicy.session.layers import evictable_layers, evicting_layers, prepare, take_over, why_not
from kvpolicy.session.listening import listening_to
from kvpolicy.session.modality import ModalityWatch
from kvpolicy.session.parallel import head_group
from kvpolicy.session.run import CacheRun, run_of
from kvpolicy.session.watch import Watch
from kvpolicy.session.when import Prompt
from kvpolicy.step import forget


class _Now(threading.local):
    """What a thread is reading: of the prompt, what is known; of each block that makes one, the caches read into."""

    def __init__(self) -> None:
        self.prompt = Prompt()
        self.read: list[dict[int, tuple[CacheRun, DynamicCache]]] = []


class Session(Bound):
    """A context manager in which a model runs under a policy.

    Inside it, ``model.generate`` and a forward pass by hand evict; outside, the model is as it was. Sessions nest (the
    innermost takes new caches) and may be entered again.

    Args:
        policy: what to keep.
        model: any transformers decoder, or a module that holds one.
        inactive: "raise" or "warn": what to do when the policy could not act.
    """

    def __init__(self, policy: Policy, model: nn.Module, *, inactive: str = "raise") -> None:
        if inactive not in ("raise", "warn"):
            raise PolicyError(f"inactive: expected 'raise' or 'warn', got {inactive!r}")
        self.policy = policy
        self.report = Report(policy.name)
        self._inactive = inactive
        self._decoders = find_decoders(model)
        for decoder in self._decoders:
            policy.check_model(decoder.config)
        self.peers = head_group(self._decoders[0])
        self._watch = Watch(model, policy, self._swap)
        self._modality = ModalityWatch(model) if policy.needs.modality else None
        self._listening = {id(decoder): listening_to(decoder, policy) for decoder in self._decoders}
        self._now = _Now()
        self._entered = 0
        self._hooks: list[RemovableHandle] = []

    def __repr__(self) -> str:
        state = "active" if self.active else "not active"
        return f"<Session of policy '{self.policy.name}', {state}; what it did is in .report>"

    @property
    def active(self) -> bool:
        """Whether the session is entered."""
        return self._entered > 0

    @contextmanager
    def prompt(self) -> Iterator[None]:
        """Read one prompt in several forward passes by hand: under a policy whose `prefill` is "whole" it evicts at the
        end of the block.

        >>> import torch, kvpolicy
        >>> from transformers import DynamicCache
        >>> from kvpolicy.session.decoder import cache_name
        >>> from kvpolicy.testing.models import tiny
        >>> model, ids = tiny(), torch.arange(96)[None]
        >>> with kvpolicy.load("snapkv", budget=64).on(model) as run:
        ...     cache = DynamicCache()
        ...     with run.prompt():
        ...         for chunk in ids.split(32, dim=1):
        ...             _ = model(chunk, **{cache_name(model): cache})
        >>> run.report.to_dict()["layers"][0]["kept"]
        [[64, 64]]
        """
        if not self.active:
            raise InactiveSessionError("prompt: expected to be inside the session's `with` block")
        with self.unfinished() as read:
            yield
        for run, cache in read.values():
            run.settle(cache)

    @contextmanager
    def unfinished(self) -> Iterator[dict[int, tuple[CacheRun, DynamicCache]]]:
        """Read one prompt, from which "whole" evicts nothing, not at the end either; yield what is read into."""
        outer = self._swap(Prompt(unfinished=True))
        read: dict[int, tuple[CacheRun, DynamicCache]] = {}
        self._now.read.append(read)
        try:
            yield read
        finally:
            self._now.read.remove(read)
            self._swap(outer)

    def _swap(self, prompt: Prompt) -> Prompt:
        before, self._now.prompt = self._now.prompt, prompt
        return before

    def __enter__(self) -> Session:
        if not self._entered:
            self._attach()
        self._entered += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._entered -= 1
        if not self._entered:
            self._detach()

    def _attach(self) -> None:
        if self.policy.needs.pre_rope:
            for decoder in self._decoders:
                known = self._listening[id(decoder)]
                if known.before_rope is None:
                    before_rope = BeforeRope(decoder, evictable_layers(decoder.config))
                    self._listening[id(decoder)] = replace(known, before_rope=before_rope)
        switched: list[Any] = []
        try:
            for decoder in self._decoders:
                attend.switch(decoder.config)
                switched.append(decoder.config)
        except Exception:
            for config in switched:
                attend.restore(config)
            raise
        for decoder in self._decoders:
            # First in line, so that in nested sessions the innermost takes an empty cache.
            before = decoder.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            after = decoder.register_forward_hook(self._after, with_kwargs=True)
            self._hooks += [before, after]
        for listener in self._listeners():
            listener.attach()
        self._watch.begin()

    def _detach(self) -> None:
        self._watch.lift()
        for listener in self._listeners():
            listener.detach()
        forget()
        while self._hooks:
            self._hooks.pop().remove()
        for decoder in self._decoders:
            attend.restore(decoder.config)

    def _listeners(self) -> list[ModalityWatch | RotaryRecorder | CallWatch | ChangeWatch]:
        modality = [] if self._modality is None else [self._modality]
        return [*modality, *(one for each in self._listening.values() for one in each.listeners)]

    def _before(self, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = arguments(decoder, args, kwargs)
        cache = cache_in(given)
        if cache is None:
            if not uses_cache(decoder, given):
                self.cannot_act("it was called without a cache (use_cache=False)")
                return None
            cache = DynamicCache(config=decoder.config)
            args, kwargs = (), {**given, cache_name(decoder): cache}
        run = self._run_of(cache, decoder)
        if run is not None:
            modality = None if self._modality is None else self._modality.of_pass(given)
            run.begin(cache, given.get("attention_mask"), self._now.prompt, modality, given)
            # Also of a cache that was copied, or taken up again.
            self.report = run.report
            # A cache belongs to the outermost block that has read into it.
            if self._now.prompt.unfinished and not any(id(cache) in read for read in self._now.read):
                self._now.read[-1][id(cache)] = run, cache
        return args, kwargs

    def _after(self, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = cache_in(arguments(decoder, args, kwargs))
        run = run_of(cache)
        if run is not None and run.owner is self and run.finish():
            run.settle(cache)

    def _run_of(self, cache: Any, decoder: PreTrainedModel) -> CacheRun | None:
        run = run_of(cache)
        if run is not None:
            run.require_active()
            return run if run.owner is self else None
        refused = why_not(cache)
        if refused:
            self.cannot_act(refused)
            return None
        evictable = prepare(cache, decoder.config)
        if not evictable:
            self.cannot_act("it has no full-attention layer to evict from")
            return None
        run = CacheRun(self.policy, evictable, self, self._listening[id(decoder)])
        take_over(cache, evictable, run)
        run.report.left_alone = [index for index in range(len(cache.layers)) if index not in evictable]
        return run

    def adopt(self, cache: DynamicCache) -> None:
        """Take over an evicted cache of the same policy and model; no token read from now on belongs to a prompt.

        The session has to be entered, and the model to have one decoder.
        """
        run = run_of(cache)
        if run is None:
            raise InactiveSessionError("adopt: expected a cache that a session has evicted from")
        seen = max(layer.seen for layer in evicting_layers(cache))
        run.move(self, self._listening[id(self._decoders[0])], seen)
        self.report = run.report

    def cannot_act(self, reason: str) -> None:
        """Raise or warn that a policy which would evict could not; return None."""
        if self.policy.trivial:
            return
        message = f"policy '{self.policy.name}' could not act on this model: {reason}"
        if self._inactive == "raise":
            raise UnsupportedModelError(message)
        warnings.warn(message, stacklevel=3)
