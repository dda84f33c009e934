"""What a plugin may offer: the hooks, the kinds, and the checks of each class; and the version of all that."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic.dataclasses import is_pydantic_dataclass

from kvpolicy.errors import NOTHING, PluginError
from kvpolicy.fields import CHILD, not_giveable
from kvpolicy.types import Needs

CONTRACT = 1
"""The version of what plugins rely on: the hooks and what they return, what the class of each kind must have (the
protocols in `kvpolicy.plugin`), and the names in `LayerView`, `Needs` and `Selection`. It rises when a plugin that kept
to it would have to change. What is only added does not raise it."""

KINDS = ("scorer", "combiner", "layers", "heads", "selector", "evicted", "store")
"""Scorers and combiners; layer and head budgets; selectors; what becomes of the evicted; stores."""

HOOKS = {
    "kvpolicy_scorers": "scorer",
    "kvpolicy_combiners": "combiner",
    "kvpolicy_budgets": "",  # each class says which with `stage`
    "kvpolicy_selectors": "selector",
    "kvpolicy_evicted": "evicted",
    "kvpolicy_stores": "store",
    "kvpolicy_policies": "policy",
}
"""The kind that each hook offers."""

WHAT = {
    "score": "scorer or combiner",
    "layers": "layer budget",
    "heads": "head budget",
    "selector": "selector",
    "evicted": "treatment of the evicted",
    "store": "store",
    "policy": "policy",
}
"""What stands in each place of a policy file, in words."""

INHERITED = "inherited"
"""What a policy file calls the importance of the policy it extends; no plugin may take the name."""

ROLES = ("importance", "diversity", "other")
"""What a scorer may measure."""

RESERVED = ("name", "needs", "role", "source", "formula", "stage")
"""What a plugin's class says of itself, and so can be no setting."""

# A letter first: what YAML reads as a number begins with none.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_NOT_TEXT = ("true", "false", "null")
NAMES = "a letter, then letters, digits, '-', '_' or '.'"
"""What a name is made of, in words."""


@dataclass(frozen=True)
class Entry:
    """One registered plugin class, or one policy file.

    Args:
        kind: one of `KINDS`, or "policy".
        name: what a policy file calls it.
        value: the class, or the path of the policy file.
        origin: the distribution (and version) or module that registered it.
    """

    kind: str
    name: str
    value: Any
    origin: str

    @property
    def what(self) -> str:
        """Its kind in words: "scorer", "layer budget", ..."""
        return WHAT.get(self.kind, self.kind)

    @property
    def place(self) -> tuple[str, str]:
        """Where its name must be the only one: scorers and combiners stand in the same place of a policy file."""
        return "score" if self.kind in ("scorer", "combiner") else self.kind, self.name


def offered(kind: str, value: Any, origin: str) -> Entry:
    """Return a class that a hook offers as an entry.

    Args:
        kind: one of `KINDS`; "" for a budget, which says itself.
        value: what is offered.
        origin: who offers it.

    Raises:
        PluginError: when it breaks the contract of its kind.
    """
    if not isinstance(value, type):
        raise PluginError(f"{origin}: expected a class, got {value!r}")
    who = f"{origin}: {kind or 'budget'} {value.__name__}"
    if not kind:
        kind = getattr(value, "stage", "")
        if kind not in ("layers", "heads"):
            raise PluginError(f"{who}: expected stage = 'layers' or 'heads', got {kind!r}")
    if not is_pydantic_dataclass(value):
        raise PluginError(f"{who}: expected a class made with @kvpolicy.settings")
    if wrong := fault(value, kind):
        raise PluginError(f"{who}: {wrong}")
    name: str = value.name  # type: ignore[attr-defined]
    if name == INHERITED and kind in ("scorer", "combiner"):
        raise PluginError(f"{who}: expected another name than '{name}', which stands for a base's importance")
    if wrong := not_giveable(value):
        raise PluginError(f"{who}: {wrong}")
    return Entry(kind, name, value, origin)


def stated(number: object, origin: str) -> int:
    """Return the version of the contract that a plugin says it is written for, its ``kvpolicy_contract``.

    Raises:
        PluginError: when this kvpolicy does not offer it.
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise PluginError(f"{origin}: kvpolicy_contract: expected a whole number from 1, got {number!r}")
    if number > CONTRACT:
        raise PluginError(
            f"{origin} is written for contract {number}, this kvpolicy {version('kvpolicy')} offers {CONTRACT}: "
            "upgrade kvpolicy."
        )
    return number


def will_do(name: str) -> bool:
    """Return whether a policy file may call something so.

    >>> will_do("my-score"), will_do("1e3"), will_do("null")
    (True, False, False)
    """
    return bool(_NAME.fullmatch(name)) and name.lower() not in _NOT_TEXT


def fault(plugin: object, kind: str) -> str:
    """Return what a plugin, or a plugin class, has wrong as one of its kind, in words; "" where nothing.

    >>> class Nameless:
    ...     needs = Needs()
    >>> fault(Nameless, "scorer")
    "it has no `name`: what a policy file calls it, as in name = 'nameless'"
    """
    cls = plugin if isinstance(plugin, type) else type(plugin)
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.name in RESERVED:
            return f"its `{field.name}` is annotated, so a policy file could set it: write it without the annotation"
    name = _said(plugin, "name")
    if name is NOTHING:
        return f"it has no `name`: what a policy file calls it, as in name = '{_dashed(cls.__name__)}'"
    if not isinstance(name, str):
        return f"its `name` is {name!r}, not text in a class attribute"
    if not will_do(name):
        return f"its `name` is {name!r}, not such as 'my-score' ({NAMES})"
    if not (issubclass(plugin, Callable) if isinstance(plugin, type) else callable(plugin)):  # type: ignore[arg-type]
        return "it has no `__call__`, which does its work"
    if kind in ("scorer", "combiner", "evicted") and (wrong := _fault_of_needs(plugin)):
        return wrong
    if kind == "scorer" and (wrong := _fault_of_call(cls)):
        return wrong
    if kind in ("scorer", "combiner"):
        return _fault_of_role(plugin)
    if kind == "evicted":
        return "" if _said(plugin, "stage") == "evicted" else "it has no `stage`, as in stage = 'evicted'"
    if kind == "selector":
        missing = [f"`{part}`" for part in ("protects", "protect") if _said(plugin, part) is NOTHING]
        return f"it has no {' and no '.join(missing)} (see kvpolicy.plugin.Selector)" if missing else ""
    if kind == "layers" and _said(plugin, "note") is not NOTHING:
        missing = [f"`{part}`" for part in ("share", "needs") if _said(plugin, part) is NOTHING]
        if missing:
            return f"it shares slots out but has no {' and no '.join(missing)} (see kvpolicy.plugin.SharedOut)"
        return _fault_of_needs(plugin)
    return ""


def _fault_of_needs(plugin: object) -> str:
    needs = _said(plugin, "needs")
    if needs is NOTHING:
        return "it has no `needs`: what it reads, as in needs = kvpolicy.Needs(keys=True), or a property"
    # A class's property says it once there is an instance.
    later = isinstance(plugin, type) and hasattr(needs, "__get__") and not inspect.isroutine(needs)
    if not isinstance(needs, Needs) and not later:
        return f"its `needs` is {needs!r}, not a kvpolicy.Needs or a property that returns one"
    return ""


def _fault_of_call(cls: Any) -> str:
    """Return in words what tells a class from a scorer: that it is called with more than a view."""
    if any(CHILD in field.metadata for field in getattr(cls, "__pydantic_fields__", {}).values()):
        return ""  # a combiner: its children come besides
    try:
        _, *given = inspect.signature(cls.__call__).parameters.values()
    except ValueError:
        return ""  # it does not say what it is called with
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one.name for one in given if one.kind in positional and one.default is one.empty]
    if len(needed) < 2:
        return ""
    return (
        f"its `__call__` takes ({', '.join(needed)}), a scorer's the view alone: write stage = 'evicted' into a class "
        "that says what becomes of the evicted, stage = 'heads' into a head budget"
    )


def _fault_of_role(plugin: object) -> str:
    role = _said(plugin, "role")
    if role is not NOTHING and role not in ROLES:
        return f"its `role` is {role!r}, not one of {', '.join(map(repr, ROLES))}"
    return ""


def _dashed(cls: str) -> str:
    """Return the name of a class as a policy file would write it.

    >>> _dashed("ValueNovelty"), _dashed("L2Norm"), _dashed("KVDistance")
    ('value-novelty', 'l2-norm', 'kv-distance')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cls).lower()


def _said(plugin: object, attribute: str) -> object:
    """Return an attribute, or `NOTHING`; of a class as it stands there, a property as itself."""
    if isinstance(plugin, type):
        return inspect.getattr_static(plugin, attribute, NOTHING)
    return getattr(plugin, attribute, NOTHING)
