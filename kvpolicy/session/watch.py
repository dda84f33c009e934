"""Watching `generate`: what only its caller knows, where the prompt ends, and what cannot run under a policy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import GenerationMixin

from kvpolicy.compat import CACHE_NAMES
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.policy import Policy
from kvpolicy.session.when import Prompt

_WATCHED = ("generate", "generate_batch")
_DRAFTS = ("assistant_model", "prompt_lookup_num_tokens")
_OWN_DRAFTS = ("assistant_early_exit", "use_mtp", "speculation_type")


class Watch:
    """Stands before `generate` of every generating module inside a model, until it is lifted.

    Args:
        model: the model, or a module that holds it.
        policy: what runs.
        swap: takes what is known of the prompt that is read from now on, and returns what was known before.
    """

    def __init__(self, model: nn.Module, policy: Policy, swap: Callable[[Prompt], Prompt]) -> None:
        self._policy = policy
        self._swap = swap
        self._watched = [module for module in model.modules() if isinstance(module, GenerationMixin)]
        self._own: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Take the place of `generate` and `generate_batch`."""
        for module in self._watched:
            self._own.append({name: vars(module)[name] for name in _WATCHED if name in vars(module)})
            vars(module).update(generate=self._generate(module), generate_batch=_refuse_batch)

    def lift(self) -> None:
        """Give every module its own back."""
        for module, own in zip(self._watched, self._own, strict=True):
            for name in _WATCHED:
                vars(module).pop(name, None)
            vars(module).update(own)
        self._own.clear()

    def _generate(self, module: Any) -> Callable[..., Any]:
        own = module.generate

        @functools.wraps(own)
        def generate(*args: Any, **kwargs: Any) -> Any:
            outer = self._swap(self._prompt(module, own, args, kwargs))
            try:
                return own(*args, **kwargs)
            finally:
                self._swap(outer)

        return generate

    def _prompt(self, module: Any, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prompt:
        given = inspect.signature(own).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        config = given.get("generation_config") or module.generation_config

        def setting(name: str) -> Any:
            return given[name] if name in given else getattr(config, name, None)

        for name in _OWN_DRAFTS:
            if setting(name):
                raise UnsupportedModelError(
                    f"generate({name}=...): expected drafts of another model or of the prompt, got drafts of the model "
                    "itself, from whose cache its session would evict"
                )
        drafts = [name for name in _DRAFTS if setting(name)]
        if drafts and self._policy.decode is not None:
            raise UnsupportedModelError(
                f"policy '{self._policy.name}' evicts while decoding: expected decoding without drafts, got "
                f"{drafts[0]}: drafts that are taken back would have decided what is evicted"
            )
        cache = next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
        if drafts and cache is not None and cache.get_seq_length():
            raise UnsupportedModelError(
                f"generate({drafts[0]}=...): expected an empty cache, got one that has seen {cache.get_seq_length()} "
                "tokens: transformers would read all tokens of the prompt into it again"
            )
        if not drafts and setting("prefill_chunk_size") is None:
            return Prompt()
        return Prompt(end=_length(given))


def _refuse_batch(*_: Any, **__: Any) -> None:
    raise UnsupportedModelError(
        "generate_batch: continuous batching keeps a paged cache of its own and ignores any other: no policy can act. "
        "Use generate."
    )


def _length(given: dict[str, Any]) -> int:
    """Return how many tokens will have been seen once the prompt of a call of `generate` is read."""
    for name in ("attention_mask", "inputs_embeds", "inputs", "input_ids"):
        if given.get(name) is not None:
            return int(given[name].shape[1])
    cache = next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
    return 1 if cache is None else int(cache.get_seq_length()) + 1
