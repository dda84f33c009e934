"""The documentation: its commands and policy files do what the pages say, and its generated parts are up to date.

Python blocks are run by sybil (see conftest.py). Of the others, a page may say in a comment right above:

- ``<!-- file: NAME -->``: the block is a file of that name, for the policies and commands of the page;
- ``<!-- exit: 2 -->``: the commands end with this exit code;
- ``<!-- wrong policy -->``: the YAML is refused, with the message that the next text block shows;
- ``<!-- no policy -->``: the YAML is something else.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvpolicy
from kvpolicy import errors
from kvpolicy.cli import app
from kvpolicy.errors import PolicyFileError

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"((?:^<!-- [^\n]* -->\n+)*)^```([\w-]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Args:
        page: the page.
        line: of its first fence.
        language: what the fence says.
        text: between the fences.
        notes: the comments right above it.
    """

    page: Path
    line: int
    language: str
    text: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def note(self, name: str) -> str | None:
        """Return what the comment ``<!-- name: ... -->`` says, "" where it is ``<!-- name -->``, else None."""
        said = dict(note.partition(":")[::2] for note in self.notes)
        return said[name].strip() if name in said else None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start(2)) + 1,
            language=found[2],
            text=found[3],
            notes=tuple(re.findall(r"<!-- (.*) -->", found[1])),
        )
        for found in BLOCK.finditer(text)
    ]


ALL = [block for page in PAGES for block in blocks(page)]
POLICIES = [block for block in ALL if block.language == "yaml" and block.note("no policy") is None]
NEEDS_MODEL = re.compile(r"\$ kvpolicy (run|eval|analyze|tune|calibrate)")
COMMANDS = [
    pytest.param(block, marks=[pytest.mark.model] if NEEDS_MODEL.search(block.text) else [], id=str(block))
    for block in ALL
    if block.language == "console"
]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder, now the current one, with the files of the block's page and the repository's docs."""
    block: Block = request.getfixturevalue("block")
    for one in ALL:
        if one.page == block.page and (name := one.note("file")):
            (tmp_path / name).write_text(one.text)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", POLICIES, ids=str)
def test_a_policy_loads_or_is_refused_as_the_page_says(block: Block, folder: Path) -> None:
    wrong = block.note("wrong policy") is not None
    path = Path(block.note("file") or ("wrong.yaml" if wrong else "policy.yaml"))
    path.write_text(block.text)
    if not wrong:
        assert kvpolicy.load(path).name
        return
    with pytest.raises(PolicyFileError) as caught:
        kvpolicy.load(path)
    following = ALL[ALL.index(block) + 1]
    assert (following.page, following.language) == (block.page, "text")
    assert f"{caught.value}\n" == following.text


@pytest.mark.parametrize("block", COMMANDS)
def test_commands_print_what_the_page_shows(block: Block, folder: Path) -> None:
    first, *commands = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert not first and commands, "a console block starts with a command"
    for command in commands:
        line, _, shown = command.partition("\n")
        program, *arguments = shlex.split(line)
        assert program == "kvpolicy", "commands of others stand in bash blocks, which are not run"
        into = arguments.index(">") if ">" in arguments else len(arguments)
        result = CliRunner().invoke(app, arguments[:into], catch_exceptions=False)
        assert result.exit_code == int(block.note("exit") or 0), result.output
        if arguments[into:]:
            Path(arguments[into + 1]).write_text(result.stdout)
        elif shown:
            assert matches(shown, result.output), f"{line}\n{result.output}"


def matches(shown: str, output: str) -> bool:
    """Return whether `output` is what is shown, where ``...`` stands for any lines or any part of a line.

    >>> matches("a ...\\n...\\nz\\n", "a b  \\nc\\nd\\nz\\n"), matches("a\\n", "a\\nb\\n")
    (True, False)
    """
    pattern = ""
    for line in shown.splitlines():
        within = ".*".join(map(re.escape, line.rstrip().split("...")))
        pattern += r"(?:.*\n)*?" if line == "..." else rf"{within} *\n"
    return re.fullmatch(pattern, output) is not None


def test_generated_parts_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for page in PAGES:
        text = page.read_text()
        assert text == generate.rewritten(text), f"{page.name} is out of date: run python docs/generate.py"


def test_the_errors_page_has_every_error() -> None:
    headings = re.findall(r"^### `(\w+)`$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    there = [
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    ]
    assert sorted([*headings, "KVPolicyError"]) == sorted(there)
    assert all(issubclass(getattr(errors, name), errors.KVPolicyError) for name in there)


def test_every_python_block_is_run() -> None:
    # A pattern that misses a page would leave its examples untested, and say nothing.
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "README.md", "docs"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    for block in ALL:
        if block.language == "python":
            # Of a block of doctests, each example is one.
            line = block.line + block.text.startswith(">>>")
            assert f"{block.page.relative_to(ROOT)}::line:{line}," in listed, f"{block} is not run"


def test_every_link_inside_the_repository_leads_somewhere() -> None:
    for page in [*PAGES, ROOT / "plugins" / "kvpolicy-example" / "README.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
