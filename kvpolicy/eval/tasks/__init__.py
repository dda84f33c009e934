"""Tasks: what policies are compared on, made on the fly from any text."""
