"""Error classes: every error a user can cause is a `KVPolicyError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class KVPolicyError(Exception):
    """Base of every error that kvpolicy raises on purpose."""


class PolicyError(KVPolicyError, ValueError):
    """A policy is declared wrongly: an unknown name, a bad setting, a budget that cannot hold."""


NOTHING = object()
"""What a `SettingError` problem found, where showing a value would not help."""

Problem = tuple[tuple[str | int, ...], str, str, object]
"""Where (field names and indices), its kind (pydantic's error type), what was expected, what was found."""


class SettingError(PolicyError):
    """Settings of a plugin or policy are unknown, of a wrong type or out of range.

    Args:
        owner: the plugin or policy they belong to.
        problems: what is wrong with them.

    >>> print(SettingError("budget", [(("tokens",), "int_type", "expected a valid integer", "512")]))
    budget: tokens: expected a valid integer, got '512'
    """

    def __init__(self, owner: str, problems: list[Problem]) -> None:
        self.owner = owner
        self.problems = problems
        texts = []
        for where, _, message, found in problems:
            at = f"{'.'.join(map(str, where))}: " if where else ""
            texts.append(at + message + ("" if found is NOTHING else f", got {found!r}"))
        super().__init__(f"{owner}: " + "; ".join(texts))


class PolicyFileError(PolicyError):
    """A policy file, mapping or keyword is wrong; the message says where, what was expected, what was found.

    Args:
        message: one line a problem, each beginning with its place.
        file: the file of the first problem; None when it came from a mapping or keyword.
        line: its line, from 1; None when the problem is with the file as a whole.
        column: its column, from 1.
    """

    def __init__(
        self, message: str, *, file: str | None = None, line: int | None = None, column: int | None = None
    ) -> None:
        self.file = file
        self.line = line
        self.column = column
        super().__init__(message)


class PluginError(KVPolicyError, TypeError):
    """A plugin breaks its contract: a wrong hook, a name clash, a wrong shape, an undeclared read."""


class UndeclaredReadError(PluginError):
    """A plugin reads something of a view that its `needs` does not declare."""


class ConformanceError(KVPolicyError, AssertionError):
    """A check of `kvpolicy.testing` found that a plugin does not keep its contract."""


class ViewError(KVPolicyError, ValueError):
    """The tensors of a `LayerView` do not fit together."""


class UnsupportedModelError(KVPolicyError, ValueError):
    """A policy cannot act on this model, this cache or this way of running it."""


class InactiveSessionError(KVPolicyError, ValueError):
    """An evicted cache is used where the session that made it is not active."""


class ContextError(KVPolicyError, ValueError):
    """A compressed context, its file, a question put to it or the model it is given to is wrong."""


class UnsupportedVersionError(KVPolicyError, ImportError):
    """A package that kvpolicy needs is not installed, or older than it needs."""


class MissingModelError(KVPolicyError, ValueError):
    """A model's files or the package that carries them are not there."""


def check_weights(owner: str, weights: Sequence[float] | None, inputs: Sequence[object]) -> None:
    """Raise a `SettingError` of `owner` where there are weights, but not one for each of its `inputs`."""
    if weights is not None and len(weights) != len(inputs):
        message = f"expected one weight for each of {len(inputs)} inputs"
        raise SettingError(owner, [(("weights",), "value_error", message, list(weights))])


def not_installed(what: str, package: str, extra: str) -> str:
    """Return the message of an optional package that is not there: who needs it, and how to get it.

    >>> not_installed("tuning", "Optuna", "tune")
    "tuning needs Optuna, which is not installed. Install it:  pip install 'kvpolicy[tune]'"
    """
    return f"{what} needs {package}, which is not installed. Install it:  pip install 'kvpolicy[{extra}]'"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the names closest to `name`, whatever their case, then all that exist.

    >>> nearest("SnapKB", ["snapkv", "random"])
    " Did you mean 'snapkv'? Known: random, snapkv."
    """
    known = sorted(names)
    folded = {each.casefold(): each for each in known}
    close = [folded[match] for match in difflib.get_close_matches(str(name).casefold(), folded, n=3, cutoff=0.6)]
    hint = " Did you mean " + " or ".join(repr(match) for match in close) + "?" if close else ""
    return f"{hint} Known: {', '.join(known) or 'none'}."
