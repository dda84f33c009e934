"""Makes every Python block of README.md and docs/ a test, run down the page in one namespace."""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# Of the harness, which has an environment of its own: make test-extras.
collect_ignore_glob = [] if find_spec("lm_eval") else ["tests/test_lm_eval.py", "kvpolicy/integrations/lm_eval/*"]
if not find_spec("lmms_eval"):  # likewise: make test-lmms-eval
    collect_ignore_glob += ["tests/test_lmms_eval.py", "kvpolicy/integrations/lmms_eval/*"]
if not find_spec("pyarrow"):
    collect_ignore_glob.append("kvpolicy/analysis/tables.py")


class Page(ModuleType):
    """The names that the blocks of a page have made: what a page defines can be pickled, as from a module."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__("page")
        self.names = names

    def __getattr__(self, name: str) -> Any:
        try:
            return self.names[name]
        except KeyError:
            raise AttributeError(name) from None


def begin(names: dict[str, Any]) -> None:
    names["__name__"] = "page"
    sys.modules["page"] = Page(names)


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    setup=begin,
).pytest()
