"""The policy file that a search writes, which says in comments where it is from."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpolicy.config import to_yaml
from kvpolicy.config.source import to_text
from kvpolicy.eval.bench import Bench
from kvpolicy.eval.show import span
from kvpolicy.files import whole
from kvpolicy.policy import Policy
from kvpolicy.session.fingerprint import fingerprint
from kvpolicy.session.saved import versions
from kvpolicy.tune.outcome import Comparison, Outcome
from kvpolicy.tune.record import TuneError


def provenance(found: Outcome, bench: Bench, texts: Sequence[str], command: str) -> dict[str, Any]:
    """Return where a policy is from, as plain data: all that it takes to find it again, and what it was shown to do.

    Args:
        found: the search.
        bench: the model.
        texts: what it was measured on.
        command: by which it was found.
    """
    known = fingerprint(bench.model)
    return {
        "made by": command,
        "settings": found.settings,
        "trials": found.counts,
        "drift, in nats a token": {
            "on the texts searched": _spans(found.searched),
            "on text held out": _spans(found.held_out),
        },
        "text": f"sha256 {hashlib.sha256(chr(0).join(texts).encode()).hexdigest()[:16]}",
        "model": {
            "name": bench.name,
            "architecture": known.architecture,
            "dtype": known.dtype,
            "weights": known.weights[:16],
            "device": str(bench.model.device),
        },
        "versions": {
            "python": platform.python_version(),
            "optuna": importlib.metadata.version("optuna"),
            **versions(),
        },
    }


def _spans(found: Comparison) -> dict[str, Any]:
    return {
        "texts": found.texts,
        "as it is": span(found.base),
        "tuned": span(found.tuned),
        "difference": span(found.difference, signed=True),
    }


def write_policy(policy: Policy, provenance: Mapping[str, Any], path: Path) -> None:
    """Write a policy file with its provenance in comments at the top; it appears whole or not at all.

    Raises:
        TuneError: when it cannot be written.
    """
    comments = "".join(f"# {line}\n" for line in to_text(provenance).splitlines())
    try:
        with whole(path) as partial:
            partial.write_text(f"{comments}\n{to_yaml(policy)}", encoding="utf-8")
    except OSError as error:
        raise TuneError(
            f"{path}: cannot be written: {error.strerror}. Make room, and run the same command again: nothing "
            "is measured twice"
        ) from error
