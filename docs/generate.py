"""Writes the parts of the pages that are made from the code: ``python docs/generate.py``.

A page holds such a part between ``<!-- generated: NAME -->`` and ``<!-- end -->``. A test fails where a page says
anything else than this script would write.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from kvpolicy.budgets.uniform import UniformHeads, UniformLayers
from kvpolicy.combiners.fixed import Fixed
from kvpolicy.config import describe
from kvpolicy.config.about import Setting, about, written
from kvpolicy.contract import Entry
from kvpolicy.loading import built_in
from kvpolicy.registry import Registry
from kvpolicy.scorers.snapkv import SnapKV
from kvpolicy.selectors.top_k import TopK
from kvpolicy.testing import checks

DOCS = Path(__file__).parent
EXAMPLE = DOCS.parent / "plugins" / "kvpolicy-example"
ELSEWHERE = ("kvpress-presses",)
"""Parts that something else writes: plugins/kvpolicy-kvpress, as it needs kvpress."""
PART = re.compile(r"(?<=^<!-- generated: )([\w-]+)( -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)


def rewritten(text: str) -> str:
    """Return the text of a page with each generated part as it has to be."""
    return PART.sub(
        lambda found: found[0] if found[1] in ELSEWHERE else f"{found[1]}{found[2]}\n{part(found[1])}\n", text
    )


def part(name: str) -> str:
    """Return one generated part, in Markdown: of a kind of plugin, its checks, the policies or the example plugin."""
    if name == "example-scorer":
        return _code("python", EXAMPLE / "kvpolicy_example.py")
    if name == "example-project":
        return _code("toml", EXAMPLE / "pyproject.toml")
    if name == "example-test":
        # It imports the installed package: tests/test_plugin_example.py runs it.
        return "<!-- skip: next -->\n" + _code("python", EXAMPLE / "test_kvpolicy_example.py")
    if name.endswith("-checks"):
        return _checks(name.removesuffix("-checks"))
    # Without the plugins that happen to be installed here.
    entries = Registry(built_in()).entries(name)
    if name == "policy":
        rows = [f"| `{entry.name}` | {_cell(describe(entry.name))} |" for entry in entries]
        return "\n".join(["| policy | what it is |", "| --- | --- |", *rows, ""])
    return "\n".join(_plugin(entry) for entry in entries)


def _checks(kind: str) -> str:
    """Return the table of the checks of a kind of plugin."""
    every = {
        "scorer": SnapKV(),
        "combiner": Fixed(inputs=[SnapKV()]),
        "layers": UniformLayers(),
        "heads": UniformHeads(),
        "selector": TopK(),
    }
    found = checks(every[kind])
    if kind == "combiner":
        of_scorers = {check.name for check in checks(every["scorer"])}
        found = [check for check in found if check.name not in of_scorers]
    rows = [f"| `{check.name}` | {_cell(' '.join((inspect.getdoc(check.run) or '').split()))} |" for check in found]
    return "\n".join(["| check | what has to hold |", "| --- | --- |", *rows, ""])


def _code(language: str, path: Path) -> str:
    return f"```{language}\n{path.read_text()}```\n"


def _plugin(entry: Entry) -> str:
    """Return what one plugin is, its formula and source, and the table of its settings."""
    one = about(entry)
    source = "kvpolicy, so ours" if one.source == "kvpolicy" else one.source
    said = [f"### `{one.name}`\n", f"{one.description}\n", f"`{one.formula}`\n", f"Source: {source}.\n"]
    if not one.settings:
        return "\n".join([*said, "No settings.\n"])
    rows = [_row(setting) for setting in one.settings]
    return "\n".join([*said, "| setting | value | default | what it does |", "| --- | --- | --- | --- |", *rows, ""])


def _row(setting: Setting) -> str:
    default = "required" if setting.required else "none" if setting.default is None else f"`{written(setting.default)}`"
    return f"| `{setting.name}` | {setting.values} | {default} | {_cell(setting.description)} |"


def _cell(text: str) -> str:
    return text.replace("|", "&#124;")


def main() -> None:
    """Rewrite the pages that differ."""
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        if rewritten(text) != text:
            page.write_text(rewritten(text))
            print(f"{page.relative_to(DOCS)} rewritten")


if __name__ == "__main__":
    main()
