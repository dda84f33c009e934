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

OURS = ("example", "kvpress")
"""What the packages that kvpolicy brings beside itself are called, after 'kvpolicy-'."""


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
    "evicted": Kind("treatment of the evicted", "evicted", "evicted"),
    "store": Kind("store", "store", "stores"),
    "policy": Kind("policy", "policy", "policies"),
}


@dataclass(frozen=True)
class Role:
    """What a new scorer may measure, and where in the example it stands.

    Args:
        base: the policy that the example extends.
        score: what the example says of its score.
        description: of the example.
    """

    base: str
    score: str
    description: str


ROLES = {
    "importance": Role("ecokv-snapkv", "\n  importance: $name", "ECOKV's score with $name for its importance"),
    "diversity": Role("ecokv-snapkv", "\n  diversity: $name", "ECOKV's score with $name for its diversity"),
    "other": Role("snapkv", " $name", "SnapKV's budget and selection with $name for its score"),
}

REQUIRED = {"annotated_types": "annotated-types", "kvpolicy": "kvpolicy", "torch": "torch"}
"""Module that a template may import -> the distribution it comes with."""

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


def package(name: str, kind: str, role: str = "importance") -> dict[str, str]:
    """Return the files of a package for a plugin called `name`: path -> text.

    Args:
        name: what policy files will call it.
        kind: one of `KINDS`.
        role: one of `ROLES`; of a scorer.

    Raises:
        OptionError: when the name will not do.

    >>> sorted(package("my-score", "scorer"))
    ['README.md', 'example.yaml', 'kvpolicy_my_score.py', 'pyproject.toml', 'test_kvpolicy_my_score.py']
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or name in NOT_A_NAME:
        raise OptionError(f"expected a name such as my-score, lower-case words joined by dashes, got {name!r}")
    if name.startswith("kvpolicy-"):
        short = name.removeprefix("kvpolicy-")
        raise OptionError(f"expected a name without 'kvpolicy-', which the package gets in front: {short}")
    module, chosen = _template(kind, "module.py").template, ROLES[role]
    required = [name for imported, name in REQUIRED.items() if re.search(rf"^(from|import) {imported}\b", module, re.M)]
    words = {
        "name": name,
        "role": role,
        "base": chosen.base,
        "score": Template(chosen.score).substitute(name=name),
        "description": Template(chosen.description).substitute(name=name),
        "dependencies": ", ".join(f'"{one}"' for one in required),
        "title": name.replace("-", " ").capitalize(),
        "cls": "".join(word.capitalize() for word in name.split("-")),
        "distribution": f"kvpolicy-{name}",
        "module": f"kvpolicy_{name.replace('-', '_')}",
        "what": KINDS[kind].what,
        "listed": KINDS[kind].listed,
    }
    if name in OURS:
        raise OptionError(f"expected another name: {words['distribution']} is a package of kvpolicy's own")
    if words["cls"].startswith("Test") or words["module"].endswith("_test"):
        took = f"the class {words['cls']} or the module {words['module']}"
        raise OptionError(f"expected another name: pytest would take {took} for tests")
    _check_class(words["cls"], f"{module}\n{_template(kind, 'test.py').template}")
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
    """Raise where the class would be called like something that its module or test imports."""
    imported = re.findall(r"\w+", " ".join(re.findall(r"^(?:from|import) .*", text, re.MULTILINE)))
    if "$cls" in text and cls in imported:
        raise OptionError(f"expected another name: the class would be called {cls}, as what its module or test imports")
