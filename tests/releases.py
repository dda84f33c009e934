"""What holds in some releases of transformers only."""

from __future__ import annotations

import transformers
from packaging.specifiers import SpecifierSet


def installed(releases: str) -> bool:
    """Return whether the transformers that runs is one of `releases`, as in ``">=5.6"``."""
    return SpecifierSet(releases).contains(transformers.__version__, prereleases=True)
