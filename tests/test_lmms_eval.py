"""The model `kvpolicy` of lmms-eval, against the harness's own LLaVA, and against contexts compressed by hand.

In float64, where two ways of computing the same choose the same tokens.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from lmms_eval.api.instance import Instance
from lmms_eval.evaluator import simple_evaluate
from lmms_eval.models import get_model
from lmms_eval.tasks import TaskManager
from loguru import logger
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, LlavaForConditionalGeneration

import kvpolicy
from kvpolicy import models
from kvpolicy.errors import KVPolicyError
from kvpolicy.eval.pictures.draw import draw
from kvpolicy.eval.pictures.questions import label, questions
from kvpolicy.eval.pictures.scene import random_scene
from kvpolicy.integrations.lmms_eval import KVPolicyLMM
from kvpolicy.integrations.lmms_eval.__main__ import main
from kvpolicy.integrations.lmms_eval.prompt import split_prompt
from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.random import Random as RandomScore
from kvpolicy.testing.vision.families import prompt, tiny_model

IMAGE = AutoConfig.from_pretrained(models.TINY_LLAVA_FOLDER).image_token_index
ASKED = {"max_new_tokens": 6}

TASK = """
task: {name}
dataset_path: {folder}/rows
dataset_kwargs: {{load_from_disk: true}}
test_split: test
output_type: {output_type}
{wording}
doc_to_target: answer
{more}
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""
GENERATES = "generation_kwargs: {max_new_tokens: 6, temperature: 0, do_sample: false}"


def rows() -> list[dict[str, Any]]:
    """One question about each three of some pictures."""
    scenes = {seed: [random_scene(Random(seed + number)) for number in (1, 2, 3)] for seed in range(0, 50, 10)}
    asked = {seed: Random(seed).choice(questions(each)) for seed, each in scenes.items()}
    return [{"seed": seed, "question": one.question, "answer": one.answer} for seed, one in asked.items()]


def messages(doc: dict[str, Any]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    for number in (1, 2, 3):
        picture = Image.fromarray(draw(random_scene(Random(doc["seed"] + number))))
        content += [{"type": "text", "text": label(number)}, {"type": "image", "url": picture}]
    return [{"role": "user", "content": [*content, {"type": "text", "text": doc["question"]}]}]


def visual(doc: dict[str, Any]) -> list[Image.Image]:
    return [Image.fromarray(draw(random_scene(Random(doc["seed"]))))]


FUNCTIONS = (
    "from random import Random\nfrom typing import Any\nfrom PIL import Image\n"
    "from kvpolicy.eval.pictures.draw import draw\nfrom kvpolicy.eval.pictures.questions import label\n"
    "from kvpolicy.eval.pictures.scene import random_scene\n\n"
    f"{inspect.getsource(messages)}\n{inspect.getsource(visual)}"
)
"""What the tasks name with `!function`, as a file beside their YAML."""

ROWS = rows()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA of random weights, and tasks: to answer, to answer as the harness words it, and to choose."""
    folder = tmp_path_factory.mktemp("lmms-eval")
    config = AutoConfig.from_pretrained(models.TINY_LLAVA_FOLDER)
    # Large weights, so that what it says depends on what it reads.
    config.initializer_range = config.text_config.initializer_range = 0.4
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).double()
    model.generation_config = GenerationConfig.from_pretrained(models.TINY_LLAVA_FOLDER)
    model.save_pretrained(folder / "model")
    models.load_processor(models.TINY_LLAVA).save_pretrained(folder / "model")
    DatasetDict(test=Dataset.from_list(ROWS)).save_to_disk(folder / "tasks" / "rows")
    (folder / "tasks" / "functions.py").write_text(FUNCTIONS)
    own = "doc_to_messages: !function functions.messages\ndoc_to_text: question"
    worded = "doc_to_visual: !function functions.visual\ndoc_to_text: question"
    for name, output_type, wording, more, metric in (
        ("answer", "generate_until", own, GENERATES, "exact_match"),
        ("answer_one", "generate_until", worded, GENERATES, "exact_match"),
        ("choose", "multiple_choice", worded, "doc_to_choice: ['red', 'blue']", "acc"),
    ):
        text = TASK.format(
            name=name, folder=folder / "tasks", output_type=output_type, wording=wording, more=more, metric=metric
        )
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> Callable[..., KVPolicyLMM]:
    common = {"pretrained": str(folder / "model"), "dtype": "float64", "device": "cpu"}
    return lambda **settings: asked_of(KVPolicyLMM(**{**common, **settings}))


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    """The harness's own LLaVA, which imports a reader of videos even where there are none."""
    with pytest.MonkeyPatch.context() as patch:
        decord = ModuleType("decord")
        decord.VideoReader = decord.cpu = None  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "decord", decord)
        yield get_model("llava_hf")


def asked_of(lm: Any) -> Any:
    lm.task_dict = {"task": {"test": ROWS}}
    return lm


def requests(settings: dict[str, Any] = ASKED, messages_of: Any = messages) -> list[Instance]:
    return [
        Instance(
            "generate_until",
            (row["question"], messages_of, dict(settings), index, "task", "test"),
            0,
            {"task": "task", "doc_id": index, "repeats": 1},
        )
        for index, row in enumerate(ROWS)
    ]


def says(lm: Any, **settings: Any) -> list[str]:
    return [one.text for one in lm.generate_until(requests({**ASKED, **settings}))]


@pytest.fixture(scope="module")
def expected(folder: Path, theirs) -> list[str]:
    """What the harness's own model says."""
    model = theirs(pretrained=str(folder / "model"), dtype="float64", device="cpu", device_map="cpu")
    found = says(asked_of(model))
    assert len(set(found)) > 2
    return found


@pytest.mark.parametrize("held_back", [1, 4, "question"])
@pytest.mark.parametrize(("policy", "budget"), [("full", None), ("ecokv-ada-kv", 1.0), ("snapkv-w8", 500)])
def test_keeping_all_is_the_harness_s_own_llava(ours, expected, policy, budget, held_back) -> None:
    lm = ours(policy=policy, budget=budget, held_back=held_back)
    assert says(lm) == expected
    assert lm.kept.contexts == lm.kept.whole == len(ROWS)
    assert lm.kept.bytes == lm.kept.bytes_full


@pytest.mark.parametrize("held_back", [1, "question"])
@pytest.mark.parametrize(("name", "budget"), [("snapkv-w8", 0.2), ("ecokv-ada-kv", 40)])
def test_what_is_said_comes_from_what_was_kept(ours, expected, name, budget, held_back) -> None:
    lm = ours(policy=name, budget=budget, held_back=held_back)
    found = says(lm)
    assert found == [by_hand(lm, row, held_back) for row in ROWS]
    assert found != expected
    assert lm.kept.whole == 0
    assert 0 < lm.kept.bytes < 0.3 * lm.kept.bytes_full


def by_hand(lm: KVPolicyLMM, row: dict[str, Any], held_back: int | str) -> str:
    text = lm.processor.apply_chat_template(messages(row), tokenize=False, add_generation_prompt=True)
    pictures = [Image.fromarray(draw(random_scene(Random(row["seed"] + number)))) for number in (1, 2, 3)]
    inputs = lm.processor(text=text, images=pictures, add_special_tokens=False, return_tensors="pt")
    ids, pixels = inputs["input_ids"], inputs["pixel_values"].double()
    at = ids[0].tolist()[::-1].index(IMAGE) if held_back == "question" else held_back
    context = lm.policy.compress(lm.model, {"input_ids": ids[:, :-at], "pixel_values": pixels})
    with context.fork() as fork:
        new = fork.generate(ids[:, -at:], do_sample=False, **ASKED)
    return lm.processor.tokenizer.decode(new[0], skip_special_tokens=True)


def test_even_an_answer_of_one_token_comes_from_what_was_kept(ours) -> None:
    evicted = ours(policy="snapkv-w8", budget=0.1)
    assert says(evicted, max_new_tokens=1) != says(ours(policy="full"), max_new_tokens=1)


def test_the_question_is_not_read_before_the_policy_evicts(ours) -> None:
    lm = ours(policy="snapkv-w8", budget=0.2, held_back="question")
    read: list[Tensor] = []
    hook = lm.model.register_forward_pre_hook(lambda *call: read.append(call[2]["input_ids"]), with_kwargs=True)
    says(lm, max_new_tokens=1)
    hook.remove()
    contexts, asked = read[::2], read[1::2]
    assert all(ids[0, -1] == IMAGE for ids in contexts)
    assert all(IMAGE not in ids for ids in asked)
    assert [lm.processor.tokenizer.decode(ids[0, :-1]) for ids in asked] != [""] * len(ROWS)


def test_it_samples_where_a_temperature_is_asked_for(ours) -> None:
    lm = ours(policy="full")
    torch.manual_seed(0)
    sampled = says(lm, temperature=5.0, top_p=1.0)
    assert sampled != says(lm, temperature=0.0, top_p=None)
    assert lm.kept.contexts == len(ROWS)  # of the latest requests


def test_beams_are_those_of_the_harness_s_own(ours, expected, folder, theirs) -> None:
    model = theirs(pretrained=str(folder / "model"), dtype="float64", device="cpu", device_map="cpu")
    found = says(ours(policy="full"), num_beams=4)
    assert found == says(asked_of(model), num_beams=4) != expected


def test_a_model_in_python_brings_its_processor(ours, expected) -> None:
    lm = ours(policy="full")
    again = KVPolicyLMM(lm.model, policy="full", processor=lm.processor)
    assert says(asked_of(again)) == expected
    with pytest.raises(KVPolicyError, match="processor: expected that of a model in Python, got none"):
        KVPolicyLMM(lm.model, policy="full")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 4}, "batch_size: expected 1, got 4"),
        ({"batch_size": "auto"}, "batch_size: expected 1, got 'auto'"),
        ({"held_back": 0}, "held_back: expected a whole number of tokens from 1, or 'question', got 0"),
        ({"held_back": "Q:"}, "got 'Q:'"),
        ({"held_back": True}, "got True"),
        ({"dtype": "float5"}, "dtype: expected one of floating point, such as 'bfloat16' or 'float32', got 'float5'"),
        ({"dtype": "int8"}, "got 'int8'"),
        ({"max_pixels": 9, "fps": 1}, "got max_pixels, fps besides"),
        ({"policy": "snapkw"}, "Did you mean 'snapkv'"),
        ({"policy": Policy(name="x", score=RandomScore(), budget=Budget(tokens=20)), "budget": 9}, "budget: expected"),
        ({"pretrained": "/no/such/model"}, "cannot load the model '/no/such/model'"),
    ],
)
def test_settings_that_do_not_go_with_eviction_are_refused_by_name(ours, settings, message) -> None:
    with pytest.raises(KVPolicyError) as caught:
        ours(**settings)
    assert message in str(caught.value)


def without_pictures(doc: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": doc["question"]}]}]


@pytest.mark.parametrize(
    ("held_back", "messages_of", "message"),
    [
        (300, messages, "got 300 held back of 2"),
        (60, messages, "expected text alone to be held back, got a prompt of 2"),
        ("question", without_pictures, "expected prompts with a picture"),
    ],
)
def test_prompts_that_would_measure_nothing_are_refused(ours, held_back, messages_of, message) -> None:
    with pytest.raises(KVPolicyError) as caught:
        ours(policy="full", held_back=held_back).generate_until(requests(messages_of=messages_of))
    assert message in str(caught.value)


def test_a_prompt_without_pictures_is_read_and_asked_as_any(ours) -> None:
    found = ours(policy="full").generate_until(requests(messages_of=without_pictures))
    assert all(one.text for one in found)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_5", "gemma3", "internvl", "llava_next", "mllama"])
def test_prompts_of_other_classes_are_cut_right(model_type: str) -> None:
    model = tiny_model(model_type)
    rows = prompt(model, [[6, "image", 4, "image", 9]])
    inputs = {"input_ids": rows.ids, "attention_mask": rows.mask, **rows.pictures}
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = model.generate(**inputs, **settings)[:, rows.ids.shape[1] :]
    # The pictures of Mllama are not in its prompt.
    for held_back in (3,) if model_type == "mllama" else (3, "question"):
        read, asked = split_prompt(inputs, held_back, model.config)
        assert torch.equal(torch.cat([read["input_ids"], asked], dim=1), rows.ids)
        assert asked.shape[1] == (3 if held_back == 3 else 9)
        with kvpolicy.load("full").compress(model, read).fork() as fork:
            assert torch.equal(fork.generate(asked, **settings), expected)


def test_a_processor_without_a_chat_template_is_refused(ours) -> None:
    lm = ours(policy="full")
    lm.processor.chat_template = None
    with pytest.raises(KVPolicyError, match="expected a processor with a chat template, got LlavaProcessor without"):
        KVPolicyLMM(lm.model, policy="full", processor=lm.processor)


@pytest.mark.parametrize("name", ["loglikelihood", "generate_until_multi_round"])
def test_other_kinds_of_requests_are_refused_with_the_reason(ours, name) -> None:
    with pytest.raises(KVPolicyError, match=f"^{name}: expected a task"):
        getattr(ours(policy="full"), name)([])


def test_it_warns_where_the_budget_holds_whole_prompts(ours) -> None:
    said: list[Any] = []
    sink = logger.add(lambda message: said.append(message.record), level="WARNING")
    says(ours(policy="snapkv-w8", budget=500))
    logger.remove(sink)
    assert [one["level"].name for one in said] == ["WARNING"]
    assert "nothing evicted from 5 of them" in said[0]["message"]


def test_a_task_run_by_name_is_the_harness_s_own_run(folder: Path, theirs) -> None:
    """`theirs`: it is read by its name, too."""
    common = {
        "tasks": ["answer", "answer_one"],
        "task_manager": TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        "bootstrap_iters": 0,
        "log_samples": True,
    }
    arguments = f"pretrained={folder / 'model'},dtype=float64,device=cpu"
    expected = simple_evaluate("llava_hf", f"{arguments},device_map=cpu", **common)
    same = simple_evaluate("kvpolicy", f"{arguments},policy=snapkv,budget=1.0", **common)
    other = simple_evaluate("kvpolicy", f"{arguments},policy=snapkv-w8,budget=0.2,held_back=question", **common)
    assert get_model("kvpolicy") is KVPolicyLMM

    def said(results: dict[str, Any], task: str) -> list[str]:
        return [sample["filtered_resps"][0] for sample in results["samples"][task]]

    for task in common["tasks"]:
        assert said(same, task) == said(expected, task) != said(other, task)
    assert same["results"]["answer"] == expected["results"]["answer"]
    kept = {name: value for name, value in other["throughput"].items() if name.startswith("avg_kept")}
    assert kept["avg_kept_contexts"] == 2 * len(ROWS)
    assert kept["avg_kept_slots"] / kept["avg_kept_tokens"] == pytest.approx(0.2, abs=0.01)
    assert kept["avg_kept_bytes"] / kept["avg_kept_bytes_full"] == pytest.approx(0.2, abs=0.01)


def command(folder: Path, policy: str) -> list[str]:
    arguments = f"pretrained={folder / 'model'},dtype=float64,{policy}"
    command = ["--model", "kvpolicy", "--model_args", arguments, "--device", "cpu", "--tasks", "answer"]
    return [*command, "--include_path", str(folder / "tasks")]


def test_the_command_line_writes_what_was_kept_into_the_results(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*command(folder, "policy=snapkv-w8,budget=0.2"), "--output_path", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", ["lmms-eval", *arguments])
    main()
    assert "answer" in capsys.readouterr().out
    (file,) = (tmp_path / "results").rglob("*_results.json")
    written = json.loads(file.read_text())
    assert written["throughput"]["avg_kept_contexts"] == len(ROWS)
    assert "policy=snapkv-w8,budget=0.2" in written["config"]["model_args"]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("policy=snapkw", "error: unknown policy 'snapkw'"),
        ("policy=full,held_back=300", "error: held_back=300: expected prompts"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    folder: Path, policy, message, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lmms-eval", *command(folder, policy)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith(message)
    assert "Traceback" not in said


def test_a_task_of_given_answers_is_refused_by_the_harness_itself(folder: Path) -> None:
    tasks = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    arguments = f"pretrained={folder / 'model'},policy=full,device=cpu"
    with pytest.raises(AssertionError, match="generation only"):
        simple_evaluate("kvpolicy", arguments, tasks=["choose"], task_manager=tasks)


def test_without_the_harness_it_says_what_to_install() -> None:
    ended = run(
        "import runpy, sys; sys.modules['lmms_eval'] = None;"
        "runpy.run_module('kvpolicy.integrations.lmms_eval', run_name='__main__')"
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        "error: kvpolicy.integrations.lmms_eval needs the module 'lmms_eval.api', which is not installed. "
        "Install it:  pip install 'kvpolicy[lmms-eval]'"
    )


def test_importing_kvpolicy_does_not_import_the_harness() -> None:
    code = (
        "import sys, kvpolicy\nfor name in kvpolicy.__all__: getattr(kvpolicy, name)\n"
        "import kvpolicy.integrations.lmms_eval\nkvpolicy.load('snapkv')\nprint('lmms_eval' in sys.modules)"
    )
    assert run(code).stdout.strip() == "False"


@pytest.mark.slow
def test_the_page_has_a_task_that_needs_no_network(tmp_path: Path) -> None:
    page = (Path(kvpolicy.__file__).parents[1] / "docs" / "lmms-eval.md").read_text()
    files = re.findall(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["rows.py", "words.py", "drawn.yaml"]
    for name, text in files:
        (tmp_path / name).write_text(text)
    found = re.search(r"^python rows\.py\n(python .*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    for command in ("python rows.py", found[1].replace("\\\n", "")):
        _, *arguments = shlex.split(command)
        ended = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
    (file,) = (tmp_path / "results").rglob("*_results.json")
    written = json.loads(file.read_text())
    # By chance one in six is right, and more than eight of 20 once in 350 times.
    assert written["results"]["drawn"]["exact_match,none"] > 0.4
    assert written["throughput"]["avg_kept_contexts"] == 20
    assert written["throughput"]["avg_kept_slots"] == 20 * 64
