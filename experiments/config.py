"""What an experiment with draft networks or a speed table is: a YAML file, checked before anything runs. An
unknown key is an error."""

from __future__ import annotations

import copy
import re
from typing import Annotated, Any, Literal, TypeVar

import pydantic

from jspec import text
from training import blockwise, drafter
from training import config as configs
from training.config import Count, Strict
from training.text import Source

DRAFTERS = ("none", "model", *text.DRAFTERS)


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
    """The speed table: every row on every prompt, each repeat in turn with plain decoding; one for each
    temperature and batch size (prompts decoded together)."""

    kind: Literal["speed"] = "speed"
    target: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    prompts: Prompts
    max_new_tokens: Annotated[int, pydantic.Field(ge=1)] = 128
    temperatures: tuple[Annotated[float, pydantic.Field(ge=0)], ...] = (0.0,)
    batch_sizes: Annotated[tuple[Count, ...], pydantic.Field(min_length=1)] = (1,)
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
            if row.drafter == "trained" and not isinstance(row.arguments.get("folder", ""), str):
                raise ValueError(f"table.drafters: {row.name!r}: expected a folder, got {row.arguments}")
        recipes = self.recipes()
        if any(found.target != self.table.target for found in recipes.values()):
            raise ValueError(f"table.target: expected that of all methods, got {self.table.target}")
        for name, found in recipes.items():
            if found.training.best:  # curves and tables are of the last step
                raise ValueError(f"methods.{name}: training.best: expected false in a comparison, got true")
        return self

    def recipes(self) -> dict[str, drafter.Drafter]:
        """The whole configuration of each method."""
        return {
            name: configs.check(overlaid(self.base, values), drafter.Drafter, f"methods.{name}")
            for name, values in self.methods.items()
        }


class Blockwise(Strict):
    """Stern's sweep over the block size k on the target of a study, and its drafters compared.

    ``frozen`` (heads beside the target as it is) and ``masked`` (a block drafter as SpecDec's) hold keys of
    `training.drafter.Drafter`, ``joint`` (heads and base together) those of `training.blockwise.Blockwise`;
    what follows from the study and from other settings is none of them.
    """

    kind: Literal["blockwise"]
    study: str  # the study that has the target, a file beside this one
    drafter: str  # a row of that study to compare with: "small, distilled"
    block_sizes: Annotated[tuple[Annotated[int, pydantic.Field(ge=2)], ...], pydantic.Field(min_length=1)] = (
        2,
        4,
        6,
        8,
    )
    mlp_width: Count | None = None  # units of the heads' hidden layer for each head; None: 4 E
    frozen: dict[str, Any]
    joint: dict[str, Any]
    masked: dict[str, Any]
    draft_length: Count = 5  # of the masked drafter
    sentences: Count = 40  # of the test set, for speed
    repeats: Count = 3

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Blockwise:
        if len(set(self.block_sizes)) != len(self.block_sizes):
            raise ValueError(f"block_sizes: expected different numbers, got {self.block_sizes}")
        source = Source(text="target")
        for k in self.block_sizes:
            self.heads(k, source)
            self.joined(k, source)
        self.block(source)
        return self

    def heads(self, k: int, source: Source) -> drafter.Drafter:
        """k - 1 heads beside a frozen target."""
        network = {"num_heads": k - 1, "mlp_width": self.mlp_width}
        made = {"kind": "blockwise", "network": network, "num_tokens": k - 1, "loss": HEADS_LOSS}
        return _completed("frozen", self.frozen, made, source, drafter.Drafter)

    def joined(self, k: int, source: Source) -> blockwise.Blockwise:
        """k heads that learn with their base."""
        made = {"block_size": k, "mlp_width": self.mlp_width}
        return _completed("joint", self.joint, made, source, blockwise.Blockwise)

    def block(self, source: Source) -> drafter.Drafter:
        """SpecDec's drafter (arXiv 2203.16487): a bidirectional block of masks, each with its own vector."""
        network = {"num_tokens": self.draft_length, "causal": False, "shared_mask": False}
        made = {"kind": "masked", "network": network, "num_tokens": self.draft_length, "loss": HEADS_LOSS}
        made |= {"head": "own", "features": None}
        return _completed("masked", self.masked, made, source, drafter.Drafter)


#: The mean of the cross-entropies of all tokens ahead.
HEADS_LOSS = {"terms": [{"loss": "cross_entropy"}], "weighting": {"kind": "uniform"}}
OF_THE_STUDY = ("target", "sources", "data", "limits", "max_new_tokens", "generation_batch")
Settings = TypeVar("Settings", bound=pydantic.BaseModel)


def _completed(
    name: str, given: dict[str, Any], made: dict[str, Any], source: Source, kind: type[Settings]
) -> Settings:
    """The settings of a recipe, ``made`` those that are not given."""
    if taken := sorted(given.keys() & {*made, *OF_THE_STUDY}):
        raise ValueError(f"{name}.{taken[0]}: expected none, it follows from the study or other settings")
    return configs.check({**given, **made, "sources": [source]}, kind, name)


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
