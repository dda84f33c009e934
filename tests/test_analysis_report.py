"""`kvpolicy analyze`: the command, its report, and the report in a real browser."""

from __future__ import annotations

import base64
import errno
import importlib.util
import json
import os
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from browser import needs_chromium, screenshot, show
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from typer.testing import CliRunner

import kvpolicy
from kvpolicy.analysis.analyze import analyze
from kvpolicy.analysis.pieces import pieces
from kvpolicy.analysis.result import Analysis
from kvpolicy.cli import app
from kvpolicy.testing.models import tiny
from kvpolicy.texts import topics

pytest.importorskip("matplotlib")

from kvpolicy.analysis.page import page
from kvpolicy.analysis.plots import pictures

TEXT = "".join(f"Line {number}: <b>not bold</b> & 'quoted'.\n" for number in range(6))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model whose tokens are characters."""
    where = tmp_path_factory.mktemp("model")
    backend = Tokenizer(WordLevel({chr(code): code for code in range(128)}, unk_token="\x01"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="\x01").save_pretrained(where)
    tiny().save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def found() -> Analysis:
    ids = torch.tensor([ord(each) for each in TEXT])
    chosen = [kvpolicy.load(name, budget=40) for name in ("snapkv", "ecokv-ada-kv", "key-norm", "random")]
    return analyze(tiny(), ids, chosen, tokens=list(TEXT), name="tiny <model>")


class Reader(HTMLParser):
    """Reads the spans of the texts, and what a page would fetch or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.shades: list[list[str]] = []
        self.texts: list[str] = []
        self.sources: list[str] = []
        self.tags: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.sources += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if given.get("class") == "text":
            self._inside = True
            self.shades.append([])
            self.texts.append("")
        elif self._inside and tag == "span":
            self.shades[-1].append(str(given["class"]))

    def handle_endtag(self, tag: str) -> None:
        self._inside &= tag != "div"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[-1] += data


def test_the_page_is_whole_in_itself(found: Analysis) -> None:
    text = page(found)
    read = Reader(text)
    assert read.sources and all(source.startswith("data:image/svg+xml;base64,") for source in read.sources)
    assert not {"script", "link", "iframe", "object"} & set(read.tags)
    assert "@import" not in text and "url(" not in text
    for source in read.sources:
        ElementTree.fromstring(base64.b64decode(source.partition(",")[2]))


def test_the_page_shows_the_text_as_it_is(found: Analysis) -> None:
    read = Reader(page(found))
    assert read.texts == [TEXT] * 4
    assert "b" not in read.tags and "model" not in read.tags
    for shades, kept in zip(read.shades, found.kept, strict=True):
        # 6 heads: none, then tenths, rounded up.
        assert shades == [f"k{[0, 2, 4, 5, 7, 9, 10][count]}" for count in kept.votes]


def test_the_page_says_what_is_kept_and_noted(found: Analysis) -> None:
    text = page(replace(found, notes=["1 < 2"]))
    assert "<h1>What policies keep: tiny &lt;model&gt;</h1>" in text
    assert '<p class="note">1 &lt; 2</p>' in text
    assert f"<td>{found.overlap[0].mean:.2f}</td>" in text
    most = max(map(max, found.kept[1].lengths))
    assert f"<td>40.0 ({min(map(min, found.kept[1].lengths))} to {most})</td>" in text


def test_letters_stand_out_from_their_ground(found: Analysis) -> None:
    for rule in re.findall(r"\.k\d+ \{ (.*) \}", page(found)):
        ground = re.search(r"background: rgba\(0, 90, 170, ([\d.]+)\)", rule)
        opaque = float(ground[1]) if ground else 0.0
        letters = re.search(r" ?color: #(\w+)", rule)
        colour = {"fff": 255, "767676": 0x76}[letters[1]] if letters else 0x1A
        below = [255 - opaque * (255 - part) for part in (0, 90, 170)]
        lights = sorted((luminance(below), luminance([colour] * 3)))
        assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5, rule


def luminance(colour: list[float]) -> float:
    """Return how light a colour is, as the Web Content Accessibility Guidelines define it."""
    parts = [part / 255 for part in colour]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_pictures_of_one_policy_and_of_several(found: Analysis) -> None:
    several = [picture.title for picture in pictures(found)]
    assert several == [
        "Redundancy and anisotropy by layer",
        "Redundancy by layer and head",
        "Importance against diversity",
        "Overlap of policies by layer",
        "Positions kept by layer",
        "Head budgets",
    ]
    one = replace(found, kept=found.kept[:1], overlap=[])
    assert [picture.title for picture in pictures(one)] == [title for title in several if "Overlap" not in title]


def test_pictures_show_the_numbers(found: Analysis) -> None:
    drawn = {picture.title: picture.figure for picture in pictures(found)}
    lines = drawn["Overlap of policies by layer"].axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines] == [pair.jaccard for pair in found.overlap]
    cosine, euclidean, spread = drawn["Redundancy and anisotropy by layer"].axes
    for axes, name in ((cosine, "cosine"), (euclidean, "euclidean"), (spread, "anisotropy")):
        for line, one in zip(axes.get_lines(), found.likeness, strict=True):
            assert list(line.get_ydata()) == [sum(heads) / len(heads) for heads in getattr(one, name)]
    lengths = drawn["Head budgets"].axes[1].get_images()[0].get_array()
    assert lengths is not None and lengths.T.tolist() == found.kept[1].lengths
    positions = drawn["Positions kept by layer"].axes[2].get_images()[0].get_array()
    assert positions is not None and positions.tolist() == found.kept[2].positions
    density = drawn["Importance against diversity"].axes[0].get_images()[0].get_array()
    assert density is not None and density.T.tolist() == found.balance.density


def test_layers_may_have_different_numbers_of_heads(found: Analysis) -> None:
    kept = [replace(one, lengths=[[30, 50], [40], [20, 30, 70]]) for one in found.kept]
    drawn = {picture.title: picture for picture in pictures(replace(found, kept=kept))}
    assert drawn["Head budgets"].svg().startswith(b"<?xml")


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["analyze", *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: str) -> str:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    # transformers shows its progress before.
    *_, last = err.splitlines()
    assert last.startswith("error: ") and err.count("error: ") == 1
    return last


def test_the_command_writes_a_report(folder: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "text.txt", tmp_path / "a" / "report"
    file.write_text(TEXT)
    options = ("--file", str(file), "--policies", "snapkv, ecokv", "--budget", "40", "--model", str(folder))
    code, printed, _ = call(*options, "--out", str(out))
    assert code == 0
    assert f"{len(TEXT)} tokens, 3 layers" in printed and str(out / "report.html") in printed
    assert re.search(r"snapkv +│ +40\.0 ", printed) and "overlap with ecokv" in printed
    assert sorted(path.name for path in out.iterdir()) == ["analysis.json", "report.html"]
    data = json.loads((out / "analysis.json").read_text())
    assert "".join(data["tokens"]) == TEXT
    assert [one["policy"] for one in data["kept"]] == ["snapkv", "ecokv"]
    assert Reader((out / "report.html").read_text()).texts == [TEXT] * 2
    # Again, over what is there; and as data.
    code, printed, _ = call(*options, "--out", str(out), "--json")
    assert code == 0
    assert json.loads(printed) == data


def test_a_full_disk_leaves_the_report_of_before(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    names = ("analysis.json", "report.html")
    for name in names:
        (tmp_path / name).write_text("before")
    monkeypatch.setattr("kvpolicy.files.os.fsync", full)
    error = refused("--prompt", TEXT, "--budget", "40", "--model", str(folder), "--out", str(tmp_path))
    assert error.endswith("No space left on device")
    assert [(tmp_path / name).read_text() for name in names] == ["before", "before"]


def test_a_question_comes_behind_the_text(folder: Path) -> None:
    _, printed, _ = call("--prompt", TEXT, "--question", "Why?", "--model", str(folder), "--budget", "40", "--json")
    assert "".join(json.loads(printed)["tokens"]) == f"{TEXT.rstrip()}\n\nWhy?"


def test_without_a_folder_nothing_is_drawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_matplotlib(monkeypatch)
    code, printed, _ = call("--prompt", TEXT, "--model", str(folder), "--budget", "40")
    assert code == 0
    assert "rank correlation of importance and diversity" in printed


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))


def test_wrong_options_are_one_message_each(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ("--model", str(folder))
    assert "expected exactly one of --prompt and --file, got none" in refused()
    assert "cannot read" in refused("--file", str(tmp_path / "nowhere.txt"))
    assert "expected text in --prompt" in refused("--prompt", " ")
    assert "--policies: expected names" in refused("--prompt", TEXT, "--policies", ",")
    assert "snapkw" in refused("--prompt", TEXT, "--policies", "snapkw")
    assert "--budget: policy 'snapkv': budget.tokens" in refused("--prompt", TEXT, "--budget", "3")
    assert "'snapkv' more than once" in refused("--prompt", TEXT, "--policies", "snapkv,snapkv", *model)
    assert "a prompt of 20 tokens or more, got 5" in refused("--prompt", "short", *model)
    (tmp_path / "file").write_text("")
    assert "--out: expected a folder" in refused("--prompt", TEXT, "--out", str(tmp_path / "file"))
    assert "--out: expected a folder" in refused("--prompt", TEXT, "--out", str(tmp_path / "file" / "below"))
    without_matplotlib(monkeypatch)
    assert "pip install 'kvpolicy[eval]'" in refused("--prompt", TEXT, "--out", str(tmp_path))


def test_words_that_the_model_does_not_know_are_refused() -> None:
    words = "The quick brown fox jumps over the lazy dog and runs away from here, as many a fox does"
    says = "--model: expected one that knows the words of the text, got one to which 17 of 20 are unknown: choose"
    assert says in refused("--prompt", words, "--policies", "snapkv-w8", "--model", "tiny-llava")


def test_a_policy_that_cannot_run_on_the_model_is_named(folder: Path, tmp_path: Path) -> None:
    where = tmp_path / "gpt2"
    tiny("gpt2").save_pretrained(where)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, where)
    error = refused("--prompt", TEXT, "--policies", "snapkv,ecokv-pre-rope", "--budget", "40", "--model", str(where))
    assert "policy 'ecokv-pre-rope' reads keys before RoPE" in error


@needs_chromium
def test_a_browser_shows_the_report_on_a_phone_too(found: Analysis, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    report.write_text(page(found))
    for width in (400, 1100):
        shown = show(report, width)
        assert (shown.overflow, shown.fetched, shown.complaints) == (0, [], [])
        assert shown.rows == [1 + 4]
        # Letters of 10 points in pictures of 10 inches can be read.
        assert len(shown.images) == 6 and min(shown.images) >= 700


@pytest.mark.model
@pytest.mark.slow
@needs_chromium
def test_a_browser_shows_the_report_of_a_real_model(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    from PIL import Image

    model, tokenizer = smollm2
    text = topics()["for"]
    inputs: Any = tokenizer(text, return_tensors="pt")
    tokens = pieces(tokenizer, inputs["input_ids"][0].tolist())
    assert "".join(tokens) == text
    chosen = [kvpolicy.load(name, budget=64) for name in ("snapkv", "ecokv-snapkv", "ecokv-ada-kv")]
    found = analyze(model, inputs, chosen, tokens=tokens)
    # Keys before RoPE are more alike than after it, and values are hardly alike.
    after, before, values = (sum(map(sum, one.cosine)) / 90 for one in found.likeness)
    assert before > after > values

    report = tmp_path / "report.html"
    report.write_text(page(found))
    with Image.open(screenshot(report, (1100, 3600))) as taken:
        assert taken.size == (1100, 3600)
        pixels = taken.convert("RGB")
    # In each screenful something is drawn, and in colour: text, then pictures.
    for top in range(0, 3600, 900):
        part = pixels.crop((0, top, 1100, top + 900)).getcolors(maxcolors=2**24)
        assert part is not None and len(part) > 100
        assert any(blue > red + 60 for _, (red, _, blue) in part)
