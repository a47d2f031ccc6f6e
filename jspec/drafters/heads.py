"""Heads on the target's last hidden state: Medusa, Hydra, blockwise parallel decoding.

The target's own head says from the hidden state at position a - 1 what stands at a: the root. Head k (k = 1
... K) says from the same state what stands at a + k. They are drafted with in one go, for the state comes out
of the target's verification: the merged predict and verify of blockwise parallel decoding (m / k + 1 forwards
for m tokens in blocks of k) is what the engine does with every drafter.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec import trees
from jspec.checks import at_least, check, instance
from jspec.drafters import nets
from jspec.drafters.autoregressive import Continue, draft_chain, stopping
from jspec.drafters.common import root, top_k
from jspec.drafters.head_nets import Bound, HeadsConfig, binder, dtype_of
from jspec.drafters.nets import Network, Weights
from jspec.types import (
    Context,
    Draft,
    Drafter,
    Forward,
    Keys,
    LanguageModel,
    Method,
    Prompt,
    Verdict,
)


class HeadsParams(NamedTuple):
    """The network's weights and the stopping rule."""

    weights: Weights
    proceed: Continue | None


def _draw_chain(
    net: Bound,
    hidden: Float[Array, "B E"],
    context: Context,
    keys: Keys,
    proceed: Continue | None,
    num_tokens: int,
    sample: bool,
) -> Draft:
    """A chain. Independent heads have run before it, Hydra's run along it."""
    batch, width = hidden.shape
    vocab_size = net.target.config.vocab_size
    drawn = functools.partial(draft_chain, num_tokens=num_tokens, sample=sample, proceed=proceed)

    if net.module.config.kind != "hydra":
        logits = net.at_once(hidden, num_tokens)

        def known(carry: tuple[()], token: Array, t: Array, active: Array) -> tuple[tuple[()], Array]:
            at_t = jax.lax.dynamic_index_in_dim(logits, t, axis=1, keepdims=False)
            return carry, nets.spread(net.weights, at_t, vocab_size)

        return drawn(context, keys, known, ())[0]

    def head(k: int, read: Float[Array, "B K+1 E"]) -> Float[Array, "B Vd"]:
        return net.next(read[:, : k + 2].reshape(batch, -1), k)

    def step(read: Array, token: Array, t: Array, active: Array) -> tuple[Array, Array]:
        read = read.at[:, t + 1].set(net.embed(token[:, None])[:, 0])
        logits = jax.lax.switch(t, [functools.partial(head, k) for k in range(num_tokens)], read)
        return read, nets.spread(net.weights, logits, vocab_size)

    # The hidden state, then the embeddings of the root and of drafted tokens.
    read = jnp.zeros((batch, num_tokens + 1, width), hidden.dtype).at[:, 0].set(hidden)
    return drawn(context, keys, step, read)[0]


def _fill_at_once(net: Bound, hidden: Float[Array, "B E"], template: trees.Template) -> Int[Array, "B N-1"]:
    """Nodes of independent heads: all at depth d choose from head d's best, whatever their parents are."""
    ranks = max(template.ranks) + 1
    best = top_k(net.at_once(hidden, template.depth), ranks)[1]
    at = (np.array(template.depths[1:]) - 1) * ranks + np.array(template.ranks[1:])
    return net.token(best.reshape(best.shape[0], -1)[:, at])


def _fill_levels(
    net: Bound, hidden: Float[Array, "B E"], root: Int[Array, " B"], template: trees.Template
) -> Int[Array, "B N-1"]:
    """Nodes of Hydra's heads, level by level: each inner node is read with its ancestors."""
    parents, ranks, depths = (np.array(x) for x in template)
    levels, tokens = [], root[:, None]
    read, readers = hidden[:, None], np.array([-1])  # what inner nodes of the level above have read
    for depth in range(template.depth):
        level, below = np.flatnonzero(depths == depth), np.flatnonzero(depths == depth + 1)
        inner = np.unique(parents[below])
        embedded = net.embed(tokens[:, np.searchsorted(level, inner)])
        above = np.searchsorted(readers, parents[inner])
        read, readers = jnp.concatenate([read[:, above], embedded], axis=-1), inner
        most = int(ranks[below].max()) + 1
        best = top_k(net.next(read, depth), most)[1].reshape(root.shape[0], -1)
        tokens = net.token(best[:, np.searchsorted(inner, parents[below]) * most + ranks[below]])
        levels.append(tokens)
    return jnp.concatenate(levels, axis=1)


@functools.cache
def _heads(config: HeadsConfig, num_tokens: int, template: trees.Template | None, sample: bool) -> Method:
    bind = binder(config)

    def init(
        params: HeadsParams, prompt: Prompt, capacity: int, target: LanguageModel
    ) -> Float[Array, "B E"]:
        config.check_target(target.config)
        return jnp.zeros((prompt.lengths.shape[0], config.width), dtype_of(params.weights))

    def propose(
        params: HeadsParams, hidden: Float[Array, "B E"], context: Context, keys: Keys
    ) -> tuple[Draft, Float[Array, "B E"]]:
        net = bind(params.weights, context.target, context.params)
        if template is None:
            return _draw_chain(net, hidden, context, keys, params.proceed, num_tokens, sample), hidden
        first = root(context)
        if config.kind == "hydra":
            nodes = _fill_levels(net, hidden, first, template)
        else:
            nodes = _fill_at_once(net, hidden, template)
        tokens = jnp.concatenate([first[:, None], nodes], axis=1)
        parents = jnp.broadcast_to(jnp.array(template.parents, jnp.int32), tokens.shape)
        return Draft(tokens, parents, jnp.ones(tokens.shape, bool)), hidden

    def update(
        params: HeadsParams,
        hidden: Float[Array, "B E"],
        context: Context,
        draft: Draft,
        verdict: Verdict,
        forward: Forward,
    ) -> Float[Array, "B E"]:
        return nets.keep_finished(nets.last(forward.hidden, verdict).astype(hidden.dtype), hidden, verdict)

    if template is not None:
        return Method(init, propose, update, width=template.width, depth=template.depth)
    draws = "iid" if sample else "chosen"
    return Method(init, propose, update, width=num_tokens + 1, depth=num_tokens, draws=draws)


def heads(
    network: Network,
    weights: Weights,
    num_tokens: int | None = None,
    *,
    template: trees.Template | None = None,
    sample: bool = True,
    proceed: Continue | None = None,
) -> Drafter:
    """Draft with heads on the target's last hidden state: a chain, or a static tree of their best tokens.

    Lossless in law with any lossless rule (Medusa and blockwise decoding publish lossy ones besides:
    `verify.typical`, `verify.blockwise`). The state is one hidden state a row, [B, E],
    zeros before the first token.

    A chain's tokens are drawn one after another, each from its head's law under the sampler of the request,
    given the drafted tokens before it. A tree's node with rank r at depth d is the (r + 1)-th best token of
    head d: for Medusa and blockwise heads the same below every parent (part of a Cartesian product), computed
    with one gather; for Hydra of the head that has read its ancestors, one pass a level.

    Args:
      network: `heads_network`.
      weights: its weights; with ``head="rows"`` the rows (`nets.rows_of_head`) and their ids.
      num_tokens: the longest chain, at most K; None: K.
      template: a tree, in order of depth as `trees.template`, `trees.grow` and `trees.fastest` make them;
        its nodes are chosen, ``sample`` is not looked at.
      sample, proceed: as for `model`.
    Raises:
      ValueError: ``num_tokens`` or a template deeper than K, or both given; a rank beyond the head's columns;
        a template that is not in order of depth, or one with ``proceed``; another family's network; what is
        no stopping rule; weights of other shapes than the config's; a target of another width or vocabulary
        (when first run).

    Reference: Cai et al. 2024, arXiv 2401.10774; Ankner et al. 2024, arXiv 2402.05109; Stern et al. 2018,
    arXiv 1811.03115.
    """
    config = nets.given(network, weights)
    check(isinstance(config, HeadsConfig), "network", "one of `heads_network`", type(config).__name__)
    nets.check_weights(config, weights)
    if template is None:
        at_least(1, num_tokens=num_tokens)
        most = config.num_heads if num_tokens is None else num_tokens
        check(1 <= most <= config.num_heads, "num_tokens", f"1 to {config.num_heads}", most)
        return Drafter(HeadsParams(weights, stopping(proceed)), _heads(config, most, None, sample))
    instance(trees.Template, "a tree of jspec.trees", template=template)
    check(num_tokens is None, "num_tokens", "None with a template, which has a depth", num_tokens)
    check(proceed is None, "proceed", "None with a template, whose nodes are fixed", proceed)
    check(
        1 <= template.depth <= config.num_heads,
        "template",
        f"a depth of 1 to {config.num_heads}",
        template.depth,
    )
    check(max(template.ranks) < config.columns, "template", f"ranks < {config.columns}", max(template.ranks))
    ordered = list(template.depths) == sorted(template.depths)
    check(ordered, "template", "nodes in order of depth", template.depths)
    return Drafter(HeadsParams(weights, None), _heads(config, template.depth, template, False))
