"""Which cells a comparison has: policies x budgets x tasks x modes, with the baselines that belong to every table."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.config import dump, load, load_at
from kvpolicy.errors import PolicyError
from kvpolicy.eval.bench import Bench
from kvpolicy.eval.cells import Cell, Mode, digest
from kvpolicy.eval.tasks.example import Task
from kvpolicy.eval.tasks.files import dump_task
from kvpolicy.eval.tasks.pictures import Pictures
from kvpolicy.policies import kvpolicy_policies
from kvpolicy.policy import Policy
from kvpolicy.session.fingerprint import fingerprint

ALWAYS = ("full", "random")
"""Policies of every table: what nothing can beat, and what everything must."""
WEIGHED = "ecokv-snapkv"
"""The policy whose redundancy weight is taken away where none of those asked for has one."""
ADAPTIVE = "redundancy-adaptive"
OF_PICTURES = {"name": "euclid-alone", "score": "euclidean-diversity", "select": {"sinks": 4, "recent": 8}}
"""What every table of pictures has besides: diversity without importance, which is hard to beat there."""
SHIPPED = "shipped"
"""Stands for every policy that is part of kvpolicy."""
BUDGETS = "--budgets"
"""The option that budgets come by, for errors."""


def policies(
    asked: Sequence[str],
    budgets: Sequence[int | float],
    *,
    left_out: Callable[[str, int | float], None] = lambda name, budget: None,
) -> list[Policy]:
    """Return the policies of a table, at each budget; those that keep everything once.

    To those asked for, of which `SHIPPED` stands for all that a budget holds, come `ALWAYS`, and for each that weighs
    by redundancy the same without that weight.

    Args:
        asked: names and paths, as `kvpolicy.load` takes them.
        budgets: slots a KV head, or shares.
        left_out: called with each policy that `SHIPPED` stands for and that protects more slots than a budget has.

    Raises:
        PolicyFileError: when one is wrong, or a budget does not hold what it protects.

    >>> [policy.name for policy in policies(["snapkv", "ecokv"], [64])]
    ['full', 'random', 'snapkv', 'ecokv', 'ecokv, no redundancy weight']
    """
    found = {}
    named = {*ALWAYS, *asked}
    for name in _names(asked):
        own = load(name)
        for budget in budgets:
            try:
                policy = own if own.trivial else _at(name, budget, asked)
            except PolicyError:
                if name in named:
                    raise
                left_out(name, budget)
            else:
                found[digest(dump(policy))] = policy
    weighed = list(found.values())
    ablated = [one for one in map(without_weight, weighed) if one]
    if not ablated:
        ablated = [one for one in (without_weight(_at(WEIGHED, budget, asked)) for budget in budgets) if one]
    return [*weighed, *ablated]


def shipped() -> list[str]:
    """Return the names of the policies that are part of kvpolicy.

    >>> {"snapkv", "ecokv"} <= set(shipped())
    True
    """
    return sorted(path.stem for path in kvpolicy_policies().glob("*.yaml"))


def _names(asked: Sequence[str]) -> list[str]:
    named = [name for word in asked for name in (shipped() if word == SHIPPED else [word])]
    return list(dict.fromkeys([*ALWAYS, *named]))


def _at(name: str, budget: int | float, asked: Sequence[str]) -> Policy:
    besides = "" if name in asked else ", part of every table"
    return load_at(name, budget, f"{BUDGETS}: policy {name!r}{besides}")


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
        weights = fingerprint(bench.model).weights
        for task in self.tasks:
            plain = dump_task(task)
            # Drift draws nothing: under another seed its examples would be counted twice.
            seed = 0 if task.name == "drift" else self.seed
            examples = digest(list(bench.examples(task, seed)))
            for policy in [*self.policies, *self._besides(task)]:
                files = {str(path): _content(path) for path in _files(policy)}
                for mode in self._modes(policy, task):
                    yield Cell(bench.name, weights, dump(policy), plain, mode, seed, examples, files)

    def _besides(self, task: Task) -> Iterator[Policy]:
        """Yield the policies that belong to the tables of one kind of task only, at each budget."""
        if task.name == Pictures.name:
            evicting = [policy.budget for policy in self.policies if not policy.trivial]
            budgets = dict.fromkeys(budget.tokens or budget.keep for budget in evicting)
            yield from (load(OF_PICTURES, budget=budget) for budget in budgets)

    def _modes(self, policy: Policy, task: Task) -> Sequence[Mode]:
        if task.name == "drift":
            return ["query-agnostic"]
        return ["either"] if policy.trivial else self.modes


def _files(part: Any) -> Iterator[Path]:
    """Yield the paths that a policy, or a part of one, has among its settings."""
    if isinstance(part, Path):
        yield part
    elif isinstance(part, tuple | list):
        for each in part:
            yield from _files(each)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from _files(getattr(part, field.name))


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def shard(cells: Sequence[Cell], index: int, count: int) -> Sequence[Cell]:
    """Return the cells of shard `index`, from 1, of `count`."""
    return cells[index - 1 :: count]
