"""Losses of draft networks: K laws after each anchor, against the target's laws at the same places.

With a a root's index, the law of depth k is that of token a + k. A loss is a weighted sum of terms

    sum_terms c * mean over sequences of  sum w_k m L(p_k, q_k) / sum w_k m

over all depths of all anchors of a sequence, so that a long answer counts no more than a short one
(`losses.sequence_mean`); a sequence where m is 0 throughout adds 0. L is one of `training.losses`, w_k the
weight of a depth (`Weighting`), and m says where the term means something. On a reduced vocabulary D, where
q = 0 outside::

    cross_entropy                               m: the label is in D
    forward_kl, reverse_kl, jsd                 p renormalised on D; m: the target's first choice is in D
    total_variation, negative_log_acceptance    p as it is: alpha = sum_{x in D} min(p, q)
    lk_hybrid                                   its KL like the KLs, 0 where these have m = 0; p as it is in
                                                the rest of it

(EAGLE-3, arXiv 2503.01840, masks so; LK losses, arXiv 2602.23881, tell the two p apart.)
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import pydantic
from jaxtyping import Array, Bool, Float, Int

from training import losses
from training.config import Strict

RENORMALISED = ("forward_kl", "reverse_kl", "jsd")
Weight = Annotated[float, pydantic.Field(ge=0)]


class Known(NamedTuple):
    """What is known of the text and the target at [B, A, K] places, over the drafter's Vd columns.

    All but ``hidden`` may be anything where ``exists`` is false: beyond the answer's end, at missing anchors.
    """

    target: Float[Array, "B A K Vd"]  # the target's logits of these columns
    rest: Float[Array, "B A K"] | None  # log sum exp of those of all other tokens; None: there are none
    inside: Bool[Array, "B A K"]  # the target's first choice is a column
    best: Int[Array, "B A K"]  # that token
    labels: Int[Array, "B A K"]  # the column of the text's token, -1: outside
    hidden: Float[Array, "B A K E"]  # the target's, of which these laws are made
    exists: Bool[Array, "B A K"]  # the token belongs to the answer; closed under smaller k


# --- settings ---------------------------------------------------------------------------------------


class Term(Strict):
    """A loss by name (`training.losses.NAMES`) with its arguments, and its coefficient."""

    loss: str = "forward_kl"
    arguments: dict[str, float] = pydantic.Field(default={})
    weight: Annotated[float, pydantic.Field(gt=0)] = 1.0

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Term:
        losses.named(self.loss, **self.arguments)
        return self


class Weighting(Strict):
    """The weight of depth k = 1 .. K, up to the normalisation per sequence.

    uniform: 1. decay: ``decay ** (k - 1)`` (EAGLE-3 .8, FastMTP .6). dflash: ``exp(-(k - 1) / gamma)``
    (DFlash: 7 for a block of 16, 4 for 8). dpace: ``sum_{m >= k} prod_{i <= m} ((1 - s) alpha_i + s)`` with
    the exact alpha_i, without gradient, s = ``smoothing``: how much of the accepted length hangs on depth k
    (D-PACE, arXiv 2605.18810, there with q(label) for alpha).
    """

    kind: Literal["uniform", "decay", "dflash", "dpace"] = "decay"
    decay: Annotated[float, pydantic.Field(gt=0, le=1)] = 0.8
    gamma: Annotated[float, pydantic.Field(gt=0)] = 4.0
    smoothing: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.5


class DraftLoss(Strict):
    """Terms over laws, the weights of depths, and terms over what else a network shows (`Network.details`).

    regression: coefficient of SmoothL1 between the network's hidden state and the target's, a mean over the
    width (EAGLE-1: 1 beside 0.1 of a KL). confidence: coefficient of the binary cross-entropy between the
    network's confidence and alpha, which gets no gradient from it (DSpark).
    """

    terms: Annotated[tuple[Term, ...], pydantic.Field(min_length=1)] = (Term(),)
    weighting: Weighting = Weighting()
    regression: Weight = 0.0
    confidence: Weight = 0.0

    def static(self) -> Objective:
        """The loss as a hashable function."""
        terms = tuple((t.loss, losses.named(t.loss, **t.arguments), t.weight) for t in self.terms)
        etas = tuple(loss.keywords.get("eta") for _, loss, _ in terms)
        return Objective(terms, etas, self.weighting, self.regression, self.confidence)


# --- the loss ---------------------------------------------------------------------------------------


def acceptance(known: Known, logits: Float[Array, "B A K Vd"]) -> Float[Array, "B A K"]:
    """alpha = sum_x min(p, q), p over the whole vocabulary; 0 where there is no token."""
    alpha = losses.acceptance(*_whole(known, logits))
    return jnp.where(known.exists, alpha, 0)


def _whole(known: Known, logits: Array) -> tuple[Float[Array, "B A K Vw"], Float[Array, "B A K Vw"]]:
    """Logits over the columns and, where the vocabulary is reduced, one more that stands for all other
    tokens: it has their mass under the target, and none under the drafter."""
    if known.rest is None:
        return known.target, logits
    impossible = jnp.full((*logits.shape[:-1], 1), -jnp.inf, logits.dtype)
    whole = jnp.concatenate([known.target, known.rest[..., None]], axis=-1)
    return whole, jnp.concatenate([logits, impossible], axis=-1)


def depth_weights(
    weighting: Weighting, exists: Bool[Array, "B A K"], alpha: Float[Array, "B A K"] | None
) -> Float[Array, "B A K"]:
    """Not normalised; 0 where there is no token. ``alpha``: for dpace.

    >>> exists = jnp.array([[[True, True, False]]])
    >>> depth_weights(Weighting(kind="decay", decay=0.5), exists, None).tolist()
    [[[1.0, 0.5, 0.0]]]
    >>> depth_weights(Weighting(kind="dpace"), exists, jnp.array([[[0.5, 0.0, 1.0]]])).tolist()
    [[[1.125, 0.375, 0.0]]]
    """
    step = jnp.arange(exists.shape[-1], dtype=jnp.float32)
    if weighting.kind == "dpace":
        assert alpha is not None
        smooth = (1 - weighting.smoothing) * jax.lax.stop_gradient(alpha) + weighting.smoothing
        reached = jnp.where(exists, jnp.cumprod(smooth, axis=-1), 0)
        weights = jnp.flip(jnp.cumsum(jnp.flip(reached, -1), axis=-1), -1)
    elif weighting.kind == "decay":
        weights = jnp.broadcast_to(weighting.decay**step, exists.shape)
    elif weighting.kind == "dflash":
        weights = jnp.broadcast_to(jnp.exp(-step / weighting.gamma), exists.shape)
    else:
        weights = jnp.ones(exists.shape, jnp.float32)
    return jnp.where(exists, weights, 0)


def smooth_l1(found: Float[Array, "... E"], wanted: Float[Array, "... E"]) -> Float[Array, ...]:
    """The mean over the width of d^2 / 2 where |d| < 1, else |d| - 1/2.

    >>> float(smooth_l1(jnp.array([0.5, 3.0]), jnp.zeros(2)))
    1.3125
    """
    d = found.astype(jnp.float32) - wanted.astype(jnp.float32)
    near = jnp.minimum(jnp.abs(d), 1)
    return (near * (jnp.abs(d) - near / 2)).mean(-1)


@dataclasses.dataclass(frozen=True)
class Objective:
    """`DraftLoss` as a static, hashable function of what is known and what the network says."""

    terms: tuple[tuple[str, losses.Loss, float], ...]
    etas: tuple[float, ...]
    weighting: Weighting
    regression: float
    confidence: float

    @property
    def needs(self) -> tuple[str, ...]:
        """Which of a network's details it looks at."""
        wanted = (("hidden", self.regression), ("confidence", self.confidence))
        return tuple(name for name, weight in wanted if weight)

    def __call__(
        self, known: Known, logits: Float[Array, "B A K Vd"], details: dict[str, Array] | None = None
    ) -> Float[Array, ""]:
        """The mean over sequences; 0 where no sequence has an anchor.

        Gradients are finite whatever the logits are: those of `training.losses` are, and what stands at a
        place without weight has none.
        """
        alpha = None
        if self.weighting.kind == "dpace" or self.confidence:
            alpha = jax.lax.stop_gradient(acceptance(known, logits))
        weights = depth_weights(self.weighting, known.exists, alpha)

        def mean(values: Float[Array, "B A K"], where: Bool[Array, "B A K"] | None = None) -> Array:
            rows = values.shape[0]
            if where is None:
                return losses.sequence_mean(values.reshape(rows, -1), weights.reshape(rows, -1))
            chosen = jnp.where(where, weights, 0).reshape(rows, -1)
            found = losses.sequence_mean(values.reshape(rows, -1), chosen)
            # Of all sequences, so that a batch's mean is that of its micro-batches' means.
            answered = (weights.reshape(rows, -1).sum(-1) > 0).sum()
            share = (chosen.sum(-1) > 0).sum() / jnp.maximum(answered, 1)
            return found * share.astype(jnp.float32)

        total = jnp.zeros((), jnp.float32)
        for (name, loss, weight), eta in zip(self.terms, self.etas, strict=True):
            if name == "cross_entropy":
                value = mean(loss(None, logits, jnp.maximum(known.labels, 0)), known.labels >= 0)
            elif name in RENORMALISED:
                value = mean(loss(known.target, logits), known.inside)
            elif name == "lk_hybrid":
                value = mean(_lk_hybrid(known, logits, eta))
            else:
                value = mean(loss(*_whole(known, logits)))
            total = total + weight * value
        if self.regression:
            assert details is not None
            total = total + self.regression * mean(smooth_l1(details["hidden"], known.hidden))
        if self.confidence:
            assert details is not None
            assert alpha is not None
            score = details["confidence"].astype(jnp.float32)
            entropy = jnp.maximum(score, 0) - score * alpha + jnp.log1p(jnp.exp(-jnp.abs(score)))
            total = total + self.confidence * mean(entropy)
        return total


def _lk_hybrid(known: Known, logits: Float[Array, "B A K Vd"], eta: float) -> Float[Array, "B A K"]:
    """`losses.lk_hybrid` with the KL on the columns and the acceptance over the whole vocabulary."""
    variation = losses.total_variation(*_whole(known, logits))
    share = jnp.exp(-eta * (1 - jax.lax.stop_gradient(variation)))
    divergence = jnp.where(known.inside, losses.forward_kl(known.target, logits), 0)
    return share * divergence + (1 - share) * variation
