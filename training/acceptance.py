"""Simulated acceptance: what a drafter would be worth, from two forwards over fixed text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec import models
from jspec.types import LanguageModel, PyTree
from training import forward, losses


def tau(alpha: float, gamma: int) -> float:
    """Tokens emitted per target forward with ``gamma`` drafted ones, each accepted with probability alpha:
    (1 - alpha^(gamma + 1)) / (1 - alpha), Leviathan et al., arXiv 2211.17192, equation 1.

    >>> tau(0.5, 2), tau(1.0, 4)
    (1.75, 5.0)
    """
    return sum(alpha**i for i in range(gamma + 1))


def _mean(values: dict[str, Float[Array, "B T"]], weights: Float[Array, "B T"]) -> dict[str, Array]:
    """Sums over the weighted positions, and their number."""
    sums = {name: (jnp.where(weights > 0, x, 0) * weights).sum() for name, x in values.items()}
    return sums | {"positions": weights.sum()}


def _means(sums: Callable[[Any], dict[str, Array]], batches: Sequence[Any]) -> dict[str, float]:
    """Means over all positions of all batches. Nothing is read until all batches are under way."""
    parts = [sums(batch) for batch in batches]
    total = {name: float(sum(part[name] for part in jax.device_get(parts))) for name in parts[0]}
    positions = max(total.pop("positions"), 1.0)
    return {name: value / positions for name, value in total.items()}


@functools.partial(jax.jit, static_argnames=("lm", "width", "banned", "dtype"))
def _fit_sums(
    params: PyTree,
    batch: PyTree,
    *,
    lm: LanguageModel,
    width: int | None,
    banned: tuple[int, ...],
    dtype: str,
) -> dict[str, Array]:
    q = forward.possible(forward.logits(lm, models.cast(params, dtype), batch), width, banned)
    right = (q.argmax(-1) == batch.labels).astype(jnp.float32)
    loss = losses.cross_entropy(None, q, batch.labels)
    return _mean({"validation_loss": loss, "accuracy": right}, batch.weights)


def validate(
    lm: LanguageModel,
    params: PyTree,
    batches: Sequence[Any],
    *,
    width: int | None = None,
    banned: tuple[int, ...] = (),
    dtype: str = "float32",
) -> dict[str, float]:
    """``validation_loss`` (cross-entropy) and ``accuracy`` (of the first choice), means over positions: for a
    model without a target beside it. ``width`` and ``banned`` as for `simulate`."""
    settings = {"lm": lm, "width": width, "banned": banned, "dtype": dtype}
    return _means(lambda batch: _fit_sums(params, batch, **settings), batches)


@functools.partial(jax.jit, static_argnames=("target", "drafter", "width", "banned", "temperatures", "dtype"))
def _sums(
    target_params: PyTree,
    drafter_params: PyTree,
    batch: PyTree,
    *,
    target: LanguageModel,
    drafter: LanguageModel,
    width: int | None,
    banned: tuple[int, ...],
    temperatures: tuple[float, ...],
    dtype: str,
) -> dict[str, Array]:
    p = forward.logits(target, target_params, batch)
    q = forward.logits(drafter, models.cast(drafter_params, dtype), batch)
    width = min(p.shape[-1], q.shape[-1]) if width is None else width
    p, q = (forward.possible(logits, width, banned) for logits in (p, q))
    values = {
        "validation_loss": losses.cross_entropy(None, q, batch.labels),
        "greedy_agreement": (p.argmax(-1) == q.argmax(-1)).astype(jnp.float32),
    }
    for temperature in temperatures:
        values[f"alpha_{temperature:g}"] = losses.acceptance(p / temperature, q / temperature)
    return _mean(values, batch.weights)


def simulate(
    target: LanguageModel,
    target_params: PyTree,
    drafter: LanguageModel,
    drafter_params: PyTree,
    batches: Sequence[Any],
    *,
    width: int | None = None,
    banned: tuple[int, ...] = (),
    gamma: int = 5,
    temperatures: tuple[float, ...] = (1.0,),
    dtype: str = "float32",
) -> dict[str, float]:
    """Acceptance on the target positions of ``batches``, one number a position with equal weight.

    Args:
      width: tokens of the vocabulary. Logits from there on are padding, which decoding never emits and
        distillation never trains, and no part of a law. None: as many as both models have logits.
      banned: tokens that the target never emits (`jspec.Model.banned`), and no part of a law either. A label
        among them has an infinite loss.
      gamma: drafted tokens a round, for tau.
      temperatures: > 0, of both laws; what greedy decoding would do is always among the results.
      dtype: the drafter's forward computes in; the target's is that of its params.

    Returns:
      ``validation_loss`` (cross-entropy of the labels), ``greedy_agreement`` (share of positions where both
      have the same first choice: alpha at temperature 0) and ``tau_0`` that follows from it, and for each
      temperature t > 0 ``alpha_t``, the mean of sum_x min(p, q), and ``tau_t``.

    Raises:
      ValueError: a temperature of 0 or below.
    """
    if any(temperature <= 0 for temperature in temperatures):
        raise ValueError(f"temperatures: expected numbers > 0, got {temperatures}")

    def sums(batch: Any) -> dict[str, Array]:
        return _sums(
            target_params,
            drafter_params,
            batch,
            target=target,
            drafter=drafter,
            width=width,
            banned=banned,
            temperatures=temperatures,
            dtype=dtype,
        )

    means = _means(sums, batches)
    result = {name: means[name] for name in ("validation_loss", "greedy_agreement")}
    result["tau_0"] = tau(means["greedy_agreement"], gamma)
    for temperature in temperatures:
        alpha = means[f"alpha_{temperature:g}"]
        result |= {f"alpha_{temperature:g}": alpha, f"tau_{temperature:g}": tau(alpha, gamma)}
    return result
