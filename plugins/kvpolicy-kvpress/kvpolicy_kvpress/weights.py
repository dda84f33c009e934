"""Random weights for presses that read some that were trained for a model: in folders, called as kvpress calls them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedModel


@contextlib.contextmanager
def weights_for(models: Iterable[PreTrainedModel]) -> Iterator[None]:
    """Be in a temporary working directory in which presses find weights for `models`, by their names."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for model in models:
            _write(model)
        yield


def _write(model: PreTrainedModel) -> None:
    from kvpress.presses.expected_attention_with_stats import ExpectedAttentionStats
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
    from kvpress.presses.qfilter_press import QFilters

    config = model.config
    name, layers, heads = config.name_or_path, config.num_hidden_layers, config.num_key_value_heads
    torch.manual_seed(0)
    stats = ExpectedAttentionStats(layers, config.num_attention_heads, config.head_dim, "", name, 0, 0, 0)
    torch.nn.init.normal_(stats.query_mean)
    square = torch.randn(stats.query_cov.shape) / config.head_dim
    stats.query_cov.data = square @ square.mT
    stats.save_pretrained(f"stats-{name}")
    QFilters(layers, heads, config.head_dim).save_pretrained(f"nthngdy/{name}_qfilt")
    zap = KVzapConfig(input_dim=config.hidden_size, output_dim=heads, n_modules=layers, hidden_dim=16)
    KVzapModel(zap).save_pretrained(f"nvidia/KVzap-mlp-{name}")
