"""Losses of a drafter against its target, position by position.

A loss maps target logits [..., V], drafter logits [..., V] and labels [...] to float32 [...]. With p the
target's law and q the drafter's, the share of drafts that speculative sampling keeps is
alpha = sum_x min(p, q) = 1 - TV(p, q) (Leviathan et al., arXiv 2211.17192, corollary 3.6)::

    cross_entropy            -log q(label)                                  needs no target logits
    forward_kl               sum_x p log(p / q)                             DistillSpec, arXiv 2310.08461
    reverse_kl               sum_x q log(q / p)
    jsd(beta)                beta KL(p || m) + (1 - beta) KL(q || m),  m = beta p + (1 - beta) q
    total_variation          1 - alpha
    negative_log_acceptance  -log alpha                                     LK losses, arXiv 2602.23881
    lk_hybrid(eta)           l KL(p || q) + (1 - l) TV(p, q),  l = exp(-eta alpha), l without gradient

Laws are at temperature 1; for another one divide both logits by it. Only the drafter's logits get a gradient,
and it is finite whatever the logits are (-inf included): with u_x = dF / d log q(x), that of a loss F is
u_x - q(x) sum_y u_y, computed from the logits and one number a position, so that no law [..., V] is kept from
the forward to the backward pass. A row of logits that are all -inf is the law 0.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Loss = Callable[..., Float[Array, "..."]]
TINY = float(np.log(np.finfo(np.float32).tiny))  # of the least normal number: below, p is 0 or nearly so


# --- laws and their gradient --------------------------------------------------------------------------


class _Divergence(NamedTuple):
    """F of (log p, log q) and dF / d log q; ``slope`` gets the value of F [..., 1], too. Hashable."""

    value: Callable[..., Float[Array, ...]]
    slope: Callable[..., Float[Array, "... V"]]


def _log_mass(logits: Float[Array, "... V"]) -> Float[Array, "... 1"]:
    """log sum exp of each row; 0 where every logit is -inf, so that these stay the law 0 and never NaN."""
    top = logits.max(-1, keepdims=True)
    empty = top == -jnp.inf
    top = jnp.where(empty, 0, top)
    return jnp.where(empty, 0, top + jnp.log(jnp.exp(logits - top).sum(-1, keepdims=True)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _measure(
    divergence: _Divergence, target_logits: Float[Array, "... V"], drafter_logits: Float[Array, "... V"]
) -> Float[Array, ...]:
    return _measure_forward(divergence, target_logits, drafter_logits)[0]


def _measure_forward(divergence: _Divergence, target_logits: Array, drafter_logits: Array) -> tuple:
    masses = _log_mass(target_logits), _log_mass(drafter_logits)
    value = divergence.value(target_logits - masses[0], drafter_logits - masses[1])
    return value, (target_logits, drafter_logits, *masses, value)


def _measure_backward(divergence: _Divergence, residuals: tuple, cotangent: Float[Array, ...]) -> tuple:
    # Behind the barrier the laws are computed again, which is cheaper than to keep them.
    residuals = jax.lax.optimization_barrier(residuals)
    target_logits, drafter_logits, target_mass, drafter_mass, value = residuals
    log_q = drafter_logits - drafter_mass
    slope = divergence.slope(target_logits - target_mass, log_q, value[..., None])
    gradient = slope - jnp.exp(log_q) * slope.sum(-1, keepdims=True)
    return None, cotangent[..., None] * gradient


_measure.defvjp(_measure_forward, _measure_backward)


def _of(divergence: _Divergence, target_logits: Array, drafter_logits: Array) -> Float[Array, ...]:
    if target_logits.shape != drafter_logits.shape:
        raise ValueError(
            f"target_logits: expected the drafter's shape {drafter_logits.shape}, got {target_logits.shape}"
        )
    return _measure(divergence, target_logits.astype(jnp.float32), drafter_logits.astype(jnp.float32))


# --- the losses ---------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _label_entropy(
    drafter_logits: Float[Array, "... V"], labels: Int[Array, ...], smoothing: float
) -> Float[Array, ...]:
    return _label_entropy_forward(drafter_logits, labels, smoothing)[0]


def _possible(logits: Float[Array, "... V"]) -> tuple[Array, Float[Array, "... 1"]]:
    """Which tokens a law may give, and how many they are (at least 1)."""
    possible = logits > -jnp.inf
    return possible, jnp.maximum(possible.sum(-1, keepdims=True), 1).astype(jnp.float32)


def _label_entropy_forward(drafter_logits: Array, labels: Array, smoothing: float) -> tuple:
    mass = _log_mass(drafter_logits)
    log_q = jnp.take_along_axis(drafter_logits, labels[..., None], axis=-1)[..., 0] - mass[..., 0]
    if smoothing:
        possible, number = _possible(drafter_logits)
        others = jnp.where(possible, drafter_logits - mass, 0).sum(-1) / number[..., 0]
        log_q = (1 - smoothing) * log_q + smoothing * others
    return -log_q, (drafter_logits, mass, labels)


def _label_entropy_backward(smoothing: float, residuals: tuple, cotangent: Float[Array, ...]) -> tuple:
    drafter_logits, mass, labels = jax.lax.optimization_barrier(residuals)
    wanted = jax.lax.broadcasted_iota(jnp.int32, drafter_logits.shape, labels.ndim) == labels[..., None]
    wanted = (1 - smoothing) * wanted.astype(jnp.float32)
    if smoothing:
        possible, number = _possible(drafter_logits)
        wanted = wanted + jnp.where(possible, smoothing / number, 0)
    return cotangent[..., None] * (jnp.exp(drafter_logits - mass) - wanted), None


_label_entropy.defvjp(_label_entropy_forward, _label_entropy_backward)


def cross_entropy(
    target_logits: Float[Array, "... V"] | None,
    drafter_logits: Float[Array, "... V"],
    labels: Int[Array, ...],
    *,
    smoothing: float = 0.0,
) -> Float[Array, ...]:
    """-log q of the labels, of which a share ``smoothing`` is spread evenly over all tokens but those whose
    logit is -inf (banned ones).

    The labels are tokens of the target (or references); ``target_logits`` are not looked at.

    Raises:
      ValueError: ``smoothing`` outside [0, 1[.

    >>> round(float(cross_entropy(None, jnp.log(jnp.array([0.25, 0.75])), jnp.array(0))), 4)
    1.3863
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing: expected a number in [0, 1[, got {smoothing}")
    return _label_entropy(drafter_logits.astype(jnp.float32), labels, smoothing)


def _times(mass: Array, log_ratio: Array) -> Array:
    """``mass * log_ratio``, 0 where the mass is."""
    return jnp.where(mass > 0, mass * log_ratio, 0)


def _forward_kl(log_p: Array, log_q: Array) -> Array:
    return _times(jnp.exp(log_p), log_p - log_q).sum(-1)


_FORWARD_KL = _Divergence(_forward_kl, lambda log_p, log_q, value: -jnp.exp(log_p))


def forward_kl(
    target_logits: Float[Array, "... V"], drafter_logits: Float[Array, "... V"], labels: Any = None
) -> Float[Array, ...]:
    """KL(p || q) = sum_x p log(p / q), infinite where q = 0 < p; its gradient q - p is finite there, too.

    >>> p, q = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75]))
    >>> round(float(forward_kl(p, q)), 4), round(float(reverse_kl(p, q)), 4)
    (0.1438, 0.1308)
    """
    return _of(_FORWARD_KL, target_logits, drafter_logits)


def _reverse_kl(log_p: Array, log_q: Array) -> Array:
    return _times(jnp.exp(log_q), log_q - jnp.maximum(log_p, TINY)).sum(-1)


def _reverse_kl_slope(log_p: Array, log_q: Array, value: Array) -> Array:
    return _times(jnp.exp(log_q), log_q - jnp.maximum(log_p, TINY) + 1)


_REVERSE_KL = _Divergence(_reverse_kl, _reverse_kl_slope)


def reverse_kl(
    target_logits: Float[Array, "... V"], drafter_logits: Float[Array, "... V"], labels: Any = None
) -> Float[Array, ...]:
    """KL(q || p) = sum_x q log(q / p). Where p is less than the least normal float32, 2**-126, or 0, it
    counts as that number: the drafter is pushed off such a token by a finite gradient, not an infinite one.
    """
    return _of(_REVERSE_KL, target_logits, drafter_logits)


def _log_mixture(beta: float, log_p: Array, log_q: Array) -> Array:
    mixture = beta * jnp.exp(log_p) + (1 - beta) * jnp.exp(log_q)
    return jnp.log(jnp.where(mixture > 0, mixture, 1))


@functools.cache
def _jsd(beta: float) -> _Divergence:
    def value(log_p: Array, log_q: Array) -> Array:
        log_m = _log_mixture(beta, log_p, log_q)
        terms = beta * _times(jnp.exp(log_p), log_p - log_m) + (1 - beta) * _times(
            jnp.exp(log_q), log_q - log_m
        )
        return terms.sum(-1)

    def slope(log_p: Array, log_q: Array, value: Array) -> Array:
        return (1 - beta) * _times(jnp.exp(log_q), log_q - _log_mixture(beta, log_p, log_q))

    return _Divergence(value, slope)


def jsd(
    target_logits: Float[Array, "... V"],
    drafter_logits: Float[Array, "... V"],
    labels: Any = None,
    *,
    beta: float = 0.5,
) -> Float[Array, ...]:
    """The Jensen-Shannon divergence, beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.

    Raises:
      ValueError: ``beta`` outside ]0, 1[, where it would be 0 for all laws.
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta: expected a number in ]0, 1[, got {beta}")
    return _of(_jsd(float(beta)), target_logits, drafter_logits)


def _overlap_slope(log_p: Array, log_q: Array) -> Array:
    """d sum_x min(p, q) / d log q: more of a token counts where the drafter has less than the target."""
    return jnp.where(log_q < log_p, jnp.exp(log_q), 0)


_ACCEPTANCE = _Divergence(
    lambda log_p, log_q: jnp.exp(jnp.minimum(log_p, log_q)).sum(-1),
    lambda log_p, log_q, value: _overlap_slope(log_p, log_q),
)
_TOTAL_VARIATION = _Divergence(
    lambda log_p, log_q: 1 - jnp.exp(jnp.minimum(log_p, log_q)).sum(-1),
    lambda log_p, log_q, value: -_overlap_slope(log_p, log_q),
)


def acceptance(
    target_logits: Float[Array, "... V"], drafter_logits: Float[Array, "... V"]
) -> Float[Array, ...]:
    """alpha = sum_x min(p, q), the probability that a draft drawn from q is kept.

    >>> p, q = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75]))
    >>> round(float(acceptance(p, q)), 4), round(float(total_variation(p, q)), 4)
    (0.75, 0.25)
    """
    return _of(_ACCEPTANCE, target_logits, drafter_logits)


def total_variation(
    target_logits: Float[Array, "... V"], drafter_logits: Float[Array, "... V"], labels: Any = None
) -> Float[Array, ...]:
    """TV(p, q) = 1 - alpha. Where the laws hardly overlap its gradient is as small as the overlap."""
    return _of(_TOTAL_VARIATION, target_logits, drafter_logits)


def _negative_log_acceptance(log_p: Array, log_q: Array) -> Array:
    # In logarithms, so that laws that share next to nothing still have a value and a direction.
    common = jnp.minimum(log_p, log_q)
    top = common.max(-1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0, top)
    return -(top[..., 0] + jnp.log(jnp.exp(common - top).sum(-1)))


def _negative_log_acceptance_slope(log_p: Array, log_q: Array, value: Array) -> Array:
    value = jnp.where(value == jnp.inf, 0, value)
    return -jnp.where(log_q < log_p, jnp.exp(log_q + value), 0)


_NEGATIVE_LOG_ACCEPTANCE = _Divergence(_negative_log_acceptance, _negative_log_acceptance_slope)


def negative_log_acceptance(
    target_logits: Float[Array, "... V"], drafter_logits: Float[Array, "... V"], labels: Any = None
) -> Float[Array, ...]:
    """-log alpha: the gradient of TV divided by alpha, which does not vanish where the laws hardly overlap.

    Infinite, with gradient 0, where no token has p > 0 and a drafter's logit above -inf.
    """
    return _of(_NEGATIVE_LOG_ACCEPTANCE, target_logits, drafter_logits)


def lk_hybrid(
    target_logits: Float[Array, "... V"],
    drafter_logits: Float[Array, "... V"],
    labels: Any = None,
    *,
    eta: float = 3.0,
) -> Float[Array, ...]:
    """l KL(p || q) + (1 - l) TV(p, q), where l = exp(-eta alpha) at each position and has no gradient: KL for
    a drafter that knows nothing yet, the acceptance itself for one that does.

    Raises:
      ValueError: ``eta`` < 0.
    """
    if not eta >= 0:
        raise ValueError(f"eta: expected a number >= 0, got {eta}")
    variation = total_variation(target_logits, drafter_logits)
    share = jnp.exp(-eta * (1 - jax.lax.stop_gradient(variation)))
    return share * forward_kl(target_logits, drafter_logits) + (1 - share) * variation


# --- by name ------------------------------------------------------------------------------------------

_LOSSES: dict[str, Loss] = {
    function.__name__: function
    for function in (
        cross_entropy,
        forward_kl,
        reverse_kl,
        jsd,
        total_variation,
        negative_log_acceptance,
        lk_hybrid,
    )
}
NAMES = tuple(_LOSSES)


def named(name: str, **arguments: float) -> Loss:
    """A loss with its settings as a function of three arguments: equal settings give the same object, so
    that it can be a static argument of a jitted step.

    Args:
      name: one of `NAMES`.
      **arguments: ``smoothing`` of cross_entropy, ``beta`` of jsd, ``eta`` of lk_hybrid.
    Raises:
      ValueError: an unknown name or setting, or one out of range.

    >>> named("jsd") is named("jsd", beta=0.5)
    True
    """
    if name not in _LOSSES:
        raise ValueError(f"loss: expected one of {', '.join(NAMES)}, got {name!r}")
    parameters = inspect.signature(_LOSSES[name]).parameters.values()
    settings = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for argument in arguments:
        if argument not in settings:
            raise ValueError(f"{name}: expected arguments among {list(settings)}, got {argument!r}")
    return _with_settings(name, tuple((settings | arguments).items()))


@functools.cache
def _with_settings(name: str, settings: tuple[tuple[str, float], ...]) -> Loss:
    loss = functools.partial(_LOSSES[name], **dict(settings))
    jax.eval_shape(loss, jnp.zeros(1), jnp.zeros(1), jnp.int32(0))  # refuses a setting out of range
    return loss


# --- from positions to a scalar -----------------------------------------------------------------------


def sequence_mean(per_position: Float[Array, "B T"], weights: Float[Array, "B T"]) -> Float[Array, ""]:
    """The weighted mean within each sequence, then the mean over the sequences that have any weight, so that
    a long answer counts no more than a short one. 0 where nothing has weight; what stands at a position
    without weight, NaN included, has no influence.

    >>> losses = jnp.array([[1.0, 3.0], [8.0, 9.0], [4.0, 5.0]])
    >>> float(sequence_mean(losses, jnp.array([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]])))
    3.5
    """
    total = weights.sum(-1)
    some = total > 0
    sums = (jnp.where(weights > 0, per_position, 0) * weights).sum(-1)
    means = sums / jnp.where(some, total, 1)
    return means.sum() / jnp.maximum(some.sum(), 1).astype(jnp.float32)


def token_filter(
    target_logits: Float[Array, "B T V"],
    drafter_logits: Float[Array, "B T V"],
    reference_logits: Float[Array, "B T V"],
    weights: Float[Array, "B T"],
    keep: float = 0.4,
) -> Float[Array, "B T"]:
    """AdaSPEC's selection: ``weights``, set to 0 but for the share ``keep`` of the batch's tokens where the
    drafter is furthest behind the reference, a copy of the drafter that was distilled before it.

    Of the n tokens with weight, round(keep * n) are kept, at least one: those with the largest
    KL(p || drafter) - KL(p || reference), the earlier one of two equal ones. No gradient passes.

    Raises:
      ValueError: ``keep`` outside ]0, 1].

    Reference: Hu et al. 2025, AdaSPEC, arXiv 2510.19779.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep: expected a number in ]0, 1], got {keep}")
    behind = forward_kl(target_logits, drafter_logits) - forward_kl(target_logits, reference_logits)
    mine = (weights > 0).reshape(-1)
    behind = jnp.where(mine & ~jnp.isnan(behind.reshape(-1)), behind.reshape(-1), -jnp.inf)
    # By weight first, so that a token without weight never stands before one with it.
    order = jnp.lexsort((-behind, ~mine))
    count = jnp.maximum(jnp.round(keep * mine.sum().astype(jnp.float32)), 1).astype(jnp.int32)
    count = jnp.minimum(count, mine.sum())
    kept = jnp.zeros_like(mine).at[order].set(jnp.arange(mine.shape[0]) < count)
    return jax.lax.stop_gradient(jnp.where(kept.reshape(weights.shape), weights, 0))
