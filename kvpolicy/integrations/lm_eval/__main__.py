"""``python -m kvpolicy.integrations.lm_eval``: the harness's own command line, which knows the model ``kvpolicy``."""

from __future__ import annotations

import importlib
import sys

from kvpolicy.errors import KVPolicyError


def main() -> None:
    """Run the command line of lm-evaluation-harness."""
    try:
        # Registers the model, which releases of the harness that know no plugins would not find.
        importlib.import_module("kvpolicy.integrations.lm_eval.model")
        from lm_eval.__main__ import cli_evaluate  # type: ignore[import-not-found]

        cli_evaluate()
    except KVPolicyError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
