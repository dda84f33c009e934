"""Watching `generate`: what only its caller knows, where the prompt ends, and what cannot run under a policy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from transformers import GenerationMixin

from kvpolicy.compat import CACHE_NAMES
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.policy import Policy
from kvpolicy.session.bound import Bound
from kvpolicy.session.when import Prompt

_NAMES = ("generate", "generate_batch")
DRAFTS = ("assistant_model", "prompt_lookup_num_tokens")
"""Settings of `generate` that ask for drafts of another model or of the prompt."""

_OWN_DRAFTS = ("assistant_early_exit", "use_mtp", "speculation_type")


class Watch:
    """What a session wants to know of `generate`, of every generating module inside a model, until it is lifted.

    Args:
        model: the model, or a module that holds it.
        policy: what runs.
        swap: takes what is known of the prompt that is read from now on, and returns what was known before.
    """

    def __init__(self, model: nn.Module, policy: Policy, swap: Callable[[Prompt], Prompt]) -> None:
        self.policy = policy
        self.swap = swap
        self._modules = [module for module in model.modules() if isinstance(module, GenerationMixin)]

    def begin(self) -> None:
        """Stand before `generate`; `generate_batch` is refused from now on."""
        for module in self._modules:
            if not isinstance(vars(module).get("generate"), _Watched):
                vars(module).update(generate=_Watched(module), generate_batch=_Refused())
            vars(module)["generate"].watches.append(self)

    def lift(self) -> None:
        """Stand before it no longer; the last one gives every module its own back."""
        for module in self._modules:
            watched = vars(module).get("generate")
            if isinstance(watched, _Watched):
                watched.watches.remove(self)
                if not watched.watches:
                    watched.give_back()


class _Watched(Bound):
    """A module's `generate`, watched."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._own = {name: vars(module)[name] for name in _NAMES if name in vars(module)}
        self._generate = module.generate
        # Those of the sessions that are entered, outermost first.
        self.watches: list[Watch] = []
        functools.update_wrapper(self, module.generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.watches:
            # Bound in a session that has ended: what the module has now counts.
            now = vars(self._module).get("generate")
            return (now if isinstance(now, _Watched) else self._generate)(*args, **kwargs)
        given = inspect.signature(self._generate).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        # The innermost takes new caches. Those that are not its own were refused, or let in, when their session was.
        prompt = _prompt(self._module, given, self.watches[-1].policy)
        swaps = [watch.swap for watch in self.watches]
        outer = [swap(prompt) for swap in swaps]
        try:
            return self._generate(*args, **kwargs)
        finally:
            for swap, before in zip(swaps, outer, strict=True):
                swap(before)

    def give_back(self) -> None:
        """Leave the module, which has its own again."""
        for name in _NAMES:
            vars(self._module).pop(name, None)
        vars(self._module).update(self._own)


class _Refused(Bound):
    """A module's `generate_batch`, refused."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedModelError(
            "generate_batch: continuous batching keeps a paged cache of its own and ignores any other: no policy can "
            "act. Use generate."
        )


def setting(module: Any, given: dict[str, Any], name: str) -> Any:
    """Return a setting of a call of `generate`: as given, of the config given, or of the model's own config."""
    if given.get(name) is not None:
        return given[name]
    configs = (given.get("generation_config"), module.generation_config)
    return next((found for config in configs if (found := getattr(config, name, None)) is not None), None)


def _prompt(module: Any, given: dict[str, Any], policy: Policy) -> Prompt:
    """Return what a call of `generate` says of the prompt.

    Raises:
        UnsupportedModelError: when it asks for what cannot run under the policy.
    """
    for name in _OWN_DRAFTS:
        if setting(module, given, name):
            raise UnsupportedModelError(
                f"generate({name}=...): expected drafts of another model or of the prompt, got drafts of the model "
                "itself, from whose cache its session would evict"
            )
    drafts = [name for name in DRAFTS if setting(module, given, name)]
    if drafts:
        _check_drafts(module, given, policy, drafts[0])
    if not drafts and setting(module, given, "prefill_chunk_size") is None:
        return Prompt()
    return Prompt(end=_length(given))


def _check_drafts(module: Any, given: dict[str, Any], policy: Policy, name: str) -> None:
    if policy.decode is not None:
        raise UnsupportedModelError(
            f"policy '{policy.name}' evicts while decoding: expected decoding without drafts, got {name}: drafts that "
            "are taken back would have decided what is evicted"
        )
    cache = next((given[one] for one in CACHE_NAMES if given.get(one) is not None), None)
    if cache is not None and cache.get_seq_length():
        raise UnsupportedModelError(
            f"generate({name}=...): expected an empty cache, got one that has seen {cache.get_seq_length()} tokens: "
            "transformers would read all tokens of the prompt into it again"
        )
    assistant = given.get("assistant_model")
    if isinstance(getattr(assistant, "generate", None), _Watched):
        raise UnsupportedModelError(
            "generate(assistant_model=...): expected an assistant outside of any session, got one that is in a session "
            "itself: its own drafts would be evicted for"
        )
    if setting(module, given, "output_attentions"):
        raise UnsupportedModelError(
            f"generate({name}=..., output_attentions=True): expected one of the two, as a pass that evicts in its "
            "middle has no attention weights of one shape"
        )


def _length(given: dict[str, Any]) -> int:
    """Return how many tokens will have been seen once the prompt of a call of `generate` is read."""
    for name in ("attention_mask", "inputs_embeds", "inputs", "input_ids"):
        if given.get(name) is not None:
            return int(given[name].shape[1])
    cache = next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
    return 1 if cache is None else int(cache.get_seq_length()) + 1
