"""The tiny LLaVA before it is trained: its config, its words and its processor, all of transformers' own classes."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from kvpolicy.eval.pictures.scene import COLORS, SHAPES, SIDE

PATCH = 8
PICTURES = 6
"""Pictures of a prompt, at most: there is no number above."""
PAD, START, END, UNKNOWN, IMAGE, ANSWER = SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<image>", "<answer>")
WORDS = ["picture", ":", "what", "color", "shape", "is", "the", "object", "in", "?", "which", "has", "a"]
VOCABULARY = [*SPECIAL, *WORDS, *(str(number) for number in range(1, PICTURES + 1)), *COLORS, *SHAPES]
TEMPLATE = (
    "<s>{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: a token a word, in whatever case."""
    backend = Tokenizer(WordLevel({word: at for at, word in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[IMAGE, ANSWER],
        chat_template=TEMPLATE,
    )


def model() -> LlavaForConditionalGeneration:
    """Return the model with random weights."""
    vision = CLIPVisionConfig(
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=96,
    )
    text = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=VOCABULARY.index(START),
        eos_token_id=VOCABULARY.index(END),
        pad_token_id=VOCABULARY.index(PAD),
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=VOCABULARY.index(IMAGE),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(SIDE // PATCH) ** 2,
    )
    made = LlavaForConditionalGeneration(config)
    made.generation_config = GenerationConfig(
        bos_token_id=text.bos_token_id, eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id
    )
    return made


def save(made: LlavaForConditionalGeneration, folder: Path) -> None:
    """Write model, tokenizer and processor into a folder, weights in float16."""
    made.half().save_pretrained(folder)
    _rename(folder / "model.safetensors")
    tokenizer().save_pretrained(folder)
    # Named by hand, as an older release does not know what a newer one writes.
    half = [0.5] * 3
    _write(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"height": SIDE, "width": SIDE},
            "do_center_crop": False,
            "image_mean": half,
            "image_std": half,
        },
    )
    _write(
        folder / "processor_config.json",
        {
            "processor_class": "LlavaProcessor",
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": IMAGE,
        },
    )


def _rename(path: Path) -> None:
    """Call the tower's weights what every release of transformers can read, and let everybody read them."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    weights = {name.replace(old, new) if new not in name else name: one for name, one in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
