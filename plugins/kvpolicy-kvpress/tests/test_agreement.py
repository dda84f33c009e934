"""docs/agreement.json has every run of a policy against a press."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "docs" / "agreement.py"


def test_the_record_of_agreement_has_every_run() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
