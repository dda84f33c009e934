"""Seeing what a policy does to a model, before it runs and after."""
