"""Importing: what it must not do, and which room may import which (DESIGN, "Flow and rooms")."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvpolicy
from kvpolicy.compat import require
from kvpolicy.errors import UnsupportedVersionError

PACKAGE = Path(kvpolicy.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

STAGES = {"capture", "scorers", "combiners", "budgets", "selectors", "evicted", "store", "attend"}
SHARED = {
    "attention",
    "blocks",
    "compat",
    "types",
    "errors",
    "filters",
    "plugin",
    "hookspecs",
    "maths",
    "step",
    "vectors",
    "window",
    "wrap",
}
LIBRARIES = {"torch", "einops", "pydantic", "annotated_types"}
MAY_IMPORT_TRANSFORMERS = {
    "analysis",
    "attend",
    "bench",
    "capture",
    "compat",
    "integrations",
    "models",
    "rotary",
    "session",
    "store",
    "testing",
}


def room(module: str) -> str:
    """Return the first name below the package: ``scorers`` of ``scorers/snapkv.py``."""
    return module.removesuffix(".py").split("/")[0]


def imported(source: str, *, to_run: bool = False) -> set[str]:
    """Return the full names that Python source imports, wherever in it; or only those imported when it runs."""
    tree = ast.parse(source)
    for node in list(ast.walk(tree)):
        if to_run and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what they import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def breaches(module: str, source: str) -> list[str]:
    """Return the imports of a module that its room forbids."""
    here = room(module)
    found = []
    if here not in MAY_IMPORT_TRANSFORMERS:
        loading = ("transformers.", "kvpolicy.compat.")
        found += [name for name in sorted(imported(source, to_run=True)) if f"{name}.".startswith(loading)]
    if here not in STAGES:
        return found
    for name in sorted(imported(source)):
        library, _, inside = name.partition(".")
        if library in sys.stdlib_module_names or library == "transformers":
            continue
        allowed = room(inside.replace(".", "/")) in {here, *SHARED} if library == "kvpolicy" else library in LIBRARIES
        if not allowed:
            found.append(name)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_only_what_it_may(module: str) -> None:
    assert breaches(module, (PACKAGE / module).read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        (
            "scorers/new.py",
            "from kvpolicy.budgets.uniform import UniformHeads",
            ["kvpolicy.budgets.uniform.UniformHeads"],
        ),
        ("scorers/new.py", "from kvpolicy import selectors", ["kvpolicy.selectors"]),
        ("scorers/new.py", "def f():\n    import kvpolicy.policy", ["kvpolicy.policy"]),
        ("scorers/new.py", "from transformers import Cache", ["transformers.Cache"]),
        ("scorers/new.py", "from kvpolicy.compat import CACHE_NAMES", ["kvpolicy.compat.CACHE_NAMES"]),
        ("budgets/new.py", "import numpy", ["numpy"]),
        ("attend.py", "from kvpolicy.store.dense import DenseStore", ["kvpolicy.store.dense.DenseStore"]),
        ("store/new.py", "from kvpolicy.capture import layer_view", ["kvpolicy.capture.layer_view"]),
        ("scorers/new.py", "if TYPE_CHECKING:\n    from kvpolicy import selectors", ["kvpolicy.selectors"]),
        ("eval/new.py", "if TYPE_CHECKING:\n    from transformers import Cache", []),
        ("config/new.py", "import transformers.cache_utils", ["transformers.cache_utils"]),
        (
            "store/new.py",
            "import transformers, math\nfrom kvpolicy.store import dense\nfrom kvpolicy.maths import ranks",
            [],
        ),
        ("cli/new.py", "import yaml\nfrom kvpolicy import scorers", []),
    ],
)
def test_the_rules_see_a_breach(module: str, source: str, found: list[str]) -> None:
    assert breaches(module, source) == found


def in_a_fresh_process(code: str) -> str:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_importing_loads_neither_torch_nor_transformers() -> None:
    heavy = "sorted({'torch', 'transformers', 'pydantic', 'yaml'} & set(sys.modules))"
    assert in_a_fresh_process(f"import sys, kvpolicy; print({heavy})") == "[]"
    assert in_a_fresh_process(f"import sys, kvpolicy.cli; print({heavy})") == "[]"


@pytest.mark.parametrize("command", [["list"], ["show", "ecokv"], ["schema"], ["validate", "/nowhere.yaml"]])
def test_a_light_command_does_not_load_transformers(command: list[str]) -> None:
    code = (
        "import sys\nfrom kvpolicy.cli import app\n"
        f"try: app({command!r})\n"
        "except SystemExit: print('transformers' in sys.modules)"
    )
    assert in_a_fresh_process(code).splitlines()[-1] == "False"


def test_importing_changes_nothing_in_transformers_or_torch() -> None:
    code = """
import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

def state():
    attention = dict(ALL_ATTENTION_FUNCTIONS.items())
    masks = dict(ALL_MASK_ATTENTION_FUNCTIONS.items())
    threads = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed()
    return attention, masks, threads, transformers.DynamicCache, torch.nn.functional.scaled_dot_product_attention

before = state()
import kvpolicy
for name in kvpolicy.__all__:
    getattr(kvpolicy, name)
kvpolicy.load("ecokv-snapkv")
assert state() == before
print("unchanged")
"""
    assert in_a_fresh_process(code) == "unchanged"


@pytest.mark.parametrize("module", ["kvpolicy.session.context", "kvpolicy.models"])
def test_too_old_a_transformers_is_named_before_anything_is_looked_up_in_it(module: str) -> None:
    code = f"""
import sys, types
old = sys.modules["transformers"] = types.ModuleType("transformers")
old.__version__ = "5.1.0"
import kvpolicy
policy = kvpolicy.load("snapkv")
try:
    import {module}
except kvpolicy.KVPolicyError as error:
    print(isinstance(error, ImportError), error)
"""
    assert in_a_fresh_process(code) == (
        "True transformers: expected >=5.2, got 5.1.0. Run: pip install 'transformers>=5.2'"
    )


@pytest.mark.parametrize("installed", ["5.2.0", "5.24.0", "5.25.0.dev0", "6.0.0"])
def test_the_oldest_release_and_every_newer_one_will_do(installed: str) -> None:
    require(installed)


@pytest.mark.parametrize("installed", ["4.57.0", "5.1.9", "5.2.0.dev0"])
def test_older_releases_will_not(installed: str) -> None:
    with pytest.raises(UnsupportedVersionError, match=f"got {installed}"):
        require(installed)


def test_every_public_name_is_there() -> None:
    for name in kvpolicy.__all__:
        assert getattr(kvpolicy, name) is not None
    assert dir(kvpolicy) == sorted(kvpolicy.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        kvpolicy.nonsense  # noqa: B018
