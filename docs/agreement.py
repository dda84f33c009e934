"""Writes docs/agreement.json, how often each policy keeps what its references keep: ``python docs/agreement.py``.

It runs the tests that are marked ``agreement(policy, reference)``: where kvpress is installed those against its
presses, elsewhere those against twins. Either writes its own part of the file. ``--check`` runs none of them: it says
whether the file has the runs that there are.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.loading import built_in
from kvpolicy.registry import Registry

DOCS = Path(__file__).parent
FILE = DOCS / "agreement.json"
TWIN = "twin"
PRESSES = find_spec("kvpress") is not None
TESTS = DOCS.parent / ("plugins/kvpolicy-kvpress/tests" if PRESSES else "tests")

Record = dict[str, dict[str, dict[str, int]]]
"""Policy -> reference -> how many runs there are, and in how many the same slots are kept."""


class Agreement:
    """A plugin of pytest that counts the marked runs, and those that pass."""

    def __init__(self) -> None:
        self.marked: dict[str, tuple[str, str]] = {}
        self.same: Counter[tuple[str, str]] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember what each run is of."""
        for item in session.items:
            for mark in item.iter_markers("agreement"):
                self.marked[item.nodeid] = mark.args

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a run that passed."""
        if report.when == "call" and report.passed:
            self.same[self.marked[report.nodeid]] += 1

    @property
    def runs(self) -> Counter[tuple[str, str]]:
        """How many there are of each policy and reference."""
        return Counter(self.marked.values())


def collect(*more: str) -> Agreement:
    """Return what pytest finds, and does, in the tests of this environment."""
    found = Agreement()
    files = [str(path) for path in sorted(TESTS.glob("test_zoo_*.py"))]
    code = pytest.main(["-q", "-m", "agreement", *more, *files], plugins=[found])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(int(code))
    return found


def own(reference: str) -> bool:
    """Return whether runs against a reference are made in this environment."""
    return (reference != TWIN) == PRESSES


def record(found: Agreement, before: Record) -> Record:
    """Return `before` with the part of this environment made anew, and an entry for every policy that is shipped."""
    made: Record = {entry.name: {} for entry in Registry(built_in()).entries("policy")}
    for policy, kept in before.items():
        others = {reference: counts for reference, counts in kept.items() if not own(reference)}
        if policy in made:
            made[policy].update(others)
    for (policy, reference), runs in found.runs.items():
        made[policy][reference] = {"runs": runs, "same": found.same[policy, reference]}
    return made


def runs(of: Record) -> dict[tuple[str, str], int]:
    """Return how many runs there are of each policy and reference."""
    return {(policy, name): counts["runs"] for policy, kept in of.items() for name, counts in kept.items()}


def main() -> None:
    """Write the file, or check it."""
    before: Any = json.loads(FILE.read_text()) if FILE.exists() else {}
    if "--check" not in sys.argv:
        FILE.write_text(json.dumps(record(collect(), before), indent=2, sort_keys=True) + "\n")
        return
    with contextlib.redirect_stdout(io.StringIO()):
        now = record(collect("--collect-only"), before)
    if now.keys() != before.keys() or runs(now) != runs(before):
        raise SystemExit(f"{FILE.name} is out of date: run python docs/agreement.py, with and without kvpress")


if __name__ == "__main__":
    main()
