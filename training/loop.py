"""The training loop. There is one, for every recipe.

A step is one jitted function of (state, frozen arguments, batch); the state (params, optimizer state, step)
is donated. Batches and random keys are functions of the seed and the step, so a run that was killed goes on
from its last checkpoint exactly as if nothing had happened: same losses, same weights, bit for bit. (On a
GPU, where XLA sums some gradients in no fixed order, that takes XLA_FLAGS=--xla_gpu_deterministic_ops=true.)
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import rich.console
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jspec import models, parallel
from jspec.io import orbax
from jspec.models.decoder import LAYER_INPUT
from jspec.types import PyTree
from training import hosts
from training.checkpoint import Checkpoints
from training.config import Optimizer, Training
from training.metrics import FILE, Metrics, read

# (params in the compute dtype, frozen, batch, key) -> mean loss over the batch's sequences, numbers to log
Objective = Callable[..., tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]
Source = Callable[[int, PyTree], PyTree]  # (step from 0, params) -> batch
# Numbers of a step that must be finite. The loss and its gradient are those of the params before it; only the
# update says that the params after it, which a checkpoint holds, are good.
CHECKED = ("loss", "gradient_norm", "update_norm")


class State(NamedTuple):
    """All that a checkpoint holds. ``params`` are float32 whatever the forward computes in."""

    params: PyTree
    opt_state: PyTree
    step: Any  # steps done, int32


# --- the optimizer ----------------------------------------------------------------------------------


def schedule(optimizer: Optimizer, steps: int) -> optax.Schedule:
    """The learning rate of each step, counted from 0; see `Optimizer`.

    >>> rate = schedule(Optimizer(learning_rate=1.0, schedule="linear", warmup_steps=2), 6)
    >>> [round(float(rate(step)), 2) for step in range(7)]
    [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0]
    """
    warmup, peak = optimizer.warmup_steps, optimizer.learning_rate
    last = peak * optimizer.final_fraction
    # Warm-up is moved by one step: a step at rate 0 would be wasted.
    rest = max(steps - max(warmup - 1, 0), 1)
    if optimizer.schedule == "constant":
        falling = optax.constant_schedule(peak)
    elif optimizer.schedule == "linear":
        falling = optax.linear_schedule(peak, last, rest)
    elif optimizer.schedule == "cosine":
        falling = optax.cosine_decay_schedule(peak, rest, optimizer.final_fraction)
    else:
        start = float(max(warmup, 1))
        falling = lambda step: peak * jnp.sqrt(start / (start + step))  # noqa: E731
    if warmup <= 1:
        return falling
    rising = optax.linear_schedule(peak / warmup, peak, warmup - 1)
    return optax.join_schedules([rising, falling], [warmup - 1])


def transformation(optimizer: Optimizer, steps: int) -> optax.GradientTransformation:
    """Clipping, then the optimizer with its schedule."""
    rate = schedule(optimizer, steps)

    def matrices(params: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.ndim > 1, params)

    if optimizer.name == "adamw":
        rule = optax.adamw(
            rate, optimizer.b1, optimizer.b2, weight_decay=optimizer.weight_decay, mask=matrices
        )
    else:
        # Optax's own decay of Adafactor comes behind the learning rate and ignores it; as AdamW's, this one
        # comes before. The direction has its sign already.
        rule = optax.chain(
            optax.adafactor(),
            optax.add_decayed_weights(-optimizer.weight_decay, matrices),
            optax.scale_by_learning_rate(rate, flip_sign=False),
        )
    clip = optax.identity() if optimizer.clip_norm is None else optax.clip_by_global_norm(optimizer.clip_norm)
    return optax.chain(clip, rule)


# --- one step ---------------------------------------------------------------------------------------


class _Static(NamedTuple):
    """What a compiled step depends on besides shapes."""

    objective: Objective
    optimizer: Optimizer
    steps: int
    accumulate: int
    dtype: str
    rematerialise: bool


def _static(objective: Objective, settings: Training) -> _Static:
    return _Static(
        objective,
        settings.optimizer,
        settings.steps,
        settings.accumulate,
        settings.dtype,
        settings.rematerialise,
    )


def _sequences(batch: PyTree) -> Float[Array, ""]:
    return (batch.weights.sum(-1) > 0).sum().astype(jnp.float32)


def _step(
    state: State, frozen: PyTree, batch: PyTree, seed: Array, static: _Static
) -> tuple[State, dict[str, Array]]:
    key = jax.random.fold_in(jax.random.key(seed), state.step)

    def loss(params: PyTree, batch: PyTree, key: jax.Array) -> tuple[Array, dict[str, Array]]:
        return static.objective(models.cast(params, static.dtype), frozen, batch, key)

    if static.rematerialise:
        keep = jax.checkpoint_policies.save_only_these_names(LAYER_INPUT)
        loss = jax.checkpoint(loss, policy=keep)
    gradient = jax.value_and_grad(loss, has_aux=True)
    if static.accumulate == 1:
        (value, numbers), grads = gradient(state.params, batch, key)
    else:
        value, numbers, grads = _accumulated(gradient, state.params, batch, key, static.accumulate)
    rule = transformation(static.optimizer, static.steps)
    # Optax relies on implicit promotion, whatever the user's settings are for their own code.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, opt_state = rule.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        rate = schedule(static.optimizer, static.steps)(state.step)
        norms = optax.tree.norm(grads), optax.tree.norm(updates)
    numbers = {
        "loss": value,
        **numbers,
        "gradient_norm": norms[0],
        "update_norm": norms[1],
        "learning_rate": jnp.asarray(rate, jnp.float32),
    }
    return State(params, opt_state, state.step + 1), numbers


def _accumulated(
    gradient: Callable[..., Any], params: PyTree, batch: PyTree, key: jax.Array, count: int
) -> tuple[Array, dict[str, Array], PyTree]:
    """The whole batch's loss and gradient from ``count`` micro-batches.

    A scan inside the step, rather than `optax.MultiSteps`: the state between micro-batches is never part of
    a checkpoint, steps are optimizer steps everywhere, and a micro-batch weighs as much as it has
    sequences, so that the result is the large batch's, of an objective that is a mean over the sequences of
    the batch (`losses.sequence_mean`). Row b goes to micro-batch ``b % count``: rows stay on their devices.
    """
    parts = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch)
    total = jnp.maximum(_sequences(batch), 1)

    def add(carry: PyTree, part: tuple[PyTree, Array]) -> tuple[PyTree, None]:
        micro, index = part
        (value, numbers), grads = gradient(params, micro, jax.random.fold_in(key, index))
        share = _sequences(micro) / total
        return jax.tree.map(lambda a, x: a + share * x, carry, (value, numbers, grads)), None

    first = jax.tree.map(lambda x: x[0], parts)
    shapes = jax.eval_shape(gradient, params, first, key)
    (value, numbers), grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    carry, _ = jax.lax.scan(add, (value, numbers, grads), (parts, jnp.arange(count)))
    return carry


def _gathered(objective: Objective, shardings: PyTree, params: PyTree, *rest: Any) -> tuple[Array, PyTree]:
    return objective(parallel.gathered(params, shardings), *rest)


@functools.cache
def _compiled(static: _Static, placement: tuple[Any, ...] | None) -> Callable[..., Any]:
    """The jitted step; ``placement`` is the state's flattened shardings on a mesh."""
    options = {}
    if placement is not None:
        leaves, structure = placement
        placed = jax.tree.unflatten(structure, leaves)
        options["out_shardings"] = (placed, None)
        static = static._replace(objective=functools.partial(_gathered, static.objective, placed.params))
    return jax.jit(functools.partial(_step, static=static), donate_argnums=0, **options)


def lower(objective: Objective, settings: Training, state: State, batch: PyTree) -> jax.stages.Lowered:
    """The step that `fit` runs, for abstract arrays which say where on a mesh they lie: for dry runs."""
    leaves, structure = jax.tree.flatten(jax.tree.map(lambda leaf: leaf.sharding, state))
    step = _compiled(_static(objective, settings), (tuple(leaves), structure))
    return step.lower(state, (), batch, jax.ShapeDtypeStruct((), jnp.uint32))


def seconds_per_step(
    params: PyTree,
    objective: Objective,
    batches: Sequence[PyTree],
    settings: Training,
    *,
    frozen: PyTree = (),
) -> float:
    """Measured on this process' first device: the mean over ``batches``, the same steps as `fit` takes, when
    each has been run once and everything is compiled. Nothing is kept."""
    state, placement = _first(params, settings, None)
    step = _compiled(_static(objective, settings), placement)
    seed = jnp.uint32(settings.seed)
    begun = 0.0
    for turn in range(2):
        begun = time.perf_counter()
        for batch in batches:
            state, values = step(state, frozen, batch, seed)
            if turn == 0:
                jax.block_until_ready(values)
        jax.block_until_ready(state)
    return (time.perf_counter() - begun) / len(batches)


# --- the loop ---------------------------------------------------------------------------------------


def fit(
    params: PyTree,
    objective: Objective,
    source: Source,
    settings: Training,
    folder: Path,
    *,
    frozen: PyTree = (),
    evaluate: Callable[[PyTree], dict[str, float]] | None = None,
    shardings: PyTree | None = None,
    console: rich.console.Console | None = None,
) -> PyTree:
    """Train to the end, from the newest checkpoint in ``folder`` if there is one.

    Args:
      params: the first ones, float32.
      objective: static and hashable (a frozen dataclass, a function); equal ones share compiled steps.
      source: gives the batch of a step. It may look at the params (and only within the call: they are
        donated), but must be a function of the step and of params alone.
      folder: gets ``checkpoints/``, ``metrics.jsonl``, ``tensorboard/`` and, last, ``DONE``: the step of the
        params that count, their numbers, and how many seconds the process took that came to the end.
      frozen: a pytree that reaches the objective as a jit argument: teachers.
      evaluate: numbers of an evaluation, finite; "validation_loss" among them where ``settings.best`` is set.
        On a mesh its params are in the dtype of the forward and whole along ``data``, as within a step.
      shardings: of the params on a mesh (`parallel.param_shardings`): the optimizer state follows them, the
        rows of a batch go along ``data``. ``frozen`` is the caller's to place.

    Returns:
      The final params; those of the best checkpoint with ``settings.best``.

    Raises:
      ValueError: params of another dtype.
      FloatingPointError: a loss, gradient, update or evaluation that is not finite; the message names the
        step. Checkpoints are written after all updates before them were seen to be finite, so those that
        exist are good.
      OSError: a checkpoint or a log could not be written. Earlier checkpoints are as they were.
    """
    begun = time.monotonic()
    state, placement = _first(params, settings, shardings)
    mesh = None if shardings is None else parallel.mesh_of(state)
    step = _compiled(_static(objective, settings), placement)
    evaluated = _evaluated(settings.dtype, shardings)
    seed = jnp.uint32(settings.seed)
    pending: list[tuple[int, dict[str, Array]]] = []
    with contextlib.ExitStack() as opened:
        checkpoints = Checkpoints(folder / orbax.CHECKPOINTS, settings.keep, settings.best)
        opened.callback(checkpoints.close)
        done = checkpoints.latest() or 0
        if done:
            restored, rest = checkpoints.restore(done, state.params, state[1:])
            state = State(restored, *rest)
        metrics = Metrics(folder, done, settings.steps, console)
        opened.callback(metrics.close)

        def check(what: str, values: dict[str, float]) -> None:
            if not all(map(math.isfinite, values.values())):
                metrics.flush()
                found = ", ".join(f"{name} is {value}" for name, value in values.items())
                raise FloatingPointError(
                    f"training: {what}: {found}; the last good checkpoint in {folder} is "
                    f"{checkpoints.last_good()}"
                )

        def look(keep: int) -> None:
            """Write all pending losses but the newest ``keep``: reading a number waits for its step."""
            ready, pending[:] = pending[: len(pending) - keep], pending[len(pending) - keep :]
            for number, values in jax.device_get(ready):
                values = {name: float(value) for name, value in values.items()}
                check(f"step {number}", {name: values[name] for name in CHECKED})
                metrics.train(number, values)

        for number in range(done + 1, settings.steps + 1):
            batch = parallel.shard_batch(mesh, source(number - 1, state.params))
            state, values = step(state, frozen, batch, seed)
            pending.append((number, values))
            if len(pending) > settings.log_every:
                look(keep=1)  # the device has the newest step to work on meanwhile
            results = None
            if evaluate is not None and settings.evaluates(number):
                look(keep=0)
                results = evaluate(evaluated(state.params))
                check(f"the evaluation after step {number}", results)
                metrics.evaluation(number, results)
            if settings.saves(number):
                look(keep=0)
                metrics.flush()
                checkpoints.save(number, state.params, state[1:], results)
        chosen = settings.steps
        if settings.best:
            chosen = hosts.on_first(lambda: _best(folder))
            if chosen != settings.steps:
                state = State(checkpoints.restore(chosen, state.params, state[1:])[0], *state[1:])
        metrics.flush()
    hosts.on_first(lambda: _finish(folder, chosen, time.monotonic() - begun))
    return state.params


def _evaluated(dtype: str, shardings: PyTree | None) -> Callable[[PyTree], PyTree]:
    """From trained params to those that forwards want: without a mesh they are."""
    if shardings is None:
        return lambda params: params
    return jax.jit(functools.partial(models.cast, dtype=dtype), out_shardings=parallel.whole(shardings))


def _finish(folder: Path, step: int, seconds: float) -> None:
    """Write ``DONE``."""
    last = [row for row in read(folder / FILE) if row["step"] == step]
    summary = {name: value for row in last for name, value in row.items()}
    orbax.write_json(folder / orbax.DONE, {**summary, "step": step, "seconds": seconds})


def _first(
    params: PyTree, settings: Training, shardings: PyTree | None
) -> tuple[State, tuple[Any, ...] | None]:
    """The state before the first step (copies: steps donate it, the caller keeps ``params``), and its
    flattened shardings."""
    for leaf in jax.tree.leaves(params):
        if leaf.dtype != jnp.float32:
            raise ValueError(f"params: expected float32, which small steps add up in, got {leaf.dtype}")
    rule = transformation(settings.optimizer, settings.steps)
    if shardings is None:
        # Placed for good, as a checkpoint's arrays are: to jit, arrays that may move are other arguments.
        state = State(params, rule.init(params), jnp.zeros((), jnp.int32))
        return jax.device_put(state, jax.local_devices()[0], may_alias=False), None
    abstract = jax.eval_shape(rule.init, params)
    placed = parallel.optimizer_shardings(abstract, params, shardings)
    everywhere = NamedSharding(jax.tree.leaves(shardings)[0].mesh, PartitionSpec())
    params = jax.tree.map(jnp.copy, parallel.shard(params, shardings))  # `shard` may alias
    opt_state = jax.jit(rule.init, out_shardings=placed)(params)
    state = State(params, opt_state, parallel.shard(jnp.zeros((), jnp.int32), everywhere))
    leaves, structure = jax.tree.flatten(State(shardings, placed, everywhere))
    return state, (tuple(leaves), structure)


def _best(folder: Path) -> int:
    """The complete checkpoint with the lowest validation loss."""
    steps = orbax.complete_steps(folder / orbax.CHECKPOINTS)
    rows = read(folder / FILE)
    losses = {int(row["step"]): row["validation_loss"] for row in rows if "validation_loss" in row}
    return min((step for step in steps if step in losses), key=lambda step: (losses[step], step))
