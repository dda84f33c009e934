"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvpolicy.files import whole


def test_after_an_error_what_was_there_still_is(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("before")
    with pytest.raises(OSError, match="full"), whole(file) as partial:
        partial.write_text("half of")
        raise OSError("the disk is full")
    assert file.read_text() == "before"
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    for text in ("first", "second"):
        with whole(link) as partial:
            partial.write_text(text)
        assert link.is_symlink() and file.read_text() == text


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with whole(pipe) as partial:
        partial.write_text("all of it")
    reader.join(timeout=30)
    assert read == ["all of it"] and pipe.is_fifo()
    with pytest.raises(IsADirectoryError), whole(tmp_path) as partial:
        partial.write_text("")
