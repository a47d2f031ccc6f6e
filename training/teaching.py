"""A draft network beside its target: the objective that trains it, and what it would be worth."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jspec import models
from jspec.drafters.nets import Network, Text, Weights
from jspec.types import LanguageModel, PyTree
from training import anchors, draft_loss, forward, losses
from training.draft_loss import Known


@dataclasses.dataclass(frozen=True)
class Teaching:
    """The objective: the network's laws after a sample of anchors against the target's.

    ``frozen`` holds the target's params, head and ids of `Weights` and, as ``columns``, the target's head of
    these ids where it is a kernel; the trained params are its net.
    """

    target: LanguageModel
    network: Network
    loss: draft_loss.Objective
    num_tokens: int
    anchors: int | None
    vocab_size: int  # logits from there on are padding
    longest: int  # answer tokens of a sequence; of longer answers not all can be anchors
    banned: tuple[int, ...] = ()  # tokens that the target never emits: no part of any law

    def __call__(
        self, params: PyTree, frozen: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """See `training.loop.Objective`."""
        return self.loss(*self.taught(params, frozen, batch, key)), {}

    def taught(
        self, params: PyTree, frozen: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[Known, Float[Array, "B A K Vd"], dict[str, Array]]:
        """What is known at the anchors drawn with ``key``, the network's logits there, and its details."""
        weights = Weights(params, frozen["head"], frozen["ids"])
        number = self.longest if self.anchors is None else min(self.anchors, self.longest)
        chosen = anchors.sample(key, batch.weights, number)
        hidden, taps = self._shown(frozen["target"], batch)
        known = anchors.look(
            self.target,
            frozen["target"],
            hidden,
            batch.labels,
            *anchors.places(chosen, batch.weights, self.num_tokens),
            weights.ids,
            self.vocab_size,
            self.longest,
            self.banned,
            batch.laws,
            frozen["columns"],
        )
        given = Text(batch.tokens, batch.lengths, chosen, hidden, taps, batch.source, batch.source_lengths)
        arguments = (weights, self.target, frozen["target"], given, self.num_tokens)
        details: dict[str, Array] = {}
        if self.loss.needs:
            assert self.network.details is not None
            logits, details = self.network.details(*arguments)
            if missing := [name for name in self.loss.needs if details.get(name) is None]:
                raise ValueError(f"loss: expected a network with {missing[0]!r} among its details, got none")
        else:
            logits = self.network.teach(*arguments)
        return known, self._possible(logits, weights.ids), details

    def _possible(self, logits: Float[Array, "*n Vd"], ids: Array | None) -> Float[Array, "*n Vd"]:
        """The network's logits of what can come out."""
        if ids is None:
            return forward.possible(logits, self.vocab_size, self.banned)
        if not self.banned:
            return logits
        return jnp.where(jnp.isin(ids, jnp.array(self.banned)), -jnp.inf, logits)

    def _shown(self, target_params: PyTree, batch: PyTree) -> tuple[Array, dict[int, Array]]:
        taps = self.network.taps
        if batch.features is None:
            found = forward.hidden(self.target, target_params, batch, taps=taps)
            return jax.lax.stop_gradient((found.hidden, found.taps))
        dtype = jax.tree.leaves(target_params)[0].dtype
        hidden, *rest = jnp.split(jnp.asarray(batch.features).astype(dtype), 1 + len(taps), axis=-1)
        return hidden, dict(zip(taps, rest, strict=True))


# --- simulated acceptance ---------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("objective", "dtype"))
def _sums(
    params: PyTree, frozen: PyTree, batch: PyTree, *, objective: Teaching, dtype: str
) -> dict[str, Float[Array, " K"]]:
    """Sums over the anchors, by depth."""
    known, logits, _ = objective.taught(models.cast(params, dtype), frozen, batch, jax.random.key(0))
    first = logits.argmax(-1).astype(jnp.int32)
    if frozen["ids"] is not None:
        first = frozen["ids"][first]
    alpha = draft_loss.acceptance(known, logits)
    entropy = losses.cross_entropy(None, logits, jnp.maximum(known.labels, 0))
    labelled = known.exists & (known.labels >= 0)
    found = {
        "exists": known.exists,
        "accepted": jnp.cumprod((known.exists & (first == known.best)).astype(jnp.int32), axis=-1),
        "alpha": alpha,
        "kept": jnp.cumprod(alpha, axis=-1),
        "labelled": labelled,
        "entropy": jnp.where(labelled, entropy, 0),
    }
    return {name: value.astype(jnp.float32).sum((0, 1)) for name, value in found.items()}


@functools.partial(jax.jit, static_argnames=("objective", "number", "dtype"))
def _ranked(
    params: PyTree, frozen: PyTree, batch: PyTree, *, objective: Teaching, number: int, dtype: str
) -> tuple[Float[Array, "K R"], Float[Array, " K"]]:
    """How often the target's first choice is the network's r-th, and of how many."""
    known, logits, _ = objective.taught(models.cast(params, dtype), frozen, batch, jax.random.key(0))
    tokens = jax.lax.top_k(logits, number)[1]
    if frozen["ids"] is not None:
        tokens = frozen["ids"][tokens]
    right = known.exists[..., None] & (tokens == known.best[..., None])
    return right.astype(jnp.float32).sum((0, 1)), known.exists.astype(jnp.float32).sum((0, 1))


def accuracies(
    objective: Teaching,
    params: PyTree,
    frozen: PyTree,
    batches: Sequence[Any],
    *,
    number: int = 10,
    dtype: str = "float32",
) -> Float[np.ndarray, "K R"]:
    """By depth, the shares of anchors where the target's first choice is the network's r-th, r = 1 ..
    ``number``: what `jspec.trees.grow` makes a static tree from."""
    parts = [
        _ranked(params, frozen, batch, objective=objective, number=number, dtype=dtype) for batch in batches
    ]
    right, exists = (np.sum(values, axis=0) for values in zip(*jax.device_get(parts), strict=True))
    return right / np.maximum(exists, 1)[:, None]


def simulate(
    objective: Teaching, params: PyTree, frozen: PyTree, batches: Sequence[Any], *, dtype: str = "float32"
) -> dict[str, float]:
    """What a chain of K drafted tokens would be worth on these texts, from the target's and the network's
    laws alone. Means at depth k are over the anchors after which there are k tokens; anchors are the same at
    every call.

    Returns:
      For k = 1 .. K ``accepted_k``, the share of anchors from which the first choices of depths 1 .. k all
      are the target's, and ``tau_0`` = 1 + sum_k accepted_k: on text that the target wrote greedily, what
      greedy decoding emits a round. ``alpha_k``, the mean of sum min(p, q) at depth k given the text before
      it, and ``tau_1`` = 1 + sum_k mean(alpha_1 ... alpha_k): an estimate for sampling at temperature 1, on
      text that was sampled so. ``validation_loss``: -log q of the text's tokens, of all depths, where they
      are columns.
    """
    parts = [_sums(params, frozen, batch, objective=objective, dtype=dtype) for batch in batches]
    found = jax.device_get(parts)
    total = {name: np.sum([part[name] for part in found], axis=0) for name in found[0]}
    number = np.maximum(total["exists"], 1)
    accepted, alpha, kept = (total[name] / number for name in ("accepted", "alpha", "kept"))
    result = {f"accepted_{k + 1}": float(value) for k, value in enumerate(accepted)}
    result |= {f"alpha_{k + 1}": float(value) for k, value in enumerate(alpha)}
    loss = float(total["entropy"].sum() / max(total["labelled"].sum(), 1))
    taus = {"tau_0": 1 + float(accepted.sum()), "tau_1": 1 + float(kept.sum())}
    return {"validation_loss": loss} | taus | result
