"""The policy that a plugin is checked in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import kvpolicy
from kvpolicy.evicted.drop import Drop
from kvpolicy.plugin import kind_of, walk
from kvpolicy.policy import Budget, Decode, Policy
from kvpolicy.registry import registry
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.selectors.top_k import TopK


def tokens_for(plugin: Any) -> int:
    """Return the budget of `policy_with`, in slots a KV head: 16, or what a selector protects and some more."""
    protects = plugin.protects if kind_of(type(plugin)) == "selector" else 0
    return max(16, protects + 4 if isinstance(protects, int) else 0)


def policy_with(plugin: Any, *, decode: Decode | None = None) -> Policy:
    """Return a policy that keeps `tokens_for` slots, with the plugin in its place and a plain one in every other."""
    kind = kind_of(type(plugin))
    score = plugin if kind in ("scorer", "combiner") else KeyNorm()
    shares = {kind: plugin} if kind in ("layers", "heads") else {}
    select = plugin if kind == "selector" else TopK(sinks=2, recent=4)
    budget = Budget(tokens=tokens_for(plugin), **shares)
    evicted = plugin if kind == "evicted" else Drop()
    return Policy(name="conformance", score=score, budget=budget, select=select, evicted=evicted, decode=decode)


@contextmanager
def known(plugin: Any) -> Iterator[None]:
    """Register the classes of a plugin and of the plugins below it, for as long as the block lasts."""
    nodes = list(walk(plugin)) if kind_of(type(plugin)) in ("scorer", "combiner") else [plugin]
    registered = {entry.value for entry in registry().entries()}
    with ExitStack() as stack:
        for cls in {type(node) for node in nodes} - registered:
            stack.enter_context(kvpolicy.register(cls))
        yield
