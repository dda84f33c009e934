"""Keys before RoPE: what a decoder's own rotary embedding did to the keys in its cache, undone."""

from kvpolicy.rotary.probe import find_rotations
from kvpolicy.rotary.record import RotaryRecord, RotaryRecorder
from kvpolicy.rotary.rotation import Rotation, unrotate

__all__ = ["RotaryRecord", "RotaryRecorder", "Rotation", "find_rotations", "unrotate"]
