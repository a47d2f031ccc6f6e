"""Draft networks on disk: a folder with ``config.json`` and ``model.safetensors``."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jspec import trees
from jspec.drafters import kinds, nets
from jspec.drafters.model import HasModel
from jspec.drafters.nets import Network, Weights
from jspec.io import orbax
from jspec.io.params import dotted
from jspec.types import Drafter, PyTree

CONFIG, TENSORS = "config.json", "model.safetensors"


class Stored(NamedTuple):
    """A draft network as it lies in a folder. ``num_tokens``: how far it was trained to draft;
    ``accuracies`` [K, R]: how often its r-th choice at depth k was seen to be the target's first."""

    kind: str
    network: Network
    weights: Weights
    num_tokens: int | None
    accuracies: list[list[float]] | None = None


def save(
    folder: str | Path,
    kind: str,
    config: Any,
    weights: Weights,
    *,
    num_tokens: int | None = None,
    accuracies: Sequence[Sequence[float]] | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a draft network. Rows of the target's head are not stored: `load` gathers them again.

    The config comes last, so that a folder that has one is whole.

    Args:
      about: where it comes from, for people: its target, data, the command that made it.
    Raises:
      OSError: it cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    leaves, _ = jax.tree_util.tree_flatten_with_path(weights.net)
    tensors = {f"net.{dotted(path)}": np.asarray(leaf) for path, leaf in leaves}
    if weights.ids is not None:
        tensors["ids"] = np.asarray(weights.ids, np.int32)
    unfinished = folder / f".{TENSORS}.tmp"
    save_file(tensors, unfinished)
    unfinished.replace(folder / TENSORS)
    values = {"kind": kind, "config": dataclasses.asdict(config), "num_tokens": num_tokens}
    if accuracies is not None:
        values["accuracies"] = [[round(value, 4) for value in depth] for depth in accuracies]
    if about is not None:
        values["about"] = dict(about)
    orbax.write_json(folder / CONFIG, values)


def load(folder: str | Path, target: HasModel) -> Stored:
    """Read a draft network for its target.

    Raises:
      FileNotFoundError: there is none.
      ValueError: a broken one, or one for another target (width, vocabulary); the message has both numbers.
    """
    folder = Path(folder).expanduser()
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"drafter: no {CONFIG} in {folder}")
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind, settings = values["kind"], values["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / CONFIG}: expected kind and config of a drafter, got: {error!r}"
        ) from None
    config = kinds.build(kind, settings, f"{folder / CONFIG}: config")
    config = _for_target(config, target, str(folder))
    network = kinds.find(kind).network(config)
    try:
        tensors = load_file(folder / TENSORS)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder / TENSORS}: {error}") from None
    ids = tensors.pop("ids", None)
    net = _filled(jax.eval_shape(network.init, jax.random.key(0)), tensors, str(folder / TENSORS))
    weights = headed(config, target, net, ids)
    return Stored(kind, network, weights, values.get("num_tokens"), values.get("accuracies"))


def _for_target(config: Any, target: HasModel, source: str) -> Any:
    """A config for a target that it fits. A language model of its own (no width) fits all targets with the
    tokens that it knows, however wide their logits are padded.

    Raises:
      ValueError: another width or vocabulary; with both numbers.
    """
    theirs = target.lm.config
    if not hasattr(config, "width"):
        tokens = getattr(target, "vocab_size", theirs.vocab_size)
        if config.vocab_size >= tokens:
            return dataclasses.replace(config, vocab_size=theirs.vocab_size)
        raise ValueError(
            f"{source}: made for a target of vocab_size {config.vocab_size}, got one of {tokens}"
        )
    for name in kinds.OF_THE_TARGET:
        mine, its = getattr(config, name), getattr(theirs, name)
        if mine != its:
            raise ValueError(f"{source}: made for a target of {name} {mine}, got one of {its}")
    return config


def _filled(abstract: PyTree, tensors: dict[str, np.ndarray], source: str) -> PyTree:
    """The tree of these arrays.

    Raises:
      ValueError: missing or left-over tensors, or another shape.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    shapes = {f"net.{dotted(path)}": leaf.shape for path, leaf in leaves}
    if different := sorted(shapes.keys() ^ tensors.keys()):
        raise ValueError(f"{source}: missing or unknown tensors: {', '.join(different[:6])}")
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{source}: {name}: expected shape {shape}, got {tensors[name].shape}")
    return jax.tree.unflatten(structure, [jnp.asarray(tensors[name]) for name in shapes])


def headed(config: Any, target: HasModel, net: PyTree, ids: Any) -> Weights:
    """Weights with the head that ``config`` names; ``ids`` of its columns, None: all tokens."""
    ids = None if ids is None else jnp.asarray(ids, jnp.int32)
    head = nets.rows_of_head(target.lm, target.params, ids) if config.head == "rows" else None
    return Weights(net, head, ids)


def drafter(
    stored: Stored, num_tokens: int | None = None, *, num_nodes: int | None = None, **options: Any
) -> Drafter:
    """The drafting method of a stored network; ``options`` as for its kind's factory.

    ``num_nodes``: draft a tree of so many nodes, root included: a block's likeliest ones, or the static tree
    that the accuracies seen in training make the best (`trees.grow`).

    Raises:
      ValueError: a kind that drafts no such trees, accuracies that were not stored, or a wrong option.
    """
    kind = kinds.find(stored.kind)
    factory = kind.drafter
    if num_nodes is not None and kind.tree is not None:
        factory, options["num_nodes"] = kind.tree, num_nodes
    elif num_nodes is not None:
        if "template" not in inspect.signature(factory).parameters:
            raise ValueError(f"num_nodes: expected none for {stored.kind!r}, which drafts no static trees")
        if stored.accuracies is None:
            raise ValueError("num_nodes: expected none, for no accuracies are stored; give a template")
        options["template"] = trees.grow(np.asarray(stored.accuracies), num_nodes)
    if num_tokens is not None:
        options["num_tokens"] = num_tokens
    proposed = {} if stored.num_tokens is None else {"num_tokens": stored.num_tokens}
    return method(stored.kind, factory, stored.network, stored.weights, proposed, options)


def method(
    name: str,
    factory: Callable[..., Drafter],
    network: Network,
    weights: Weights,
    proposed: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Drafter:
    """What a factory makes of ``options``, and of those that a checkpoint proposes where these say nothing; a
    tree or a template has a depth of its own.

    Raises:
      ValueError: an option that the factory does not have, or a wrong one.
    """
    _, _, *known = inspect.signature(factory).parameters  # behind network and weights
    for option in options:
        if option not in known:
            raise ValueError(f"{option}: expected one of {', '.join(known)} for a drafter of kind {name!r}")
    shaped = {"tree", "template"} & options.keys()
    return factory(network, weights, **{**({} if shaped else proposed), **options})
