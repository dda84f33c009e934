"""Combiners: one file a method."""
