"""Pictures: scenes are drawn the same everywhere, answers are right, and a model is asked as its processor would."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from benches import bench, letters
from typer.testing import CliRunner

from kvpolicy import load, models
from kvpolicy.cli import app
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.eval.answer import answer
from kvpolicy.eval.bench import Bench
from kvpolicy.eval.grid import Grid, policies
from kvpolicy.eval.pictures.draw import draw, mask
from kvpolicy.eval.pictures.prompt import prompt
from kvpolicy.eval.pictures.questions import questions
from kvpolicy.eval.pictures.scene import COLORS, DULL, MARKS, PATTERNS, SHAPES, SIDE, Scene, Thing, random_scene
from kvpolicy.eval.readings import Readings
from kvpolicy.eval.tasks.example import Pictured
from kvpolicy.eval.tasks.files import dump_task, from_plain, load_tasks
from kvpolicy.eval.tasks.haystack import TaskError
from kvpolicy.texts import unrepeated

BARE = Scene("flat", 4, ((200, 200, 200), (150, 150, 150)), (), (), 0)


@functools.cache
def tiny_llava() -> Bench:
    return Bench("tiny-llava", *models.load("tiny-llava"), unrepeated())


def examples(samples: int, seed: int = 0, **settings: Any) -> list[Pictured]:
    task = load_tasks("pictures", {"samples": samples, **settings})[0]
    return list(tiny_llava().examples(task, seed))  # type: ignore[arg-type]


def said(policy: str, asked: Pictured, *, aware: bool = False, new_tokens: int = 3, **settings: Any) -> str:
    model, processor = tiny_llava().model, models.load_processor("tiny-llava")
    chosen = load(policy, **settings)
    return answer(Readings(model), processor, chosen, asked, query_aware=aware, new_tokens=new_tokens).text


# Scenes and what is drawn of them


def test_a_scene_is_drawn_the_same_everywhere() -> None:
    """Of any release of any library: figures of one pixel's difference are figures of another task."""
    scenes = [random_scene(Random(seed), clutter=6) for seed in range(30)]
    assert {scene.pattern for scene in scenes} == set(PATTERNS)
    assert {mark.kind for scene in scenes for mark in scene.marks} == set(MARKS)
    assert {thing.shape for scene in scenes for thing in scene.things} == set(SHAPES)
    drawn = hashlib.sha256(b"".join(draw(scene).tobytes() for scene in scenes))
    assert drawn.hexdigest()[:16] == "13aded4a6d4a98e2"


def test_a_picture_has_things_over_clutter_over_a_background() -> None:
    for seed in range(20):
        scene = random_scene(Random(seed), things=3, clutter=5)
        picture = draw(scene).astype(int)
        there = np.zeros((SIDE, SIDE), bool)
        for thing in scene.things:
            assert abs(picture[mask(thing)] - COLORS[thing.color]).max() <= 5
            assert not (there & mask(thing)).any()
            there |= mask(thing)
        known = [*scene.tones, *(mark.color for mark in scene.marks)]
        near = [abs(picture[~there] - color).max(-1) <= 5 for color in known]
        assert np.logical_or.reduce(near).all()
        assert near[0].any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [10, 13, 14])
def test_a_shape_fills_its_square_and_no_two_look_alike(shape: str, size: int) -> None:
    found = {each: mask(Thing("red", each, 20, 30, size)) for each in SHAPES}
    rows, columns = found[shape].nonzero()
    assert (rows.min(), rows.max() + 1) == (30, 30 + size)
    assert (columns.min(), columns.max() + 1) == (20, 20 + size)
    others = [(found[shape] ^ other).sum() for each, other in found.items() if each != shape]
    assert min(others) > 0.05 * size**2


def test_no_color_of_clutter_is_like_one_that_is_asked_about() -> None:
    for dull in DULL:
        assert min(sum(abs(np.array(dull) - color)) for color in COLORS.values()) > 100


# Questions


def truth(scenes: tuple[Scene, ...], question: str) -> set[str]:
    """Return every right answer, found word by word."""
    words = question.rstrip("?").split()
    things = [(number, thing) for number, scene in enumerate(scenes, 1) for thing in scene.things]
    if words[0] == "Which":
        return {str(number) for number, thing in things if [thing.color, thing.shape] == words[-2:]}
    inside = [thing for number, thing in things if str(number) == words[-1]]
    if words[1] == "color":
        return {thing.color for thing in inside if thing.shape == words[4]}
    return {thing.shape for thing in inside if thing.color == words[4]}


def test_every_question_has_one_right_answer() -> None:
    for seed in range(20):
        scenes = tuple(random_scene(Random(f"{seed} {number}")) for number in range(6))
        asked = questions(scenes)
        assert len({one.question for one in asked}) == len(asked) >= 2 * 12
        for one in asked:
            assert truth(scenes, one.question) == {one.answer}


def test_no_place_is_asked_of_what_is_in_two_pictures() -> None:
    twice = Scene("flat", 4, BARE.tones, (), (Thing("red", "ring", 5, 5, 12),), 0)
    assert [one.kind for one in questions([twice, twice])] == ["color", "shape", "color", "shape"]


# The task


def test_examples_repeat_by_seed_and_ask_what_is_wanted() -> None:
    first = examples(30)
    assert first == examples(30)
    assert len({*first, *examples(30, seed=1)}) == 60
    assert {each.question.split()[1] for each in first} == {"color", "shape", "picture"}
    for each in first:
        assert truth(each.scenes, each.question) == set(each.answers)
        assert (len(each.scenes), len(each.scenes[0].things), len(each.scenes[0].marks)) == (6, 2, 4)
    other = examples(5, pictures=2, things=1, clutter=0, ask="place")
    assert {each.question.split()[0] for each in other} == {"Which"}
    assert {(len(each.scenes), len(each.scenes[0].things), len(each.scenes[0].marks)) for each in other} == {(2, 1, 0)}


def test_a_task_is_plain_data() -> None:
    task = load_tasks("pictures", {"samples": 2})[0]
    assert from_plain(json.loads(json.dumps(dump_task(task)))) == task


def test_a_prompt_is_what_the_processor_makes_of_it_cut_before_the_question() -> None:
    asked, processor = examples(1)[0], models.load_processor("tiny-llava")
    inputs, question = prompt(processor, asked)
    parts: list[dict[str, str]] = []
    for number in range(1, 7):
        parts += [{"type": "text", "text": f"Picture {number}:"}, {"type": "image"}]
    chat = [{"role": "user", "content": [*parts, {"type": "text", "text": asked.question}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    images = [draw(scene) for scene in asked.scenes]
    whole = processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
    assert torch.equal(torch.cat([inputs["input_ids"], question], dim=1), whole["input_ids"])
    assert torch.equal(inputs["pixel_values"], whole["pixel_values"])
    seen = (inputs["pixel_values"] * 0.5 + 0.5) * 255
    torch.testing.assert_close(seen.permute(0, 2, 3, 1), torch.from_numpy(np.stack(images)).float(), rtol=0, atol=1e-3)
    assert processor.decode(question[0]).replace(" ", "") == f"{asked.question}<answer>".lower().replace(" ", "")
    assert inputs["input_ids"].shape == (1, 1 + 6 * (3 + 64))


# The tiny model


@pytest.mark.parametrize("aware", [False, True])
def test_keeping_everything_is_plain_generate(aware: bool) -> None:
    model, asked = tiny_llava().model, examples(1)[0]
    inputs, question = prompt(models.load_processor("tiny-llava"), asked)
    ids = torch.cat([inputs["input_ids"], question], dim=1)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": inputs["pixel_values"]}
    out = model.generate(**given, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
    assert said("full", asked, aware=aware) == tiny_llava().tokenizer.decode(out, skip_special_tokens=True)
    kept = said("ecokv-pre-rope", asked, aware=aware, budget=450)
    assert kept == said("full", asked)


def test_a_batch_is_answered_as_one_by_one() -> None:
    """In float64, where a word is not decided by the order of a sum."""
    model, _ = models.load("tiny-llava", dtype=torch.float64)
    processor = models.load_processor("tiny-llava")
    prompts = [prompt(processor, each) for each in examples(6, ask="color")]
    policy = load("ecokv-pre-rope", budget=64)

    def answered(inputs: dict[str, torch.Tensor], question: torch.Tensor) -> list[list[int]]:
        with policy.compress(model, inputs).fork() as fork:
            return fork.generate(question, max_new_tokens=2, do_sample=False).tolist()

    names = ("input_ids", "attention_mask", "pixel_values")
    together = {name: torch.cat([inputs[name] for inputs, _ in prompts]) for name in names}
    alone = [answered(dict(inputs), question)[0] for inputs, question in prompts]
    assert answered(together, torch.cat([question for _, question in prompts])) == alone


def test_it_answers_about_pictures_it_has_not_seen() -> None:
    right = [said("full", each) == each.answers[0] for each in examples(60, seed=7)]
    assert sum(right) >= 58


def test_it_has_to_see_the_pictures() -> None:
    """Asked about the pictures of other examples, it knows no more than chance, a sixth; three deviations more."""
    asked = examples(60, seed=7)
    others = [Pictured(other.scenes, each.question, each.answers) for each, other in pairwise(asked)]
    right = sum(said("full", each) == each.answers[0] for each in others)
    assert right / len(others) < 1 / 6 + 3 * (1 / 6 * 5 / 6 / len(others)) ** 0.5


def test_it_stops_after_one_word() -> None:
    text = said("full", examples(1)[0], new_tokens=8)
    assert len(text.split()) == 1


def test_its_weights_are_small_and_part_of_the_package() -> None:
    weights = models.TINY_LLAVA_FOLDER / "model.safetensors"
    assert 2e6 < weights.stat().st_size < 3e6
    assert (models.TINY_LLAVA_FOLDER / "README.md").is_file()


# What is refused


def test_a_folder_of_a_model_of_text_has_no_processor(tmp_path: Path) -> None:
    bench().model.save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    says = rf"model '{tmp_path}': expected a vision-language model.*text alone.*'tiny-llava'"
    with pytest.raises(UnsupportedModelError, match=says):
        models.load_processor(str(tmp_path))
    command = ["eval", "--model", str(tmp_path), "--policies", "snapkv", "--tasks", "pictures", "--out"]
    result = CliRunner().invoke(app, [*command, str(tmp_path / "results")])
    assert result.exit_code == 2
    assert re.search(says, result.output)


def test_tasks_of_text_are_refused_where_its_words_are_unknown() -> None:
    for name in ("drift", "niah-single", "odd-one-out"):
        with pytest.raises(TaskError, match=r"180 of the first 196 are unknown: .* 'tiny-llava' the task 'pictures'"):
            tiny_llava().examples(load_tasks(name)[0], 0)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "expected a processor with a chat template, got a LlavaProcessor without one"),
        ("{{ messages[0].content | length }}", "holds a question as it is, got '13'"),
        ("{{ messages[0].content[-1].text }}<image>", "expected a chat template that puts 6 pictures before the"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(template: str | None, says: str) -> None:
    processor = models.load_processor("tiny-llava")
    processor.chat_template = template
    with pytest.raises(TaskError, match=says):
        prompt(processor, examples(1)[0])


# The command


def test_euclid_alone_is_in_every_table_of_pictures() -> None:
    tasks = [*load_tasks("pictures", {"samples": 1}), *load_tasks("examples.jsonl")]
    grid = Grid(policies(["snapkv"], [64, 0.5]), tasks[:1], ["query-agnostic"])
    found = [(cell.policy["name"], cell.policy["budget"]) for cell in grid.cells(tiny_llava())]
    alone = [{"tokens": 64}, {"keep": 0.5}]
    assert [{**budget, "layers": "uniform", "heads": "uniform"} for budget in alone] == [
        budget for name, budget in found if name == "euclid-alone"
    ]


def test_policies_are_compared_in_one_command(tmp_path: Path) -> None:
    names = "snapkv-w8,mixkv-snapkv,ecokv-pre-rope"
    command = ["eval", "--model", "tiny-llava", "--tasks", "pictures", "--samples", "4", "--policies", names]
    modes = ["--budgets", "64", "--mode", "query-agnostic,query-aware", "--out", str(tmp_path)]
    made = CliRunner().invoke(app, [*command, *modes], catch_exceptions=False)
    assert made.exit_code == 0
    # The full cache makes no difference; two of those asked for weigh by redundancy.
    assert made.output.startswith(f"{1 + 2 * (1 + 3 + 2 + 1)} cells measured")
    shown = CliRunner().invoke(app, ["report", str(tmp_path), "--json"], catch_exceptions=False)
    tables = json.loads(shown.output)
    rows = {row["policy"]: row for row in tables[0]["rows"]}
    assert rows["full"]["scores"]["string_match_all"]["mean"] == 1
    assert rows["euclid-alone"]["bytes"] == pytest.approx(64 / 403 * rows["full"]["bytes"], rel=1e-9)


def test_policies_of_the_benchmark_are_named_as_their_files() -> None:
    found = sorted((Path(__file__).parents[1] / "benchmarks" / "tiny_llava" / "policies").glob("*.yaml"))
    assert len(found) > 5
    assert [load(path, budget=64).name for path in found] == [path.stem for path in found]
