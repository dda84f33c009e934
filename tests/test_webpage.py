"""The browser that pages are tested in sees what is wrong with one."""

from __future__ import annotations

from pathlib import Path

from browser import needs_chromium, show

from kvpolicy.webpage import document, picture

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="300"><rect width="900" height="300"/></svg>'


@needs_chromium
def test_the_browser_complains(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    body = (
        '<img src="data:image/svg+xml;base64,broken"><img src="http://example.org/a.png"><div style="width: 700px">wide'
        "</div><table><tr><td>1</td></tr></table><script>nonsense()</script>"
    )
    page.write_text(document("wrong", body))
    found = show(page, width=400)
    assert found.overflow > 200
    assert found.images == [0, 0]
    assert found.rows == [1]
    assert found.fetched == ["http://example.org/a.png"]
    assert any("nonsense is not defined" in line for line in found.complaints)


@needs_chromium
def test_a_picture_scrolls_where_it_does_not_fit(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(document("right & proper", picture(SVG, "a < b")))
    assert "<title>right &amp; proper</title>" in page.read_text() and 'alt="a &lt; b"' in page.read_text()
    narrow, wide = (show(page, width) for width in (400, 1100))
    assert (narrow.overflow, wide.overflow) == (0, 0)
    assert 700 <= narrow.images[0] < wide.images[0] <= 1100
    assert not narrow.complaints and not narrow.fetched
