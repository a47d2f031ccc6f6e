"""`python -m experiments dry-run --config FILE`: how large models lie on devices that are not here.

The training step and the decode round are lowered and compiled for a simulated mesh of CPU devices, from
shapes alone: no weight is ever made. Bytes per device follow from the layouts and hold on any hardware;
collectives are those of the program after partitioning; temporaries are what XLA's CPU backend plans, which
computes bfloat16 products in float32 and does not schedule for memory, and say little of a TPU or a GPU.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import pydantic
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jspec import drafters, engine, models, parallel, sampling, verify
from jspec.io import orbax
from jspec.models import Seq2SeqConfig
from jspec.types import Drafter, LanguageModel, Prompt, PyTree
from training import loop
from training.config import Count, Optimizer, Strict, Training
from training.data import Batch
from training.finetune import CrossEntropy

GIB = 2**30
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


class Step(Strict):
    """The training step: a batch, and the loop's settings."""

    batch_size: Count
    source: Count  # tokens of an encoder's input
    target: Count
    optimizers: Annotated[tuple[Optimizer, ...], pydantic.Field(min_length=1)]  # the first one is compiled
    rematerialise: bool = True


class Decoding(Strict):
    """The decode round: rows, slots of their caches, and how far the drafter drafts."""

    batch_size: Count
    source: Count
    capacity: Count
    gamma: Count = 5


class Devices(Strict):
    """A mesh; see `jspec.parallel`."""

    data: Count
    model: Count


class DryRun(Strict):
    """Two encoder-decoders, target and drafter, and the meshes to lay them out on.

    ``target`` and ``drafter`` are architectures as in `training.finetune.Finetune`. ``layers`` compiles
    targets of so many encoder and decoder layers in the whole one's place, which takes less time; bytes are
    those of the whole one in any case.
    """

    name: str
    target: dict[str, Any]
    drafter: dict[str, Any]
    step: Step
    decoding: Decoding
    meshes: Annotated[tuple[Devices, ...], pydantic.Field(min_length=1)]
    layers: Count | None = None

    @pydantic.field_validator("target", "drafter")
    @classmethod
    def _known(cls, values: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(orbax.architecture(values), Seq2SeqConfig):
            raise ValueError("kind: expected encoder-decoder, got decoder")
        return values


class Program(NamedTuple):
    """A compiled program."""

    name: str
    layers: int
    collectives: collections.Counter[str]  # by kind
    moved: collections.Counter[str]  # bytes of their results on one device, by kind
    temporaries: int
    seconds: float


class Layout(NamedTuple):
    """What a device of a mesh holds, in bytes, and the programs it runs."""

    devices: Devices
    training: dict[str, int]
    decoding: dict[str, int]
    programs: tuple[Program, ...]


# --- shapes in place of arrays ----------------------------------------------------------------------


class _Model(NamedTuple):
    lm: LanguageModel
    params: PyTree


def _model(mesh: Mesh, config: Seq2SeqConfig, dtype: DTypeLike, rules: parallel.Rules) -> _Model:
    shapes = jax.eval_shape(lambda params: models.cast(params, dtype), models.abstract_params(config))
    placed = parallel.param_shardings(mesh, shapes, config, rules)
    return _Model(models.language_model(config), parallel.abstract(shapes, placed))


def _rows(mesh: Mesh, *shape: int, dtype: DTypeLike = jnp.int32) -> Any:
    leaf = jax.ShapeDtypeStruct(shape, dtype)
    return parallel.abstract(leaf, parallel.state_shardings(mesh, leaf))


def _optimizer_state(params: PyTree, optimizer: Optimizer) -> PyTree:
    placed = jax.tree.map(lambda leaf: leaf.sharding, params)
    shapes = jax.eval_shape(loop.transformation(optimizer, 1).init, params)
    return parallel.abstract(shapes, parallel.optimizer_shardings(shapes, params, placed))


def _generation(mesh: Mesh, settings: Decoding, target: _Model, drafter: Drafter) -> engine.State:
    rows, lengths = settings.batch_size, _rows(mesh, settings.batch_size)
    tokens, source = _rows(mesh, rows, settings.capacity), _rows(mesh, rows, settings.source)
    keys = jax.eval_shape(sampling.row_keys, lengths)
    empty = functools.partial(
        engine._empty, target=target.lm, capacity=settings.capacity, record=None, mesh=None
    )
    prompt = Prompt(tokens, lengths, source, lengths)
    state = jax.eval_shape(empty, target.params, prompt, keys, drafter, sampling.greedy(rows), lengths)
    return parallel.abstract(state, parallel.state_shardings(mesh, state))


# --- programs ---------------------------------------------------------------------------------------


def _compiled(name: str, layers: int, lower: Callable[[], jax.stages.Lowered]) -> Program:
    begun = time.monotonic()
    program = lower().compile()
    counts, moved = collections.Counter[str](), collections.Counter[str]()
    for (kind, shape), count in parallel.collectives(program.as_text() or "").items():
        counts[kind] += count
        moved[kind] += count * result_bytes(shape)
    planned = program.memory_analysis()
    assert planned is not None, "the CPU backend always plans its memory"
    return Program(name, layers, counts, moved, planned.temp_size_in_bytes, time.monotonic() - begun)


def result_bytes(shape: str) -> int:
    """Bytes of an array, or of a tuple of arrays, as XLA writes its type.

    >>> result_bytes("(f32[2,3], /*index=1*/bf16[4], pred[])")
    33
    """
    found = _ARRAY.findall(shape)
    return sum(_BYTES[kind] * math.prod(int(n) for n in sizes.split(",") if n) for kind, sizes in found)


def _training_step(mesh: Mesh, settings: Step, model: _Model, layers: int) -> Program:
    optimizer, rows = settings.optimizers[0], settings.batch_size
    everywhere = NamedSharding(mesh, PartitionSpec())
    done = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    state = loop.State(model.params, _optimizer_state(model.params, optimizer), done)  # type: ignore[arg-type]
    training = Training(
        steps=max(optimizer.warmup_steps, 1),
        optimizer=optimizer,
        dtype="bfloat16",
        rematerialise=settings.rematerialise,
    )
    tokens, lengths = _rows(mesh, rows, settings.target), _rows(mesh, rows)
    weights = _rows(mesh, rows, settings.target, dtype=jnp.float32)
    batch = Batch(tokens, tokens, weights, lengths, _rows(mesh, rows, settings.source), lengths)
    objective = CrossEntropy(model.lm, 0.0, 0.0)
    lower = functools.partial(loop.lower, objective, training, state, batch)
    return _compiled(f"training step, {optimizer.name}", layers, lower)


def _decode_round(mesh: Mesh, settings: Decoding, target: _Model, drafter: Drafter, layers: int) -> Program:
    def one_round(params: PyTree, state: engine.State, drafter: Drafter, *rest: Any) -> engine.State:
        rule, sampler, stops = rest
        return engine.round(
            params,
            state,
            target=target.lm,
            drafter=drafter,
            verify=rule,
            sampler=sampler,
            stops=stops,
            widths=engine.block_widths(drafter),
        )[0]

    state = _generation(mesh, settings, target, drafter)
    rest = verify.block(), sampling.greedy(settings.batch_size), engine.no_stops()
    jitted = jax.jit(one_round, donate_argnames=("state",))
    return _compiled("decode round", layers, lambda: jitted.lower(target.params, state, drafter, *rest))


# --- the run ----------------------------------------------------------------------------------------


def simulate(settings: DryRun) -> None:
    """Make this process one with enough CPU devices; before anything else touches a device."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(mesh.data * mesh.model for mesh in settings.meshes))


def run(settings: DryRun) -> Iterator[Layout]:
    """Lay out and compile for one mesh after another, after `simulate`.

    Raises:
      ValueError: a mesh has more devices than there are.
    """
    target, drafter = (orbax.architecture(values) for values in (settings.target, settings.drafter))
    assert isinstance(target, Seq2SeqConfig)
    assert isinstance(drafter, Seq2SeqConfig)
    layers = settings.layers or target.num_layers
    short = target
    if settings.layers is not None:
        short = dataclasses.replace(target, num_layers=layers, num_encoder_layers=layers)
    for devices in settings.meshes:
        mesh = parallel.make_mesh(devices.data, devices.model)
        masters = functools.partial(_model, mesh, dtype=jnp.float32, rules=parallel.FULLY_SHARDED)
        served = functools.partial(_model, mesh, dtype=jnp.bfloat16, rules=parallel.RULES)
        small = served(drafter)
        drafting = drafters.model(small, settings.decoding.gamma)
        params = masters(target).params
        state = _generation(mesh, settings.decoding, served(target), drafting)
        yield Layout(
            devices,
            {
                "params, float32": parallel.bytes_per_device(params),
                **{
                    f"optimizer state, {optimizer.name}": parallel.bytes_per_device(
                        _optimizer_state(params, optimizer)
                    )
                    for optimizer in settings.step.optimizers
                },
            },
            {
                "params, bfloat16": parallel.bytes_per_device(served(target).params),
                "the drafter's params": parallel.bytes_per_device(small.params),
                "cache": parallel.bytes_per_device(state.cache),
                "the drafter's state": parallel.bytes_per_device(state.drafter_state),
            },
            (
                _training_step(mesh, settings.step, masters(short), layers),
                _decode_round(mesh, settings.decoding, served(short), drafting, layers),
            ),
        )


def parameters(values: dict[str, Any]) -> int:
    """Of an architecture."""
    leaves = jax.tree.leaves(models.abstract_params(orbax.architecture(values)))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def describe(settings: DryRun) -> str:
    """What is laid out, as markdown."""
    step, decoding = settings.step, settings.decoding
    remat = ", rematerialised" if step.rematerialise else ""
    return "\n".join(
        (
            f"# {settings.name}: dry run",
            "",
            f"Target: {parameters(settings.target) / 1e6:,.0f} million parameters; "
            f"drafter: {parameters(settings.drafter) / 1e6:,.0f} million.",
            f"Training step: {step.batch_size} rows, {step.source} source and {step.target} target tokens, "
            f"bfloat16 over float32 masters{remat}.",
            f"Decode round: {decoding.batch_size} rows, {decoding.source} source tokens, caches of "
            f"{decoding.capacity} slots, {decoding.gamma} drafted tokens, bfloat16.",
        )
    )


def report(layout: Layout) -> str:
    """One mesh, as markdown."""
    data, model = layout.devices.data, layout.devices.model
    lines = [f"## {data * model} devices: data {data} x model {model}", ""]
    lines += ["| on each device | GiB |", "| --- | ---: |"]
    for what, sizes in (("training", layout.training), ("decoding", layout.decoding)):
        lines += [f"| {what}: {name} | {size / GIB:.3f} |" for name, size in sizes.items()]
    for program in layout.programs:
        depth = f"{program.layers} + {program.layers} layers"
        lines += ["", f"{program.name}, compiled with {depth} in {program.seconds:.0f} s:", ""]
        lines += ["| collective | number | GiB of results on a device |", "| --- | ---: | ---: |"]
        lines += [
            f"| {kind} | {count} | {program.moved[kind] / GIB:.3f} |"
            for kind, count in sorted(program.collectives.items())
        ]
        lines += ["", f"Temporaries as the CPU backend plans them: {program.temporaries / GIB:.2f} GiB."]
    return "\n".join(lines)
