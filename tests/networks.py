"""Every draft network on a tiny random target, as the tests of drafting and of training take them."""

from __future__ import annotations

import dataclasses
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
    rows: bool = False  # a reduced vocabulary: three quarters of the target's rows, or as many of its own


NETWORKS: dict[str, Case] = {
    "medusa": Case(head_network("medusa", layers=2), drafters.heads),
    "medusa own head": Case(head_network("medusa", 4, head="own"), lambda n, w: drafters.heads(n, w, 3)),
    "medusa rows": Case(head_network("medusa", head="rows"), drafters.heads, rows=True),
    "hydra": Case(head_network("hydra", 4, layers=2), lambda n, w: drafters.heads(n, w, 3)),
    "hydra own head": Case(head_network("hydra", head="own"), drafters.heads),
    "hydra rows": Case(head_network("hydra", head="rows"), drafters.heads, rows=True),
    "blockwise": Case(head_network("blockwise", 4), lambda n, w: drafters.heads(n, w, 3)),
}


# --- blocks -----------------------------------------------------------------------------------------


def a_block(kind: str, **settings) -> Callable[[Tiny], Network]:
    """A block network of two layers for a target; ``rows``: of a reduced vocabulary."""

    def network(model: Tiny) -> Network:
        config = model.lm.config
        sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_width": 48}
        if settings.get("head") == "rows":
            sizes["draft_vocab"] = config.vocab_size * 3 // 4
        return drafters.block_network(drafters.block_config(config, kind, **(sizes | settings)))

    return network


def a_chain(network: Network, weights: Weights) -> Drafter:
    return drafters.block(network, weights, NUM_TOKENS)


NETWORKS |= {
    "dflash": Case(a_block("dflash"), a_chain),
    "dflash window": Case(a_block("dflash", window=4, qk_norm=False, taps=()), a_chain),
    "dspark rows": Case(a_block("dspark", markov_rank=4, head="rows"), a_chain, rows=True),
    "causal block own": Case(a_block("causal", markov_rank=4, head="own"), a_chain),
}


def a_masked(**settings) -> Callable[[Tiny], Network]:
    """A language model like the target, of one layer."""

    def network(model: Tiny) -> Network:
        target = model.lm.config
        shape = {"vocab_size": target.vocab_size, "num_tokens": NUM_TOKENS}
        shape["lm"] = dataclasses.replace(target, num_layers=1)
        return drafters.masked_network(drafters.MaskedConfig(**(shape | settings)))

    return network


NETWORKS |= {
    "masked": Case(a_masked(), drafters.masked),
    "masked block": Case(a_masked(causal=False, shared_mask=False), drafters.masked),
}


# --- recurrent nets ---------------------------------------------------------------------------------


def small(model: Tiny, **more) -> dict:
    """Fields of a network's config that suit the tiny targets; a reduced vocabulary unless the head is the
    target's."""
    width, vocab_size = model.lm.config.width, model.lm.config.vocab_size
    reduced = None if more.get("head", "target") == "target" else vocab_size * 3 // 4
    sizes = {"width": width, "vocab_size": vocab_size, "draft_vocab": reduced}
    return sizes | {"num_heads": 2, "head_dim": 8, "mlp_width": 24} | more


def eagle(**more) -> Callable[[Tiny], Network]:
    return lambda t: drafters.eagle_network(drafters.EagleConfig(**small(t, **more)))


def eagle3(**more) -> Callable[[Tiny], Network]:
    def network(t: Tiny) -> Network:
        taps = drafters.eagle3_taps(t.lm.config.num_layers)
        return drafters.eagle_network(drafters.Eagle3Config(taps=taps, **small(t, **more)))

    return network


def mtp(**more) -> Callable[[Tiny], Network]:
    return lambda t: drafters.mtp_network(drafters.MtpConfig(**small(t, **more)))


def mtp_heads(**more) -> Callable[[Tiny], Network]:
    more = {"num_layers": NUM_TOKENS} | more
    return lambda t: drafters.mtp_network(drafters.MtpHeadsConfig(**small(t, **more)))


def by_eagle(network: Network, weights: Weights, **more) -> Drafter:
    return drafters.eagle(network, weights, NUM_TOKENS, **more)


def by_mtp(network: Network, weights: Weights, **more) -> Drafter:
    return drafters.mtp(network, weights, NUM_TOKENS, **more)


NETWORKS |= {
    "eagle": Case(eagle(), by_eagle),
    "eagle rows": Case(eagle(head="rows", bias=False, num_layers=2), by_eagle, rows=True),
    "eagle3": Case(eagle3(), by_eagle),
    "eagle3 own": Case(eagle3(head="own", num_kv_heads=1), by_eagle, rows=True),
    "eagle3.1": Case(eagle3(fc_norm=True, feed_normed=True, qk_norm=True, qkv_bias=True), by_eagle),
    "mtp": Case(mtp(), by_mtp),
    "mtp rows": Case(mtp(head="rows", feed_normed=True), by_mtp, rows=True),
    "mtp heads": Case(mtp_heads(), by_mtp),
    "mtp heads tap": Case(mtp_heads(tap=1, head="rows"), by_mtp, rows=True),
}


# --- nets that look at the target's cache, and look-ahead tokens --------------------------------------


def a_reader(kind: str, **more) -> Callable[[Tiny], Network]:
    """One that looks at the target's layers 1 and 0."""

    def network(t: Tiny) -> Network:
        own = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8} if kind == "glide" else {"inner": 24}
        if more.get("head", "target") != "target":
            own["draft_vocab"] = t.lm.config.vocab_size * 3 // 4
        sizes = {"layers": (1, 0), "mlp_width": 24}
        return drafters.attend_network(drafters.attend_config(t.lm.config, kind, **(sizes | own | more)))

    return network


def by_attend(network: Network, weights: Weights, **more) -> Drafter:
    return drafters.attend(network, weights, NUM_TOKENS, **more)


def a_lookahead(**more) -> Callable[[Tiny], Network]:
    def network(t: Tiny) -> Network:
        sizes = {"width": t.lm.config.width, "vocab_size": t.lm.config.vocab_size}
        if more.get("head", "target") != "target":
            sizes["draft_vocab"] = sizes["vocab_size"] * 3 // 4
        return drafters.lookahead_network(
            drafters.LookaheadConfig(**({"num_tokens": NUM_TOKENS} | sizes | more))
        )

    return network


NETWORKS |= {
    "glide": Case(a_reader("glide"), by_attend),
    "glide rows": Case(a_reader("glide", head="rows", query_norm=True), by_attend, rows=True),
    "assistant": Case(a_reader("assistant"), by_attend),
    "assistant own": Case(a_reader("assistant", head="own"), by_attend, rows=True),
    "pass": Case(a_lookahead(), drafters.lookahead_tokens),
    "bita own": Case(a_lookahead(num_prompts=2, head="own"), drafters.lookahead_tokens, rows=True),
    "bita rows": Case(
        a_lookahead(num_tokens=4, num_prompts=1, head="rows"),
        lambda n, w, **more: drafters.lookahead_tokens(n, w, **({"num_tokens": NUM_TOKENS} | more)),
        rows=True,
    ),
}


def shaken(weights: Weights, seed: int = 0) -> Weights:
    """The same with every parameter of the net moved at random: networks begin with zeros in places, and
    a test would not see what hangs on them. (Three times as much, and EAGLE's outputs, which no norm bounds,
    amplify rounding to 6e-4 of a law.)"""
    leaves, structure = jax.tree.flatten(weights.net)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [x + 0.1 * jax.random.normal(key, x.shape, x.dtype) for x, key in zip(leaves, keys, strict=True)]
    return weights._replace(net=jax.tree.unflatten(structure, moved))


def of(name: str, tiny: Tiny) -> tuple[Network, Weights]:
    """The network of a case, and random weights of it."""
    from jspec.drafters import nets

    case, vocab_size = NETWORKS[name], tiny.lm.config.vocab_size
    network = case.network(tiny)
    weights = shaken(Weights(network.init(jax.random.key(5))))
    if case.rows:
        ids = jnp.arange(vocab_size * 3 // 4, dtype=jnp.int32) + vocab_size // 4
        own = network.config.head == "own"
        weights = weights._replace(
            head=None if own else nets.rows_of_head(tiny.lm, tiny.params, ids), ids=ids
        )
    return network, weights


@functools.cache
def drafter_of(name: str, model: Callable[[int], Tiny], vocab_size: int) -> tuple[Network, Weights, Drafter]:
    """The network of a case, random weights of it and its drafter."""
    network, weights = of(name, model(vocab_size))
    return network, weights, NETWORKS[name].drafter(network, weights)
