"""`Record`: all that a benchmark measured, as plain data and as a file."""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.bench.subject import BenchError, Subject
from kvpolicy.files import whole
from kvpolicy.session.saved import machine, versions

FORMAT = 1
"""Of the files written; files of a higher one are refused."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, read one way, once.

    Args:
        context: its tokens.
        way: how it was read.
        seconds: of the whole forward pass.
        stages: seconds of each stage within.
    """

    context: int
    way: str
    seconds: float
    stages: dict[str, float]


@dataclass(frozen=True)
class Tokens:
    """Tokens read one by one after a prompt.

    Args:
        context: tokens of the prompt.
        way: how they were read.
        seconds: of each of them.
        stages: seconds of each stage within, of all of them together.
    """

    context: int
    way: str
    seconds: list[float]
    stages: dict[str, float]


@dataclass(frozen=True)
class Memory:
    """What a prompt takes in memory.

    Args:
        context: its tokens.
        way: how it was read.
        ragged: whether heads of a layer hold different numbers of slots.
        bytes: of keys and values held once it is read, read from storage.
        slots: bytes that the slots held then would take without any slack.
        later: as `bytes`, once the tokens behind it are read.
        later_slots: as `slots`, then.
        full: bytes that a full cache holds of the prompt.
        layer: of them, those of the largest layer.
        planned: of them, those that the budget says, where every layer evicts.
        cache_peak: most bytes of keys and values that the cache held while the prompt was read.
        pass_peak: most bytes of all tensors that were alive at once while it was read.
        scoring: most bytes of all tensors that are alive at once while one layer is scored and selected from, besides
            its keys and values; None where nothing is.
    """

    context: int
    way: str
    ragged: bool
    bytes: int
    slots: int
    later: int
    later_slots: int
    full: int
    layer: int
    planned: int
    cache_peak: int
    pass_peak: int
    scoring: int | None


@dataclass(frozen=True)
class Record:
    """All that was measured in one run.

    Args:
        about: what it takes to repeat it: model, settings, versions, machine.
        prompts: in the order in which they were read.
        tokens: one of each way and context.
        memory: likewise.
    """

    about: dict[str, Any]
    prompts: list[Prompt]
    tokens: list[Tokens]
    memory: list[Memory]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, ready for JSON."""
        return {"kvpolicy-bench": FORMAT, **dataclasses.asdict(self)}


def about(subject: Subject, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what it takes to repeat a benchmark: model, settings, versions and machine."""
    model, device = subject.model, subject.ids.device
    return {
        "model": subject.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        **settings,
        "versions": {"python": platform.python_version(), **versions()},
        "machine": {**machine(device), "processor": _processor()},
    }


def write_record(record: Record, path: Path) -> None:
    """Write a file, which appears whole or not at all.

    Raises:
        BenchError: when it cannot be written.
    """
    try:
        with whole(path) as partial:
            partial.write_text(json.dumps(record.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: cannot be written: {error.strerror}") from error


def read_record(path: Path) -> Record:
    """Return what a file holds.

    Raises:
        BenchError: when it is none that `kvpolicy bench` wrote.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        readable = found["kvpolicy-bench"] <= FORMAT
        record = Record(
            found["about"],
            [Prompt(**one) for one in found["prompts"]],
            [Tokens(**one) for one in found["tokens"]],
            [Memory(**one) for one in found["memory"]],
        )
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{path}: expected a file that `kvpolicy bench --out` wrote: {error}") from None
    if not readable:
        raise BenchError(f"{path}: expected format {FORMAT} or older: upgrade kvpolicy")
    return record


def _processor() -> str:
    """Return the name of the processor, where Linux says it; elsewhere what Python knows."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
