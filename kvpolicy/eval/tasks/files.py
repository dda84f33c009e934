"""Tasks by name, from a YAML file, or from a user's own examples; and back to plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpolicy.config.build import make
from kvpolicy.config.source import Item, Place, compose, fault, from_python, read_text, show
from kvpolicy.errors import PolicyFileError, nearest
from kvpolicy.eval.tasks.drift import DriftTask
from kvpolicy.eval.tasks.example import Task
from kvpolicy.eval.tasks.haystack import TaskError
from kvpolicy.eval.tasks.needles import MultiKeyNeedle, MultiQueryNeedle, MultiValueNeedle, SingleNeedle
from kvpolicy.eval.tasks.odd import OddOneOut
from kvpolicy.eval.tasks.own import OwnExamples
from kvpolicy.eval.tasks.pictures import Pictures
from kvpolicy.eval.tasks.tracking import VariableTracking
from kvpolicy.eval.tasks.words import CommonWords, FrequentWords

KINDS: dict[str, type] = {
    kind.name: kind
    for kind in (
        DriftTask,
        SingleNeedle,
        MultiKeyNeedle,
        MultiValueNeedle,
        MultiQueryNeedle,
        VariableTracking,
        CommonWords,
        FrequentWords,
        OddOneOut,
        Pictures,
        OwnExamples,
    )
}
"""Every kind of task by its name."""


def load_tasks(asked: str, overrides: Mapping[str, Any] | None = None) -> list[Task]:
    """Return the tasks that a word stands for: a kind, a YAML file of tasks, or a JSON lines file of examples.

    Args:
        asked: the kind's name, or a path: one that has a '/' or ends in .yaml, .yml or .jsonl.
        overrides: settings laid over those of each task that has them.

    Raises:
        TaskError: when there is no such kind or file, or a setting is wrong; of a file, says in which line.

    >>> load_tasks("niah-single", {"length": 256})[0].length
    256
    """
    try:
        return [_task(each, overrides or {}) for each in _items(asked)]
    except PolicyFileError as error:
        raise TaskError(str(error)) from None


def dump_task(task: Task) -> dict[str, Any]:
    """Return a task in full as plain data: its kind as ``task``, then its settings; `from_plain` reads it back."""
    return {"task": task.name, **dataclasses.asdict(task)}  # type: ignore[call-overload]  # a task is a dataclass


def from_plain(task: Mapping[str, Any]) -> Task:
    """Return the task that `dump_task` made plain data of."""
    return _task(from_python(task, Place("task")), {})


def _items(asked: str) -> list[Item]:
    path, place = Path(asked), Place("--tasks")
    if path.suffix == ".jsonl":
        return [from_python({"task": OwnExamples.name, "file": asked}, place)]
    if "/" not in asked and path.suffix not in (".yaml", ".yml"):
        return [from_python({"task": asked}, place)]
    item = compose(read_text(path, what="task"), asked, "task or a list of them")
    return item.value if isinstance(item.value, list) else [item]


def _task(item: Item, overrides: Mapping[str, Any]) -> Task:
    named = item.value.get("task") if isinstance(item.value, dict) else None
    if named is None:
        wanted = "expected a mapping with a kind of task, {task: niah-single, samples: 16}"
        raise fault((item.place, f"{wanted}, got {show(item.plain)}"))
    if named.value not in KINDS:
        raise fault((named.place, f"unknown task {named.value!r}.{nearest(named.value, KINDS)}"))
    kind = KINDS[named.value]
    known = {field.name for field in dataclasses.fields(kind)}
    laid = {name: from_python(value, Place(f"--{name}")) for name, value in overrides.items() if name in known}
    below = {name: part for name, part in item.value.items() if name != "task"}
    return make(kind, Item(below | laid, item.place, item.key), (named.value,), {})
