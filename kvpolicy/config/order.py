"""The error of policies that do not fit over each other: placed where a file lists them, with the order that works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvpolicy.config.extend import Document, base_of, resolve
from kvpolicy.config.source import fault
from kvpolicy.errors import PolicyFileError


def explained(error: PolicyFileError, document: Document, made: Callable[[Document], object]) -> PolicyFileError:
    """Return the error of a policy that cannot be made; placed at the base to blame, where that is laid over others.

    Args:
        error: what was raised.
        document: the policy.
        made: what makes a policy of a document, or raises.
    """
    below: list[str] = []
    # With its own file, or none, the error is where it should be.
    for index, named in enumerate(document.extends if error.file not in (None, str(document.file)) else ()):
        base = base_of(document, named)
        if below and str(base.file) == error.file:
            laying = (
                f"extends: laying {base.title!r} over {' + '.join(map(repr, below))}: {str(error).removesuffix('.')}."
            )
            return fault((named.place, f"{laying}{_other_order(document, index, made)}"))
        below.append(base.title)
    return error


def _other_order(document: Document, index: int, made: Callable[[Document], object]) -> str:
    """Return a hint where the settings of the base at `index` fit once it comes first."""
    order = (document.extends[index], *document.extends[:index], *document.extends[index + 1 :])
    try:
        # A base that finds nothing to inherit is not helped by coming first: what is laid over it would replace it.
        resolve(document)
        made(replace(document, extends=order))
    except PolicyFileError:
        return ""
    return f" The other order works: extends: [{', '.join(named.value for named in order)}]."
