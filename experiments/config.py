"""What an experiment is: a YAML file, checked before anything runs. An unknown key is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml

from jspec import text

DRAFTERS = ("none", "model", *text.DRAFTERS)


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Prompts(_Strict):
    """Which prompts, from a JSONL file whose rows have ``turns`` (the first is used) or ``prompt``."""

    file: str  # absolute, or looked up in --data DIR, $JSPEC_DATA and the prompts that come with the project
    ids: tuple[int | str, ...] | None = None  # by ``question_id`` or ``id``, in this order; None: every row
    chat: bool = True  # wrap each in the model's chat template


class Row(_Strict):
    """One line of the table."""

    name: str
    drafter: Literal[DRAFTERS]  # type: ignore[valid-type]
    arguments: dict[str, Any] = {}  # of the factory in jspec.drafters
    verify: str | None = None  # a rule of jspec.verify; None: the best lossless one for the draft
    widths: tuple[Annotated[int, pydantic.Field(ge=1)], ...] | None = None  # None: the engine's choice


class Table(_Strict):
    """The speed table: every row on every prompt, each repeat in turn with plain decoding."""

    target: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    prompts: Prompts
    max_new_tokens: Annotated[int, pydantic.Field(ge=1)] = 128
    temperatures: tuple[Annotated[float, pydantic.Field(ge=0)], ...] = (0.0,)
    seed: int = 0
    repeats: Annotated[int, pydantic.Field(ge=1)] = 3
    curve: tuple[Annotated[int, pydantic.Field(ge=1)], ...] = (1, 2, 4, 5, 8, 16, 24)  # widths n of t(n)
    drafters: Annotated[tuple[Row, ...], pydantic.Field(min_length=1)]
    output: str | None = None  # folder; None: runs/<name of the config file>

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Table:
        names = [row.name for row in self.drafters]
        if len(set(names)) != len(names):
            raise ValueError("drafters: two rows have the same name")
        for row in self.drafters:
            if row.drafter in ("none", "auto") and row.arguments:
                raise ValueError(f"drafters: {row.name!r} takes no arguments, got {sorted(row.arguments)}")
        if [row.drafter for row in self.drafters].count("none") > 1:
            raise ValueError("drafters: more than one row with drafter 'none'")
        if not self.temperatures:
            raise ValueError("temperatures: expected at least one")
        return self


def load(path: str | Path) -> Table:
    """Read and check a configuration.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not YAML, or not a `Table`; one line that names the key.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"config: no such file: {path}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected keys and values, got {type(content).__name__}")
    try:
        return Table.model_validate(content)
    except pydantic.ValidationError as error:
        raise ValueError(f"{path}: {_one_line(error)}") from None


def _one_line(error: pydantic.ValidationError) -> str:
    messages = []
    for detail in error.errors():
        key = ".".join(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            message = "unknown key"
        elif "input" in detail and not isinstance(detail["input"], dict | list):
            message += f", got {detail['input']!r}"
        messages.append(f"{key}: {message}" if key else message)
    return "; ".join(messages)
