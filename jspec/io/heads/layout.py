"""What the layouts of public draft heads share: how one is described, found, read and written.

A layout is a mapping of its config.json, both ways, and one table of its tensors, as a model family is
(`jspec.models.families`). The rest is here: the reduced vocabulary (``d2t``, ``t2d``), frozen copies of the
target's own tensors, and the refusal of a target that the head was not made for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jspec.drafters.model import HasModel
from jspec.drafters.nets import Network, Weights, rows_of_head
from jspec.io.heads.target import (
    MEMBERS,
    OFFSETS,
    check_copy,
    check_target,
    check_theta,
    of_target,
    read_ids,
    write_ids,
)
from jspec.io.hf import INDEX, SINGLE, Tensors, read_json
from jspec.io.params import dotted, fill_tree, named
from jspec.io.torch_file import TorchTensors, save_torch
from jspec.models import is_norm
from jspec.models.families.base import Transform
from jspec.types import Drafter, PyTree

if TYPE_CHECKING:
    from jspec.io.heads.pard import Pard

Raw = Mapping[str, Any]  # a config.json
Shapes = Mapping[str, tuple[int, ...]]
Table = Iterator[tuple[str, str, Transform]]  # path in the net, name in the checkpoint, what to do to it
BUFFERS = (".rotary_emb.inv_freq",)  # endings of tensors that carry nothing


class Lent(NamedTuple):
    """What a net that borrows from the target says of it in a checkpoint: entries of config.json, and further
    files by name, each a dict for `save_torch`."""

    raw: Mapping[str, Any] = MappingProxyType({})
    files: Mapping[str, dict[str, Any]] = MappingProxyType({})


class Layout(NamedTuple):
    """One public layout.

    ``config(raw, shapes, model)`` makes the config of the network from config.json, the shapes of the tensors
    by name and the target; ``raw(config, model, num_tokens)`` what `config` reads of it, and what other
    programs ask for; ``settings(raw)`` are those of the drafter's factory that config.json proposes.

    ``table(config)`` lists the tensors but for `d2t` and `t2d`; ``rename`` maps its names to those of a file
    that may spell them otherwise. ``copies`` are names under which the target's "embedding" or "head" may be
    stored, ``stacked`` entries of the net whose first axis the checkpoint has as tensors of their own.
    ``borrows`` are entries of the net that no tensor of the table makes: ``borrowed(raw, folder, config,
    model)`` reads them, and ``lend(config, net, model, raw)`` says what of them goes into config.json and
    into further files.
    """

    name: str
    network: Callable[[Any], Network]  # of the config
    drafter: Callable[..., Drafter]  # (network, weights, **settings)
    fits: Callable[[Raw, Collection[str]], bool]
    config: Callable[[Raw, Shapes, HasModel], Any]
    table: Callable[[Any], Table]
    raw: Callable[[Any, HasModel, int], dict[str, Any]]
    settings: Callable[[Raw], dict[str, Any]] = lambda raw: {}
    file: str = SINGLE
    copies: Mapping[str, str] = MappingProxyType({})
    stacked: tuple[str, ...] = ()
    own_head: bool = False  # the checkpoint stores a head whether or not it is the target's
    rename: Callable[[Collection[str]], Mapping[str, str]] = lambda names: {name: name for name in names}
    canonical: Callable[[Any], Any] = lambda config: config  # nothing left open that `config` fills in
    borrows: tuple[str, ...] = ()
    borrowed: Callable[[Raw, Path, Any, HasModel], dict[str, jax.Array]] = lambda *_: {}
    lend: Callable[[Any, PyTree, HasModel, Raw], Lent] = lambda *_: Lent()

    def read(self, folder: Path, model: HasModel, dtype: DTypeLike | None, rope: float | None) -> Checkpoint:
        """See `read`."""
        return read(folder, self, model, dtype, rope)

    def write(
        self,
        folder: Path,
        network: Network,
        weights: Weights,
        model: HasModel,
        raw: Raw | None,
        extras: Collection[str],
        num_tokens: int,
    ) -> Path:
        """See `write`."""
        return write(folder, self, network.config, weights, model, raw, extras, num_tokens)


def respell(*pairs: tuple[str, str]) -> Callable[[Collection[str]], Mapping[str, str]]:
    """A ``rename`` that replaces beginnings of stored names, one pair after the other.

    >>> respell(("model.", ""), ("layers.0.", "midlayer."))(["model.layers.0.a", "b"])
    {'midlayer.a': 'model.layers.0.a', 'b': 'b'}
    """

    def rename(names: Collection[str]) -> Mapping[str, str]:
        found = {}
        for name in names:
            ours = name
            for old, new in pairs:
                ours = new + ours.removeprefix(old) if ours.startswith(old) else ours
            found[ours] = name
        return found

    return rename


def strip(prefix: str) -> Callable[[Collection[str]], Mapping[str, str]]:
    """A ``rename`` of names that may begin with a prefix."""
    return respell((prefix, ""))


class Stored(Protocol):
    """Tensors by name."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All of them."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, in its own dtype."""
        ...


class Checkpoint(NamedTuple):
    """A public checkpoint as it was read; `write` makes the same files of it.

    ``raw`` is its config.json, ``extras`` the names of the tensors that say nothing the target or the other
    tensors do not say (frozen copies, and an identity map of the vocabulary).
    """

    layout: Layout | Pard
    network: Network
    weights: Weights
    raw: dict[str, Any]
    extras: tuple[str, ...] = ()


# --- files ------------------------------------------------------------------------------------------

FILES = (
    SINGLE,
    "medusa_lm_head.safetensors",
    "hydra_lm_head.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
    "hydra_lm_head.pt",
)


def open_tensors(folder: Path) -> Stored:
    """The tensors of a head's folder, whatever it calls the file.

    Raises:
      FileNotFoundError: none of the known files is there.
      ValueError: a broken file.
    """
    file = next((name for name in (INDEX, *FILES) if (folder / name).is_file()), None)
    if file is None:
        raise FileNotFoundError(f"{folder}: expected one of {', '.join((INDEX, *FILES))}")
    if file.endswith((".bin", ".pt")):
        return TorchTensors(folder / file)
    return Tensors(folder, None if file == INDEX else file)


# --- reading and writing ----------------------------------------------------------------------------


def abstract(network: Network) -> PyTree:
    """The network's parameters as `jax.ShapeDtypeStruct` leaves."""
    return jax.eval_shape(network.init, jax.eval_shape(lambda: jax.random.key(0)))


def read(
    folder: Path,
    layout: Layout,
    model: HasModel,
    dtype: DTypeLike | None = None,
    rope: float | None = None,
) -> Checkpoint:
    """A head in ``layout``, for the target ``model``.

    Args:
      dtype: of the weights (norms: float32); None: each as it is stored.
      rope: a rope base other than the target's that is right all the same.
    Raises:
      ValueError: a missing, left-over or misshapen tensor, a setting that is not known, or a target that the
        head was not made for; one line that begins with the folder.
    """
    source, raw, stored = str(folder), read_json(folder / "config.json"), open_tensors(folder)
    shapes = stored.shapes
    names = layout.rename(shapes)
    try:
        config = layout.config(raw, {name: shapes[theirs] for name, theirs in names.items()}, model)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    network = layout.network(config)
    check_target(source, network, model)
    theta = theta_of(raw)
    if theta is not None and rope != theta:
        check_theta(source, theta, model)
    table = list(layout.table(config))
    used = {name for _, name, _ in table}
    ids, extras = None, []
    if (columns := getattr(config, "draft_vocab", None)) is not None and OFFSETS not in names:
        raise ValueError(
            f"{source}: {OFFSETS}: expected the ids of {columns} columns among {config.vocab_size} tokens, "
            "but it is missing"
        )
    if OFFSETS in names:
        members = stored.read(names[MEMBERS]) if MEMBERS in names else None
        offsets = stored.read(names[OFFSETS])
        ids = read_ids(source, offsets, members, config.vocab_size, columns or config.vocab_size)
        if columns is None:  # the whole vocabulary
            ids, extras = None, [name for name in (OFFSETS, MEMBERS) if name in names]
    for name, what in layout.copies.items():
        if name in names and name not in used:
            check_copy(source, name, stored.read(names[name]), model, what)
            extras.append(name)
    known = {OFFSETS, MEMBERS, *extras}

    def ignored(name: str) -> bool:
        return name in known or name.endswith(BUFFERS)

    def get(name: str) -> np.ndarray:
        return stored.read(names[name])

    loads = [(path, name, transform.load) for path, name, transform in table]
    try:
        borrowed = layout.borrowed(raw, folder, config, model)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    wanted = {name: entry for name, entry in abstract(network).items() if name not in borrowed}
    filled = fill_tree(_apart(wanted, layout.stacked), loads, names, get, dtype, source, ignored)
    net = _together(filled, layout.stacked)
    kind = _main_dtype(net)
    net |= {name: x.astype(kind) for name, x in borrowed.items()}
    columns = None if ids is None else jnp.asarray(ids, jnp.int32)
    head = None
    if config.head == "rows" and columns is not None:
        head = rows_of_head(model.lm, model.params, columns)
    return Checkpoint(layout, network, Weights(net, head, columns), raw, tuple(extras))


def _apart(net: PyTree, stacked: tuple[str, ...]) -> PyTree:
    """The net with entries [K, ...] (arrays or their shapes) as dicts of K parts."""

    def parts(x: Any) -> dict[int, Any]:
        if isinstance(x, jax.ShapeDtypeStruct):
            return {i: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for i in range(x.shape[0])}
        return dict(enumerate(x))

    return {name: parts(entry) if name in stacked else entry for name, entry in net.items()}


def _together(net: PyTree, stacked: tuple[str, ...]) -> PyTree:
    return {
        name: jnp.stack([entry[i] for i in range(len(entry))]) if name in stacked else entry
        for name, entry in net.items()
    }


def theta_of(raw: Raw) -> float | None:
    """The rope base that a config.json states."""
    raw = raw.get("transformer_layer_config") or raw
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    return None if theta is None else float(theta)


def write(
    folder: Path,
    layout: Layout,
    config: Any,
    weights: Weights,
    model: HasModel,
    raw: Raw | None = None,
    extras: Collection[str] = (),
    num_tokens: int = 7,
) -> Path:
    """A head as a folder in ``layout``: config.json and one file of tensors, each in its own dtype.

    Args:
      raw: entries of config.json to add (those of a `Checkpoint`); they must not say another network.
      extras: tensors to write that say nothing new: names of ``layout.copies``, ``d2t`` and ``t2d``.
      num_tokens: the length of a draft that config.json proposes, where the layout does.
    Raises:
      ValueError: the layout cannot express the network (the message says what it loses), or the folder is
        not empty.
    """
    config = layout.canonical(config)
    if layout.own_head and config.head != "own":
        config, weights = with_head(config, weights, model)
    net, table = _apart(weights.net, layout.stacked), list(layout.table(config))
    have = {dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(net)} - set(layout.borrows)
    if homeless := sorted(have ^ {path for path, _, _ in table}):
        raise ValueError(f"config: the layout {layout.name} has no such parameters: {', '.join(homeless)}")
    tensors = named(net, table)
    if weights.ids is not None:
        tensors |= write_ids(np.asarray(weights.ids), config.vocab_size)
    dtype = np.dtype(_main_dtype(weights.net))
    for name in extras:
        if name in layout.copies:
            tensors[name] = np.ascontiguousarray(of_target(model, layout.copies[name]).astype(dtype))
        elif name in (OFFSETS, MEMBERS):
            tensors[name] = write_ids(np.arange(config.vocab_size), config.vocab_size)[name]
        else:
            known = ", ".join((*layout.copies, OFFSETS, MEMBERS))
            raise ValueError(f"extras: expected names among {known}, got {name!r}")
    lent = layout.lend(config, weights.net, model, raw or {})
    said = layout.raw(config, model, num_tokens) | {"torch_dtype": str(dtype)}
    values = {**said, **(raw or {})}
    for key, value in lent.raw.items():  # a dict adds to what is said under its key
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    made = layout.config(values, {name: x.shape for name, x in tensors.items()}, model)
    if made != config:
        raise ValueError(f"config: the layout {layout.name} cannot say {_difference(config, made)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder: expected a new or an empty one, got {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if layout.file.endswith(".pt"):
            save_torch(folder / layout.file, tensors)
        else:
            save_file(tensors, folder / layout.file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{folder}: cannot write {layout.file} ({error})") from error
    for name, entries in lent.files.items():
        save_torch(folder / name, entries)
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return folder


def with_head(config: Any, weights: Weights, model: HasModel) -> tuple[Any, Weights]:
    """The network with a head of its own that says what the target's, or rows of it, did."""
    kernel = weights.head
    if kernel is None:
        kernel = rows_of_head(model.lm, model.params, jnp.arange(config.vocab_size))
    kernel = kernel.astype(_main_dtype(weights.net))
    if hasattr(config, "head_bias"):  # one a head
        kernel = jnp.broadcast_to(kernel[None], (config.num_heads, *kernel.shape))
    return (
        dataclasses.replace(config, head="own"),
        Weights(weights.net | {"head": kernel}, None, weights.ids),
    )


def _main_dtype(net: PyTree) -> Any:
    """That of the kernels; norms may be float32."""
    leaves = jax.tree_util.tree_leaves_with_path(net)
    return next(x.dtype for path, x in leaves if not is_norm(path))


def _difference(ours: Any, theirs: Any) -> str:
    """The fields in which two configs differ."""
    if type(ours) is not type(theirs):
        return f"{type(ours).__name__}, only {type(theirs).__name__}"
    names = [field.name for field in dataclasses.fields(ours)]
    lost = [name for name in names if getattr(ours, name) != getattr(theirs, name)]
    return ", ".join(f"{name} = {getattr(ours, name)!r}" for name in lost)
