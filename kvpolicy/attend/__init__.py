"""Attend: later tokens see what is kept, through the model's own attention function."""

from kvpolicy.attend.switch import restore, switch

__all__ = ["restore", "switch"]
