"""What an experiment with draft networks or a speed table is: a YAML file, checked before anything runs. An
unknown key is an error."""

from __future__ import annotations

import copy
import re
from typing import Annotated, Any, Literal

import pydantic

from jspec import text
from training import config as configs
from training import drafter
from training.config import Strict

DRAFTERS = ("none", "model", "trained", *text.DRAFTERS)


class Prompts(Strict):
    """Which prompts, from a JSONL file whose rows have ``turns`` (the first is used) or ``prompt``."""

    file: str  # absolute, or looked up in --data DIR, $JSPEC_DATA and the prompts that come with the project
    ids: tuple[int | str, ...] | None = None  # by ``question_id`` or ``id``, in this order; None: every row
    chat: bool = True  # wrap each in the model's chat template


class Row(Strict):
    """One line of the table."""

    name: str
    drafter: Literal[DRAFTERS]  # type: ignore[valid-type]
    arguments: dict[str, Any] = pydantic.Field(default={})  # of the factory in jspec.drafters
    verify: str | None = None  # a rule of jspec.verify; None: the best lossless one for the draft
    widths: tuple[Annotated[int, pydantic.Field(ge=1)], ...] | None = None  # None: the engine's choice


class Table(Strict):
    """The speed table: every row on every prompt, each repeat in turn with plain decoding."""

    kind: Literal["speed"] = "speed"
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


class Drafters(Strict):
    """``base``: what all methods share, keys of `training.drafter.Drafter`; ``methods``: by the name of the
    run's folder, what each lays over them. Rows of ``table`` with ``drafter: trained`` name one by its
    argument ``folder``."""

    kind: Literal["drafters"]
    base: dict[str, Any]
    methods: Annotated[dict[str, dict[str, Any]], pydantic.Field(min_length=1)]
    table: Table

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Drafters:
        for name in self.methods:
            if not re.fullmatch(r"\w[\w.-]*", name) or name == "text":  # a folder beside that of the text
                raise ValueError(f"methods: expected names of folders, and not text, got {name!r}")
        for row in self.table.drafters:
            if row.drafter == "trained" and not isinstance(row.arguments.get("folder"), str):
                raise ValueError(f"table.drafters: {row.name!r}: expected a folder, got {row.arguments}")
        recipes = self.recipes()
        if any(found.target != self.table.target for found in recipes.values()):
            raise ValueError(f"table.target: expected that of all methods, got {self.table.target}")
        return self

    def recipes(self) -> dict[str, drafter.Drafter]:
        """The whole configuration of each method."""
        return {
            name: configs.check(overlaid(self.base, values), drafter.Drafter, f"methods.{name}")
            for name, values in self.methods.items()
        }


def overlaid(values: Any, overlay: Any) -> Any:
    """``values`` with those of ``overlay`` in their place, key by key; lists are replaced whole.

    >>> overlaid({"a": {"b": 1, "c": 2}, "d": [1, 2]}, {"a": {"b": 3}, "d": [4]})
    {'a': {'b': 3, 'c': 2}, 'd': [4]}
    """
    if not (isinstance(values, dict) and isinstance(overlay, dict)):
        return copy.deepcopy(overlay)
    merged = dict(values)
    for key, value in overlay.items():
        merged[key] = overlaid(merged.get(key), value)
    return merged
