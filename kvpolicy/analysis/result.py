"""`Analysis`: all that was measured of one prompt, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

ByHead = list[list[float]]
"""By layer, first layer first, then by KV head."""


@dataclass(frozen=True)
class Likeness:
    """How alike the vectors of each head are.

    Args:
        of: "keys", "keys before RoPE" or "values".
        slots: "all", or the modality of the slots that count.
        cosine: redundancy from cosine, `kvpolicy.maths.cosine_redundancy`.
        euclidean: redundancy from Euclidean distance, `kvpolicy.maths.euclidean_redundancy`.
        anisotropy: `kvpolicy.analysis.anisotropy.anisotropy`.
    """

    of: str
    slots: str
    cosine: ByHead
    euclidean: ByHead
    anisotropy: ByHead


@dataclass(frozen=True)
class Balance:
    """Importance against diversity.

    Args:
        policy: the policy whose scores they are.
        correlation: `kvpolicy.analysis.balance.rank_correlation`.
        density: `kvpolicy.analysis.balance.joint_density` of all layers: by part of importance, the lowest first, then
            by part of diversity.
    """

    policy: str
    correlation: ByHead
    density: list[list[float]]


@dataclass(frozen=True)
class Kept:
    """What one policy keeps.

    Args:
        policy: its name.
        budget: its budget, as a policy file has it.
        slots: the kept slots, by layer and KV head.
        lengths: how many they are.
        votes: of each token, how many heads of all layers keep it.
        positions: by layer, the share kept of each stretch of the prompt, first stretch first.
    """

    policy: str
    budget: dict[str, Any]
    slots: list[list[list[int]]]
    lengths: list[list[int]]
    votes: list[int]
    positions: list[list[float]]


@dataclass(frozen=True)
class Overlap:
    """What two policies both keep.

    Args:
        policies: their names.
        jaccard: `kvpolicy.analysis.kept.jaccard`, by layer.
    """

    policies: tuple[str, str]
    jaccard: list[float]

    @property
    def mean(self) -> float:
        """Mean over layers."""
        return sum(self.jaccard) / len(self.jaccard)


@dataclass(frozen=True)
class Analysis:
    """All that was measured of one prompt.

    Args:
        model: what it is called.
        tokens: the text of each token of the prompt.
        layers: the model's indices of the layers that a policy evicts from; what is by layer has one entry for each.
        likeness: of keys, of keys before RoPE where the model shows how it rotates them, and of values.
        balance: importance against diversity.
        kept: what each policy keeps.
        overlap: of each pair of policies.
        modality: what each token is, where the model takes more than text.
        notes: what a reader would not expect, a line each.
    """

    model: str
    tokens: list[str]
    layers: list[int]
    likeness: list[Likeness]
    balance: Balance
    kept: list[Kept]
    overlap: list[Overlap]
    modality: list[str] | None
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, ready for JSON."""
        return dataclasses.asdict(self)
