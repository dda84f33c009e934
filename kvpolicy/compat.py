"""What differs between releases of transformers, and which of them will do: nothing else here asks for a release.

The oldest that will do is the lower bound of kvpolicy's own requirement. There is no newest: what a release to come
changes, a session sees by itself, as it checks after every forward pass that each layer which should evict was reached.
"""

from __future__ import annotations

from importlib.metadata import requires
from typing import Any

import transformers
from packaging.requirements import Requirement
from torch import Tensor, nn

from kvpolicy.errors import UnsupportedVersionError


def require(installed: str) -> None:
    """Raise unless kvpolicy runs on the release `installed` of transformers.

    Raises:
        UnsupportedVersionError: when it is older than kvpolicy needs.
    """
    own = map(Requirement, requires("kvpolicy") or ())
    needed = next(one for one in own if one.name == "transformers")
    if not needed.specifier.contains(installed, prereleases=True):
        raise UnsupportedVersionError(
            f"transformers: expected {needed.specifier}, got {installed}. Run: pip install '{needed}'"
        )


# Before anything below is looked up.
require(transformers.__version__)

CACHE_NAMES = ("cache", "past_key_values")
"""What a decoder calls its cache, in its forward and its output: since 5.24, and before."""

HybridLayer: Any = getattr(transformers.cache_utils, "LinearAttentionAndFullAttentionLayer", None)
"""The class of a layer that keeps a recurrent state beside its keys and values; None before 5.6."""


def has_own_index(config: Any) -> bool:
    """Return whether a decoder looks slots up by an index of its own, which the class of its layers says since 5.12."""
    return bool(getattr(config, "index_topk", None))


def shared_out_unseen(decoder: nn.Module) -> bool:
    """Return whether ranks share out a decoder's heads by weights that do not say so; since 5.18 they are DTensors."""
    return any(hasattr(module, "_hf_tp_plan") for module in decoder.modules())


def new_tokens(query_length: int | Tensor) -> int:
    """Return how many tokens are new, of what `get_mask_sizes` is given: their number; before 5.4, their positions."""
    return query_length.shape[0] if isinstance(query_length, Tensor) else query_length


def tokens_to_crop(argument: int, seen: int) -> int:
    """Return how many of the last tokens `crop` removes: n of `-n`; before 5.16, n may be the length to return to.

    >>> tokens_to_crop(-3, seen=10), tokens_to_crop(7, seen=10), tokens_to_crop(12, seen=10)
    (3, 3, 0)
    """
    return -argument if argument <= 0 else max(seen - argument, 0)
