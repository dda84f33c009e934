"""`KVPolicyLM`: the harness's Hugging Face model, on what a policy keeps of each context."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import models
from kvpolicy.errors import UnsupportedVersionError, not_installed
from kvpolicy.integrations.harness import HarnessError, policy_of
from kvpolicy.integrations.kept import Kept
from kvpolicy.integrations.lm_eval.scoring import Request, padded_left, score

try:
    from lm_eval.api.registry import register_model  # type: ignore[import-not-found]
    from lm_eval.models.huggingface import HFLM, stop_sequences_criteria  # type: ignore[import-not-found]
    from tqdm import tqdm  # type: ignore[import-untyped]
except ModuleNotFoundError as error:
    raise UnsupportedVersionError(
        not_installed("kvpolicy.integrations.lm_eval", f"the module {error.name!r}", "lm-eval")
    ) from error

# Below the harness's own logger, whose level and form it sets.
logger = logging.getLogger("lm_eval.models.kvpolicy")


@register_model("kvpolicy")
class KVPolicyLM(HFLM):  # type: ignore[misc]
    """The harness's model ``hf``, each of whose contexts is read once, evicted, and only then asked.

    The last tokens of a context are held back from the reading and read with the evicted cache, so that the first token
    of an answer is predicted from what was kept: without any, an answer of one token would be scored on the full cache.

    Args:
        pretrained: as for ``hf``; ``"smollm2"`` is kvpolicy's default model.
        policy: what to keep: a policy, or what `kvpolicy.load` takes.
        budget: slots a KV head, or a share, over that of the policy; not beside a policy made in Python.
        held_back: how many of a context's last tokens are held back; or a text, from whose last occurrence in the
            context on they are, such as that with which a question begins: the policy then decides without it.
        batch_size: contexts read at once, and answers at once.
        settings: of ``hf``, by keyword.

    Raises:
        HarnessError: for settings that do not go with eviction.
        PolicyError: for a policy or a budget that is wrong.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel = models.DEFAULT,
        policy: Any = "ecokv-snapkv",
        budget: int | float | None = None,
        held_back: int | str = 1,
        batch_size: int | str = 1,
        **settings: Any,
    ) -> None:
        self.policy = policy_of(policy, budget)
        self.held_back = _checked_held_back(held_back)
        self.kept = Kept()
        _refuse(settings, batch_size)
        if pretrained == models.DEFAULT:
            # Converts it, where it has not been yet.
            models.load()
            pretrained = str(models.default_folder())
        settings.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(pretrained=pretrained, batch_size=batch_size, **settings)
        if not isinstance(self.model, PreTrainedModel):
            raise HarnessError(
                f"model: expected one of transformers, got {type(self.model).__name__}: merge what wraps it (peft, "
                "autogptq, gptqmodel) into its weights first"
            )
        logger.info("policy '%s', %s; held back: %r", self.policy.name, self.policy.budget, self.held_back)

    def _get_backend(self, *args: Any, **settings: Any) -> None:
        # Asked before the weights are loaded.
        super()._get_backend(*args, **settings)
        if self.backend != "causal":
            raise HarnessError(f"backend: expected 'causal', got {self.backend!r}: kvpolicy evicts in decoders alone")

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Refuse: each of a text's tokens is scored, and none of it is a context.

        Raises:
            HarnessError: always.
        """
        raise HarnessError(
            "loglikelihood_rolling: expected a task that has contexts, got one that scores whole texts (perplexity): "
            "nothing would be evicted before they are scored, so that it would measure the full cache"
        )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        split = [self._split(*texts, context, answer) for texts, context, answer in requests]
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        scored = score(
            self.model,
            self.policy,
            split,
            batch_size=override_bs or self.batch_size,
            pad=self.tokenizer.pad_token_id,
            kept=self.kept,
            softmax_dtype=self.softmax_dtype,
        )
        hidden = disable_tqdm or self.rank != 0
        for one in tqdm(scored, total=len(requests), disable=hidden, desc="Running loglikelihood requests"):
            found[one.index] = one.loglikelihood, one.greedy
            self.cache_hook.add_partial("loglikelihood", requests[one.index][0], found[one.index])
        self._tell()
        return found

    def _split(self, text: str, answer_text: str, context: list[int], answer: list[int]) -> Request:
        if not answer or len(answer) > self.max_length:
            raise HarnessError(
                f"answer {answer_text[:80]!r}: expected 1 to {self.max_length} tokens (max_length), got {len(answer)}"
            )
        # As the harness does: the last token of an answer is never read.
        over = len(context) + len(answer) - self.max_length - 1
        if over > 0:
            logger.warning("context and answer exceed max_length: %d tokens cut from the left of the context", over)
        told = context[max(over, 0) :]
        at = len(told) - self._count_held_back(text, context, len(told))
        return Request(tuple(told[:at]), tuple(told[at:]), tuple(answer))

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return what the model says to each request, greedily unless it asks for samples."""
        found: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
        self._tell()
        return found

    def tok_batch_encode(self, strings: Sequence[str], *args: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        """Return ids and mask of texts to go on from, ``[B, T]`` each, and remember how many are held back of each."""
        ids, mask = super().tok_batch_encode(strings, *args, **settings)
        lengths = mask.sum(-1).tolist()
        # `_model_generate`, which comes next, is not told the texts.
        self._held_counts = [
            self._count_held_back(text, self.tok_encode(text), length)
            for text, length in zip(strings, lengths, strict=True)
        ]
        return ids, mask

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], *, attention_mask: Tensor, **settings: Any
    ) -> Tensor:
        rows = [ids[seen.bool()].tolist() for ids, seen in zip(context, attention_mask, strict=True)]
        cuts = [len(row) - held for row, held in zip(rows, self._held_counts, strict=True)]
        pad = self.tokenizer.pad_token_id
        read = padded_left([row[:cut] for row, cut in zip(rows, cuts, strict=True)], pad)
        asked = padded_left([row[cut:] for row, cut in zip(rows, cuts, strict=True)], pad)
        width = read["input_ids"].shape[1] + asked["input_ids"].shape[1]
        if not settings.get("do_sample"):
            # transformers warns of one that has no effect.
            settings.pop("temperature", None)
        held = self.policy.compress(self.model, read)
        self.kept.add(held.report, cuts)
        with held.fork() as fork:
            new = fork.generate(
                asked,
                max_new_tokens=max_length - context.shape[1],
                stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, width, len(rows)),
                pad_token_id=pad,
                **settings,
            )
        return torch.cat([context, new], dim=1)

    def _count_held_back(self, text: str, tokens: Sequence[int], length: int) -> int:
        """Return how many of a context's tokens are held back.

        Args:
            text: the context.
            tokens: all of its tokens.
            length: how many of the last of them will be read.
        """
        held = self.held_back
        if isinstance(held, str):
            at = text.rfind(held)
            if at < 0:
                raise HarnessError(f"held_back: expected contexts that hold {held!r}, got {text[:80]!r}...")
            # A token that begins before the text and ends in it is held back.
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(self.tok_encode(text[:at]), tokens, strict=False))
            held = len(tokens) - sum(1 for _ in alike)
        if not 1 <= held < length:
            raise HarnessError(
                f"held_back={self.held_back!r}: expected contexts with at least 1 token held back and 1 before it, got "
                f"{held} held back of the {length} of {text[:80]!r}: hold back less, or leave the task out, as it has "
                "no context to evict from"
            )
        return held

    def _tell(self) -> None:
        tell = logger.warning if self.kept.whole and not self.policy.trivial else logger.info
        tell("policy '%s': so far, %s", self.policy.name, self.kept)

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness writes into the file of results: of the model, and of the policy and what it kept."""
        info: dict[str, Any] = super().get_model_info()
        own = {
            "version": importlib.metadata.version("kvpolicy"),
            "policy": self.policy.to_dict(),
            "held_back": self.held_back,
            "kept": vars(self.kept),
        }
        return info | {"kvpolicy": own}


def _checked_held_back(given: Any) -> int | str:
    fits = given != "" if isinstance(given, str) else isinstance(given, int) and given >= 1
    if isinstance(given, bool) or not fits:
        raise HarnessError(f"held_back: expected a whole number of tokens from 1, or a text, got {given!r}")
    return given


def _refuse(settings: dict[str, Any], batch_size: int | str) -> None:
    """Raise for settings of ``hf`` that do not go with eviction."""
    if str(batch_size).startswith("auto"):
        raise HarnessError(
            f"batch_size: expected a number, got {batch_size!r}: the harness finds its size by passes without eviction"
        )
    if settings.get("truncation"):
        raise HarnessError(
            "truncation: expected False, got True, which cuts the end of a context: contexts longer than max_length "
            "lose their beginning"
        )
    if settings.get("mixed_precision_dtype") is not None:
        raise HarnessError("mixed_precision_dtype: expected none: load the weights in that type (dtype=)")
