"""The page docs/kvpress.md: its Python runs down the page in one namespace, its policies load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_policy_press import Chat

import kvpolicy

PAGE = Path(__file__).parents[3] / "docs" / "kvpress.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_its_python_runs() -> None:
    code = blocks("python")
    chat = Chat()
    names = {"__name__": "page", "tokenizer": chat.tokenizer}
    assert len(code) > 1
    for block in code:
        exec(compile(block, str(PAGE), "exec"), names)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_its_policies_load(text: str, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    policy = kvpolicy.load(tmp_path / "policy.yaml")
    assert kvpolicy.load(policy.to_dict()) == policy
