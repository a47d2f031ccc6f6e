"""Every draft network on a tiny random target, as the tests of drafting and of training take them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from zoo import Tiny, head_network

from jspec import drafters
from jspec.drafters.nets import Network, Weights
from jspec.types import Drafter

NUM_TOKENS = 3


class Case(NamedTuple):
    """``network(model)`` for a target, and the drafter that draws a chain of `NUM_TOKENS` with it."""

    network: Callable[[Tiny], Network]
    drafter: Callable[[Network, Weights], Drafter]
    rows: bool = False  # a reduced vocabulary: the head is three quarters of the target's rows


NETWORKS: dict[str, Case] = {
    "medusa": Case(head_network("medusa", layers=2), drafters.heads),
    "medusa own head": Case(head_network("medusa", 4, head="own"), lambda n, w: drafters.heads(n, w, 3)),
    "medusa rows": Case(head_network("medusa", head="rows"), drafters.heads, rows=True),
    "hydra": Case(head_network("hydra", 4, layers=2), lambda n, w: drafters.heads(n, w, 3)),
    "hydra own head": Case(head_network("hydra", head="own"), drafters.heads),
    "hydra rows": Case(head_network("hydra", head="rows"), drafters.heads, rows=True),
    "blockwise": Case(head_network("blockwise", 4), lambda n, w: drafters.heads(n, w, 3)),
}


def shaken(weights: Weights, seed: int = 0) -> Weights:
    """The same with every parameter of the net moved at random: networks begin with zeros in places, and
    a test would not see what hangs on them."""
    leaves, structure = jax.tree.flatten(weights.net)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [x + 0.3 * jax.random.normal(key, x.shape, x.dtype) for x, key in zip(leaves, keys, strict=True)]
    return weights._replace(net=jax.tree.unflatten(structure, moved))


@functools.cache
def drafter_of(name: str, model: Callable[[int], Tiny], vocab_size: int) -> tuple[Network, Weights, Drafter]:
    """The network of a case, random weights of it and its drafter."""
    from jspec.drafters import nets

    case, tiny = NETWORKS[name], model(vocab_size)
    network = case.network(tiny)
    weights = shaken(Weights(network.init(jax.random.key(5))))
    if case.rows:
        ids = jnp.arange(vocab_size * 3 // 4, dtype=jnp.int32) + vocab_size // 4
        weights = weights._replace(head=nets.rows_of_head(tiny.lm, tiny.params, ids), ids=ids)
    return network, weights, case.drafter(network, weights)
