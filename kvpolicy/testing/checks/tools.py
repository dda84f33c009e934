"""What the checks share: when two scores are the same, and what one row of a batch is alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import ConformanceError
from kvpolicy.policy import Budget, Policy
from kvpolicy.types import LayerView

NEAR = 2.0**-16
"""How far apart two scores may be, as a share of the largest: half way, in bits, between a rounding of float32 (2**-24)
and one of bfloat16 (2**-8). Sums in another order stay well below; padding, batch mates or a sum in half precision
make far more."""


def scores_of(node: Any, view: LayerView) -> Tensor:
    """Return what a scorer, or a combiner with its children, scores; checked and limited as in a run."""
    with torch.no_grad():
        return Policy(name="conformance", score=node, budget=Budget(keep=1.0)).scores(view)[0]


def apart(got: Tensor, want: Tensor, where: Tensor) -> float:
    """Return how far `got` is from `want` at the True slots of `where`, as a share of the largest score there."""
    got, want = got.double()[where], want.double()[where]
    if not want.numel():
        return 0.0
    off = float((got - want).abs().max())
    size = float(want.abs().max())
    return off if size == 0 else off / size


def expect_same(got: Tensor, want: Tensor, where: Tensor, message: str) -> None:
    """Raise where two scores differ by more than float32 sums in another order do."""
    off = apart(got, want, where)
    if not off <= NEAR:
        raise ConformanceError(f"{message} (off by {off:.2g} of the largest score)")


def tensors_of(view: LayerView) -> list[Tensor]:
    """Return every tensor that a view holds."""
    held = [getattr(view, field.name) for field in fields(view)]
    return [each for each in held if isinstance(each, Tensor)]


def expect_untouched(given: Iterable[Tensor], run: Callable[[], object], message: str) -> None:
    """Raise where `run` writes into one of the tensors `given`, also where it writes what was there."""
    given = list(given)
    before = [(tensor._version, tensor.clone()) for tensor in given]
    run()
    for tensor, (version, copy) in zip(given, before, strict=True):
        # The version alone misses what goes through numpy or .data, the copy alone what was there already.
        if tensor._version != version or not torch.equal(tensor.nan_to_num(), copy.nan_to_num()):
            raise ConformanceError(message)


def expect_on_device(run: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
    """Raise where what `run` returns is not on `device` while another is the default."""
    advice = f"expected no tensor on the default device: make each with device=, that of what it is given ({device})"
    try:
        with torch.device("meta"):
            found = {tensor.device for tensor in run()}
    except Exception as error:
        raise ConformanceError(f"{advice} ({type(error).__name__}: {error})") from error
    if found != {device}:
        raise ConformanceError(f"{advice}, got {', '.join(sorted(map(str, found)))}")


def expect_any_default_dtype(run: Callable[[], Tensor]) -> None:
    """Raise where what `run` returns depends on torch's default dtype."""
    usual = torch.get_default_dtype()
    want = run()
    try:
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            got = run()
            if got.dtype != want.dtype or not torch.equal(got.nan_to_num(), want.nan_to_num()):
                raise ConformanceError(
                    f"expected the same under every default dtype, got other numbers under {dtype}: say dtype= of each "
                    "tensor that is made, and divide no two whole numbers"
                )
    finally:
        torch.set_default_dtype(usual)


def alone(view: LayerView, row: int) -> tuple[LayerView, Tensor]:
    """Return a row as it is without padding and batch mates, and the slots it has in the batch; heads must agree."""
    slots = view.valid[row, 0].nonzero()[:, 0]
    part = view.part(row, slice(None), slots)
    first = int(slots[0])
    positions = (part.positions - first).to(torch.int32)
    queries: dict[str, Any] = {} if part.queries is None else {"query_positions": part.query_positions - first}
    return replace(part, positions=positions, **queries), slots
