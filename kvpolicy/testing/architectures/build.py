"""Every class that transformers maps to a task of ours, and a tiny model of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from kvpolicy.testing.architectures.configs import tiny_config

_LARGEST = 30_000_000


@dataclass(frozen=True)
class Case:
    """One class of transformers, as one model type names it."""

    task: str
    model_type: str
    name: str

    def __str__(self) -> str:
        return f"{self.task}-{self.model_type}"


def cases() -> list[Case]:
    """Return every class of a causal or an image-text-to-text model in the installed transformers."""
    tasks = {
        "text": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    return [Case(task, model_type, name) for task, names in tasks.items() for model_type, name in names.items()]


def tiny_model(case: Case) -> PreTrainedModel:
    """Return a tiny model of a class with random weights, always the same ones.

    Raises:
        ValueError: when the shrunk config still has a large model.
    """
    config = tiny_config(case.model_type)
    kind: Any = getattr(transformers, case.name)
    if not isinstance(config, kind.config_class):
        # Of a composite config, the class takes a part; a config of another name it takes as it is.
        parts = (part for part in vars(config).values() if isinstance(part, kind.config_class))
        config = next(parts, config)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind._from_config(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"expected a tiny model, got one of {size:,} weights")
    return randomized(kind, config)


def randomized(kind: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model of a class and config with random weights, always the same ones."""
    # The experts' default kernel has no float64.
    model: PreTrainedModel = kind._from_config(config, experts_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            # As large as makes attention uneven: under flat attention, evicting changes nothing.
            if weight.ndim > 1:
                weight.normal_(0, 0.2, generator=generator)
    return model.eval()
