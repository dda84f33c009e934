"""Frozen values handed between stages. Every stage imports these and torch, and no other stage."""

from kvpolicy.types.merged import Merged
from kvpolicy.types.needs import ALL, MODALITIES, Call, Modality, Needs, Repetition
from kvpolicy.types.selection import Plan, Selection
from kvpolicy.types.view import LayerView

__all__ = ["ALL", "MODALITIES", "Call", "LayerView", "Merged", "Modality", "Needs", "Plan", "Repetition", "Selection"]
