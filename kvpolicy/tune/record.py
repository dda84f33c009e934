"""Record: the drift of each policy on each text, measured once, and kept in a file so that nothing is lost."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from kvpolicy.config import dump
from kvpolicy.errors import KVPolicyError
from kvpolicy.eval.bench import Bench
from kvpolicy.eval.cells import digest
from kvpolicy.eval.tasks.drift import DriftTask
from kvpolicy.eval.tasks.example import Stretch
from kvpolicy.policy import Policy
from kvpolicy.session.fingerprint import fingerprint
from kvpolicy.session.saved import versions

_START = '{"measured": '
"""How each line begins."""


class TuneError(KVPolicyError, ValueError):
    """A search cannot be made, written or gone on with."""


class NotFiniteError(TuneError):
    """A model that runs under a policy computes what is not finite."""


class Record:
    """What was measured of policies on one model, in memory and in a file of JSON lines.

    Names and descriptions of policies count for nothing; model, dtype, attention, device and versions do.

    Args:
        bench: the model.
        file: where it is kept; what is there already is not measured again.

    Raises:
        TuneError: when the file is not one of these, or cannot be read.
    """

    def __init__(self, bench: Bench, file: Path) -> None:
        self._bench = bench
        self.file = file
        self._known = _read(file)
        # Of all of it: what it predicts depends on its head too.
        self._model = digest(
            {
                "fingerprint": dataclasses.asdict(fingerprint(bench.model)),
                "attention": bench.model.config._attn_implementation,
                "device": bench.model.device.type,
                "versions": versions(),
            }
        )

    def kl(self, policy: Policy, text: Stretch) -> float:
        """Return the drift of `policy` on a text: mean KL divergence from the full cache, in nats a token.

        Raises:
            NotFiniteError: when it is none.
            TuneError: when it cannot be written down.
        """
        plain = {name: part for name, part in dump(policy).items() if name not in ("name", "description")}
        key = digest({"model": self._model, "policy": plain, "text": text})
        if key not in self._known:
            found = self._bench.measure(policy, DriftTask(), text, query_aware=False).scores["kl"]
            if not math.isfinite(found):
                raise NotFiniteError(f"the drift is {found}, as what the model computes is not finite")
            self._write({"measured": key, "kl": found})
            self._known[key] = found
        return self._known[key]

    def _write(self, line: dict[str, Any]) -> None:
        try:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise TuneError(
                f"{self.file}: cannot be written: {error.strerror}. What was measured before is in it; make room, and "
                "run the same command again"
            ) from error


def _read(path: Path) -> dict[str, float]:
    """Return what a file holds, by key; a last line that was cut off is cut off the file."""
    if not path.exists():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        whole, _, rest = text.rpartition("\n")
        found = dict(_parsed(line) for line in whole.splitlines())
        if not _START.startswith(rest[: len(_START)]):
            raise ValueError(rest)
        if rest:
            os.truncate(path, len(text.encode()) - len(rest.encode()))
    except OSError as error:
        raise TuneError(f"{path}: cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError):
        expected = "expected what an earlier `kvpolicy tune` with this --out measured"
        raise TuneError(
            f"{path}: {expected}, got another or a damaged file: move it away, or name another --out"
        ) from None
    return found


def _parsed(line: str) -> tuple[str, float]:
    found = json.loads(line)
    return str(found["measured"]), float(found["kl"])
