"""The table of all presses, made by running them: ``python -m kvpolicy_kvpress.table docs/kvpress.md`` writes it there.

A page holds it between ``<!-- generated: kvpress-presses -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from transformers.utils import logging

from kvpolicy_kvpress.agree import CASES, agrees
from kvpolicy_kvpress.make import press_names
from kvpolicy_kvpress.presses import NOT_WRAPPED, STORED, WRAPPED, Press
from kvpolicy_kvpress.weights import weights_for

PART = re.compile(r"(?<=^<!-- generated: kvpress-presses -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)

_HEAD = """| press | as a scorer | reads | decoding | same slots kept |
| --- | --- | --- | --- | --- |
"""


def table() -> str:
    """Return the table in Markdown; it takes some seconds, as each press runs."""
    with weights_for(case.model() for case in CASES):
        rows = [_row(name) for name in sorted(press_names(), key=str.lower)]
    return _HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def rewritten(text: str, made: str) -> str:
    """Return the text of a page with the table `made` in its place."""
    return PART.sub(lambda _: f"\n{made}\n", text)


def _row(name: str) -> list[str]:
    if name not in WRAPPED:
        return [f"`{name}`", f"no: {NOT_WRAPPED[name]}", "", "", ""]
    press = WRAPPED[name]
    same = sum(agrees(name, case) for case in CASES)
    return [f"`{name}`", press.role, _reads(press), "yes" if _decodes(press) else "", f"{same} of {len(CASES)} runs"]


def _reads(press: Press) -> str:
    said = ", ".join(press.reads)
    return f"{said} (or `{press.instead_of_ratio}`)" if press.instead_of_ratio else said


def _decodes(press: Press) -> bool:
    return set(press.reads) <= STORED


def main(page: Path) -> None:
    """Write the table into `page`."""
    logging.disable_progress_bar()
    page.write_text(rewritten(page.read_text(), table()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
