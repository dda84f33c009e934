"""What is registered in this process, under which name, and where it came from."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping

from kvpolicy.contract import KINDS, WHAT, Entry
from kvpolicy.errors import PluginError, PolicyError, nearest
from kvpolicy.loading import ALLOW, Failure, Plugin, allowed, being_loaded, built_in, load, origin_of, points

_LOCK = threading.RLock()
"""Held while the registry of this process is made, and while any registry changes."""


class Registry:
    """Everything that plugins offer, by kind and name.

    Args:
        plugins: what is registered at first.

    Raises:
        PluginError: when two offer the same name.
    """

    def __init__(self, plugins: Iterable[Plugin] = ()) -> None:
        self.failures: list[Failure] = []
        """The installed plugins that had to be left out."""
        self.not_allowed: tuple[str, ...] = ()
        """The installed distributions that `ALLOW` does not name."""
        self._offers: dict[Plugin, tuple[Entry, ...]] = {}
        self._entries: dict[tuple[str, str], Entry] = {}
        self.add(*plugins)

    def add(self, *plugins: Plugin) -> None:
        """Register plugins, all or none. A class that the same code makes again takes the place of the earlier one.

        Raises:
            PluginError: when two offer the same name; nothing has changed then.
        """
        with _LOCK:
            offers = {known: _not_made_again(entries, known, plugins) for known, entries in self._offers.items()}
            self._set(offers | {plugin: plugin.entries for plugin in plugins})

    def remove(self, *plugins: Plugin) -> None:
        """Forget plugins; those that are not there are no matter."""
        with _LOCK:
            self._set({known: entries for known, entries in self._offers.items() if known not in plugins})

    def _set(self, offers: dict[Plugin, tuple[Entry, ...]]) -> None:
        self._entries = _by_place(offers)
        self._offers = offers

    def get(self, kind: str, name: str) -> Entry:
        """Return the entry called `name`; `kind` is one of the places in `kvpolicy.contract.WHAT`.

        Raises:
            PolicyError: when there is none, with the nearest names.
        """
        try:
            return self._entries[kind, name]
        except KeyError:
            raise self._unknown(WHAT[kind], name, self.names(kind)) from None

    def called(self, name: str) -> list[Entry]:
        """Return every entry called `name`, whatever its kind; a policy comes first.

        Raises:
            PolicyError: when there is none, with the nearest names.
        """
        found = [entry for (_, known), entry in self._entries.items() if known == name]
        if not found:
            raise self._unknown("policy or plugin", name, {known for _, known in self._entries})
        return sorted(found, key=lambda entry: ("policy", *KINDS).index(entry.kind))

    def names(self, kind: str) -> list[str]:
        """Return the names that `get` knows for `kind`, sorted."""
        return sorted(name for place, name in self._entries if place == kind)

    def entries(self, kind: str | None = None) -> list[Entry]:
        """Return all entries, or those of one kind (`KINDS` or "policy"), sorted by kind and name."""
        found = [entry for entry in self._entries.values() if kind in (None, entry.kind)]
        return sorted(found, key=lambda entry: ((*KINDS, "policy").index(entry.kind), entry.name))

    def _unknown(self, what: str, name: str, known: Iterable[str]) -> PolicyError:
        return PolicyError(f"unknown {what} {name!r}.{nearest(name, known)}{self._left_out()}")

    def _left_out(self) -> str:
        said = ""
        if self.failures:
            who = "; ".join(f"{failure.origin}: {failure}" for failure in self.failures)
            said += f" A plugin that could not be loaded may offer it ({who})."
        if self.not_allowed:
            said += f" A plugin that {ALLOW} leaves out may offer it ({', '.join(self.not_allowed)})."
        return said


def _not_made_again(entries: tuple[Entry, ...], plugin: Plugin, added: Iterable[Plugin]) -> tuple[Entry, ...]:
    """Return those of a plugin's entries whose class no added plugin has anew, as when a notebook's cell runs again."""
    new = {entry.place: entry.value for one in added if one.in_code and plugin.in_code for entry in one.entries}
    return tuple(entry for entry in entries if not _made_again(entry.value, new.get(entry.place)))


def _made_again(old: object, new: object) -> bool:
    if not isinstance(old, type) or not isinstance(new, type) or old is new:
        return False
    return _maker(old) == _maker(new)


def _maker(cls: type) -> tuple[str, str]:
    """Return where the code that makes a class stands: that of a wrapped function's is the function's."""
    code = getattr(cls, "wraps", cls)
    return str(getattr(code, "__module__", "")), str(getattr(code, "__qualname__", code))


def _by_place(offers: Mapping[Plugin, Iterable[Entry]]) -> dict[tuple[str, str], Entry]:
    """Return the entries by the place of their names.

    Raises:
        PluginError: when two have the same.
    """
    found: dict[tuple[str, str], tuple[Plugin, Entry]] = {}
    for plugin, entries in offers.items():
        for entry in entries:
            known, other = found.setdefault(entry.place, (plugin, entry))
            # One class may be registered twice in code: it is there until both are undone.
            if other is not entry and not (known.in_code and plugin.in_code and other.value == entry.value):
                raise PluginError(_clash(other, entry, in_code=known.in_code or plugin.in_code))
    return {place: entry for place, (_, entry) in found.items()}


def _clash(one: Entry, other: Entry, *, in_code: bool) -> str:
    first, second = sorted([one.origin, other.origin])
    way_out = f"Uninstall one of them, leave it out ({ALLOW} names those to load), or ask its author to rename it."
    if in_code:
        way_out = "Give yours another name."
    elif built_in := [origin for origin in (first, second) if origin.startswith("kvpolicy ")]:
        theirs = second if built_in[0] == first else first
        way_out = f"Leave {theirs} out ({ALLOW} names those to load), or ask its author to rename it."
    if first == second:
        return f"{first} offers the {other.kind} '{other.name}' twice. {way_out}"
    return f"two plugins offer the {other.kind} '{other.name}': {first} and {second}. {way_out}"


def registry() -> Registry:
    """Return the registry of this process: built-ins, installed plugins, loaded once, and what `register` adds.

    Raises:
        PluginError: when an installed plugin says something wrongly, or asks for this while it is being loaded; the
            message names its distribution.
    """
    if origin := being_loaded.get():
        raise PluginError(
            f"{origin} asks for policies or plugins, or registers them, while it is being loaded: expected hooks that "
            "offer classes and do nothing else"
        )
    with _LOCK:
        return loaded()


@functools.cache
def loaded() -> Registry:
    """Return what `registry` returns, which is what to call: here nothing keeps threads and plugins from each other."""
    found = Registry(built_in())
    every = points()
    chosen = allowed(every)
    let_in = {origin_of(point) for point in chosen}
    found.not_allowed = tuple(dict.fromkeys(one for one in map(origin_of, every) if one not in let_in))
    for point in chosen:
        plugin = load(point)
        if isinstance(plugin, Failure):
            found.failures.append(plugin)
        else:
            found.add(plugin)
    return found
