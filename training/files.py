"""Caches of what takes long to make: folders that say what they hold, files that are whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from training import hosts


def described_folder(cache: Path, description: Mapping[str, Any], what: str) -> Path:
    """A folder in ``cache`` for what has this description (JSON), which is written into it; its name is a
    fingerprint, so that another description has another folder.

    Raises:
      OSError: it cannot be written; the message begins with ``what``.
    """
    text = json.dumps(description, indent=2, sort_keys=True) + "\n"
    folder = cache / hashlib.sha256(text.encode()).hexdigest()[:16]

    def make() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "settings.json").write_text(text, encoding="utf-8")
        except OSError as error:
            raise OSError(f"{what}: cannot write to {folder}: {error.strerror}") from error

    hosts.on_first(make)
    return folder


def write_whole(path: Path, write: Callable[[IO[bytes]], object], what: str) -> None:
    """Have ``write`` fill a file that gets its name when everything is on disk. Processes that write the same
    one at the same time do not meet.

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
