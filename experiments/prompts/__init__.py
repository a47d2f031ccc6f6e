"""Prompt files and how they are read."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Question(NamedTuple):
    """One prompt of a file; a conversation's first turn."""

    id: int | str
    category: str
    text: str


def find(name: str, data: str | Path | None = None) -> Path:
    """A prompt file: absolute, or in ``data``, $JSPEC_DATA or the project's own prompts, in this order.

    Raises:
        FileNotFoundError: naming every place that was looked at.
    """
    folders = [data, os.environ.get("JSPEC_DATA"), HERE]
    tried = [Path(folder) / name for folder in folders if folder]
    for path in tried:
        if path.is_file():
            return path
    places = ", ".join(map(str, dict.fromkeys(tried)))
    raise FileNotFoundError(
        f"prompts.file: no such file: {places}; name its folder with --data or $JSPEC_DATA"
    )


def read(path: Path, ids: Sequence[int | str] | None = None) -> list[Question]:
    """The questions of a JSONL file whose rows have ``turns`` (Spec-Bench) or ``prompt``.

    A row's id is its ``question_id`` or ``id``, else its line number from 1. With ``ids`` only those, in
    their order.

    Raises:
        ValueError: not JSON, a row without prompt, an id that occurs twice or that no row has.
    """
    questions: dict[int | str, Question] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row["turns"][0] if "turns" in row else row["prompt"]
            name = row.get("question_id", row.get("id", number))
        except (json.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError):
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with 'turns' or 'prompt'"
            ) from None
        if not isinstance(text, str) or not text:
            raise ValueError(f"{path}, line {number}: expected a prompt that is a string and not empty")
        if name in questions:
            raise ValueError(f"{path}, line {number}: the id {name!r} occurs twice")
        questions[name] = Question(name, str(row.get("category", "")), text)
    if ids is None:
        ids = list(questions)
    if missing := [name for name in ids if name not in questions]:
        raise ValueError(f"prompts.ids: {path} has no row {', '.join(map(repr, missing))}")
    if not ids:
        raise ValueError(f"prompts: no prompt in {path}")
    return [questions[name] for name in ids]
