"""When a pass evicts: a pure decision, from lengths alone."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.policy import Policy


@dataclass(frozen=True)
class Prompt:
    """What is known of the prompt that a pass belongs to.

    Args:
        end: how many tokens will have been seen once it is read; None where each pass is a prompt of its own.
        unfinished: whether more passes may follow, nobody knows how many.
    """

    end: int | None = None
    unfinished: bool = False


def eviction_point(policy: Policy, prompt: Prompt, *, start: int, end: int, settled: int) -> int | None:
    """Return how many tokens will have been seen when a pass evicts, or None where it does not.

    A point before the end of the pass is the end of the prompt: the drafts that come after it in the same pass see what
    was kept, as they would in passes of their own.

    Args:
        policy: what says whether chunks of a prompt evict, and whether decoding does.
        prompt: what is known of the prompt.
        start: tokens seen before the pass.
        end: tokens seen after it.
        settled: tokens seen at the last eviction.

    >>> from kvpolicy import load
    >>> eviction_point(load("snapkv"), Prompt(end=10), start=0, end=8, settled=0) is None
    True
    >>> eviction_point(load("snapkv"), Prompt(end=10), start=8, end=13, settled=0)
    10
    """
    chunked = policy.prefill == "chunks"
    if prompt.unfinished:
        return end if chunked else None
    if reads(prompt, start, end):
        prompt_end = end if prompt.end is None else prompt.end
        return min(end, prompt_end) if chunked or end >= prompt_end else None
    due = policy.decode is not None and end - settled >= policy.decode.every
    return end if due else None


def reads(prompt: Prompt, start: int, end: int) -> bool:
    """Return whether a pass over the tokens from `start` to `end` reads a part of the prompt; else it decodes."""
    if prompt.unfinished:
        return True
    if prompt.end is None:
        return end - start > 1 or start == 0
    return start < prompt.end


def unread(prompt: Prompt, end: int) -> bool:
    """Return whether a part of the prompt may still be unread when `end` tokens have been seen."""
    return prompt.unfinished or (prompt.end is not None and end < prompt.end)
