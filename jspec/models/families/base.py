"""What a model family is made of: a mapping of its config, both ways, and one table of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jspec.models.decoder import DecoderConfig

Raw = Mapping[str, Any]  # a config.json

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class Transform(NamedTuple):
    """What makes a parameter of a checkpoint's tensor, and what undoes it.

    Several parameters may be parts of one tensor, cut along the last axis of the loaded array: ``start`` says
    where a part begins, and ``save`` takes all of them, joined.
    """

    load: Callable[[np.ndarray], np.ndarray]
    save: Callable[[np.ndarray], np.ndarray]
    start: int = 0


Weights = Iterator[tuple[str, str, Transform]]  # path in params, name in the checkpoint, what to do to it


class Family(NamedTuple):
    """How the checkpoints of one architecture are read, and written if ``raw`` is known."""

    config: Callable[[Raw], Any]
    weights: Callable[[Any], Weights]  # of the config; without head and head bias
    model_type: str
    prefix: str = ""  # of every name but the head's; checkpoints of the bare model lack it
    raw: Callable[[Any], dict[str, Any]] | None = None  # the entries that `config` reads; it may lose some
    makes: type = DecoderConfig  # the configs that `config` makes and `raw` takes
    head: str = "lm_head.weight"
    head_bias: str | None = None
    copies: tuple[str, ...] = ()  # other names under which the embedding may be stored
    ignored: tuple[str, ...] = ()  # endings of names of buffers that carry nothing


# --- configs ----------------------------------------------------------------------------------------


def activation(name: str) -> str:
    """Our name of an activation."""
    if name not in ACTIVATION_NAMES:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATION_NAMES)}, got {name!r}")
    return ACTIVATION_NAMES[name]


def activation_name(ours: str) -> str:
    """A name that `activation` reads.

    >>> activation_name("gelu_tanh")
    'gelu_new'
    """
    return next(name for name, value in ACTIVATION_NAMES.items() if value == ours)


def refuse(raw: Raw, **allowed: Any) -> None:
    """An error for a setting that the family could have but that is not implemented."""
    for key, value in allowed.items():
        if raw.get(key, value) not in (value, None):
            raise ValueError(f"config: {key} = {raw[key]!r} is not supported (only {value!r})")


# --- transforms -------------------------------------------------------------------------------------


def _same(w: np.ndarray) -> np.ndarray:
    return w


SAME = Transform(_same, _same)
TRANSPOSE = Transform(np.transpose, np.transpose)
ROW = Transform(lambda w: w[0] if w.ndim and len(w) == 1 else w, lambda w: w[None])  # [1, n] <-> [n]


def cut(start: int, stop: int, total: int, whole: Transform = SAME) -> Transform:
    """Part of a fused weight, taken along the last axis of the loaded array; one that is not ``total`` wide
    there comes back whole, for its shape to be complained about."""

    def load(w: np.ndarray) -> np.ndarray:
        w = whole.load(w)
        return w[..., start:stop] if w.shape[-1] == total else w

    return Transform(load, whole.save, start)


def behind(rows: int) -> Transform:
    """A table whose first ``rows`` rows are never read."""
    return Transform(
        lambda w: w[rows:], lambda w: np.concatenate([np.zeros((rows, *w.shape[1:]), w.dtype), w])
    )


# --- tables -----------------------------------------------------------------------------------------


def linear(
    path: str, name: str, bias: bool, kernel: Transform = TRANSPOSE, vector: Transform = SAME
) -> Weights:
    """Kernel and bias of a linear layer."""
    yield f"{path}.kernel", f"{name}.weight", kernel
    if bias:
        yield f"{path}.bias", f"{name}.bias", vector


def layer_norm(path: str, name: str) -> Weights:
    """Scale and bias of a norm."""
    yield f"{path}.scale", f"{name}.weight", SAME
    yield f"{path}.bias", f"{name}.bias", SAME
