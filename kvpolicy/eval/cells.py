"""A cell: one policy at one budget on one task. Measured, it is one result file, named by the hash of the cell."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvpolicy.config import load
from kvpolicy.errors import KVPolicyError
from kvpolicy.eval.bench import Bench
from kvpolicy.eval.tasks.example import Example
from kvpolicy.eval.tasks.files import from_plain
from kvpolicy.files import whole
from kvpolicy.session.fingerprint import fingerprint
from kvpolicy.session.saved import machine, versions

FORMAT = 1
"""Of the result files written; files of a higher one are refused."""

Mode = Literal["query-agnostic", "query-aware", "either"]


class ResultError(KVPolicyError, ValueError):
    """A result file cannot be written or read."""


@dataclass(frozen=True)
class Cell:
    """What is measured, as plain data.

    Args:
        model: its name.
        weights: what tells its weights from others, of its fingerprint.
        policy: in full as a policy file holds it, its budget among it.
        task: its kind as ``task``, and all of its settings.
        mode: whether the question is in view when the policy decides; "either" where it makes no difference.
        seed: of the task.
        examples: hash of the examples, which another text, tokenizer or release of Python changes.
        files: by path, the hash of what is in each file that the policy names.
    """

    model: str
    weights: str
    policy: dict[str, Any]
    task: dict[str, Any]
    mode: Mode
    seed: int
    examples: str
    files: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def budget(self) -> int | float | None:
        """The policy's: slots a KV head, or a share of the tokens seen; None where it keeps everything."""
        budget = self.policy["budget"]
        if "tokens" in budget:
            return int(budget["tokens"])
        return None if budget["keep"] == 1 else float(budget["keep"])

    @property
    def name(self) -> str:
        """The hash of all of it, 16 hexadecimal digits."""
        plain = dataclasses.asdict(self)
        return digest(plain if self.files else {key: value for key, value in plain.items() if key != "files"})


def digest(value: object) -> str:
    """Return a hash of plain data, 16 hexadecimal digits, the same everywhere.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=dataclasses.asdict)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of_other_examples(cells: Iterable[Cell]) -> tuple[Cell, Cell] | None:
    """Return the first two cells of one model, task and seed whose examples differ, None where there are none."""
    made: dict[str, Cell] = {}
    for cell in cells:
        other = made.setdefault(digest([cell.model, cell.weights, cell.task, cell.seed]), cell)
        if other.examples != cell.examples:
            return other, cell
    return None


def result_path(cell: Cell, folder: Path) -> Path:
    """Return where the result of a cell is, once there is one."""
    return folder / f"{cell.name}.jsonl"


def measure(cell: Cell, bench: Bench, *, advance: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Return the lines of a cell's result file: its header, then what came of each example.

    Args:
        cell: what to measure.
        bench: the cell's model.
        advance: called after each example.

    Raises:
        ResultError: when the examples are not those the cell was made with, or a score is not finite.
    """
    examples = bench.examples(from_plain(cell.task), cell.seed)
    if digest(list(examples)) != cell.examples:
        raise ResultError(f"cell {cell.name}: expected the examples it was made with, got others: the text has changed")
    return [header(cell, bench), *_lines(cell, bench, examples, advance)]


def header(cell: Cell, bench: Bench) -> dict[str, Any]:
    """Return what a result says of itself before its examples: all that it takes to repeat it."""
    model, tokenizer = bench.model, bench.tokenizer
    return {
        "kvpolicy-eval": FORMAT,
        "cell": dataclasses.asdict(cell),
        "scores": from_plain(cell.task).scores,
        "fingerprint": dataclasses.asdict(fingerprint(model)),
        "attention": model.config._attn_implementation,
        "chat_template": tokenizer.chat_template,
        "stop_tokens": model.generation_config.eos_token_id,
        "versions": {
            "python": platform.python_version(),
            "tokenizers": importlib.metadata.version("tokenizers"),
            **versions(),
        },
        "machine": machine(model.device),
    }


def _lines(
    cell: Cell, bench: Bench, examples: Sequence[Example], advance: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """Yield what came of each example."""
    policy, task = load(cell.policy), from_plain(cell.task)
    for index, example in enumerate(examples):
        found = bench.measure(policy, task, example, query_aware=cell.mode == "query-aware")
        if wrong := [f"{name} is {value}" for name, value in found.scores.items() if not math.isfinite(value)]:
            raise ResultError(
                f"{policy.name}, {task.name}, example {index}: {', '.join(wrong)}, as what the model computes is not "
                "finite: try another dtype"
            )
        yield {"example": index, **dataclasses.asdict(found), "answers": getattr(example, "answers", None)}
        advance()


def as_line(value: dict[str, Any]) -> str:
    """Return plain data as a line of a JSON lines file."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


def write_whole(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write a JSON lines file, which appears whole or not at all.

    Raises:
        ResultError: when it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as partial, partial.open("w", encoding="utf-8") as file:
            file.writelines(map(as_line, lines))
    except OSError as error:
        raise ResultError(
            f"{path}: cannot be written: {error.strerror or error}. What was finished before is in {path.parent}; make "
            "room, or name a folder that you can write to, and run the same command again"
        ) from error
