"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_whole(path: Path, write: Callable[[IO[bytes]], object], what: str) -> None:
    """Have ``write`` fill a file that gets its name when everything is on disk.

    Raises:
      OSError: it cannot be written; the message begins with ``what``. No part of it stays.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"{what}: cannot write {path}: {error.strerror}") from error
