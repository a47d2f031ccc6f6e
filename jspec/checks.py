"""What is refused alike wherever it comes up."""

from __future__ import annotations

import numbers as abstract
import operator
from types import UnionType


def check(good: bool, name: str, expected: str, value: object) -> None:
    """Refuse an argument, unless it is good.

    >>> check(1 < 2, "depth", "at most 2", 1)
    """
    if not good:
        raise ValueError(f"{name}: expected {expected}, got {shown(value)}")


def at_least(least: int, /, **numbers: int | None) -> None:
    """Refuse what is no whole number of at least so much; None is left open.

    Raises:
      ValueError: the argument's name, what was expected and what came.

    >>> at_least(1, num_tokens=4, depth=None)
    >>> at_least(1, num_tokens=2.5)
    Traceback (most recent call last):
    ...
    ValueError: num_tokens: expected a whole number >= 1, got 2.5
    """
    for name, value in numbers.items():
        if value is None:
            continue
        try:
            found = operator.index(value)
        except TypeError:
            found = None
        if found is None or isinstance(value, bool) or found < least:
            raise ValueError(f"{name}: expected a whole number >= {least}, got {value!r}")


def between(least: float, most: float, /, **numbers: float) -> None:
    """Refuse what is no number from ``least`` to ``most``.

    Raises:
      ValueError: the argument's name, what was expected and what came.

    >>> between(0, 1, threshold=0.5)
    >>> between(0, 1, threshold=2)
    Traceback (most recent call last):
    ...
    ValueError: threshold: expected a number from 0 to 1, got 2
    """
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, abstract.Real) or not least <= value <= most:
            raise ValueError(f"{name}: expected a number from {least} to {most}, got {shown(value)}")


def instance(kind: type | UnionType, expected: str, /, **values: object) -> None:
    """Refuse what is not of a kind.

    Raises:
      ValueError: the argument's name, what was expected and what came.

    >>> instance(str, "a name", drafter="suffix")
    >>> instance(str, "a name", drafter=5)
    Traceback (most recent call last):
    ...
    ValueError: drafter: expected a name, got 5
    """
    for name, value in values.items():
        if not isinstance(value, kind):
            raise ValueError(f"{name}: expected {expected}, got {shown(value)}")


def shown(value: object) -> str:
    """A value for a message: short ones as they are, others by their type."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else type(value).__name__
