"""What a folder lacks of the grid that its results span: an interrupted command, a shard, a cell that failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicy.config import load
from kvpolicy.errors import PolicyError
from kvpolicy.eval.cells import Cell, digest
from kvpolicy.eval.grid import OF_PICTURES
from kvpolicy.eval.tasks.pictures import Pictures


@dataclass(frozen=True)
class Gap:
    """A policy at a budget whose result is not there.

    Args:
        policy: its name.
        budget: slots a KV head, or a share of the tokens seen; None where it keeps everything.
        seeds: those of the task that are not there; none where no seed is.
    """

    policy: str
    budget: int | float | None
    seeds: tuple[int, ...]


def gaps(cells: Sequence[Cell], every: Sequence[Cell]) -> list[Gap]:
    """Return which policies at which budgets others of a folder suggest, and a task in a mode has not.

    A budget that does not hold what a policy protects is not suggested, nor a policy of pictures for other tasks.

    Args:
        cells: of one task in one mode, with those that hold for either.
        every: all of the same model.
    """
    policies = {_own(cell.policy): cell for cell in every if _belongs(cell.policy, cells[0].task)}
    budgets = sorted({cell.budget for cell in every if cell.budget is not None})
    seeds = {cell.seed for cell in cells}
    there = {(_own(cell.policy), cell.budget, cell.seed) for cell in cells}
    found = []
    for own, cell in policies.items():
        for budget in budgets if cell.budget is not None else [None]:
            missing = tuple(sorted(seed for seed in seeds if (own, budget, seed) not in there))
            if missing and (budget is None or _holds(cell.policy, budget)):
                found.append(Gap(cell.policy["name"], budget, missing if len(missing) < len(seeds) else ()))
    return found


def _own(policy: Mapping[str, Any]) -> str:
    """Return what tells a policy from others at whatever budget."""
    budget = {name: part for name, part in policy["budget"].items() if name not in ("tokens", "keep")}
    return digest({**policy, "budget": budget})


def _belongs(policy: Mapping[str, Any], task: Mapping[str, Any]) -> bool:
    return task["task"] == Pictures.name or policy["name"] != OF_PICTURES["name"]


def _holds(policy: Mapping[str, Any], budget: int | float) -> bool:
    try:
        load(policy, budget=budget)
    except PolicyError:
        return False
    return True
