"""Prints the page of all classes as Markdown; progress goes to the error stream."""

from __future__ import annotations

import sys
import warnings

from transformers.utils import logging

from kvpolicy.testing.architectures.build import cases
from kvpolicy.testing.architectures.check import judge
from kvpolicy.testing.architectures.table import page, summary


def main() -> int:
    """Judge every class and print the page; return 1 where one is wrong."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    found = cases()
    rows = []
    for number, case in enumerate(found, 1):
        rows.append(judge(case))
        print(f"{number}/{len(found)} {case}: {rows[-1].verdict}", file=sys.stderr, flush=True)
    print(page(rows), end="")
    print(summary(rows), file=sys.stderr)
    return any(row.verdict == "wrong" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
