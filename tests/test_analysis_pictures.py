"""`kvpolicy analyze --image`: pictures from files, prompts with pictures, and pictures as the model saw them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoProcessor, CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.qwen2_vl import Qwen2VLImageProcessor
from typer.testing import CliRunner

from kvpolicy.analysis.analyze import AnalysisError
from kvpolicy.analysis.prompts import ask, read_image
from kvpolicy.cli import app
from kvpolicy.testing.models import tiny
from kvpolicy.testing.vision import tiny_model

pytest.importorskip("matplotlib")

from PIL import Image

from kvpolicy.analysis.images import as_seen

CHAT = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}#"
)


def save(folder: Path, *, chat: bool = False, strategy: str = "default") -> Path:
    """Make the folder of a tiny LLaVA: pictures of 32 x 32, 16 tokens each, and a token for each letter."""
    model = tiny_model("llava")
    vocabulary = {chr(code): code for code in range(10, 127)} | {"<image>": model.config.image_token_id}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="~"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<image>"])
    LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="~"),
        patch_size=8,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=1,
        chat_template=CHAT if chat else None,
    ).save_pretrained(folder)
    model.config.vision_feature_select_strategy = strategy
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("chatting"), chat=True)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


# Files


def test_a_picture_is_read_upright_and_in_colour(tmp_path: Path) -> None:
    image = noise(8, 4)
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned by a quarter
    image.save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(np.asarray(read_image(tmp_path / "a.png")), np.rot90(np.asarray(image), -1))
    image.convert("P").save(tmp_path / "a.gif")
    assert read_image(tmp_path / "a.gif").mode == "RGB"


def test_what_is_no_picture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, cut, text = (tmp_path / name for name in ("good.png", "cut.png", "text.png"))
    noise(64, 64).save(good)
    cut.write_bytes(good.read_bytes()[:2000])
    text.write_text("no picture")
    for path, why in (
        (tmp_path / "none.png", "No such file"),
        (tmp_path, "Is a directory"),
        (text, "none that Pillow can read"),
        (cut, "none that Pillow can read"),
    ):
        with pytest.raises(AnalysisError, match=f"image '{path}': expected the file of a picture.*{why}"):
            read_image(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(AnalysisError, match="none that Pillow can read"):
        read_image(good)


def test_a_picture_of_16_bits_keeps_its_shades(tmp_path: Path) -> None:
    shades = (np.arange(2400).reshape(40, 60) * 27).astype("uint16")
    Image.fromarray(shades).save(tmp_path / "deep.png")
    assert np.array_equal(np.asarray(read_image(tmp_path / "deep.png"))[..., 0], shades // 256)
    Image.fromarray(shades.astype("int32")).save(tmp_path / "any.tiff")
    with pytest.raises(AnalysisError, match="expected 8 or 16 bits a number, got 'I'"):
        read_image(tmp_path / "any.tiff")


# Prompts


def read(processor: Any, inputs: Any) -> str:
    return processor.tokenizer.decode(inputs["input_ids"][0])


def test_pictures_stand_where_their_placeholders_are(folder: Path) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    images = [noise(32, 32, seed) for seed in (1, 2)]
    inputs = ask(processor, "<image>one, two<image>", images)
    assert read(processor, inputs) == "<image>" * 16 + "one, two" + "<image>" * 16
    assert np.allclose(as_seen(processor, inputs, images)[1], np.asarray(images[1]) / 255, atol=1e-6)


def test_a_template_puts_pictures_first_or_where_their_placeholders_are(chatting: Path) -> None:
    processor = AutoProcessor.from_pretrained(chatting)
    images = [noise(32, 32, seed) for seed in (1, 2)]
    first, within = (ask(processor, text, images) for text in ("what?", "this<image> and <image>that"))
    assert read(processor, first) == "<image>" * 32 + "what?#"
    assert read(processor, within) == "this" + "<image>" * 16 + " and " + "<image>" * 16 + "that#"
    for inputs in (first, within):
        for image, seen in zip(images, as_seen(processor, inputs, images), strict=True):
            assert np.allclose(seen, np.asarray(image) / 255, atol=1e-6)


def test_pictures_and_placeholders_are_as_many(folder: Path, chatting: Path) -> None:
    plain, chat = map(AutoProcessor.from_pretrained, (folder, chatting))
    with pytest.raises(AnalysisError, match="expected 1 x <image>, one for each image, got 0"):
        ask(plain, "what?", [noise(32, 32)])
    with pytest.raises(AnalysisError, match="expected 1 x <image>, one for each image, or none at all, got 2"):
        ask(chat, "<image>what?<image>", [noise(32, 32)])


# As the model saw them


def test_a_picture_is_shown_cropped_as_llava_crops_it(folder: Path) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    image = noise(64, 32)
    (seen,) = as_seen(processor, ask(processor, "<image>", [image]), [image])
    assert seen.shape == (32, 32, 3)
    assert np.allclose(seen, np.asarray(image)[:, 16:48] / 255, atol=1e-6)


def test_a_picture_is_shown_as_qwen_cuts_it_into_tokens() -> None:
    made = Qwen2VLImageProcessor(patch_size=8, merge_size=2, temporal_patch_size=2, min_pixels=256, max_pixels=4096)
    image = noise(75, 40)
    inputs = made(images=[image], return_tensors="pt")
    (seen,) = as_seen(type("", (), {"image_processor": made}), inputs, [image])
    _, rows, columns = (int(size) for size in inputs["image_grid_thw"][0])
    assert seen.size == (8 * columns, 8 * rows)
    # The four patches of a token stand together; its colour is the mean of the part of the picture where it is drawn.
    patches = inputs["pixel_values"].reshape(rows // 2 * columns // 2, 4, 3, -1).mean((1, 3))
    colours = patches * torch.tensor(made.image_std) + torch.tensor(made.image_mean)
    parts = np.asarray(seen).reshape(rows // 2, 16, columns // 2, 16, 3).mean((1, 3)).reshape(-1, 3) / 255
    assert np.allclose(colours, parts, atol=1e-5)


# The command


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["analyze", "--budget", "40", *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_report_shows_what_is_kept_on_the_pictures(folder: Path, tmp_path: Path, dtype: str) -> None:
    paths = [str(tmp_path / name) for name in ("a.png", "b.jpg")]
    for seed, path in enumerate(paths):
        noise(48, 32, seed).save(path)
    images = [option for path in paths for option in ("--image", path)]
    options = (*images, "--prompt", "one <image>two <image>three", "--model", str(folder), "--dtype", dtype)
    code, printed, _ = call(*options, "--out", str(tmp_path))
    assert code == 0
    assert "not drawn on the images" not in printed
    report = (tmp_path / "report.html").read_text()
    assert "45 tokens (13 text, 32 image)" in report
    assert "What is kept of image 2" in report and "What is kept of image 3" not in report
    assert report.count("▪") == 2 * 32
    data = json.loads((tmp_path / "analysis.json").read_text())
    assert "".join(data["tokens"]).replace("<image>", "") == "one two three"
    assert data["modality"][4:20] == ["image"] * 16


def test_a_layout_that_is_not_known_is_a_note(tmp_path: Path) -> None:
    model = save(tmp_path / "model", strategy="full")  # a token of the whole picture before those of its patches
    noise(32, 32).save(tmp_path / "a.png")
    options = ("--image", str(tmp_path / "a.png"), "--prompt", "<image>what is it?", "--model", str(model))
    code, printed, _ = call(*options, "--out", str(tmp_path))
    assert code == 0
    assert "note: what is kept is not drawn on the images: inputs: expected 16 tokens for pictures" in printed
    report = (tmp_path / "report.html").read_text()
    assert "not drawn on the images" in report and "What is kept of image" not in report


def test_wrong_pictures_are_one_message_each(folder: Path, tmp_path: Path) -> None:
    noise(32, 32).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("")
    text_only = tmp_path / "text"
    tiny().save_pretrained(text_only)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, text_only)
    for path, model, message in (
        ("a.txt", folder, "expected the file of a picture"),
        ("a.png", folder, "expected 1 x <image>, one for each image, got 0"),
        ("a.png", text_only, f"model '{text_only}': expected a vision-language model"),
    ):
        code, out, err = call("--image", str(tmp_path / path), "--prompt", "what is it?", "--model", str(model))
        assert (code, out) == (2, "")
        *_, last = (line for line in err.splitlines() if line.startswith("error: "))
        assert message in last and err.count("error: ") == 1
