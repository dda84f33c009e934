"""The files of a new plugin package: the templates beside this module, filled."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from kvpolicy.cli.output import OptionError

NOT_A_NAME = ("false", "inherited", "none", "null", "true")
"""What YAML, Python or a policy file takes for something else."""


@dataclass(frozen=True)
class Kind:
    """What a new package can offer.

    Args:
        what: in words.
        place: where in a policy file its name stands, as `Registry.names` calls it.
        listed: what ``kvpolicy list`` calls it.
    """

    what: str
    place: str
    listed: str


KINDS = {
    "scorer": Kind("scorer", "score", "scorers"),
    "combiner": Kind("combiner", "score", "combiners"),
    "layer-budget": Kind("layer budget", "layers", "budgets"),
    "head-budget": Kind("head budget", "heads", "budgets"),
    "selector": Kind("selector", "selector", "selectors"),
    "policy": Kind("policy", "policy", "policies"),
}

PATHS = {
    "pyproject.toml": "pyproject.toml",
    "module.py": "$module.py",
    "test.py": "test_$module.py",
    "example.yaml": "example.yaml",
    "README.md": "README.md",
}
"""Template -> the file it becomes."""

POLICY_PATHS = PATHS | {"module.py": "$module/__init__.py", "policy.yaml": "$module/$name.yaml"}
"""Of a policy: a folder instead of a module, as its YAML file has to be installed too."""


def package(name: str, kind: str) -> dict[str, str]:
    """Return the files of a package for a plugin called `name`: path -> text.

    Args:
        name: what policy files will call it.
        kind: one of `KINDS`.

    Raises:
        OptionError: when the name will not do.

    >>> sorted(package("my-score", "scorer"))
    ['README.md', 'example.yaml', 'kvpolicy_my_score.py', 'pyproject.toml', 'test_kvpolicy_my_score.py']
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or name in NOT_A_NAME:
        raise OptionError(f"expected a name such as my-score, lower-case words joined by dashes, got {name!r}")
    words = {
        "name": name,
        "title": name.replace("-", " ").capitalize(),
        "cls": "".join(word.capitalize() for word in name.split("-")),
        "distribution": f"kvpolicy-{name}",
        "module": f"kvpolicy_{name.replace('-', '_')}",
        "what": KINDS[kind].what,
        "listed": KINDS[kind].listed,
    }
    _check_class(words["cls"], _template(kind, "module.py").template)
    words["example"] = _template(kind, "example.yaml").substitute(words)
    paths = POLICY_PATHS if kind == "policy" else PATHS
    return {
        Template(path).substitute(words): _template(kind, template).substitute(words)
        for template, path in paths.items()
    }


def write(folder: Path, texts: dict[str, str]) -> None:
    """Write the files of a package into a folder that is empty or not there yet.

    Raises:
        OptionError: when there is something already, or it cannot be written.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OptionError(f"expected a new or empty folder, got {str(folder)!r}, which has something in it")
        for path, text in texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write into {str(folder)!r}: {error.strerror}") from error


def _template(kind: str, name: str) -> Template:
    """Return a template of a kind, or the one that all kinds share."""
    templates = files(__name__) / "templates"
    own = templates / kind / f"{name}.txt"
    found = own if own.is_file() else templates / "shared" / f"{name}.txt"
    return Template(found.read_text(encoding="utf-8"))


def _check_class(cls: str, text: str) -> None:
    """Raise where the class would be called like something that its module imports."""
    imported = re.findall(r"\w+", " ".join(re.findall(r"^(?:from|import) .*", text, re.MULTILINE)))
    if "$cls" in text and cls in imported:
        raise OptionError(f"expected another name: the class would be called {cls}, as what its module imports")
