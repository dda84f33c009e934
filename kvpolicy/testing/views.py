"""Views of random tensors to test plugins on."""

from __future__ import annotations

import torch

from kvpolicy.types import LayerView


def make_view(
    seed: int = 0,
    *,
    batch: int = 3,
    heads: tuple[int, int] = (6, 2),
    slots: int = 24,
    sizes: tuple[int, int] = (64, 64),
    window: int = 8,
    dtype: torch.dtype = torch.float32,
    padding: str = "none",
    sinks: int = 0,
    recent: int = 0,
) -> LayerView:
    """Return a view whose invalid slots hold nan, so that whoever reads them shows it.

    `heads` are Hq and Hkv, `sizes` Dk and Dv; `padding` is "none", "left", "right" or "ragged" (heads differ). Each row
    has text, images and video in an order of its own.
    """
    random = torch.Generator().manual_seed(seed)
    valid = torch.ones(batch, heads[1], slots, dtype=torch.bool)
    for row in range(batch):
        pads = min(row * slots // 2, slots - 1)
        if padding == "left":
            valid[row, :, :pads] = False
        elif padding == "right":
            valid[row, :, slots - pads :] = False
        elif padding == "ragged":
            valid[row] = torch.rand(heads[1], slots, generator=random) < 0.6
            valid[row, :, -1] = True
    window = min(window, slots)
    keys = torch.randn(batch, heads[1], slots, sizes[0], generator=random) + torch.randn(sizes[0], generator=random) / 2
    values = torch.randn(batch, heads[1], slots, sizes[1], generator=random)
    queries = torch.randn(batch, heads[0], window, sizes[0], generator=random) * 2
    before = torch.randn(keys.shape, generator=random) + torch.randn(sizes[0], generator=random)
    kinds = torch.randint(0, 3, (batch, 1, slots), generator=random, dtype=torch.int8).expand(-1, heads[1], -1)
    repetition = torch.rand(batch, heads[1], slots, generator=random)
    similarity = torch.rand(batch, generator=random)
    query_positions = torch.full((batch, window), -1)
    candidates = valid.clone()
    for row in range(batch):
        there = valid[row].any(0).nonzero().flatten()[-window:]
        query_positions[row, window - len(there) :] = there
        for head in range(heads[1]):
            own = valid[row, head].nonzero().flatten()
            candidates[row, head, own[:sinks]] = False
            candidates[row, head, own[max(len(own) - recent, 0) :]] = False
    return LayerView(
        keys=keys.to(dtype).masked_fill(~valid[..., None], torch.nan),
        values=values.to(dtype).masked_fill(~valid[..., None], torch.nan),
        queries=queries.to(dtype).masked_fill((query_positions < 0)[:, None, :, None], torch.nan),
        valid=valid,
        query_positions=query_positions,
        candidates=candidates,
        seen=valid.any(1).sum(-1),
        pre_rope_keys=before.masked_fill(~valid[..., None], torch.nan),
        modality=kinds.masked_fill(~valid, 3),
        repetition=repetition.masked_fill(~valid, torch.nan),
        similarity=similarity,
    )
