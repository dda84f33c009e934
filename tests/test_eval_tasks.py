"""Tasks: what their examples hold, that chance repeats, and files of tasks and examples."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from benches import haystack, letters

from kvpolicy.errors import KVPolicyError
from kvpolicy.eval.tasks.example import Question, Stretch
from kvpolicy.eval.tasks.files import KINDS, dump_task, from_plain, load_tasks
from kvpolicy.eval.tasks.haystack import Haystack, TaskError

Write = Callable[..., Path]
ASKING = sorted(set(KINDS) - {"drift", "examples", "pictures"})


def make(name: str, seed: int = 0, **settings: Any) -> list[Question]:
    task = load_tasks(name, {"samples": 3, "length": 3000, **settings})[0]
    return list(task.examples(haystack(), seed))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ASKING)
def test_examples_repeat_by_seed_and_differ_from_each_other(name: str) -> None:
    first, again, other = make(name), make(name), make(name, seed=1)
    assert first == again
    assert len({*first, *other}) == 6


@pytest.mark.parametrize("name", ASKING)
def test_the_answers_are_in_the_context_which_is_about_as_long_as_asked(name: str) -> None:
    for each in make(name):
        assert all(answer in each.context for answer in each.answers)
        assert not any(answer in each.question + each.prefix for answer in each.answers)
        assert 0.85 * 3000 <= haystack().size(each.context) <= 3000


@pytest.mark.parametrize(
    ("name", "needles", "words", "answers"),
    [
        ("niah-single", 1, 1, 1),
        ("niah-multikey", 4, 4, 1),
        ("niah-multivalue", 4, 1, 4),
        ("niah-multiquery", 4, 4, 4),
    ],
)
def test_needles_are_as_many_as_the_kind_has(name: str, needles: int, words: int, answers: int) -> None:
    for each in make(name):
        found = re.findall(r"The secret code of the (\w+) is (\d{7})\.", each.context)
        assert len(found) == needles
        assert len({word for word, _ in found}) == words
        asked = {number for word, number in found if word in each.question}
        assert len(each.answers) == answers
        assert asked == set(each.answers)


def test_needles_stand_all_over_the_text() -> None:
    places = [each.context.index("The secret code") / len(each.context) for each in make("niah-single", samples=40)]
    assert min(places) < 0.2
    assert max(places) > 0.8


def test_needles_stand_between_sentences() -> None:
    for each in make("niah-single", samples=20):
        before, _ = each.context.split("The secret code")
        assert before.endswith("\n") or re.search(r"[.!?] +$", before)


def test_a_variable_is_set_to_one_that_was_set_before() -> None:
    for each in make("variable-tracking", chains=2, hops=3):
        held: dict[str, str] = {}
        for name, other, number in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))\.", each.context):
            held[name] = number or held[other]
        asked = re.findall(r"value (\d+)", each.question)[0]
        assert len(held) == 8
        assert {name for name, value in held.items() if value == asked} == set(each.answers)


def test_common_words_are_common() -> None:
    for each in make("common-words", common=5, often=9, seldom=2):
        counts = Counter(each.context.removeprefix("A list of words: ").split())
        assert {counts[word] for word in each.answers} == {9}
        assert {count for word, count in counts.items() if word not in each.answers} == {2}
        assert len(each.answers) == 5


def test_the_frequent_words_are_the_three_most_frequent() -> None:
    for each in make("frequent-words"):
        counts = Counter(each.context.removeprefix("A coded text: ").split()).most_common(4)
        assert [word for word, _ in counts[:3]] == list(each.answers)
        assert counts[2][1] > counts[3][1]
        assert 3 < counts[0][1] / counts[1][1] < 4.5  # alpha 2: four times


def test_one_record_is_odd() -> None:
    for each in make("odd-one-out"):
        counts = Counter(each.context.split("\n"))
        assert len(counts) == 2
        assert counts.most_common()[1][1] == 1
        assert each.answers[0] in counts.most_common()[1][0]


def test_drift_goes_on_with_the_text() -> None:
    found = load_tasks("drift", {"samples": 2, "length": 50})[0].examples(haystack(), 0)
    for each in found:
        assert isinstance(each, Stretch)
        assert (len(each.context), len(each.continuation)) == (50, 64)
    text = letters().decode([*found[0].context, *found[0].continuation])  # type: ignore[union-attr]
    assert haystack().texts[0].startswith(text)


def test_a_text_of_ones_own_is_what_tasks_are_made_from() -> None:
    own = Haystack(letters(), ("Sheep graze on green hills. " * 100,))
    each = load_tasks("niah-single", {"samples": 1, "length": 500})[0].examples(own, 0)[0]
    assert isinstance(each, Question)
    left = re.sub(r"The secret code of the \w+ is \d+\. ", "", each.context)
    assert ("Sheep graze on green hills. " * 100).startswith(left)


@pytest.mark.parametrize(
    ("name", "settings", "text", "message"),
    [
        ("niah-single", {"length": 40}, "Words in a sentence. " * 50, "expected more tokens than"),
        ("niah-multiquery", {"length": 600}, "word" * 300, "expected a text with 4 different lower-case words"),
        ("niah-single", {"length": 600, "samples": 1}, "many words " * 300, "ends of sentences or lines"),
        ("odd-one-out", {"length": 64}, "Some more words. " * 50, r"length: expected at least \d+ tokens"),
        ("drift", {"length": 10_000}, "Some words. " * 50, "got enough for 0"),
    ],
)
def test_too_little_text_or_length_is_refused(name: str, settings: dict[str, int], text: str, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        load_tasks(name, settings)[0].examples(Haystack(letters(), (text,)), 0)


def test_words_are_whole_words() -> None:
    own = Haystack(letters(), ("Extraordinarily nice days",))
    assert sorted(own.words(2, Random(0))) == ["days", "nice"]


def test_a_file_holds_a_task_or_a_list_of_them(write: Write) -> None:
    one = load_tasks(str(write("{task: niah-single, length: 512}")), {"samples": 2})
    assert [dump_task(task) for task in one] == [
        {"task": "niah-single", "length": 512, "samples": 2, "digits": 7, "new_tokens": 24}
    ]
    many = load_tasks(str(write("- {task: drift, next: 8}\n- task: odd-one-out\n")))
    assert [task.name for task in many] == ["drift", "odd-one-out"]
    assert [from_plain(json.loads(json.dumps(dump_task(task)))) for task in many] == many


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {task: drift}\n- {task: niah-singel}\n", "mine.yaml:2:10: unknown task 'niah-singel'. Did you mean 'niah"),
        ("task: drift\nlenght: 5\n", "mine.yaml:2:1: drift.lenght: unknown setting of 'drift'. Did you mean 'length'?"),
        ("- {task: drift, length: many}\n", 'mine.yaml:1:25: drift.length: expected a valid integer, got "many"'),
        ("- drift\n", "mine.yaml:1:3: expected a mapping with a kind of task"),
        ("samples: 5\n", "mine.yaml:1:1: expected a mapping with a kind of task"),
        ("- {task: drift\n", "mine.yaml:2:1: not one YAML document"),
        ("", "mine.yaml:1:1: expected a task or a list of them; the file is empty"),
        ("- {task: examples}\n", "mine.yaml:1:3: examples.file: expected this setting"),
    ],
)
def test_a_wrong_task_file_is_refused_with_its_line(write: Write, text: str, message: str) -> None:
    with pytest.raises(TaskError, match=re.escape(message)):
        load_tasks(str(write(text)))


@pytest.mark.parametrize("name", ["nowhere.yaml", "folder/nowhere", "nowhere.jsonl"])
def test_a_missing_file_is_refused(name: str) -> None:
    with pytest.raises(TaskError, match="nowhere"):
        load_tasks(name)[0].examples(haystack(), 0)


def test_own_examples_are_read(write: Write) -> None:
    lines = [
        {"context": "It is red.", "question": "Which colour?", "answers": ["red", "crimson"]},
        {"context": "It is\u2028late.", "question": "When?", "answers": ["late"], "prefix": "It is"},
    ]
    path = write("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n", "mine.jsonl")
    task = load_tasks(str(path))[0]
    assert task.examples(haystack(), 0) == [
        Question("It is red.", "Which colour?", ("red", "crimson")),
        Question("It is\u2028late.", "When?", ("late",), "It is"),
    ]
    assert task.scores == {"string_match_all": True}
    listed = load_tasks(str(write(f"[{{task: examples, file: {path}, match: part, samples: 1}}]")))[0]
    assert listed.scores == {"string_match_part": True}
    assert len(listed.examples(haystack(), 0)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"context": "a"', r"mine.jsonl:2:\d+: expected .* got no JSON"),
        ('["a"]', r'mine.jsonl:2: expected .*, got \["a"\]'),
        ('{"context": "a", "question": "b"}', "mine.jsonl:2: example: answers: expected this setting"),
        ('{"context": "a", "question": "b", "answers": "c"}', "mine.jsonl:2: example: answers: expected a .*list"),
        ('{"context": "a", "question": "b", "answers": []}', "mine.jsonl:2: example: answers: .* at least 1 item"),
        ('{"context": "", "question": "b", "answers": ["c"]}', "mine.jsonl:2: example: context: .* at least 1 char"),
        ('{"context": "a", "question": "b", "answers": ["c"], "hint": 1}', "mine.jsonl:2: example: hint: unknown"),
    ],
)
def test_a_wrong_line_of_own_examples_is_refused(write: Write, line: str, message: str) -> None:
    good = '{"context": "a", "question": "b", "answers": ["c"]}\n'
    with pytest.raises(TaskError, match=message):
        load_tasks(str(write(f"{good}{line}\n", "mine.jsonl")))[0].examples(haystack(), 0)
