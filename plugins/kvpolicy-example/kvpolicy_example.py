"""Norm diversity, a scorer that kvpolicy does not ship: how unlike the others a slot's key is in length alone."""

from typing import Literal

from torch import Tensor

from kvpolicy import LayerView, Needs, hookimpl, settings
from kvpolicy.maths import masked_mean, norms

kvpolicy_contract = 1


@settings
class NormDiversity:
    """How far the length of a slot's key is from the mean length of the head's candidates.

    Direction plays no part, where in `cosine-diversity` length plays none.

    Args:
        on: what is compared, "keys" (their lengths are the same before RoPE and after) or "values".
    """

    name = "norm-diversity"
    role = "diversity"
    source = "kvpolicy-example; no paper"
    formula = "abs(|k_i| - mean_j |k_j|), j over the candidates"
    on: Literal["keys", "values"] = "keys"

    @property
    def needs(self) -> Needs:
        """The keys or the values."""
        return Needs(keys=self.on == "keys", values=self.on == "values")

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, 0 or more, higher means a more unusual length."""
        lengths = norms(view.keys if self.on == "keys" else view.values)
        return (lengths - masked_mean(lengths, view.candidates)).abs()


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this package."""
    return [NormDiversity]
