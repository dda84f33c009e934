"""The harness's model `kvpolicy`, against the harness's own, and against the oracle.

In float64, where nothing but the order of sums is left between two ways of computing the same.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, T5Config

import kvpolicy
from kvpolicy import models, texts
from kvpolicy.errors import KVPolicyError
from kvpolicy.integrations.lm_eval import KVPolicyLM
from kvpolicy.integrations.lm_eval.__main__ import main
from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.random import Random
from kvpolicy.testing import oracle
from kvpolicy.testing.models import tiny

EXACT = {"rel": 0, "abs": 1e-9}
"""A thousand roundings of float64 on log-likelihoods of size a hundred."""

ANSWERS = (" x", " yz", " abcdef", "q")
CHOSEN = random.Random(0)
CONTEXTS = ["".join(CHOSEN.choices("abcdefgh ", k=length)) + " Q: is it?" for length in (90, 60, 75, 40)]
PAIRS = [(context, answer) for context in CONTEXTS for answer in ANSWERS]
UNTIL = {"until": ["zz"], "max_gen_toks": 9}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token a character."""
    backend = Tokenizer(WordLevel({chr(code): code for code in range(128)}, unk_token="\x01"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="\x00", eos_token="\x02", unk_token="\x01")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny(dtype=torch.float64)


@pytest.fixture
def ours(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Any:
    return lambda **settings: KVPolicyLM(**{"pretrained": model, "tokenizer": tokenizer, **settings})


@pytest.fixture
def theirs(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Any:
    return lambda **settings: HFLM(**{"pretrained": model, "tokenizer": tokenizer, **settings})


@pytest.fixture(scope="module")
def folder(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The model and its tokenizer, saved; and two tasks: to choose an answer, and to go on."""
    folder = tmp_path_factory.mktemp("lm-eval")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"text": text, "choices": list(ANSWERS), "label": index} for index, text in enumerate(CONTEXTS)]
    (folder / "rows.py").write_text(
        f"from datasets import Dataset\n\ndef load(**_):\n    return {{'test': Dataset.from_list({rows!r})}}\n"
    )
    common = "custom_dataset: !function rows.load\ntest_split: test\ndoc_to_text: text\n"
    (folder / "choose.yaml").write_text(
        f"task: choose\noutput_type: multiple_choice\n{common}doc_to_choice: choices\ndoc_to_target: label\n"
        "metric_list: [{metric: acc}]\n"
    )
    (folder / "go_on.yaml").write_text(
        f"task: go_on\noutput_type: generate_until\n{common}doc_to_target: ' x'\n"
        "generation_kwargs: {until: [zz], max_gen_toks: 9}\nmetric_list: [{metric: exact_match}]\n"
    )
    return folder


def scores(lm: HFLM, pairs: list[tuple[str, str]] = PAIRS) -> list[float]:
    found = answers(lm, pairs)
    return [each for each, _ in found]


def answers(lm: HFLM, pairs: list[tuple[str, str]] = PAIRS) -> list[tuple[float, bool]]:
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    return lm.loglikelihood(requests, disable_tqdm=True)


def says(lm: HFLM, contexts: list[str] = CONTEXTS, **settings: Any) -> list[str]:
    each = [(context, {**UNTIL, **settings}) for context in contexts]
    requests = [Instance("generate_until", {}, one, index) for index, one in enumerate(each)]
    return lm.generate_until(requests, disable_tqdm=True)


def by_the_oracle(model: PreTrainedModel, policy: Policy, held_back: int) -> list[float]:
    """Return the log-likelihoods of `PAIRS`, one by one, with a full cache whose mask hides what is evicted."""
    found = []
    for context, answer in PAIRS:
        # The harness gives the spaces at the end of a context to the answer; there are none.
        told, said = [ord(letter) for letter in context], [ord(letter) for letter in answer]
        ids, held = torch.tensor([told[:-held_back]]), told[-held_back:]
        read = torch.tensor([held + said[:-1]])
        (logits,) = oracle.continuations(model, ids, read, [oracle.plan(policy, model, ids)])
        each = logits[0, held_back - 1 :].log_softmax(-1)
        found.append(sum(float(row[token]) for row, token in zip(each, said, strict=True)))
    return found


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("held_back", [1, 7, "Q:"])
@pytest.mark.parametrize(("policy", "budget"), [("full", None), ("ecokv-ada-kv", 1.0), ("snapkv-w8", 500)])
def test_keeping_all_is_the_harness_s_own_model(ours, theirs, policy, budget, held_back, batch_size) -> None:
    expected = theirs()
    lm = ours(policy=policy, budget=budget, held_back=held_back, batch_size=batch_size)
    for found, same in zip(answers(lm), answers(expected), strict=True):
        assert found[0] == pytest.approx(same[0], **EXACT)
        assert found[1] == same[1]
    assert says(lm) == says(expected)
    assert lm.kept.contexts == lm.kept.whole == 2 * len(CONTEXTS)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("held_back", [1, 9])
@pytest.mark.parametrize(("name", "budget"), [("snapkv-w8", 0.3), ("ecokv-ada-kv", 20), ("ecokv-snapkv", 0.3)])
def test_answers_are_scored_on_what_was_kept(ours, theirs, model, name, budget, held_back, batch_size) -> None:
    """Batches of one and of four equal the same reference, which knows no batches."""
    lm = ours(policy=name, budget=budget, held_back=held_back, batch_size=batch_size)
    found = scores(lm)
    assert found == pytest.approx(by_the_oracle(model, lm.policy, held_back), **EXACT)
    moved = [abs(one - other) for one, other in zip(found, scores(theirs()), strict=True)]
    assert max(moved[0::4]) > 0.1  # also of answers of one token, what the first one was held back for
    assert lm.kept.whole == 0


def test_what_is_said_comes_from_what_was_kept_whatever_the_batch(ours, theirs) -> None:
    policy = kvpolicy.load({"extends": "ecokv-ada-kv", "select": {"sinks": 1, "recent": 1}}, budget=0.1)
    settings = {"policy": policy, "held_back": "Q:"}
    one, four = (says(ours(batch_size=size, **settings)) for size in (1, 4))
    assert one == four != says(theirs())
    assert says(ours(batch_size=2, **settings), num_beams=2) == says(ours(**settings), num_beams=2)


def test_what_stands_before_the_question_is_read_once_for_all_questions(ours, model) -> None:
    lm = ours(policy="snapkv-w8", budget=20, held_back=" Q:")
    pairs = [(f"{CONTEXTS[0][:90]} Q: {question}", answer) for question in ("is it?", "why?") for answer in ANSWERS]
    lengths: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append((args[0] if args else kwargs["input_ids"]).shape[1]), with_kwargs=True
    )
    scores(lm, pairs)
    hook.remove()
    assert [length for length in lengths if length > 40] == [90]
    assert lm.kept.contexts == 1


def test_the_longest_of_a_context_that_fits_is_read(ours, theirs) -> None:
    found, expected = ours(policy="full", max_length=50), theirs(max_length=50)
    assert scores(found) == pytest.approx(scores(expected), **EXACT)
    assert says(found) == says(expected)
    assert scores(found) != pytest.approx(scores(theirs()), rel=0, abs=0.1)


def test_probabilities_are_computed_in_softmax_dtype(ours, theirs) -> None:
    settings = {"softmax_dtype": "float32"}
    assert scores(ours(policy="full", **settings)) == pytest.approx(scores(theirs(**settings)), rel=0, abs=1e-4)
    assert scores(ours(policy="full", **settings)) != pytest.approx(scores(theirs()), **EXACT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": "auto"}, "batch_size: expected a number, got 'auto'"),
        ({"truncation": True}, "truncation: expected False"),
        ({"mixed_precision_dtype": "bfloat16"}, "mixed_precision_dtype: expected none"),
        ({"held_back": 0}, "held_back: expected a whole number of tokens from 1, or a text, got 0"),
        ({"held_back": ""}, "got ''"),
        ({"held_back": True}, "got True"),
        ({"held_back": 1.5}, "got 1.5"),
        ({"backend": "seq2seq"}, "backend: expected 'causal', got 'seq2seq'"),
        ({"policy": "snapkw"}, "Did you mean 'snapkv'"),
        ({"policy": "snapkv", "budget": 4}, "expected at least the 36 slots"),
        ({"policy": Policy(name="mine", score=Random(), budget=Budget(tokens=20)), "budget": 9}, "budget: expected no"),
    ],
)
def test_settings_that_do_not_go_with_eviction_are_refused_by_name(ours, settings, message) -> None:
    with pytest.raises(KVPolicyError) as caught:
        ours(**settings)
    assert message in str(caught.value)


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path: Path, tokenizer) -> None:
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(KVPolicyError, match="backend: expected 'causal'"):
        KVPolicyLM(pretrained=str(tmp_path), tokenizer=tokenizer)


def test_a_wrapped_model_is_refused(ours, model) -> None:
    class Wrapped(torch.nn.Module):
        device, config = model.device, model.config

        def tie_weights(self) -> None: ...

    with pytest.raises(KVPolicyError, match="expected one of transformers, got Wrapped"):
        ours(pretrained=Wrapped())


@pytest.mark.parametrize(
    ("settings", "pair", "message"),
    [
        ({}, ("", " x"), "expected contexts with at least 1 token held back and 1 before it, got 1 held back of the 1"),
        ({"held_back": 50}, ("a short one", " x"), "got 50 held back of the 11 of 'a short one'"),
        ({"held_back": "Q:"}, ("no question", " x"), "expected contexts that hold 'Q:', got 'no question'"),
        ({"held_back": "Q:"}, ("Q: a question alone", " x"), "got 19 held back of the 19"),
        ({"held_back": " "}, ("ends in a space ", "x"), "got 0 held back"),
        ({}, ("some context", ""), "answer '': expected 1 to"),
        ({"max_length": 4}, ("some context", "an answer"), "answer 'an answer': expected 1 to 4 tokens"),
    ],
)
def test_requests_that_would_measure_nothing_are_refused(ours, settings, pair, message) -> None:
    with pytest.raises(KVPolicyError) as caught:
        scores(ours(policy="full", **settings), [pair])
    assert message in str(caught.value)


def test_a_context_too_short_to_go_on_from_is_refused(ours) -> None:
    with pytest.raises(KVPolicyError, match="got 11 held back of the 11"):
        says(ours(policy="full", held_back=11), ["a short one"])


def test_perplexity_of_whole_texts_is_refused_with_the_reason(ours) -> None:
    with pytest.raises(KVPolicyError, match="it would measure the full cache"):
        ours(policy="full").loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("text",), 0)])


def test_it_warns_where_the_budget_holds_whole_contexts(ours, caplog: pytest.LogCaptureFixture) -> None:
    scores(ours(policy="snapkv-w8", budget=70))
    (said,) = [record for record in caplog.records if record.name == "lm_eval.models.kvpolicy"]
    assert said.levelname == "WARNING"
    assert "4 contexts" in said.message and "nothing evicted from 2 of them" in said.message


def test_a_task_run_by_name_is_the_harness_s_own_run(folder: Path) -> None:
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    common = {"tasks": ["choose", "go_on"], "task_manager": tasks, "bootstrap_iters": 0, "device": "cpu"}
    pretrained = str(folder / "model")
    theirs = simple_evaluate("hf", {"pretrained": pretrained}, **common)
    same = simple_evaluate("kvpolicy", {"pretrained": pretrained, "policy": "snapkv", "budget": 1.0}, **common)
    other = simple_evaluate("kvpolicy", {"pretrained": pretrained, "policy": "snapkv-w8", "budget": 0.3}, **common)
    assert get_model("kvpolicy") is KVPolicyLM

    def responses(results: dict[str, Any]) -> Tensor:
        samples = sorted(results["samples"]["choose"], key=lambda sample: sample["doc_id"])
        return torch.tensor(
            [[float(each[0][0]) for each in sample["resps"]] for sample in samples], dtype=torch.float64
        )

    torch.testing.assert_close(responses(same), responses(theirs), rtol=0, atol=1e-9)
    assert (responses(other) - responses(theirs)).abs().max() > 0.1
    assert same["results"]["choose"]["acc,none"] == theirs["results"]["choose"]["acc,none"]


def test_the_command_line_writes_the_policy_and_what_was_kept_into_the_results(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"pretrained={folder / 'model'},policy=snapkv-w8,budget=0.3,held_back=2"
    command = ["run", "--model", "kvpolicy", "--model_args", arguments, "--tasks", "choose", "--device", "cpu"]
    command += ["--include_path", str(folder), "--output_path", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *command])
    main()
    assert "choose" in capsys.readouterr().out
    (file,) = (tmp_path / "results").rglob("results_*.json")
    written = json.loads(file.read_text())["config"]["kvpolicy"]
    assert written["held_back"] == 2
    assert kvpolicy.load(written["policy"]) == kvpolicy.load("snapkv-w8", budget=0.3)
    assert written["kept"]["contexts"] == len(CONTEXTS) and written["kept"]["whole"] == 0
    assert written["kept"]["slots"] / written["kept"]["tokens"] == pytest.approx(0.3, abs=0.01)


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_a_wrong_argument_is_one_line_and_exit_code_2(folder: Path) -> None:
    arguments = f"pretrained={folder / 'model'},policy=snapkw"
    command = ["run", "--model", "kvpolicy", "--model_args", arguments, "--tasks", "choose", "--device", "cpu"]
    module = [sys.executable, "-m", "kvpolicy.integrations.lm_eval", *command, "--include_path", str(folder)]
    ended = subprocess.run(module, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("error: unknown policy 'snapkw'")
    assert "Traceback" not in ended.stderr


def test_without_the_harness_it_says_what_to_install() -> None:
    ended = run(
        "import runpy, sys; sys.modules['lm_eval'] = None;"
        "runpy.run_module('kvpolicy.integrations.lm_eval', run_name='__main__')"
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        "error: kvpolicy.integrations.lm_eval needs the module 'lm_eval.api', which is not installed. "
        "Install it:  pip install 'kvpolicy[lm-eval]'"
    )


def test_importing_kvpolicy_does_not_import_the_harness() -> None:
    code = (
        "import sys, kvpolicy\nfor name in kvpolicy.__all__: getattr(kvpolicy, name)\n"
        "import kvpolicy.integrations.lm_eval\nkvpolicy.load('snapkv')\nprint('lm_eval' in sys.modules)"
    )
    assert run(code).stdout.strip() == "False"


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_by_its_name() -> None:
    """With a real tokenizer, whose tokens are longer than a letter."""
    text = texts.topics()["compound"][:600]
    pairs = [
        (f"{text}\n\nQuestion: what is this about?\nAnswer:", answer) for answer in (" Python", " The sea, and all.")
    ]
    theirs = scores(HFLM(pretrained=str(models.default_folder()), dtype="float64", device="cpu"), pairs)
    for held_back in (1, "\nQuestion:"):
        settings = {"pretrained": "smollm2", "dtype": "float64", "held_back": held_back, "device": "cpu"}
        assert scores(KVPolicyLM(policy="full", **settings), pairs) == pytest.approx(theirs, rel=0, abs=1e-8)
    evicted = scores(KVPolicyLM(policy="ecokv-snapkv", budget=32, **settings), pairs)
    assert min(abs(one - other) for one, other in zip(evicted, theirs, strict=True)) > 0.01
