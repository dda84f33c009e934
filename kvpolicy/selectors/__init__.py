"""Selectors: which slots, given how many."""
