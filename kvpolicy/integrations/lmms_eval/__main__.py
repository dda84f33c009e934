"""``python -m kvpolicy.integrations.lmms_eval``: the harness's own command line, where kvpolicy's errors end a run."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from kvpolicy.errors import KVPolicyError


def main() -> None:
    """Run the command line of lmms-eval."""
    try:
        # First: it says so where the harness is not installed.
        importlib.import_module("kvpolicy.integrations.lmms_eval.model")
    except KVPolicyError as error:
        _end(error)
    harness: Any = importlib.import_module("lmms_eval.__main__")
    # The harness prints a run's error and ends with 0, as if nothing had happened.
    harness.cli_evaluate_single = _ending(harness.cli_evaluate_single)
    importlib.import_module("lmms_eval.cli.dispatch").main()


def _ending(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def ended(*args: Any) -> Any:
        try:
            return run(*args)
        except KVPolicyError as error:
            _end(error)

    return ended


def _end(error: KVPolicyError) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
