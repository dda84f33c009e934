"""``python -m kvpolicy.cli``."""

from kvpolicy.cli import app

app()
