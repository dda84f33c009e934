"""`KVPolicyLMM`: a vision-language model for lmms-eval, on what a policy keeps of each prompt."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from kvpolicy import models
from kvpolicy.errors import UnsupportedVersionError, not_installed
from kvpolicy.integrations.harness import HarnessError, policy_of
from kvpolicy.integrations.kept import Kept
from kvpolicy.integrations.lmms_eval.prompt import QUESTION, split_prompt

try:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts  # type: ignore[import-not-found]
    from lmms_eval.api.model import lmms  # type: ignore[import-not-found]
    from lmms_eval.models.model_utils.gen_metrics import log_metrics  # type: ignore[import-not-found]
    from lmms_eval.protocol import ChatMessages  # type: ignore[import-not-found]
    from loguru import logger  # type: ignore[import-not-found]
    from tqdm import tqdm  # type: ignore[import-untyped]
except ModuleNotFoundError as error:
    raise UnsupportedVersionError(
        not_installed("kvpolicy.integrations.lmms_eval", f"the module {error.name!r}", "lmms-eval")
    ) from error

_LONGEST = 1024
"""New tokens of an answer, where a task names no number."""


class KVPolicyLMM(lmms):  # type: ignore[misc]
    """Any model of transformers that takes chats with pictures, each prompt read once, evicted, and only then answered.

    The end of a prompt is held back from the reading and read with the evicted cache, so that the first token of an
    answer is predicted from what was kept: without, an answer of one token would come from the full cache.

    Args:
        pretrained: an id, a folder, ``"tiny-llava"``, or a model in Python, beside its processor.
        policy: what to keep: a policy, or what `kvpolicy.load` takes.
        budget: slots a KV head, or a share, over that of the policy; not beside a policy made in Python.
        held_back: how many of a prompt's last tokens are held back; or ``"question"``, all behind its last picture:
            the policy then decides without it.
        processor: by default that of `pretrained`; a model in Python needs one.
        dtype: of the weights, or its name.
        attn_implementation: as `from_pretrained` takes it.
        device: where the model runs; by default the first GPU, or the CPU.
        batch_size: 1.
        settings: none more; named in the error.

    Raises:
        HarnessError: for settings that do not go with eviction.
        MissingModelError: for a model that is not there.
        PolicyError: for a policy or a budget that is wrong.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        policy: Any = "ecokv-snapkv",
        budget: int | float | None = None,
        held_back: int | str = 1,
        processor: Any = None,
        dtype: str | torch.dtype = "bfloat16",
        attn_implementation: str | None = None,
        device: str | torch.device | None = None,
        batch_size: int | str = 1,
        **settings: Any,
    ) -> None:
        super().__init__()
        _refuse(settings, batch_size)
        self.policy = policy_of(policy, budget)
        self.held_back = _checked_held_back(held_back)
        self.kept = Kept()
        self.accelerator = Accelerator()
        if processor is None:
            if not isinstance(pretrained, str):
                raise HarnessError("processor: expected that of a model in Python, got none")
            processor = models.load_processor(pretrained)
        self.processor = processor
        if getattr(self.processor, "chat_template", None) is None:
            raise HarnessError(
                f"model: expected a processor with a chat template, got {type(self.processor).__name__} without: give "
                "it one, in the model's folder or as `processor.chat_template`"
            )
        if isinstance(pretrained, str):
            where = self.accelerator.device if device is None else device
            pretrained, _ = models.load(
                pretrained, dtype=_dtype(dtype), attn_implementation=attn_implementation, device=where
            )
        self.model = pretrained
        self.device = self.model.device
        logger.info(f"policy '{self.policy.name}', {self.policy.budget}; held back: {self.held_back!r}")

    def generate_until(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """Return what the model says to each request, greedily unless a temperature is asked for."""
        self.kept = Kept()
        began = time.perf_counter()
        with tqdm(requests, disable=self.rank != 0, desc="Model Responding") as told:
            found = [self._answer(*request.args) for request in told]
        self._tell(time.perf_counter() - began, sum(one.token_counts.output_tokens for one in found))
        return found

    def _answer(
        self, _text: str, messages_of: Any, settings: Mapping[str, Any], doc_id: int, task: str, split: str
    ) -> GenerationResult:
        messages = ChatMessages(messages=messages_of(self.task_dict[task][split][doc_id])).to_hf_messages()
        inputs = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        ).to(self.device, self.model.dtype)
        read, asked = split_prompt(inputs, self.held_back, self.model.config)
        context = self.policy.compress(self.model, read)
        self.kept.add(context.report, [context.seen])
        with context.fork() as fork:
            (new,) = fork.generate(
                asked, pad_token_id=self.processor.tokenizer.pad_token_id, **generation_settings(settings)
            )
        said = self.processor.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return GenerationResult(said, TokenCounts(input_tokens=context.seen + asked.shape[1], output_tokens=len(new)))

    def _tell(self, seconds: float, tokens: int) -> None:
        """Log what was kept of these requests, and let the harness write it among its numbers of throughput."""
        kept = self.kept
        log_metrics(
            total_elapsed_time=seconds,
            total_gen_tokens=tokens,
            avg_speed=tokens / seconds,
            additional_metrics={f"kept_{name}": value for name, value in vars(kept).items()},
        )
        level = "WARNING" if kept.whole and not self.policy.trivial else "INFO"
        logger.log(level, f"policy '{self.policy.name}': {kept}")

    def loglikelihood(self, requests: Sequence[Instance]) -> NoReturn:
        """Refuse: the harness asks it of models without chats only, as text that says nothing of where pictures stand.

        Raises:
            HarnessError: always.
        """
        raise HarnessError(
            "loglikelihood: expected a task that generates, got one that scores given answers, which this harness does "
            "not ask of chat models: choose a task that lets the model write its choice"
        )

    def generate_until_multi_round(self, requests: Sequence[Instance]) -> NoReturn:
        """Refuse: later rounds bring new pictures, and a compressed context takes text alone.

        Raises:
            HarnessError: always.
        """
        raise HarnessError(
            "generate_until_multi_round: expected a task of one round, got one of several: their later rounds may "
            "bring new pictures, and what was kept of a prompt can be asked with text alone"
        )


def generation_settings(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model's `generate` for what a task asks, which the harness's chat models read alike.

    Args:
        asked: the task's ``generation_kwargs``, of which stop texts (``until``) and all else have no effect.

    >>> generation_settings({"max_new_tokens": 16, "temperature": 0, "until": ["."]})
    {'max_new_tokens': 16, 'num_beams': 1, 'do_sample': False}
    """
    named = {name: asked[name] for name in ("temperature", "top_p") if asked.get(name) is not None}
    common = {"max_new_tokens": asked.get("max_new_tokens", _LONGEST), "num_beams": asked.get("num_beams", 1)}
    if named.get("temperature", 0) > 0:
        return common | {"do_sample": True} | named
    return common | {"do_sample": False}


def _dtype(given: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise HarnessError(f"dtype: expected one of floating point, such as 'bfloat16' or 'float32', got {given!r}")
    return found


def _checked_held_back(given: Any) -> int | str:
    if given == QUESTION or (isinstance(given, int) and not isinstance(given, bool) and given >= 1):
        return given
    raise HarnessError(f"held_back: expected a whole number of tokens from 1, or {QUESTION!r}, got {given!r}")


def _refuse(settings: Mapping[str, Any], batch_size: int | str) -> None:
    """Raise for more prompts at once than one, and for settings that the model does not have."""
    if str(batch_size) != "1":
        raise HarnessError(
            f"batch_size: expected 1, got {batch_size!r}: prompts with pictures differ in length, each is read alone"
        )
    if settings:
        raise HarnessError(
            "expected pretrained, policy, budget, held_back, processor, dtype, attn_implementation, device and "
            f"batch_size, got {', '.join(settings)} besides"
        )
