"""Tiny vision-language models with pictures, and what an evicted run of them has to equal."""

from kvpolicy.testing.vision.families import FAMILIES, Prompt, prompt, tiny_model
from kvpolicy.testing.vision.replay import Replay, Turns, converse

__all__ = ["FAMILIES", "Prompt", "Replay", "Turns", "converse", "prompt", "tiny_model"]
