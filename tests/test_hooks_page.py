"""docs/hooks.md: a heading for every hook, with its exact signature, and for nothing that is none."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from kvpolicy import hookspecs
from kvpolicy.contract import HOOKS

PAGE = (Path(__file__).parents[1] / "docs" / "hooks.md").read_text()
SECTIONS = dict(re.findall(r"^## (kvpolicy_\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
SPECS = {name: spec for name, spec in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("kvpolicy_")}


def test_the_page_has_every_hook_and_no_other() -> None:
    assert SECTIONS.keys() == SPECS.keys() == HOOKS.keys()


@pytest.mark.parametrize("name", SPECS)
def test_each_is_shown_with_its_signature_and_an_example(name: str) -> None:
    signature, *examples = re.findall(r"^```python\n(.*?)^```$", SECTIONS[name], re.MULTILINE | re.DOTALL)
    (shown,) = ast.parse(signature).body
    assert isinstance(shown, ast.FunctionDef)
    expected = inspect.signature(SPECS[name])
    assert (shown.name, ast.unparse(shown.args)) == (name, ", ".join(map(str, expected.parameters.values())))
    assert shown.returns is not None
    assert ast.unparse(shown.returns) == expected.return_annotation
    assert any(f"@hookimpl\ndef {name}(" in example for example in examples)
