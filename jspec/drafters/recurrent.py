"""Draft networks that run on in their own output: what EAGLE and multi-token prediction share.

Such a net reads pairs. The pair t is the target's feature of token t together with token t + 1, whose
feature the target has not computed yet; its output g_t stands for that missing feature, and gives the law of
token t + 2. With the root at a::

    committed   (f_0, x_1) ... (f_{a-1}, x_a)   rows of the net's own cache, 0 .. a-1
    drafted     law of x_{a+1} from g_{a-1};  (g_{a-1}, x_{a+1}) -> g_a;  law of x_{a+2} from g_a;  ...

Drafted pairs are pending rows and never enter the cache: after a round its features are known, and the
emitted tokens are appended with these. At a = 0 there is no pair, and g = 0.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jspec.checks import at_least, instance
from jspec.drafters import nets
from jspec.drafters.autoregressive import Continue, draft_chain, stopping
from jspec.drafters.beam import TreeSettings, dynamic_tree
from jspec.drafters.common import root, take
from jspec.drafters.nets import Network, Text, Weights
from jspec.drafters.pairs import Recurrence, RecurrentConfig, build
from jspec.models import cache as kv
from jspec.types import (
    Context,
    Draft,
    Drafter,
    Forward,
    Keys,
    LanguageModel,
    Method,
    Prompt,
    PyTree,
    Verdict,
)

# --- training ---------------------------------------------------------------------------------------


@functools.cache
def network(kind: type[Recurrence], config: RecurrentConfig, taps: tuple[int, ...] = ()) -> Network:
    """The network of a module class. ``teach`` runs all pairs of the text at once, then the later steps of
    the anchors alone (training-time test, arXiv 2503.01840, section 3.2): at step s the row of anchor a sees
    the pairs before a and the s - 1 rows of its own earlier steps."""
    module_of = build(kind, config)

    def init(key: jax.Array) -> PyTree:
        return nnx.to_pure_dict(nnx.state(kind(config, nnx.Rngs(params=key)), nnx.Param))

    def details(
        weights: Weights, target: LanguageModel, target_params: PyTree, text: Text, num_tokens: int
    ) -> tuple[Float[Array, "B A K Vd"], dict[str, Array]]:
        check_length(config, num_tokens)
        module: Recurrence = module_of(weights.net)
        batch, width = text.tokens.shape
        before = text.anchors - 1  # the last pair an anchor may see

        def join(tokens: Int[Array, "B N"], carried: Float[Array, "B N E"]) -> Float[Array, "B N I"]:
            return module.join(target.embed(target_params, tokens).astype(module.dtype), carried)

        cache = module.start(batch, 0)
        position = jnp.arange(width, dtype=jnp.int32)[None]
        followers = jnp.pad(text.tokens[:, 1:], ((0, 0), (0, 1)))
        pairs = join(followers, module.fuse(nets.features(taps, text)))
        g, rows = module.extend(cache, pairs, jnp.broadcast_to(position, (batch, width)))
        g = nets.along(g, jnp.clip(before, 0, width - 1))
        g = jnp.where((before >= 0).reshape(*before.shape, *[1] * (g.ndim - 2)), g, 0)
        hidden = [module.read(g, 0)]
        #   columns of the mask:  pairs of the text | step 1 of every anchor | step 2 ...
        mask = position[:, None] <= before[:, :, None]
        own = jnp.broadcast_to(jnp.eye(before.shape[1], dtype=bool)[None], (batch, *[before.shape[1]] * 2))
        for step in range(1, num_tokens):
            if module.feeds_back:
                mask = jnp.concatenate([mask, own], axis=2)
                x = join(take(text.tokens, text.anchors + step), module.feed(g))
                g, rows = module.extend(cache, x, before + step, mask, rows)
            hidden.append(module.read(g, step))
        read = jnp.stack(hidden, axis=2)
        return nets.logits(weights, target, target_params, read), {"hidden": read}

    def teach(*arguments: Any) -> Float[Array, "B A K Vd"]:
        return details(*arguments)[0]

    return Network(init, teach, taps, config, details)


def check_length(config: RecurrentConfig, length: int, name: str = "num_tokens") -> None:
    """Refuse drafts that the net cannot make."""
    at_least(1, **{name: length})
    if config.longest is not None and length > config.longest:
        raise ValueError(f"{name}: expected at most {config.longest} (num_layers), got {length}")


# --- drafting ---------------------------------------------------------------------------------------


class RecurrentParams(NamedTuple):
    """Weights and the stopping rule."""

    weights: Weights
    proceed: Continue | None


class RecurrentState(NamedTuple):
    """The committed pairs, and the output of the last one (0 before the first)."""

    cache: kv.Cache
    g: Float[Array, "B E"]


def _chain(
    module: Recurrence,
    params: RecurrentParams,
    state: RecurrentState,
    context: Context,
    keys: Keys,
    num_tokens: int,
    sample: bool,
) -> Draft:
    batch = context.lengths.shape[0]
    # Rows of the drafted pairs, filled from the left; the t-th pair sees those before it and itself (the
    # last column):   t = 2:  1 . . 1
    spare = max(num_tokens - 1, 1)  # an array to write to, even if no pair is run
    column = jnp.arange(spare + 1)

    def advance(carry: tuple, token: Array, t: Array) -> tuple:
        g, pending = carry
        embedded = context.target.embed(context.params, token[:, None]).astype(module.dtype)
        mask = jnp.broadcast_to(((column < t - 1) | (column == spare))[None, None], (batch, 1, spare + 1))
        position = (state.cache.lengths + t - 1)[:, None]
        x = module.join(embedded, module.feed(g)[:, None])
        g, rows = module.extend(state.cache, x, position, mask, pending)
        pending = jax.tree.map(lambda old, new: old.at[:, t - 1].set(new[:, -1], mode="drop"), pending, rows)
        return g[:, 0], pending

    def step(carry: tuple, token: Array, t: Array, active: Array) -> tuple[tuple, Array]:
        if module.feeds_back:  # the root's own pair is in the cache
            carry = jax.lax.cond(t > 0, advance, lambda carry, token, t: carry, carry, token, t)
        hidden = module.read(carry[0], t)
        logits = nets.logits(params.weights, context.target, context.params, hidden)
        return carry, nets.spread(params.weights, logits, context.target.config.vocab_size)

    carry = (state.g, module.scratch(batch, spare))
    draft, _ = draft_chain(
        context, keys, step, carry, num_tokens=num_tokens, sample=sample, proceed=params.proceed
    )
    return draft


def _tree(
    module: Recurrence, params: RecurrentParams, state: RecurrentState, context: Context, tree: TreeSettings
) -> Draft:
    batch, k = context.lengths.shape[0], tree.top_k
    spare = max(tree.depth - 1, 1) * k if module.feeds_back else 0
    column = jnp.arange(spare)[None, None]
    node = jnp.arange(k)
    itself = jnp.broadcast_to(jnp.eye(k, dtype=bool)[None], (batch, k, k))

    def logits(g: Array, step: Array | int) -> Float[Array, "*n Vd"]:
        return nets.logits(params.weights, context.target, context.params, module.read(g, step))

    def expand(level: Array, beam: tuple, pending: kv.Rows, tokens: Array) -> tuple:
        g, seen = beam
        if not module.feeds_back:
            return beam, pending, logits(g, level)
        embedded = context.target.embed(context.params, tokens).astype(module.dtype)
        positions = jnp.broadcast_to((state.cache.lengths + level - 1)[:, None], (batch, k))
        x = module.join(embedded, module.feed(g))
        mask = jnp.concatenate([seen, itself], axis=2)
        g, rows = module.extend(state.cache, x, positions, mask, pending)
        start = (level - 1) * k
        pending = jax.tree.map(
            lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new[:, spare:], start, axis=1),
            pending,
            rows,
        )
        # Children of a node see what it saw, and the node.
        return (g, seen | (column == (start + node)[None, :, None])), pending, logits(g, level)

    g = jnp.broadcast_to(state.g[:, None], (batch, k, *module.output))
    beam = (g, jnp.zeros((batch, k, spare), bool))
    first = logits(state.g, 0)
    pending = module.scratch(batch, spare)
    return dynamic_tree(root(context), first, expand, beam, pending, tree, params.weights.ids)


@functools.cache
def method(
    kind: type[Recurrence],
    config: RecurrentConfig,
    taps: tuple[int, ...],
    num_tokens: int,
    sample: bool,
    tree: TreeSettings | None,
) -> Method:
    """The drafting method of a module class: a chain, or a dynamic tree."""
    module_of = build(kind, config)

    def init(params: RecurrentParams, prompt: Prompt, capacity: int, target: LanguageModel) -> RecurrentState:
        config.check_target(target.config)
        module: Recurrence = module_of(params.weights.net)
        batch = prompt.lengths.shape[0]
        return RecurrentState(module.start(batch, capacity), jnp.zeros((batch, *module.output), module.dtype))

    def propose(
        params: RecurrentParams, state: RecurrentState, context: Context, keys: Keys
    ) -> tuple[Draft, RecurrentState]:
        module: Recurrence = module_of(params.weights.net)
        if tree is not None:
            return _tree(module, params, state, context, tree), state
        return _chain(module, params, state, context, keys, num_tokens, sample), state

    def update(
        params: RecurrentParams,
        state: RecurrentState,
        context: Context,
        draft: Draft,
        verdict: Verdict,
        forward: Forward,
    ) -> RecurrentState:
        module: Recurrence = module_of(params.weights.net)
        features = nets.along(nets.features(taps, forward), verdict.path)
        embedded = context.target.embed(context.params, verdict.tokens).astype(module.dtype)
        index = jnp.arange(verdict.path.shape[1], dtype=jnp.int32)[None]
        x = module.join(embedded, module.fuse(features))
        g, rows = module.extend(state.cache, x, state.cache.lengths[:, None] + index)
        path = jnp.broadcast_to(index, verdict.path.shape)
        cache = kv.commit(state.cache, rows, path, verdict.num_emitted)
        final = nets.along(g, jnp.maximum(verdict.num_emitted - 1, 0)[:, None])[:, 0]
        return RecurrentState(cache, nets.keep_finished(final, state.g, verdict))

    if tree is not None:
        return Method(init, propose, update, width=tree.num_nodes, depth=tree.depth, taps=taps)
    draws = "iid" if sample else "chosen"
    return Method(init, propose, update, width=num_tokens + 1, depth=num_tokens, taps=taps, draws=draws)


def drafter(
    kind: type[Recurrence],
    network: Network,
    weights: Weights,
    num_tokens: int,
    sample: bool,
    proceed: Continue | None,
    tree: TreeSettings | None,
) -> Drafter:
    """What the factories return, once they know the module class.

    Raises:
      ValueError: a length out of its range; weights that are not of this network's head; a stopping rule
        for a tree, which reads no law.
    """
    config = nets.given(network, weights)
    if tree is None:
        check_length(config, num_tokens)
    else:
        instance(TreeSettings, "a TreeSettings", tree=tree)
        check_length(config, tree.depth, "tree.depth")
        tree.check(config.columns)
        if proceed is not None:
            raise ValueError("proceed: expected None with a tree, got a stopping rule")
    nets.check_weights(config, weights)
    params = RecurrentParams(weights, stopping(proceed))
    # What does not matter takes one value, so that equal methods are one.
    length, sample = (num_tokens, sample) if tree is None else (tree.depth, False)
    return Drafter(params, method(kind, config, network.taps, length, sample, tree))
