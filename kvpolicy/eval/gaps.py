"""What a folder lacks of what was asked for: an interrupted command, a shard, a cell that failed."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvpolicy.eval.cells import Cell


@dataclass(frozen=True)
class Gap:
    """A policy at a budget that was asked for, and whose result is not there.

    Args:
        policy: its name.
        budget: slots a KV head, or a share of the tokens seen; None where it keeps everything.
        seeds: those of the task that are not there; none where no seed is.
    """

    policy: str
    budget: int | float | None
    seeds: tuple[int, ...]


def gaps(groups: Iterable[tuple[str, Sequence[Cell]]], there: Container[str]) -> Iterator[Gap]:
    """Yield what is not there of one task in one mode.

    Args:
        groups: each policy at each budget, by what it is called, with its cells: one for each seed.
        there: names of the cells that have results.
    """
    for policy, cells in groups:
        missing = tuple(sorted(cell.seed for cell in cells if cell.name not in there))
        if missing:
            yield Gap(policy, cells[0].budget, missing if len(missing) < len(cells) else ())
