"""What a check says of a plugin."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy.errors import ConformanceError
from kvpolicy.testing import checks


def fault(plugin: Any, name: str) -> str:
    """Return what the check called `name` says of a plugin, which it must not pass."""
    (check,) = [check for check in checks(plugin) if check.name == name]
    with pytest.raises(ConformanceError) as caught:
        check()
    return str(caught.value)
