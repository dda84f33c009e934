"""What the HTML pages share: one file each, with pictures inside, no script, nothing fetched."""

from __future__ import annotations

import base64
from html import escape

# Dark on white: so are the pictures. Where they do not fit, tables and pictures scroll by themselves.
_STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
p { max-width: 60rem; } h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; font-size: .93rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .55rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; margin: 1rem 0; } .scroll img { width: 100%; min-width: 44rem; max-width: 60rem; }
summary { cursor: pointer; font-weight: 600; padding: .3rem 0; }
@media (max-width: 40rem) { td:first-child { white-space: normal; min-width: 8rem; } }
"""


def document(title: str, body: str, style: str = "") -> str:
    """Return the text of a page.

    Args:
        title: of the page, as text.
        body: HTML.
        style: CSS besides that of all pages.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def picture(svg: bytes, alt: str) -> str:
    """Return an SVG picture as HTML, told in words by `alt`."""
    # As an image of its own, so that the names inside one picture do not meet those of another.
    data = base64.b64encode(svg).decode()
    return f'<div class="scroll"><img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}"></div>'
