"""One policy laid over another: `extends`, keywords, shorthand, and ``importance: inherited``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvpolicy.config.source import Item, Place, fault, from_python, read, show
from kvpolicy.contract import INHERITED
from kvpolicy.errors import PolicyError, PolicyFileError, nearest
from kvpolicy.plugin import child_fields, role_of
from kvpolicy.registry import registry

KEYS = ("name", "description", "extends", "score", "budget", "select", "evicted", "prefill", "decode", "store")
"""What a policy file may say at its top."""

A_PATH = "The path of a file has a '/' or ends in .yaml."
"""How a path is told from a name."""

DEFAULTS = {
    "budget": {"layers": "uniform", "heads": "uniform"},
    "select": {"type": "top-k"},
    "evicted": {"type": "drop"},
    "store": {"type": "plain"},
}
"""What every policy is laid over."""


@dataclass(frozen=True)
class Document:
    """One policy as written, before what it extends is looked up.

    Args:
        body: the mapping, without its ``extends``.
        extends: the names and paths it extends, where they were written.
        title: what a ring calls it.
        file: where it was read from; None for a mapping.
    """

    body: Item
    extends: tuple[Item, ...]
    title: str
    file: Path | None = None

    def is_same(self, other: Document) -> bool:
        """Whether both were read from one file."""
        return self.file is not None and other.file is not None and self.file.resolve() == other.file.resolve()


def find(source: object) -> Document:
    """Return the policy that `source` (a name, a path or a mapping) stands for.

    Raises:
        PolicyFileError: when there is none, or it is no policy.
    """
    if isinstance(source, Mapping):
        return to_document(from_python(source, Place("policy mapping")), "this mapping")
    if isinstance(source, os.PathLike) or (isinstance(source, str) and is_path(source)):
        path = Path(source)
        return to_document(read(path), str(path), path)
    if not isinstance(source, str):
        raise fault((Place("policy"), f"expected a name, a path or a mapping, got {show(source)}"))
    try:
        path = registry().get("policy", source).value
    except PolicyError as error:
        raise PolicyFileError(f"{error} {A_PATH}") from None
    return to_document(read(path), source, path)


def resolve(document: Document, above: tuple[Document, ...] = ()) -> Item:
    """Return the body of `document` laid over what it extends.

    Its first base counts whole, with what that extends; of each later one the own body is laid over the result.

    Args:
        document: the policy.
        above: the policies that led to it by extending each other.

    Raises:
        PolicyFileError: when a base is not there or extends itself.
    """
    above = (*above, document)
    whole = from_python(DEFAULTS, document.body.place)
    names = []
    for index, named in enumerate(document.extends):
        base = base_of(document, named)
        if any(base.is_same(other) for other in above):
            ring = " -> ".join(other.title for other in (*above, base))
            raise fault((named.place, f"extends: expected a policy that does not lead back here, got {ring}"))
        whole = resolve(base, above) if index == 0 else lay(whole, base.body)
        names.append(str(base.body.value["name"].value))
    return lay(whole, _described(whole, document.body, names))


def lay_keywords(whole: Item, given: Item) -> Item:
    """Return a resolved policy with the keywords of `kvpolicy.load` laid over it."""
    name = whole.value.get("name")
    return lay(whole, given if name is None else _described(whole, given, [str(name.value)]))


def _described(base: Item, body: Item, names: list[str]) -> Item:
    """Return the body with a description of its own where that of its bases, called `names`, would be wrong."""
    old = base.value.get("description")
    if old is None or "description" in body.value or (len(names) == 1 and _is_alike(body)):
        return body
    return _with(body, "description", Item(f"after {' + '.join(names)}", old.place))


def _is_alike(body: Item) -> bool:
    """Whether a body only renames what it is laid over, or changes how much that keeps."""
    budget = _long(body).value.get("budget")
    sizes = budget is None or budget.value.keys() <= {"tokens", "keep"}
    return sizes and body.value.keys() <= {"name", "budget"}


def lay(base: Item, body: Item) -> Item:
    """Return `base` with the settings of `body` laid over it: both mappings with the keys of a policy."""
    body = _long(body)
    if "score" in body.value:
        body = _with(body, "score", _inherit(body.value["score"], base.value.get("score")))
    return merge(_choice(base, body), body)


def merge(base: Item, over: Item) -> Item:
    """Return `over` laid over `base`: mappings key by key, unless they name another `type`; all else replaces.

    >>> place = Place("example")
    >>> base = from_python({"type": "snapkv", "window": 32, "kernel": 5}, place)
    >>> merge(base, from_python({"window": 8}, place)).plain
    {'type': 'snapkv', 'window': 8, 'kernel': 5}
    >>> merge(base, from_python({"type": "key-norm"}, place)).plain
    {'type': 'key-norm'}
    """
    if not (isinstance(base.value, dict) or isinstance(over.value, dict)):
        return over
    low, high = mapping(base), mapping(over)
    if low is None or high is None:
        return over
    if "type" in low and "type" in high and low["type"].value != high["type"].value:
        return over
    merged = {name: merge(low[name], item) if name in low else item for name, item in high.items()}
    return replace(over, value={**low, **merged})


def mapping(item: Item) -> dict[str, Item] | None:
    """Return the mapping that `item` holds; a bare name counts as ``{type: name}``."""
    if isinstance(item.value, str):
        return {"type": replace(item, key=None)}
    return item.value if isinstance(item.value, dict) else None


def _with(item: Item, name: str, below: Item) -> Item:
    return replace(item, value={**item.value, name: below})


def _long(body: Item) -> Item:
    """Return the body with a bare budget written out: whole tokens or a share."""
    budget = body.value.get("budget")
    if budget is None or isinstance(budget.value, dict):
        return body
    number = budget.value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        expected = "expected whole tokens (512), a share (0.25) or a mapping"
        raise fault((budget.place, f"budget: {expected}, got {show(budget.plain)}"))
    name = "tokens" if isinstance(number, int) else "keep"
    return _with(body, "budget", replace(budget, value={name: replace(budget, key=None)}))


def _choice(base: Item, body: Item) -> Item:
    """Return the base without the `tokens` or `keep` that the body takes back by giving the other one."""
    budget = body.value["budget"].value if "budget" in body.value else {}
    if all(name not in budget or budget[name].value is None for name in ("tokens", "keep")):
        return base
    old = base.value["budget"]
    kept = {name: item for name, item in old.value.items() if name not in ("tokens", "keep")}
    return _with(base, "budget", replace(old, value=kept))


def _inherit(item: Item, score: Item | None) -> Item:
    """Return a part of a score in which the importance of the base's `score` stands for ``inherited``."""
    if isinstance(item.value, list):
        return replace(item, value=[_inherit(below, score) for below in item.value])
    below = mapping(item)
    if below is None or "type" not in below or below["type"].value != INHERITED:
        if not isinstance(item.value, dict):
            return item
        return replace(item, value={name: _inherit(part, score) for name, part in item.value.items()})
    if score is None:
        expected = "score: expected a policy to inherit the importance of"
        raise fault((item.place, f"{expected}; this one extends none: add extends: POLICY"))
    part = score.value["importance"] if isinstance(score.value, dict) and "importance" in score.value else score
    for cls in _scorers(part):
        role = role_of(cls)
        if role != "importance":
            got = f"'{getattr(cls, 'name', cls.__name__)}', whose role is '{role}'"
            raise fault((item.place, f"score: expected a base with an importance to inherit, got that of {got}"))
    settings = {name: part for name, part in below.items() if name != "type"}
    return merge(part, replace(item, value=settings)) if settings else replace(part, key=item.key)


def _scorers(item: Item) -> Iterator[type]:
    """Yield the scorer classes of a score; an unknown name is left to `build`, which says where it is."""
    named = mapping(item)
    if named is None or "type" not in named or named["type"].value not in registry().names("score"):
        return
    cls = registry().get("score", named["type"].value).value
    fields = child_fields(cls)
    if not fields:
        yield cls
    for below in (named[name] for name in fields if name in named):
        for part in below.value if isinstance(below.value, list) else [below]:
            yield from _scorers(part)


def to_document(item: Item, title: str, file: Path | None = None) -> Document:
    """Return a mapping as a policy, its top-level keys checked."""
    for name, below in item.value.items():
        if name not in KEYS:
            raise fault((below.key or below.place, f"unknown setting {name!r} of a policy.{nearest(name, KEYS)}"))
    body = {name: below for name, below in item.value.items() if name != "extends"}
    extends = () if "extends" not in item.value else _extended(item.value["extends"])
    if "name" not in body and (file is not None or len(extends) > 1):
        # A base's name would be taken for the base itself.
        name = " + ".join(one.value for one in extends) if file is None else file.stem
        body["name"] = Item(name, item.place)
    return Document(replace(item, value=body), extends, title, file)


def _extended(item: Item) -> tuple[Item, ...]:
    named = tuple(item.value) if isinstance(item.value, list) else (item,)
    if not named:
        raise fault((item.place, "extends: expected a policy, or a list of them, got none"))
    for one in named:
        if not isinstance(one.value, str):
            raise fault((one.place, f"extends: expected the name or path of a policy, got {show(one.plain)}"))
    return named


def base_of(document: Document, named: Item) -> Document:
    """Return the policy that `document` extends by a name, or by a path relative to its own file."""
    if not is_path(named.value):
        try:
            path = registry().get("policy", named.value).value
        except PolicyError as error:
            raise fault((named.place, f"extends: {error}")) from None
        return to_document(read(path), named.value, path)
    path = Path(named.value) if document.file is None else document.file.parent / named.value
    return to_document(read(path, named.place), str(path), path)


def is_path(text: str) -> bool:
    """Return whether a text is the path of a policy file, not a name."""
    return "/" in text or os.sep in text or text.endswith((".yaml", ".yml"))
