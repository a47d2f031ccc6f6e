"""What a training run is: pydantic models of the YAML files in configs/. An unknown key is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import yaml

Count = Annotated[int, pydantic.Field(ge=1)]
Fraction = Annotated[float, pydantic.Field(ge=0, le=1)]
Decay = Annotated[float, pydantic.Field(ge=0, lt=1)]  # of a running mean


class Strict(pydantic.BaseModel):
    """Base of all settings: unknown keys and numbers that are not finite are refused, and what was read is
    not assigned to. Settings without dicts among them are hashable."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Optimizer(Strict):
    """AdamW (arXiv 1711.05101) or Adafactor (arXiv 1804.04235), a schedule, and clipping by global norm.

    The learning rate rises linearly to its peak at step ``warmup_steps`` (counted from 1; no step is at rate
    0), and then stays, falls towards ``final_fraction`` of itself, which it would reach one step after the
    last ("linear", "cosine"), or falls as ``sqrt(warmup_steps / step)`` ("inverse_sqrt"). Weight decay, at
    the learning rate's pace with either optimizer, spares vectors (norms and biases).
    """

    name: Literal["adamw", "adafactor"] = "adamw"
    learning_rate: Annotated[float, pydantic.Field(gt=0)] = 1e-3
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt"] = "cosine"
    warmup_steps: Annotated[int, pydantic.Field(ge=0)] = 0
    final_fraction: Fraction = 0.0
    weight_decay: Annotated[float, pydantic.Field(ge=0)] = 0.0
    b1: Decay = 0.9  # AdamW's
    b2: Decay = 0.999
    clip_norm: Annotated[float, pydantic.Field(gt=0)] | None = 1.0


class Training(Strict):
    """The loop's settings: how long, how much at a time, in which precision, and how often to look.

    ``accumulate`` splits a batch into that many micro-batches, one after the other in memory.
    ``rematerialise`` keeps only the layers' inputs for the backward pass. ``best`` hands out the checkpoint
    with the lowest validation loss, the cross-entropy of labels whatever is trained, instead of the last one.
    """

    steps: Count
    accumulate: Count = 1
    seed: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 0
    optimizer: Optimizer = Optimizer()
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the forward; master weights are float32
    rematerialise: bool = False
    dropout: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.0
    log_every: Count = 10  # steps between two looks at the losses (every step's loss is written)
    evaluate_every: Count | None = None  # None: after the last step only
    checkpoint_every: Count = 500
    keep: Count = 2  # checkpoints
    best: bool = False

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Training:
        if self.best and self.evaluate_every is None:
            raise ValueError("best: expected evaluate_every with it, got None")
        if self.optimizer.warmup_steps > self.steps:
            warmup = self.optimizer.warmup_steps
            raise ValueError(f"optimizer.warmup_steps: expected at most {self.steps} (steps), got {warmup}")
        return self

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation follows ``step`` (counted from 1)."""
        return step == self.steps or (self.evaluate_every is not None and step % self.evaluate_every == 0)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows ``step``."""
        due = step % self.checkpoint_every == 0 or step == self.steps
        return due or (self.best and self.evaluates(step))


class Batching(Strict):
    """The rows of a batch, and the few shapes that batches have; see `training.data.Batches`."""

    batch_size: Count | None = None  # rows, or
    max_tokens: Count | None = None  # slots: short examples, more rows
    buckets: Count | tuple[tuple[Count, Count], ...] = 4  # how many, or their (source, target) widths
    multiple: Count = 8  # of chosen widths

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Batching:
        if (self.batch_size is None) == (self.max_tokens is None):
            both = (self.batch_size, self.max_tokens)
            raise ValueError(f"expected one of batch_size and max_tokens, got {both}")
        return self


Settings = TypeVar("Settings", bound=pydantic.BaseModel)


class _Loader(yaml.SafeLoader):
    """YAML without its rule that of two equal keys the last one counts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def read(path: str | Path) -> Any:
    """What a YAML file holds.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not YAML, or has a key twice.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"config: no such file: {path}")
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None


def load(path: str | Path, kind: type[Settings]) -> Settings:
    """Read a YAML file and check it.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not YAML, or not a ``kind``; one line that names the key.
    """
    return check(read(path), kind, str(path))


def check(content: Any, kind: type[Settings], name: str) -> Settings:
    """``content`` as a ``kind``, or one line that begins with ``name`` and says what is wrong.

    Raises:
      ValueError: that line.

    >>> check({"steps": 10, "accumulate": 2}, Training, "x.yaml").checkpoint_every
    500
    >>> check({"step": 10}, Training, "x.yaml")
    Traceback (most recent call last):
        ...
    ValueError: x.yaml: steps: Field required; step: unknown key
    """
    if not isinstance(content, dict):
        raise ValueError(f"{name}: expected keys and values, got {type(content).__name__}")
    try:
        return kind.model_validate(content)
    except pydantic.ValidationError as error:
        raise ValueError(f"{name}: {one_line(error)}") from None


def one_line(error: pydantic.ValidationError) -> str:
    """All that is wrong, key by key."""
    messages = []
    for detail in error.errors():
        key = ".".join(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            message = "unknown key"
        elif detail["type"] != "missing" and not isinstance(detail.get("input"), dict | list):
            message += f", got {detail['input']!r}"
        messages.append(f"{key}: {message}" if key else message)
    return "; ".join(messages)


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """The dotted keys at which two configurations (plain YAML values) differ.

    >>> differences({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 1, "c": 3}, "d": [1], "e": 0})
    ['a.c', 'e']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(name for name in new if name not in old)]
        found = [differences(old.get(name), new.get(name), f"{key}.{name}".strip(".")) for name in names]
        return [difference for part in found for difference in part]
    return [] if old == new else [key]
