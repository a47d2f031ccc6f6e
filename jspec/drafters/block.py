"""Drafting a whole block in one forward: chains (DFlash, DSpark) and best-first trees (JetSpec, DDTree).

`jspec.drafters.block_network` has the network and says what it reads.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec import sampling
from jspec.checks import at_least, between
from jspec.drafters import nets
from jspec.drafters.autoregressive import Continue, draft_chain, stopping
from jspec.drafters.best_first import best_first, num_candidates
from jspec.drafters.block_network import (
    BlockConfig,
    BlockNet,
    block_config,
    block_net,
    block_network,
    block_width,
    teach_both,
)
from jspec.drafters.common import root
from jspec.drafters.nets import Network, Weights
from jspec.models import cache as kv
from jspec.models import cache_dtype
from jspec.types import Context, Draft, Drafter, Forward, Keys, LanguageModel, Method, Prompt, Verdict

__all__ = ["BlockConfig", "block", "block_config", "block_network", "block_tree", "teach_both"]

EXPANDED = 8  # nodes a level that a tree grows from where each needs logits of its own


class BlockParams(NamedTuple):
    """Weights, and the stopping rules (None: none)."""

    weights: Weights
    proceed: Continue | None = None
    survival: Float[Array, ""] | None = None


class _Block(NamedTuple):
    """What a network says of the block after the root."""

    net: BlockNet
    hidden: Float[Array, "B K E"]
    logits: Float[Array, "B K Vd"]  # without the Markov head's bias


def _read(
    config: BlockConfig,
    weights: Weights,
    cache: kv.Cache,
    context: Context,
    num_tokens: int,
    known: Int[Array, "B K"] | None = None,
) -> _Block:
    """One forward over the block; where ``known`` is not -1, that token stands in the mask's place."""
    net = block_net(config, weights.net)
    width = block_width(config, num_tokens)
    tokens = jnp.pad(root(context)[:, None], ((0, 0), (0, width - 1)), constant_values=-1)
    if known is not None:
        tokens = jnp.concatenate([tokens[:, :1], known[:, : width - 1]], axis=1)
    x = net.inputs(context.target, context.params, tokens[:, None])
    hidden = net.predicting(net(x, cache.keys, cache.values, cache.lengths[:, None]))[:, 0]
    return _Block(net, hidden, nets.logits(weights, context.target, context.params, hidden))


def _init(config: BlockConfig):
    def init(params: BlockParams, prompt: Prompt, capacity: int, target: LanguageModel) -> kv.Cache:
        config.check_target(target.config)
        batch, c = prompt.lengths.shape[0], config
        dtype = block_net(c, params.weights.net).dtype
        cached = cache_dtype(dtype) or dtype
        return kv.empty(batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, cached)

    return init


def _update(config: BlockConfig):
    def update(
        params: BlockParams,
        state: kv.Cache,
        context: Context,
        draft: Draft,
        verdict: Verdict,
        forward: Forward,
    ) -> kv.Cache:
        # Nodes path[:, 0 .. num_emitted - 1] are the root and what was accepted after it: the tokens that the
        # target has seen now, and all of them but the new root.
        shown = nets.along(nets.features(config.taps, forward), verdict.path)
        steps = jnp.arange(verdict.path.shape[1], dtype=jnp.int32)[None]
        rows = block_net(config, params.weights.net).context(shown, state.lengths[:, None] + steps)
        path = jnp.broadcast_to(steps, verdict.path.shape)
        return kv.commit(state, rows, path, verdict.num_emitted)

    return update


# --- chains -----------------------------------------------------------------------------------------


def _full(weights: Weights, read: _Block, t: int | Array, token: Int[Array, " B"], vocab_size: int) -> Array:
    """Logits [B, V] of drafted token t, after ``token``."""
    logits = jax.lax.dynamic_index_in_dim(read.logits, t, axis=1, keepdims=False)
    bias = read.net.bias(token)
    return nets.spread(weights, logits if bias is None else logits + bias, vocab_size)


def _reveal(
    weights: Weights,
    read: _Block,
    first: Int[Array, " B"],
    known: Int[Array, "B K"],
    scores: Float[Array, "B K"],
    count: int,
    vocab_size: int,
) -> tuple[Int[Array, "B K"], Float[Array, "B K"]]:
    """The ``count`` tokens of the block that are surest, -1 for the others, and all scores.

    A token is scored by its log probability when it was predicted, as in Mask-Predict.
    """
    token, tokens, new = first, [], []
    for t in range(known.shape[1]):
        logits = jax.nn.log_softmax(_full(weights, read, t, token, vocab_size))
        token = jnp.where(known[:, t] >= 0, known[:, t], sampling.argmax(logits))
        tokens.append(token)
        new.append(jnp.where(known[:, t] >= 0, scores[:, t], logits.max(-1)))
    scores = jnp.stack(new, axis=1)
    rank = jnp.argsort(jnp.argsort(scores, axis=1, descending=True, stable=True), axis=1)
    return jnp.where(rank < count, jnp.stack(tokens, axis=1), -1), scores


@functools.cache
def _chain(network: Network, num_tokens: int, sample: bool, steps: int) -> Method:
    config: BlockConfig = network.config

    def propose(params: BlockParams, state: kv.Cache, context: Context, keys: Keys) -> tuple[Draft, kv.Cache]:
        weights, vocab_size = params.weights, context.target.config.vocab_size
        known, scores = None, None
        read = _read(config, weights, state, context, num_tokens)
        for done in range(1, steps):
            batch = context.lengths.shape[0]
            if known is None or scores is None:
                known = jnp.full((batch, num_tokens), -1, jnp.int32)
                scores = jnp.zeros((batch, num_tokens))
            count = num_tokens - num_tokens * (steps - done) // steps
            known, scores = _reveal(weights, read, root(context), known, scores, count, vocab_size)
            read = _read(config, weights, state, context, num_tokens, known)

        # The carry is the chance that all tokens so far are accepted, as the confidence head sees it.
        def step(
            survival: Float[Array, " B"], token: Array, t: Array, active: Array
        ) -> tuple[Float[Array, " B"], Float[Array, "B V"]]:
            logits = _full(weights, read, t, token, vocab_size)
            if known is not None:
                fixed = jax.lax.dynamic_index_in_dim(known, t, axis=1)
                only = jnp.arange(vocab_size, dtype=jnp.int32)[None] == fixed
                logits = jnp.where(fixed < 0, logits, jnp.where(only, 0, sampling.NEG_INF))
            if params.survival is not None:
                hidden = jax.lax.dynamic_index_in_dim(read.hidden, t, axis=1, keepdims=False)
                chance = jax.nn.sigmoid(read.net.foresee(hidden, token))
                survival = jnp.where(active, survival * chance, survival)
            return survival, logits

        draft, _ = draft_chain(
            context,
            keys,
            step,
            jnp.ones(context.lengths.shape[0]),
            num_tokens=num_tokens,
            sample=sample,
            proceed=params.proceed,
            ready=None if params.survival is None else lambda survival: survival >= params.survival,
        )
        return draft, state

    draws = "iid" if sample else "chosen"
    return Method(
        _init(config),
        propose,
        _update(config),
        width=num_tokens + 1,
        depth=num_tokens,
        taps=config.taps,
        draws=draws,
    )


# --- trees ------------------------------------------------------------------------------------------


@functools.cache
def _tree(network: Network, num_tokens: int, num_nodes: int, branching: int, beam: int) -> Method:
    config: BlockConfig = network.config

    def propose(params: BlockParams, state: kv.Cache, context: Context, keys: Keys) -> tuple[Draft, kv.Cache]:
        read = _read(config, params.weights, state, context, num_tokens)
        ids, logits = params.weights.ids, read.logits
        return best_first(root(context), logits, num_nodes, branching, beam, read.net.bias, ids), state

    return Method(
        _init(config), propose, _update(config), width=num_nodes, depth=num_tokens, taps=config.taps
    )


# --- factories --------------------------------------------------------------------------------------


def _checked(network: Network, weights: Weights, **numbers: int) -> BlockConfig:
    """The network's config, where it, the weights and the numbers (each at least 1) go together."""
    config = nets.given(network, weights)
    if not isinstance(config, BlockConfig):
        raise ValueError(f"network: expected one of block_network, got one of {type(config).__name__}")
    nets.check_weights(config, weights)
    at_least(1, **numbers)
    return config


def block(
    network: Network,
    weights: Weights,
    num_tokens: int = 7,
    *,
    sample: bool = True,
    steps: int = 1,
    proceed: Continue | None = None,
    survival: float | None = None,
) -> Drafter:
    """A chain from one forward over ``[root, mask, mask, ...]`` (DFlash, arXiv 2602.06036).

    Lossless in law with any lossless rule. The laws of the block's tokens do not depend on one another, but
    for a Markov head (DSpark, arXiv 2607.05147), whose bias by the token before makes drawing a serial loop::

        q_k = softmax(head(h_k) + W2 W1[x_{k-1}])

    The state is a `jspec.models.cache.Cache` whose slot t holds keys and values of the target's hidden states
    at token t, for all tokens before the root; a round projects those it emitted.

    Args:
      network, weights: of `block_network(config)`.
      num_tokens: the longest draft, best what the network was trained for: in a bidirectional block all
        masks are felt.
      sample: draw drafts, or take the argmax of each law.
      steps: forwards a round, for chosen drafts: after each but the last the surest tokens are kept and the
        others masked again (Mask-Predict, arXiv 1904.09324, section 3.2). Of use only for a network that was
        trained on blocks of which parts are shown.
      proceed: `confidence(threshold)` or `entropy_bound(threshold)`.
      survival: draft token k while the chance that it and all before it are accepted is at least this, as
        the confidence head foresees it: the product of ``c_1 .. c_k``, where c_k depends on x_{k-1} and never
        on x_k.
    Raises:
      ValueError: numbers < 1; ``survival`` outside 0 to 1 or without a confidence head; several ``steps`` for
        drawn drafts; another family's network, or a head that is not the config's; at the first prompt, a
        target of another width or vocabulary.
    """
    config = _checked(network, weights, num_tokens=num_tokens, steps=steps)
    if sample and steps > 1:
        raise ValueError(f"steps: expected 1 for drawn drafts (sample=True), got {steps}")
    if survival is not None and not config.confidence:
        raise ValueError("survival: expected None for a network without a confidence head")
    if survival is not None:
        between(0, 1, survival=survival)
    threshold = None if survival is None else jnp.float32(survival)
    params = BlockParams(weights, stopping(proceed), threshold)
    return Drafter(params, _chain(network, num_tokens, sample, steps))


def block_tree(
    network: Network,
    weights: Weights,
    num_tokens: int = 7,
    num_nodes: int = 32,
    *,
    branching: int = 8,
    beam: int | None = None,
) -> Drafter:
    """The likeliest nodes of one block, as a tree: JetSpec (arXiv 2606.18394) with a causal network, DDTree
    (arXiv 2604.12989) with a bidirectional one.

    Lossless in law with any lossless rule: every node is chosen. A node's score is the sum of its path's log
    probabilities, those of level k being the k-th law of the block (and its Markov head's bias by the node
    above, where there is one); temperature and the other options of the request are not looked at.

    Args:
      network, weights: of `block_network(config)`.
      num_tokens: depth.
      num_nodes: width, root included.
      branching: children of a node that are considered.
      beam: nodes of a level whose children are considered. None: all that matter, num_nodes - 1; with a
        Markov head, which computes logits for each, at most 8.
    Raises:
      ValueError: fewer than 2 nodes, or more than ``num_tokens``, ``branching`` and ``beam`` offer; other
        numbers < 1; another family's network, or a head that is not the config's; at the first prompt, a
        target of another width or vocabulary.
    """
    config = _checked(network, weights, num_tokens=num_tokens, branching=branching, num_nodes=num_nodes)
    if beam is None:
        beam = max(min(num_nodes - 1, EXPANDED) if config.markov_rank else num_nodes - 1, 1)
    _checked(network, weights, beam=beam)
    most = num_candidates(num_tokens, min(branching, config.columns), beam)
    if not 2 <= num_nodes <= most:
        raise ValueError(
            f"num_nodes: expected 2 to {most} (num_tokens = {num_tokens}, branching = {branching}, "
            f"beam = {beam}), got {num_nodes}"
        )
    return Drafter(BlockParams(weights), _tree(network, num_tokens, num_nodes, branching, beam))
