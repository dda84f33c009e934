"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield where to write a file that is at `path` once the block has ended; after an error what was there still is.

    A link stays one. What is no file, like ``/dev/stdout``, is written to as it is.

    Raises:
        OSError: when the folder is not there or cannot be written to, `path` is a folder, or the disk is full.

    >>> from pathlib import Path
    >>> folder = Path(tempfile.mkdtemp())
    >>> with whole(folder / "a.txt") as partial:
    ...     _ = partial.write_text("all of it")
    >>> [(file.name, file.read_text()) for file in folder.iterdir()]
    [('a.txt', 'all of it')]
    """
    path = path.resolve()
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        yield path
        return
    # On the same disk, so that moving it into place copies nothing.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        partial = Path(folder) / path.name
        yield partial
        with partial.open("r+b") as file:
            os.fsync(file.fileno())
        partial.replace(path)
