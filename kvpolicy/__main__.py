"""``python -m kvpolicy``."""

from kvpolicy.cli import app

app(prog_name="kvpolicy")
