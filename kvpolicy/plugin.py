"""What a plugin class is: `settings`, the protocol of each stage, and the `Score` field.

A plugin is a class made with `settings`. Its fields are the settings a policy file may give. Its class
attributes say what it is:

- ``name``: what a policy file calls it;
- ``source``: paper and section or equation, or "kvpolicy" where it is ours;
- ``formula``: one line of maths, shown by ``kvpolicy show``;
- ``cost``: time and memory, likewise; may be left out.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Protocol, TypeVar, dataclass_transform, runtime_checkable

from annotated_types import MinLen
from pydantic import BeforeValidator, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs
from torch import Tensor

from kvpolicy.contract import RESERVED, fault
from kvpolicy.errors import NOTHING, PluginError, Problem, SettingError, nearest
from kvpolicy.fields import CHILD, core_schema, mentions
from kvpolicy.types import LayerView, Merged, Modality, Needs, Selection

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[T]) -> type[T]:
    """Return `cls` as a frozen, keyword-only dataclass whose fields are checked strictly when it is made.

    What a policy file holds will do: a list for a tuple or a set, the value of an enum's member, text for a path.

    Raises:
        PluginError: when scorers or combiners stand in a field that is neither `Score` nor `Scores`.
        SettingError: when an instance is made with an unknown field, a wrong type or a value out of range.

    >>> @settings
    ... class Loud:
    ...     name = "loud"
    ...     power: float = 2.0
    >>> Loud(power=3)
    Loud(power=3.0)
    """
    config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
    cls.__get_pydantic_core_schema__ = classmethod(core_schema)  # type: ignore[attr-defined]
    made = dataclass(frozen=True, kw_only=True, config=config)(cls)
    _check_children(made)
    checked: Callable[..., None] = made.__init__

    @functools.wraps(checked)
    def init(self: T, /, *args: Any, **kwargs: Any) -> None:
        try:
            checked(self, *args, **kwargs)
        except ValidationError as error:
            # A class's own `name` is text; a policy's is a field, which may be what is wrong.
            name = cls.__dict__.get("name")
            owner = name if isinstance(name, str) else cls.__name__.lower()
            raise SettingError(owner, _problems(owner, made, error)) from None

    made.__init__ = init  # type: ignore[assignment, method-assign]
    return made  # type: ignore[return-value]  # pydantic types its dataclasses as its own


def _check_children(cls: Any) -> None:
    """Raise where a field holds scorers or combiners otherwise than as `Score` or `Scores`: nobody would run them."""
    for name, field in cls.__pydantic_fields__.items():
        if CHILD not in field.metadata and mentions(field.annotation, (Scorer, Combiner)):
            raise PluginError(
                f"{cls.__module__}: {cls.__name__}: field '{name}': expected kvpolicy.Score, for one scorer or "
                f"combiner, or kvpolicy.plugin.Scores, for several, and nothing around it"
            )


def _problems(owner: str, cls: type, error: ValidationError) -> list[Problem]:
    """Return what pydantic found wrong as the problems of a `SettingError`."""
    problems: list[Problem] = []
    for each in error.errors(include_url=False):
        where, kind, message, found = each["loc"], each["type"], each["msg"], each["input"]
        raised = each.get("ctx", {}).get("error")
        if isinstance(raised, SettingError):
            problems += raised.problems
            continue
        if raised is not None:
            message = str(raised)
        elif kind == "unexpected_keyword_argument":
            known = [field.name for field in dataclasses.fields(cls)]
            message = _unknown(owner, cls, str(where[-1])) + nearest(str(where[-1]), known)
            found = NOTHING
        elif kind == "missing":
            message = f"expected this setting, which '{owner}' cannot do without"
            found = NOTHING
        elif kind in _NOT_MADE and isinstance(found, (str, int, float, Mapping)):
            message += f", not what a policy file would hold ({_LOAD})"
        if isinstance(found, ArgsKwargs):  # all the settings, which __post_init__ refused: too much to show
            found = NOTHING
        problems.append((where, kind, _expected(message), found))
    return problems


def _unknown(owner: str, cls: type, name: str) -> str:
    value = inspect.getattr_static(cls, name, NOTHING)
    if name in RESERVED or not isinstance(value, (bool, int, float, str, list, tuple, dict)):
        return f"unknown setting of '{owner}'."
    return (
        f"no setting of '{owner}' but an attribute of its class, as it has no annotation "
        f"(`{name}: {type(value).__name__} = {value!r}` makes it one)."
    )


def _expected(message: str) -> str:
    """Return pydantic's message in the words of our own.

    >>> _expected("Input should be greater than or equal to 1")
    'expected a number greater than or equal to 1'
    """
    message = re.sub("^Input should be ", "expected ", message)
    message = re.sub("^expected (greater|less|a multiple)", r"expected a number \1", message)
    words = {"a valid boolean": "true or false", "a valid dictionary": "a mapping"}
    words |= {f"a valid {many}": "a list" for many in ("tuple", "set", "frozenset")}
    return functools.reduce(lambda text, word: text.replace(*word), words.items(), message)


class Node(Protocol):
    """What scorers and combiners share: a place in the score tree."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> Needs: ...


@runtime_checkable
class Scorer(Node, Protocol):
    """A leaf of the score tree.

    ``role`` ("importance" or "diversity", or "other") says what the score measures; without it, "importance".
    ``across_heads = True`` says that what a head's slots score depends on other heads of the layer: such a scorer is
    refused where those are on several ranks (tensor parallelism).

    A method ``check_model(config)`` raises where a decoder with this config is not the one that it was made for;
    without it, any is.
    """

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, higher means keep; only the values at ``view.candidates`` count."""


@runtime_checkable
class Combiner(Node, Protocol):
    """A branch of the score tree: its `Score` and `Scores` fields are its children.

    A child field named ``importance`` marks the importance of the whole.

    A combiner may have a method ``decides(view)`` that returns, by child field, bool ``[B, Hkv, T]``: the slots which
    that child decides. The child then sees no other slots as candidates.

    ``across_heads = True`` says that what a head's slots score depends on other heads of the layer: where those are on
    several ranks (tensor parallelism), it is given the scores of all, and of the view `valid` and `candidates`, no
    more. It may have a method ``check_model``, as a scorer.
    """

    def __call__(self, view: LayerView, **children: Any) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, higher means keep, from the children's scores.

        Each child field arrives under its own name: a tensor for `Score`, a list of tensors for `Scores`.
        """


@runtime_checkable
class LayerBudget(Protocol):
    """How many slots a KV head each layer keeps; ``stage = "layers"``."""

    @property
    def name(self) -> str: ...
    @property
    def stage(self) -> str: ...

    def __call__(self, tokens: Tensor, available: Tensor, layers: int) -> Tensor:
        """Return int64 ``[B, layers]``, first layer first, that sums to ``layers * min(tokens, available)``.

        Args:
            tokens: int64 ``[B]``, the budget in slots a KV head, mean over layers.
            available: int64 ``[B]``, how many slots there are to keep.
            layers: how many layers share the budget.
        """


@runtime_checkable
class SharedOut(LayerBudget, Protocol):
    """A layer budget that goes by what the layers hold, and shares the slots out among them; ``stage = "layers"``.

    Called as any other it says what layers keep as long as nothing is known of them: it plans a cache by that, and
    protects sinks and recent tokens.
    """

    @property
    def needs(self) -> Needs: ...

    def note(self, view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
        """Return what a share depends on in one layer, float32 ``[B, Hkv, n]``, n the same in all layers.

        Args:
            view: the slots of the layer; protected ones are valid and no candidates.
            scores: float32 ``[B, Hkv, T]``, higher means keep.
            tokens: int64 ``[B]``, the budget in slots a KV head, mean over layers.
        """

    def share(self, notes: Tensor, tokens: Tensor, available: Tensor, protected: Tensor, layers: int) -> Tensor:
        """Return the slots a KV head of the layers read so far, int64 ``[B, l]``, each from `protected` to `available`.

        Before the last layer it is what each may hold until then, which later calls may only lower: what is evicted
        does not come back. With the last it sums to ``layers * min(tokens, available)``.

        Args:
            notes: float32 ``[B, l, Hkv, n]``, of the layers read so far, first layer first.
            tokens: int64 ``[B]``, the budget in slots a KV head, mean over layers.
            available: int64 ``[B]``, how many slots there are to keep.
            protected: int64 ``[B]``, how many slots a head every layer keeps, from 1 to ``min(tokens, available)``.
            layers: how many layers share the budget.
        """


@runtime_checkable
class HeadBudget(Protocol):
    """How many slots each KV head of one layer keeps; ``stage = "heads"``.

    ``by`` ("score" or "importance") says which scores it is given; without it, "score". ``across_heads = False`` says
    that a head's length does not depend on other heads; without it, a model whose heads are on several ranks (tensor
    parallelism) gathers of all of them what it is given: scores, and the view's `valid` and `candidates`, no more.
    """

    @property
    def name(self) -> str: ...
    @property
    def stage(self) -> str: ...

    def __call__(self, view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
        """Return int64 ``[B, Hkv]``, at least the protected slots of each head, and 1.

        A row adds up to ``Hkv * tokens``, or to all that it has; to less only where heads hold different numbers.

        Args:
            view: the slots; protected ones are valid and no candidates.
            scores: float32 ``[B, Hkv, T]``, higher means keep.
            tokens: int64 ``[B]``, the layer's budget in slots a KV head, mean over heads.
        """


@runtime_checkable
class Selector(Protocol):
    """Which slots a head keeps, given how many."""

    @property
    def name(self) -> str: ...

    @property
    def protects(self) -> int:
        """How many slots a head it keeps whatever the score; a budget in tokens must hold them.

        Of a larger budget it leaves some to the score.
        """

    def protect(self, view: LayerView, tokens: Tensor) -> Tensor:
        """Return bool ``[B, Hkv, T]``, the slots kept whatever the score; at most `tokens` (``[B]``)."""

    def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Selection:
        """Return the kept slots: exactly `lengths` (int64 ``[B, Hkv]``) of them, the protected among them."""


@runtime_checkable
class Evicted(Protocol):
    """What becomes of the slots of a layer that are not kept; ``stage = "evicted"``."""

    @property
    def name(self) -> str: ...
    @property
    def stage(self) -> str: ...
    @property
    def needs(self) -> Needs: ...

    def __call__(self, view: LayerView, selection: Selection, memory: Tensor | None) -> Merged | None:
        """Return what the kept slots hold from now on; None where they stay as they are, and so does the memory.

        Args:
            view: the slots; those that are valid and not selected are evicted.
            selection: the slots that are kept.
            memory: what it returned as such at the layer's last eviction, for the rows of now; None before that.
        """


@runtime_checkable
class Store(Protocol):
    """How the kept slots of a layer are held."""

    @property
    def name(self) -> str: ...

    def __call__(self, kept: Any) -> Any:
        """Return a store (see `kvpolicy.step.Stored`) of what `kept`, a `DenseStore` or `RaggedStore`, holds."""


_NOT_MADE = ("is_instance_of", "dataclass_exact_type")
"""What pydantic calls the error of a value that is no instance of the class."""
_LOAD = "kvpolicy.load({...}) takes that"


def _node(value: object) -> object:
    """Return `value` where it is a scorer or combiner."""
    expected = "expected a scorer or combiner"
    if isinstance(value, type):
        raise ValueError(f"{expected}, an instance: {value.__name__}()")
    if isinstance(value, (str, Mapping)):
        raise ValueError(f"{expected}, not what a policy file would hold ({_LOAD})")
    if wrong := fault(value, "scorer"):
        raise ValueError(f"{expected}, not a {type(value).__name__}: {wrong}")
    return value


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Score = Annotated[Scorer | Combiner, BeforeValidator(_node), CHILD]
"""A field that holds one scorer or combiner."""
Scores = Annotated[tuple[Annotated[Scorer | Combiner, BeforeValidator(_node)], ...], BeforeValidator(_as_tuple), CHILD]
"""A field that holds several; a list in a policy file."""
Numbers = Annotated[tuple[float, ...], BeforeValidator(_as_tuple)]
"""A field that holds several numbers; a list in a policy file."""
Modalities = Annotated[tuple[Modality, ...], MinLen(1), BeforeValidator(_as_tuple)]
"""A field that holds one modality or more; a list in a policy file."""


@functools.cache  # reading a class's annotations takes a hundred times as long as what asks for them
def child_fields(cls: type) -> tuple[str, ...]:
    """Return the names of the `Score` and `Scores` fields of a plugin class."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(name for name, hint in hints.items() if CHILD in getattr(hint, "__metadata__", ()))


def children(node: Node) -> dict[str, Node | tuple[Node, ...]]:
    """Return the children of a score-tree node by field name; empty for a scorer."""
    return {name: getattr(node, name) for name in child_fields(type(node))}


def walk(node: Node) -> Iterator[Node]:
    """Yield `node` and everything below it, parents first."""
    yield node
    for child in children(node).values():
        for below in child if isinstance(child, tuple) else (child,):
            yield from walk(below)


def kind_of(cls: type) -> str:
    """Return the kind of a plugin class: "scorer", "combiner", "layers", "heads", "selector" or "evicted"; else "".

    >>> from kvpolicy.selectors.top_k import TopK
    >>> kind_of(TopK)
    'selector'
    """
    stage = getattr(cls, "stage", None)
    if stage is not None:
        return str(stage)
    if hasattr(cls, "protect"):
        return "selector"
    if dataclasses.is_dataclass(cls) and child_fields(cls):
        return "combiner"
    return "scorer" if hasattr(cls, "needs") else ""


def needs_of(node: Node) -> Needs:
    """Return what `node` and everything below it reads, all together."""
    needs = Needs()
    for one in walk(node):
        needs |= one.needs
    return needs


def role_of(scorer: object) -> str:
    """Return what a scorer, or a scorer class, measures: "importance" unless it says otherwise."""
    return str(getattr(scorer, "role", "importance"))


def importance_of(node: Node) -> Node | None:
    """Return the part of a score tree that measures importance, or None where there is none.

    Of a combiner that gives each child slots of its own (`decides`), it is the same over the importance of each child.
    """
    below = children(node)
    if "importance" in below:
        return typing.cast(Node, below["importance"])
    if hasattr(node, "decides"):
        return _importance_of_each(node, below)
    leaves = [leaf for leaf in walk(node) if not children(leaf)]
    return node if all(role_of(leaf) == "importance" for leaf in leaves) else None


def _importance_of_each(node: Node, below: dict[str, Node | tuple[Node, ...]]) -> Node | None:
    parts: dict[str, Any] = {}
    for name, child in below.items():
        found = [importance_of(one) for one in (child if isinstance(child, tuple) else (child,))]
        if None in found:
            return None
        parts[name] = tuple(found) if isinstance(child, tuple) else found[0]
    return node if parts == below else dataclasses.replace(node, **parts)  # type: ignore[type-var]
