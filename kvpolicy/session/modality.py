"""What each token of a pass is: text, image, video or audio."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.session.bound import Bound
from kvpolicy.session.decoder import arguments, forward_names
from kvpolicy.types import MODALITIES

_IDS = "input_ids"


class _Seen(threading.local):
    """What the tokens are that a model is called with, for as long as its pass runs in a thread."""

    latest: Tensor | None = None


class ModalityWatch(Bound):
    """Reads the ids that a model is called with, where the decoder inside it sees embeddings only.

    Args:
        model: the model, or a module that holds it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._models = [
            module
            for module in model.modules()
            if isinstance(module, PreTrainedModel) and _IDS in forward_names(module) and placeholders(module.config)
        ]
        self._seen = _Seen()
        self._hooks: list[RemovableHandle] = []

    def attach(self) -> None:
        """Start to listen."""
        for model in self._models:
            before = model.register_forward_pre_hook(self._take, prepend=True, with_kwargs=True)
            self._hooks += [before, model.register_forward_hook(self._forget, always_call=True)]

    def detach(self) -> None:
        """Stop to listen."""
        while self._hooks:
            self._hooks.pop().remove()

    def _take(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = arguments(model, args, kwargs).get(_IDS)
        # A model inside a model may be called with embeddings, or with ids in which placeholders are gone already.
        if ids is not None and self._seen.latest is None:
            self._seen.latest = modalities(ids, model.config)

    def _forget(self, *_: Any) -> None:
        self._seen.latest = None

    def of_pass(self, given: dict[str, Any]) -> Tensor:
        """Return int8 ``[B, q]``, what each token of a decoder's call is.

        Raises:
            UnsupportedModelError: when their ids are not known.
        """
        ids, embeddings = given.get(_IDS), given.get("inputs_embeds")
        tokens = next((tuple(part.shape[:2]) for part in (ids, embeddings) if part is not None), None)
        if self._seen.latest is not None and tuple(self._seen.latest.shape) == tokens:
            return self._seen.latest
        if ids is not None:
            return torch.zeros_like(ids, dtype=torch.int8)
        got = (
            "embeddings only" if self._seen.latest is None else f"ids {list(self._seen.latest.shape)} for other tokens"
        )
        raise UnsupportedModelError(
            f"modality: expected the model to be called with input_ids, one for each of {list(tokens or ())} tokens, "
            f"in which placeholders that its config names stand for images, got {got}"
        )


def placeholders(config: Any) -> dict[int, int]:
    """Return, by place in `MODALITIES`, the id that stands for a token of that modality in a prompt."""
    if getattr(config.get_text_config(), "cross_attention_layers", None):
        # Pictures are in a sequence of their own: what stands in the text's is a token of text.
        return {}
    found = {}
    for code, name in enumerate(MODALITIES[1:], start=1):
        known = (getattr(config, f"{name}_token_{suffix}", None) for suffix in ("id", "index"))
        token = next((one for one in known if isinstance(one, int)), None)
        if token is not None:
            found[code] = token
    return found


def modalities(ids: Tensor, config: Any) -> Tensor:
    """Return int8, shaped as `ids`: what each token is, as a place in `MODALITIES`."""
    found = torch.zeros_like(ids, dtype=torch.int8)
    for code, token in placeholders(config).items():
        found[ids == token] = code
    return found
