"""What each rank of `test_parallel.py` runs; as a script, one rank of a tensor-parallel model.

python -m torch.distributed.run --standalone --nproc_per_node 2 parallel_worker.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from releases import installed
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

import kvpolicy
from kvpolicy.session.decoder import cache_name

SHORT = {"select": {"sinks": 2, "recent": 4}}
STEADY = {"decode": {"every": 8}, **SHORT}

MODELS: dict[str, dict[str, Any]] = {
    # Four KV heads, two a rank.
    "llama": {"name": "llama-gqa", "num_attention_heads": 4, "num_key_value_heads": 4},
    # Two KV heads, one a rank.
    "llama-gqa": {"name": "llama-gqa", "num_attention_heads": 4, "num_key_value_heads": 2},
    # One projection for queries, keys and values, whose output every rank gathers: all heads on both.
    "phi3": {"name": "phi3"},
    # One latent on both ranks, one of two heads derived from it on each.
    "deepseek": {"name": "deepseek"},
}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "snapkv": ("llama", "snapkv", SHORT),
    "pyramidkv": ("llama", "pyramidkv", SHORT),
    "ada-kv": ("llama", "ada-kv", SHORT),
    "ecokv-ada-kv": ("llama", "ecokv-ada-kv", SHORT),
    "ada-kv, one head a rank": ("llama-gqa", "ada-kv", SHORT),
    "ada-kv, decoding": ("llama", "ada-kv", STEADY),
    "snapkv, decoding": ("llama-gqa", "snapkv", STEADY),
    "ada-kv, padded": ("llama", "ada-kv", STEADY),
    "ada-kv, all heads on each rank": ("phi3", "ada-kv", SHORT),
    "cake, padded": ("llama", "cake", SHORT),
    "dynamic-kv, decoding": ("llama-gqa", "dynamic-kv", STEADY),
    "squeeze, padded": ("llama", "squeeze", {"select": {"sinks": 2}}),
    "squeeze, one head a rank": ("llama-gqa", "squeeze", STEADY),
    "compactor, padded": ("llama", "compactor", SHORT),
    "kvzip, padded": ("llama", "kvzip", {"score": {"chunk": 25, "instruction": [3, 4]}}),
    "snapkv, derived heads": ("deepseek", "snapkv", SHORT),
    "ada-kv, derived heads": ("deepseek", "ada-kv", STEADY),
}
"""Name -> the model, the policy and its settings."""


def run(model: PreTrainedModel, case: str) -> dict[str, Any]:
    """Return the tokens and logits of a generation, the positions kept by layer, row and head, and the reports."""
    _, name, settings = CASES[case]
    ids = torch.randint(1, 128, (2, 60), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if "padded" in case:
        mask[1, :21] = 0
    cache = DynamicCache()
    with kvpolicy.load(name, budget=16, **settings).on(model) as session:
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
            **{cache_name(model): cache},
        )
        positions = [
            [[[place for place in head if place >= 0] for head in row] for row in layer.padded()[2].tolist()]
            for layer in cache.layers
        ]
    return {
        "tokens": output.sequences,
        "logits": torch.stack(output.logits),
        "positions": positions,
        "local": session.report.to_dict(),
        "printed": str(session.report),
        "report": session.report.over_ranks().to_dict(),
    }


def main(folder: Path) -> None:
    """Run all cases on this rank's part of the models in `folder`, and save what they gave."""
    from torch import distributed
    from transformers.distributed import DistributedConfig

    how = {"distributed_config": DistributedConfig(tp_size=2)} if installed(">=5.18") else {"tp_plan": "auto"}
    models = {name: AutoModelForCausalLM.from_pretrained(folder / name, **how, dtype=torch.float64) for name in MODELS}
    found = {case: run(models[name].eval(), case) for case, (name, _, _) in CASES.items()}
    torch.save(found, folder / f"rank-{distributed.get_rank()}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
