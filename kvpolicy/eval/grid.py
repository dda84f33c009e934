"""Which cells a comparison has: policies x budgets x tasks x modes, with the baselines that belong to every table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicy.config import dump, load
from kvpolicy.eval.bench import Bench
from kvpolicy.eval.cells import Cell, Mode, digest
from kvpolicy.eval.tasks.example import Task
from kvpolicy.eval.tasks.files import dump_task
from kvpolicy.policy import Policy
from kvpolicy.session.decoder import find_decoders
from kvpolicy.session.fingerprint import fingerprint

ALWAYS = ("full", "random")
"""Policies of every table: what nothing can beat, and what everything must."""
WEIGHED = "ecokv-snapkv"
"""The policy whose redundancy weight is taken away where none of those asked for has one."""
ADAPTIVE = "redundancy-adaptive"


def policies(asked: Sequence[str], budgets: Sequence[int | float]) -> list[Policy]:
    """Return the policies of a table, at each budget; those that keep everything once.

    To those asked for come `ALWAYS`, and for each that weighs by redundancy the same without that weight.

    Raises:
        PolicyFileError: when one is wrong, or a budget does not hold what it protects.

    >>> [policy.name for policy in policies(["snapkv", "ecokv"], [64])]
    ['full', 'random', 'snapkv', 'ecokv', 'ecokv, no redundancy weight']
    """
    found = {}
    for name in dict.fromkeys([*ALWAYS, *asked]):
        for budget in budgets:
            policy = load(name) if load(name).trivial else load(name, budget=budget)
            found[digest(dump(policy))] = policy
    weighed = list(found.values())
    ablated = [one for one in map(without_weight, weighed) if one]
    if not ablated:
        ablated = [one for one in (without_weight(load(WEIGHED, budget=budget)) for budget in budgets) if one]
    return [*weighed, *ablated]


def without_weight(policy: Policy) -> Policy | None:
    """Return the same policy with diversity and importance mixed half and half in every head.

    None where it does not weigh them by redundancy.

    >>> without_weight(load("snapkv")) is None
    True
    >>> without_weight(load("ecokv")).score.redundancy
    0.5
    """
    plain = dump(policy)
    score = _halved(plain["score"])
    if score == plain["score"]:
        return None
    name = f"{policy.name}, no redundancy weight"
    return load({**plain, "name": name, "description": "Diversity and importance half and half", "score": score})


def _halved(part: Any) -> Any:
    """Return a part of a score tree with a redundancy of one half wherever one is measured."""
    if isinstance(part, list):
        return [_halved(each) for each in part]
    if not isinstance(part, dict):
        return part
    below = {name: _halved(each) for name, each in part.items()}
    return {**below, "redundancy": 0.5} if part.get("type") == ADAPTIVE else below


@dataclass(frozen=True)
class Grid:
    """All that is to be measured on one model.

    Args:
        policies: each with its budget.
        tasks: what they are compared on.
        modes: with the question in view, without, or both.
        seed: of the tasks.
    """

    policies: Sequence[Policy]
    tasks: Sequence[Task]
    modes: Sequence[Mode]
    seed: int = 0

    def cells(self, bench: Bench) -> list[Cell]:
        """Return the cells, task by task, so that what those of a task share is computed once."""
        return list(self._cells(bench))

    def _cells(self, bench: Bench) -> Iterator[Cell]:
        weights = fingerprint(find_decoders(bench.model)[0]).weights
        for task in self.tasks:
            plain = dump_task(task)
            examples = digest(list(bench.examples(task, self.seed)))
            for policy in self.policies:
                for mode in self._modes(policy, task):
                    yield Cell(bench.name, weights, dump(policy), plain, mode, self.seed, examples)

    def _modes(self, policy: Policy, task: Task) -> Sequence[Mode]:
        if task.name == "drift":
            return ["query-agnostic"]
        return ["either"] if policy.trivial else self.modes


def shard(cells: Sequence[Cell], index: int, count: int) -> Sequence[Cell]:
    """Return the cells of shard `index`, from 1, of `count`."""
    return cells[index - 1 :: count]
