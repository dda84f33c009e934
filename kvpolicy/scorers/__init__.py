"""Scorers: one file a method."""
