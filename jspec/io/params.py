"""Params from named tensors, every parameter filled and every tensor used, or one error; and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.models import Config, abstract_params, is_norm
from jspec.models.decoder import Params
from jspec.models.families.base import Transform
from jspec.types import PyTree

Load = Callable[[np.ndarray], np.ndarray]  # a parameter of a tensor
SHOWN = 6  # names in a message


def fill(
    config: Config,
    weights: Iterable[tuple[str, str, Load]],
    names: Iterable[str],
    read: Callable[[str], np.ndarray],
    dtype: DTypeLike | None,
    source: str,
    ignored: Callable[[str], bool] = lambda name: False,
) -> Params:
    """The params of ``config``; see `fill_tree`."""
    return fill_tree(abstract_params(config), weights, names, read, dtype, source, ignored)


def fill_tree(
    wanted: PyTree,
    weights: Iterable[tuple[str, str, Load]],
    names: Iterable[str],
    read: Callable[[str], np.ndarray],
    dtype: DTypeLike | None,
    source: str,
    ignored: Callable[[str], bool] = lambda name: False,
) -> PyTree:
    """A nested dict of arrays of the shapes of ``wanted`` (`jax.ShapeDtypeStruct` leaves) from the tensors
    ``names``, each fetched by ``read(name)``.

    ``weights`` lists (path in the dict, tensor name, `Load`); a fused tensor may feed several paths. Norms
    are kept in float32, everything else is cast to ``dtype``; None: every tensor keeps the type it is stored
    in, norms, too.

    Raises:
        ValueError: missing tensors, left-over tensors (unless ``ignored``), wrong shapes or types: one
            message that begins with ``source`` and names them.
    """
    weights, names = list(weights), set(names)
    needed = {name for _, name, _ in weights}
    _report(source, "missing tensors", sorted(needed - names))
    _report(source, "unknown tensors", [name for name in sorted(names - needed) if not ignored(name)])

    leaves, structure = jax.tree_util.tree_flatten_with_path(wanted)
    places = {dotted(path): (path, leaf) for path, leaf in leaves}
    filled: dict[str, jax.Array] = {}
    problems, last = [], ("", np.empty(0))
    for place, name, load in sorted(weights, key=lambda row: row[1]):
        if name != last[0]:
            last = name, read(name)
        raw = last[1]
        path, leaf = places[place]
        if not jnp.issubdtype(raw.dtype, jnp.floating) or raw.dtype.itemsize < 2:
            problems.append(f"{name} is of type {raw.dtype}")
            continue
        array = load(raw)
        if array.shape != leaf.shape:
            problems.append(f"{name} of shape {raw.shape} does not make a {place} of shape {leaf.shape}")
            continue
        kind = dtype if dtype is None or not is_norm(path) else jnp.float32
        filled[place] = jnp.asarray(np.ascontiguousarray(array), kind)
    _report(source, "wrong tensors", problems)
    return jax.tree_util.tree_unflatten(structure, [filled[dotted(path)] for path, _ in leaves])


def named(params: Params, weights: Iterable[tuple[str, str, Transform]]) -> dict[str, np.ndarray]:
    """The tensors that `fill` makes these params of, each in its parameters' dtype and contiguous."""
    leaves = {dotted(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    parts: dict[str, list[tuple[Transform, str]]] = {}
    for place, name, transform in weights:
        parts.setdefault(name, []).append((transform, place))
    tensors = {}
    for name, rows in parts.items():
        rows = sorted(rows, key=lambda row: row[0].start)
        whole = np.concatenate([np.asarray(leaves[place]) for _, place in rows], axis=-1)
        tensors[name] = np.ascontiguousarray(rows[0][0].save(whole))
    return tensors


def dotted(path: tuple[Any, ...]) -> str:
    """``layers.0.mlp.up.kernel`` for a jax key path."""
    return ".".join(str(entry.key) for entry in path)


def _report(source: str, what: str, problems: list[str]) -> None:
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(f"{source}: {what}: {', '.join(problems[:SHOWN])}{more}")
