"""Does what docs/first-plugin.md says, step by step, in a fresh environment: ``python tests/stranger.py``.

It takes nothing but the page: its bash blocks are run and its edits are made, in a copy of the repository. It fails
where a step fails, and where all of them together take 20 minutes or more.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "first-plugin.md"
BLOCK = re.compile(r"(?:^<!-- replaces: ([^\n]*?): ([^\n]*) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT = 20 * 60


def main() -> None:
    """Run the page; print the seconds of each step."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "kvpolicy"
        copy(place)
        began = time.monotonic()
        printed = ""
        for file, old, language, text in BLOCK.findall(PAGE.read_text()):
            if language == "bash":
                printed = commands(text, place)
            elif file:
                edit(place / file, old, text.strip())
        took = time.monotonic() - began
    if "policy largest-key-example" not in printed:
        sys.exit("the last step printed no report of the plugin's policy")
    print(f"all of it: {took:.0f} s, of {LIMIT} s")
    if took >= LIMIT:
        sys.exit("it took too long")


def copy(place: Path) -> None:
    """Copy the files of the repository, those of git and new ones, as a clone would have them."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)


def commands(text: str, place: Path) -> str:
    """Run commands in bash, in the page's environment once there is one; return what they print."""
    active = place / "try-kvpolicy" / "bin" / "activate"
    clean = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    printed = ""
    for line in text.strip().splitlines():
        began = time.monotonic()
        # Each line in a shell of its own: what an earlier one activated, it activates again.
        script = "set -eo pipefail\n" + (f"source '{active}'\n" if active.exists() else "") + line
        ended = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, check=False, cwd=place, env=clean
        )
        print(f"{time.monotonic() - began:6.1f} s  {line}", flush=True)
        if ended.returncode:
            sys.exit(f"{ended.stdout}{ended.stderr}\nended with exit code {ended.returncode}")
        printed += ended.stdout
    return printed


def edit(file: Path, old: str, new: str) -> None:
    """Put a line in the place of another."""
    text = file.read_text()
    if text.count(old) != 1:
        sys.exit(f"{file.name} has {text.count(old)} times the line that the page replaces: {old}")
    file.write_text(text.replace(old, new))
    print(f"          {file.name}: {new}")


if __name__ == "__main__":
    main()
