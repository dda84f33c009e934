"""A page as a real browser shows it, without a network."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

# Asks the browser about a page in a frame, which is as wide as the screen of a phone, say.
_ASK = """<!doctype html><pre id="found"></pre>
<iframe id="frame" style="width: {width}px; height: 900px; border: 0" srcdoc="{page}"></iframe>
<script>
frame.onload = async () => {{
  const inside = frame.contentDocument, images = [...inside.images];
  await Promise.allSettled(images.map(image => image.decode()));
  found.textContent = JSON.stringify({{
    overflow: inside.documentElement.scrollWidth - inside.documentElement.clientWidth,
    images: images.map(image => image.naturalWidth && image.clientWidth),
    rows: [...inside.querySelectorAll("table")].map(table => table.rows.length),
    fetched: frame.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name),
  }});
}};
</script>"""


@dataclass(frozen=True)
class Shown:
    """What a browser says of a page.

    Args:
        overflow: how many pixels it is wider than its window.
        images: how wide each is drawn, 0 where it is broken.
        rows: of each table.
        fetched: addresses of what it asked a network for.
        complaints: what the browser's console says.
    """

    overflow: int
    images: list[int]
    rows: list[int]
    fetched: list[str]
    complaints: list[str]


def show(page: Path, width: int) -> Shown:
    """Return what a browser says of a page in a window of so many pixels."""
    asking = page.with_name(f"{page.stem}-{width}.html")
    text = html.escape(page.read_text(encoding="utf-8"))
    asking.write_text(_ASK.format(width=width, page=text), encoding="utf-8")
    said = _run(asking, "--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom")
    answer = said.stdout.partition('<pre id="found">')[2].partition("</pre>")[0]
    found = json.loads(html.unescape(answer))
    found["fetched"] = [name for name in found["fetched"] if not name.startswith("data:")]
    return Shown(**found, complaints=[line for line in said.stderr.splitlines() if ":CONSOLE" in line])


def screenshot(page: Path, size: tuple[int, int]) -> Path:
    """Return a picture of a page, so many pixels wide and high."""
    taken = page.with_suffix(".png")
    _run(page, "--hide-scrollbars", f"--window-size={size[0]},{size[1]}", f"--screenshot={taken}")
    return taken


def _run(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu"),
        *(f"--user-data-dir={page.parent / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"),
        *(*options, page.as_uri()),
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
