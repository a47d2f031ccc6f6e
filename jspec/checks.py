"""What is refused alike wherever it comes up."""

from __future__ import annotations

import operator


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
