"""Writes the parts of the pages that are made from the code: ``python docs/generate.py``.

A page holds such a part between ``<!-- generated: NAME -->`` and ``<!-- end -->``. A test fails where a page says
anything else than this script would write.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kvpolicy
from kvpolicy.analysis.devices import DEVICES
from kvpolicy.bench import show
from kvpolicy.bench.record import read_record
from kvpolicy.budgets.cake import CakeLayers
from kvpolicy.budgets.uniform import UniformHeads
from kvpolicy.combiners.fixed import Fixed
from kvpolicy.config import describe
from kvpolicy.config.about import Setting, about, written
from kvpolicy.contract import Entry
from kvpolicy.errors import PolicyFileError
from kvpolicy.evicted.drop import Drop
from kvpolicy.loading import built_in
from kvpolicy.plugin import walk
from kvpolicy.registry import Registry
from kvpolicy.scorers.snapkv import SnapKV
from kvpolicy.selectors.top_k import TopK
from kvpolicy.testing import checks

DOCS = Path(__file__).parent
EXAMPLE = DOCS.parent / "plugins" / "kvpolicy-example"
ELSEWHERE = ("kvpress-presses",)
"""Parts that something else writes: plugins/kvpolicy-kvpress, as it needs kvpress."""
COST = re.compile(r"time O\((.*?)\), memory O\((.*?)\)(?=[,;]|$)")
PART = re.compile(r"(?<=^<!-- generated: )([\w-]+)( -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)


def rewritten(text: str) -> str:
    """Return the text of a page with each generated part as it has to be."""
    return PART.sub(
        lambda found: found[0] if found[1] in ELSEWHERE else f"{found[1]}{found[2]}\n{part(found[1])}\n", text
    )


def part(name: str) -> str:
    """Return one generated part, in Markdown: of plugins, their checks, policies, GPUs, times or the example plugin."""
    if name == "example-scorer":
        return _code("python", EXAMPLE / "kvpolicy_example.py")
    if name == "example-project":
        return _code("toml", EXAMPLE / "pyproject.toml")
    if name == "example-test":
        # It imports the installed package: tests/test_plugin_example.py runs it.
        return "<!-- skip: next -->\n" + _code("python", EXAMPLE / "test_kvpolicy_example.py")
    if name == "gpus":
        return _gpus()
    if name == "methods":
        return _methods()
    if name == "performance":
        return show.page(read_record(DOCS / "performance.json"))
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
        "layers": CakeLayers(),
        "heads": UniformHeads(),
        "selector": TopK(),
        "evicted": Drop(),
    }
    found = checks(every[kind])
    if kind == "combiner":
        of_scorers = {check.name for check in checks(every["scorer"])}
        found = [check for check in found if check.name not in of_scorers]
    rows = [f"| `{check.name}` | {_cell(' '.join((inspect.getdoc(check.run) or '').split()))} |" for check in found]
    return "\n".join(["| check | what has to hold |", "| --- | --- |", *rows, ""])


def _gpus() -> str:
    """Return the table of the GPUs that are known by name."""
    rows = [
        f"| `{one.name}` | {one.memory / 1e9:g} | {one.bandwidth / 1e9:,g} | {one.link / 1e9:g} | {one.source} |"
        for one in DEVICES.values()
    ]
    head = "| name | memory, GB | bandwidth, GB/s | from the CPU, GB/s | figures |"
    return "\n".join([head, "| --- | --- | --- | --- | --- |", *rows, ""])


def _methods() -> str:
    """Return the table of the policies: what each is from, needs, costs, and in how many runs it equals a reference."""
    record = json.loads((DOCS / "agreement.json").read_text())
    rows = []
    for entry in Registry(built_in()).entries("policy"):
        policy = kvpolicy.load(entry.name)
        parts = [*walk(policy.score), policy.budget.heads, policy.select, policy.evicted]
        cost = "none | none" if policy.trivial else _cost(parts)
        cells = [_papers(policy.description), policy.needs.words, cost, _passes(entry.name)]
        rows.append(f"| {' | '.join([f'`{entry.name}`', *cells, _agreement(record[entry.name])])} |")
    head = "| policy | paper | needs | time | memory | evicts | same slots kept |"
    return "\n".join([head, "| --- | --- | --- | --- | --- | --- | --- |", *rows, ""])


def _papers(description: str) -> str:
    ids = re.findall(r"arXiv ([\d.]+)", description)
    elsewhere = re.search(r"\(([A-Z]+ \d{4})\)", description)
    return ", ".join(f"[{one}](https://arxiv.org/abs/{one})" for one in ids) or (elsewhere[1] if elsewhere else "")


def _cost(parts: Iterable[Any]) -> str:
    """Return two cells, time and memory: what the parts take together, without what another term outgrows."""
    said = [found.groups() for part in parts if (found := COST.match(getattr(part, "cost", "")))]
    return " | ".join(f"O({_sum(one)})" for one in zip(*said, strict=True))


def _sum(costs: Iterable[str]) -> str:
    """Return the sum of costs, each a sum of products of numbers from 1 on.

    >>> _sum(["n D + n log n", "n", "n^2"])
    'n D + n^2'
    """
    terms = list(dict.fromkeys(term for cost in costs for term in cost.split(" + ")))
    return " + ".join(term for term in terms if not any(_outgrows(other, term) for other in terms if other != term))


def _outgrows(one: str, other: str) -> bool:
    return any(_factors(each) <= _factors(one) for each in (other, other.replace("log n", "n")))


def _factors(term: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, power in re.findall(r"(log n|[A-Za-z])(?:\^(\d))?", term):
        found[name] += int(power or 1)
    return found


def _passes(name: str) -> str:
    """Return when a policy can evict, as it says itself when it is asked to."""
    if kvpolicy.load(name).needs.call:
        return "a prompt read in one pass"
    more: dict[str, dict[str, Any]] = {"chunks": {"prefill": "chunks"}, "decoding": {"decode": {"every": 64}}}
    return ", ".join(["prompts", *(when for when, settings in more.items() if _takes(name, settings))])


def _takes(name: str, settings: dict[str, Any]) -> bool:
    try:
        kvpolicy.load(name, **settings)
    except PolicyFileError:
        return False
    return True


def _agreement(found: dict[str, dict[str, int]]) -> str:
    said = [f"{counts['same']} of {counts['runs']} runs" for counts in found.values()]
    names = ["" if name == "twin" else f"`{name}` " for name in found]
    return "<br>".join(sorted(f"{name}{one}" for name, one in zip(names, said, strict=True))) or "no reference"


def _code(language: str, path: Path) -> str:
    return f"```{language}\n{path.read_text()}```\n"


def _plugin(entry: Entry) -> str:
    """Return what one plugin is, its formula and source, and the table of its settings."""
    one = about(entry)
    source = "kvpolicy, so ours" if one.source == "kvpolicy" else one.source
    said = [f"### `{one.name}`\n", f"{one.description}\n", f"`{one.formula}`\n", f"Source: {source}.\n"]
    if one.cost:
        said.append(f"Cost: {one.cost}.\n")
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
