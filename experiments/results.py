"""What a study measures, as plain tuples, and how they become JSON and come back."""

from __future__ import annotations

import typing
from typing import Any, NamedTuple

import pydantic

from experiments import paper
from experiments.report import Flip, Line
from jspec.measure import CostCurve

OFF = 0.15  # a speed-up that is further from what was expected is explained below the table


class Quality(NamedTuple):
    """The whole test set, decoded in batches."""

    score: float
    metric: str
    signature: str
    sentences: int
    tokens: int
    flips: tuple[Flip, ...] | None = None  # from plain decoding; None: sampled, or plain itself


class Row(NamedTuple):
    """A line of the table: a drafter at a temperature and a batch size.

    ``alpha`` and ``c`` are measured apart from the decoding, ``line`` is what the decoding showed. ``gamma``
    was chosen by ``choice_alpha``, of the validation set; None: it was given.
    """

    task: str
    drafter: str
    paper: str | None
    temperature: float
    batch_size: int
    gamma: int
    choice_alpha: float | None
    alpha: float
    c: float
    theory: float  # Theorem 3.8
    line: Line
    plain: Line  # plain decoding, in the same run
    quality: Quality | None
    plain_quality: Quality
    reference: paper.Row | None

    @property
    def off(self) -> float:
        """How far the measured speed-up of decoding is from the expected one; 0.1: 10 % above."""
        return self.line.speedup.median / (self.line.predicted or 1) - 1

    @property
    def overall_off(self) -> float:
        """The same of whole inference."""
        return self.line.overall_speedup.median / (self.line.predicted_overall or 1) - 1


class LenientRow(NamedTuple):
    """A line of the lenience table, at temperature 1; lossy where ``factor`` < 1."""

    factor: float
    alpha: float
    gamma: int
    line: Line
    quality: Quality | None
    paper_alpha: float | None
    paper_speedup: float | None


class SweepPoint(NamedTuple):
    """One draft length of one drafter."""

    temperature: float
    gamma: int
    c: float
    line: Line


class Curve(NamedTuple):
    """t(n) behind ``fill`` cached tokens, as one stage measured it."""

    cost: CostCurve
    fill: int


class Part(NamedTuple):
    """A part of the data: pairs of texts."""

    pairs: int
    skipped: int  # beside them: pairs with an empty side
    cut: int  # among them: pairs whose source was longer than allowed


class Results(NamedTuple):
    """Everything that a study measures."""

    parts: dict[str, Part]  # train, validation, test
    rows: list[Row]
    alphas: dict[str, dict[float, float]]  # drafter -> temperature -> alpha
    alpha_tokens: dict[float, int]  # temperature -> positions
    curves: dict[str, Curve]  # by stage: each is the one behind what that stage expects
    lenient: list[LenientRow]
    lenient_alphas: dict[str, list[float]]
    sweep: list[SweepPoint]
    sweep_drafter: str
    rounds: dict[str, Any]


def fields(kind: Any) -> Any:
    """The names of a tuple's fields and of those within: what a kept value must have to be read.

    >>> from experiments.report import Flip
    >>> fields(dict[str, list[Flip]])
    [[{'prompt': [], 'position': [], 'gap': []}]]
    """
    if hasattr(kind, "_fields"):
        return {name: fields(part) for name, part in typing.get_type_hints(kind).items()}
    return [found for part in typing.get_args(kind) if (found := fields(part))]


def unpacked(kind: Any, value: Any) -> Any:
    """What `named` made of a ``kind``, as it was.

    >>> from experiments.report import Speed
    >>> unpacked(Speed, named(Speed(1.0, 0.5, 1.5)))
    Speed(median=1.0, low=0.5, high=1.5)
    """
    return pydantic.TypeAdapter(kind).validate_python(value)


def named(value: Any) -> Any:
    """Tuples with field names as dicts, for files: they are read by name, by `unpacked` and by others.

    >>> from experiments.report import Speed
    >>> named([Speed(1.0, 0.5, 1.5)])
    [{'median': 1.0, 'low': 0.5, 'high': 1.5}]
    """
    if hasattr(value, "_asdict"):
        return {key: named(part) for key, part in value._asdict().items()}
    if isinstance(value, dict):
        return {str(key): named(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [named(part) for part in value]
    return value
