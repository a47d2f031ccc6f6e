"""Several devices: a mesh of two axes, and which dimension of which array is cut along which of them.

``data`` cuts the rows of a batch, ``model`` the heads, the perceptrons' hidden units and the vocabulary.
Every parameter has *logical axes*, known from the end of its path in the params, and rules map logical axes
to mesh axes: other rules are another layout, and nothing else changes. A dimension that a mesh axis does not
divide stays whole on every device of that axis, so that any model runs on any mesh.

No function of a model knows of a mesh. Arrays are placed here, XLA's partitioner derives the rest, and what
it made of it is in the compiled program: `collectives` counts them, and `experiments.dryrun` shows them for
models that fit on no machine at hand.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jspec.checks import at_least
from jspec.types import PyTree

DATA, MODEL = "data", "model"
Axes = tuple[str | None, ...]
Rules = Mapping[str, str | None]
AnyMesh = Mesh | AbstractMesh  # layouts can be looked at without devices

#: Logical axis -> mesh axis. Weights are cut along `model` and repeated along `data`.
RULES: Rules = {"vocab": MODEL, "heads": MODEL, "mlp": MODEL, "embed": None}
#: For training: the model's width is cut along `data` as well (fully sharded data parallelism), so that
#: params and optimizer state take 1 / devices of their size; each use gathers a weight for a moment.
FULLY_SHARDED: Rules = {**RULES, "embed": DATA}

# The logical axes of a parameter by the last one or two names of its path; whatever is not here (norms,
# tables of other drafters) is repeated on every device.
_AXES: dict[tuple[str, ...], Axes] = {
    ("embedding",): ("vocab", "embed"),
    ("positions",): (None, "embed"),
    ("relative_bias",): (None, "heads"),
    ("head_bias",): ("vocab",),
    ("unembedding", "kernel"): ("embed", "vocab"),
    **{(name, "kernel"): ("embed", "heads") for name in ("query", "key", "value")},
    **{(name, "bias"): ("heads",) for name in ("query", "key", "value")},
    ("out", "kernel"): ("heads", "embed"),
    ("out", "bias"): ("embed",),
    **{(name, "kernel"): ("embed", "mlp") for name in ("gate", "up")},
    **{(name, "bias"): ("mlp",) for name in ("gate", "up")},
    ("down", "kernel"): ("mlp", "embed"),
    ("down", "bias"): ("embed",),
}
_CACHED = ("keys", "values", "cross_keys", "cross_values")  # of a cache; every leaf [B, K, slots, h]


# --- the mesh ---------------------------------------------------------------------------------------


def make_mesh(data: int | None = None, model: int = 1) -> Mesh:
    """A mesh of ``data * model`` devices; None: as many rows as the devices of all processes make.

    Devices are ordered so that those of a `model` axis are neighbours in the machine's network.

    Raises:
      ValueError: more devices than there are, a number that does not go into them, or, with several
        processes, fewer than all.

    >>> dict(make_mesh(data=1).shape)
    {'data': 1, 'model': 1}
    """
    devices = jax.device_count()
    at_least(1, data=data, model=model)
    if data is None:
        if devices % model:
            raise ValueError(f"model: expected a divisor of {devices} devices, got {model}")
        data = devices // model
    processes = jax.process_count()
    if data * model > devices or (processes > 1 and data * model < devices):
        least = "at most" if processes == 1 else f"all of {processes} processes'"
        raise ValueError(f"mesh: expected {least} {devices} devices, got {data} x {model}")
    # Auto: with explicit axes every gather would have to name its output's layout, inside the models.
    return jax.make_mesh((data, model), (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def mesh_of(tree: PyTree) -> Mesh | None:
    """The mesh that a tree's arrays are placed on; None: on one device, or not on a mesh of `make_mesh`."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == (DATA, MODEL):
            return sharding.mesh  # pyright: ignore[reportReturnType]
    return None


def initialize_distributed(
    coordinator: str | None = None, num_processes: int | None = None, process: int | None = None
) -> None:
    """Join the processes of several hosts; to be called before anything else touches a device.

    Without arguments JAX finds the hosts of a Cloud TPU slice, of Slurm and of Open MPI itself; elsewhere
    set JAX_COORDINATOR_ADDRESS (``host:port`` of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.
    Does nothing on a single machine, and nothing the second time.

    Raises:
      RuntimeError: something has touched a device before, on a single machine, too.
      ValueError: a coordinator without the two numbers, or one of them without a coordinator; a cluster that
        JAX finds and cannot join. Processes that went on alone would each do the whole work.
    """
    if jax.distributed.is_initialized():
        return
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    given = {"JAX_NUM_PROCESSES": num_processes, "JAX_PROCESS_ID": process}
    if coordinator is None:
        for name, value in given.items():
            if value is not None or name in os.environ:
                number = os.environ[name] if value is None else value
                raise ValueError(
                    "JAX_COORDINATOR_ADDRESS: expected the host:port of process 0 beside "
                    f"{name}={number}, got none"
                )
        try:
            jax.distributed.initialize()
        except ValueError as error:
            if "coordinator_address should be defined" not in str(error):
                raise
            # No cluster that JAX knows of: a machine alone.
        return
    for name, value in given.items():
        if value is None and not os.environ.get(name, "").isdigit():
            raise ValueError(f"{name}: expected a number beside {coordinator}, got {os.environ.get(name)!r}")
    count, index = (int(os.environ[name]) if value is None else value for name, value in given.items())
    jax.distributed.initialize(coordinator, count, index)


# --- layouts ----------------------------------------------------------------------------------------


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """A jax key path as strings: keys of dicts, fields, indices."""
    return tuple(str(getattr(e, "key", getattr(e, "name", getattr(e, "idx", e)))) for e in path)


def logical_axes(path: tuple[Any, ...]) -> Axes:
    """The logical axes of the parameter at a jax key path; () = repeated on every device.

    >>> from jspec.testing import tiny_decoder
    >>> _, params = tiny_decoder(num_layers=1)
    >>> {jax.tree_util.keystr(path, simple=True, separator="."): logical_axes(path)
    ...  for path, _ in jax.tree_util.tree_leaves_with_path(params["layers"][0]["mlp"])}
    {'down.kernel': ('mlp', 'embed'), 'gate.kernel': ('embed', 'mlp'), 'up.kernel': ('embed', 'mlp')}
    """
    names = _names(path)
    return _AXES.get(names[-2:]) or _AXES.get(names[-1:]) or ()


def param_shardings(mesh: AnyMesh, params: PyTree, config: Any, rules: Rules = RULES) -> PyTree:
    """Where every parameter goes: a tree of `NamedSharding` for params, abstract ones included.

    Attention is cut between key-value heads, never through one, and only where their number divides evenly:
    half a head would gather the whole cache in every round. Grouped query heads stay with the head they read.

    Args:
      config: the model's (`LanguageModel.config`), for its number of heads.
      rules: `RULES`, `FULLY_SHARDED`, or another map of logical axes ("vocab", "heads", "mlp", "embed").
    """
    heads = getattr(config, "num_kv_heads", getattr(config, "num_heads", 1))

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        axes = logical_axes(path)
        spec = [rules[axis] if axis else None for axis in axes]
        sizes = [heads if axis == "heads" else size for axis, size in zip(axes, leaf.shape, strict=False)]
        return NamedSharding(mesh, _even(mesh, spec, sizes))

    return jax.tree_util.tree_map_with_path(place, params)


def _even(mesh: AnyMesh, spec: list[str | None], sizes: list[int]) -> PartitionSpec:
    """The spec without the axes that do not divide their dimension."""
    pairs = zip(spec, sizes, strict=True)
    return PartitionSpec(*(axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in pairs))


def optimizer_shardings(opt_state: PyTree, params: PyTree, shardings: PyTree) -> PyTree:
    """Where every leaf of an optax state goes: with the parameter that it belongs to.

    A leaf belongs to the parameter whose path ends its own: moments have its shape and its layout, the rows
    and columns of Adafactor one dimension less, and whatever else there is (counts, placeholders) is
    repeated on every device.

    Args:
      params, shardings: the params, or abstract ones, and their `param_shardings`.
    """
    placed = jax.tree.leaves(shardings)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    known = {_names(path): (leaf.shape, s) for (path, leaf), s in zip(leaves, placed, strict=True)}
    longest = max(map(len, known))

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = _names(path)
        tails = (names[len(names) - n :] for n in range(longest, 0, -1) if n <= len(names))
        shape, sharding = next((known[tail] for tail in tails if tail in known), ((), None))
        mesh = placed[0].mesh
        if sharding is None:
            return NamedSharding(mesh, PartitionSpec())
        spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
        if leaf.shape == shape:
            return sharding
        dropped = [i for i in range(len(shape)) if shape[:i] + shape[i + 1 :] == leaf.shape]
        if not dropped:
            return NamedSharding(mesh, PartitionSpec())
        # Of a square, optax's rows lack the last dimension and its columns the first.
        axis = dropped[-1] if "v_row" in names else dropped[0]
        return NamedSharding(mesh, PartitionSpec(*spec[:axis], *spec[axis + 1 :]))

    return jax.tree_util.tree_map_with_path(place, opt_state)


def check_together(name: str, tree: PyTree, params: PyTree) -> None:
    """Refuse params of a drafter that are bound to other devices than the target's ``params``. What is bound
    to none (numpy, or made without a mesh and not restored) goes wherever the others are.

    Raises:
      ValueError: naming the argument.
    """

    def bound(tree: PyTree) -> set[frozenset[Any]]:
        arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
        return {frozenset(array.sharding.device_set) for array in arrays if array.committed}

    theirs, ours = bound(tree), bound(params)
    if len(theirs | ours) > 1:
        got, wanted = (sorted(map(len, found)) for found in (theirs, ours))
        raise ValueError(
            f"{name}: expected params on the target's devices ({wanted} of them), got others ({got}); "
            "load both with the same mesh="
        )


def state_shardings(mesh: AnyMesh, state: PyTree) -> PyTree:
    """Where every leaf of a generation goes (an engine's `State`, a prompt, a batch): all lead with B rows.

    Rows go along `data`, the K key-value heads of caches along `model`, each where it divides evenly (a
    single row is computed by every device of `data`).
    """

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        spec: list[str | None] = [DATA, *[None] * (leaf.ndim - 1)][: leaf.ndim]
        if leaf.ndim == 4 and any(name in _CACHED for name in _names(path)):
            spec[1] = MODEL
        return NamedSharding(mesh, _even(mesh, spec, leaf.shape))

    return jax.tree_util.tree_map_with_path(place, state)


# --- placing and reading ----------------------------------------------------------------------------


def shard(tree: PyTree, shardings: PyTree) -> PyTree:
    """The arrays where ``shardings`` (a tree of them, or one for all) say.

    With several processes, each holds the whole tree and keeps the parts of its own devices.
    """

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda leaf: put(leaf, shardings), tree)
    return jax.tree.map(put, tree, shardings)


def on_host(mesh: Mesh | None) -> contextlib.AbstractContextManager[None]:
    """Where params are made or read before `shard`: in the host's memory if a mesh will hold them, because no
    single device may be able to; without a mesh, where they always are."""
    if mesh is None:
        return contextlib.nullcontext()
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def shard_batch(mesh: Mesh | None, batch: PyTree) -> PyTree:
    """A batch of host arrays with its rows along `data` (see `state_shardings`); as it is without a mesh."""
    return batch if mesh is None else shard(batch, state_shardings(mesh, batch))


def constrain(mesh: Mesh | None, state: PyTree) -> PyTree:
    """`state_shardings`, demanded inside a trace; nothing without a mesh."""
    if mesh is None:
        return state
    return jax.lax.with_sharding_constraint(state, state_shardings(mesh, state))


def whole(shardings: PyTree) -> PyTree:
    """Those of `FULLY_SHARDED` params without the cuts along `data`: where forwards want them."""

    def uncut(sharding: NamedSharding) -> NamedSharding:
        spec = PartitionSpec(*(None if axis == DATA else axis for axis in sharding.spec))
        return NamedSharding(sharding.mesh, spec)

    return jax.tree.map(uncut, shardings)


def gathered(params: PyTree, shardings: PyTree) -> PyTree:
    """Inside a trace: params that `FULLY_SHARDED` cut along `data`, whole along it again.

    What a training step does with its params first, once they are in the dtype of the forward. Left alone,
    the partitioner sees a product of rows cut along `data` with a weight cut along it, and cuts activations.
    """
    return jax.tree.map(jax.lax.with_sharding_constraint, params, whole(shardings))


def abstract(tree: PyTree, shardings: PyTree) -> PyTree:
    """Shapes, dtypes and places, no arrays: what a checkpoint is restored into, and a dry run compiles."""

    def leaf(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(leaf, tree, shardings)


def fetch(tree: PyTree) -> PyTree:
    """The whole arrays on this host, wherever their parts are; a collective if other hosts hold some."""
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


# --- what the compiler made of it -------------------------------------------------------------------

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf"= (?P<shape>.+?) (?P<kind>{_KINDS})(?:-start)?\(")


def collectives(program: str) -> collections.Counter[tuple[str, str]]:
    """The collectives of a compiled program (``compiled.as_text()``) by kind and shape of the result.

    Each counts once, however often the loop around it runs.

    >>> collectives("  %r.2 = f32[4,64]{1,0} all-reduce(f32[4,64]{1,0} %x), channel_id=1")
    Counter({('all-reduce', 'f32[4,64]'): 1})
    """
    found = (_COLLECTIVE.search(line) for line in program.splitlines())
    return collections.Counter(
        (match["kind"], re.sub(r"\{[^}]*\}", "", match["shape"])) for match in found if match
    )


def bytes_per_device(tree: PyTree) -> int:
    """What one device holds of a tree of placed arrays, abstract ones included."""

    def size(leaf: Any) -> int:
        shape = leaf.sharding.shard_shape(leaf.shape)
        return int(np.prod(shape, dtype=np.int64)) * leaf.dtype.itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))
