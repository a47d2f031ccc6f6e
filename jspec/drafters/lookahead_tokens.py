"""Trained look-ahead tokens: the target itself foresees, at rows that no token stands in (PaSS, BiTA).

Behind every node of the draft hangs a group of M side rows, whose inputs are trained vectors in place of
embeddings. They see the committed text, the node with its ancestors, and one another causally; no node sees
them, so the target's laws are what they were. With the root at a and a draft of one token, M = 2::

    index         a    a+1  a+2  a+3
    root          r                         group of r:    stands where the next root will, and behind it
    r's group          1    2
    node               d
    d's group               1    2

After the round the group of the last accepted node, at i say, knows everything up to i. The next root is at
i + 1, in the place of the group's first row, and is not known to it; row k = 1, 2, ... gives the law of token
i + 1 + k, the k-th after the root. So a forward that verifies a draft also makes the next one, whatever is
accepted. A group behind the last node alone would cost M rows and not (K + 1) M, but would leave nothing to
draft from where a token is rejected, which with such weak drafts is nearly always.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jspec.checks import at_least
from jspec.drafters import nets
from jspec.drafters.autoregressive import Continue, draft_chain, stopping
from jspec.drafters.nets import NetConfig, Network, Text, Weights
from jspec.types import (
    Block,
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookaheadConfig(NetConfig):
    """PaSS: ``num_tokens`` look-ahead embeddings. BiTA: also ``num_prompts`` trained vectors before them.

    Raises:
      ValueError: as for `NetConfig`; numbers below 1, or of prompts below 0.
    """

    num_tokens: int = 4  # K, the most that are drafted
    num_prompts: int = 0  # rows of a group in front of the look-ahead tokens, at their node's position

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one(("num_tokens",))
        at_least(0, num_prompts=self.num_prompts)

    def check_tokens(self, num_tokens: int) -> None:
        """Refuse drafts of no token, or of more than there are embeddings for."""
        at_least(1, num_tokens=num_tokens)
        if num_tokens > self.num_tokens:
            raise ValueError(
                f"num_tokens: expected 1 to {self.num_tokens} (look-ahead tokens), got {num_tokens}"
            )

    def offsets(self, num_tokens: int) -> np.ndarray:
        """[M] positions of a group's rows, from their node's on: 0 ... 0 1 2 ... K."""
        return np.array([0] * self.num_prompts + list(range(1, num_tokens + 1)), np.int32)


@functools.cache
def lookahead_network(config: LookaheadConfig) -> Network:
    """The network of a config, the same object for equal ones.

    ``net`` is ``{"embeddings": [P + K, E]}``, prompts first, on the scale of the target's embeddings, and
    with ``head="own"`` ``"head"`` [E, Vd]. ``teach`` runs the target over the text (`Network.runs_target`)
    and then over the groups of all anchors, whose rows are scored against one another: anchors should be a
    sample. The gradient goes through the target into the embeddings.
    """

    def init(key: jax.Array) -> PyTree:
        first, second = jax.random.split(key)
        rows = config.num_prompts + config.num_tokens
        net = {"embeddings": jax.random.normal(first, (rows, config.width)) * config.width**-0.5}
        if config.head == "own":
            kernel = jax.random.normal(second, config.own_head)
            net["head"] = kernel * config.width**-0.5
        return net

    def teach(
        weights: Weights, target: LanguageModel, target_params: PyTree, text: Text, num_tokens: int
    ) -> Float[Array, "B A K Vd"]:
        offsets = _offsets(config, num_tokens)
        cache, shown = nets.run_over(target, target_params, text)
        (batch, width), num_anchors = text.tokens.shape, text.anchors.shape[1]
        size = len(offsets)

        # The groups of the nodes before the anchors, one after the other.
        node = jnp.repeat(text.anchors - 1, size, axis=1)
        positions = jnp.maximum(node + jnp.asarray(np.tile(offsets, num_anchors))[None], 0)
        before = jnp.arange(width, dtype=jnp.int32)[None, None] <= node[..., None]
        own = np.kron(np.eye(num_anchors, dtype=bool), np.tril(np.ones((size, size), bool)))
        mask = jnp.concatenate([before, jnp.broadcast_to(own[None], (batch, *own.shape))], axis=2)
        inputs = jnp.tile(_group(config, weights.net, num_tokens), (num_anchors, 1))[None]
        inputs = jnp.broadcast_to(inputs, (batch, *inputs.shape[1:]))
        block = Block(jnp.full(positions.shape, -1, jnp.int32), positions, mask, inputs)
        hidden = target.extend(target_params, cache, block, pending=shown.rows).hidden
        hidden = hidden.reshape(batch, num_anchors, size, -1)[:, :, config.num_prompts :]
        return nets.logits(weights, target, target_params, hidden)

    return Network(init, teach, (), config, runs_target=True)


def _offsets(config: LookaheadConfig, num_tokens: int) -> np.ndarray:
    config.check_tokens(num_tokens)
    return config.offsets(num_tokens)


def _group(config: LookaheadConfig, net: PyTree, num_tokens: int) -> Float[Array, "M E"]:
    """The inputs of a group's rows."""
    return net["embeddings"][: config.num_prompts + num_tokens]


def group_mask(num_nodes: int, size: int) -> np.ndarray:
    """``[N * M, N + N * M]``: what the rows of all groups see of the chain and of one another.

    For N = 2 nodes and M = 2::

             r d   1 2 1 2
        r 1  1     1
        r 2  1     1 1
        d 1  1 1       1
        d 2  1 1       1 1

    >>> group_mask(2, 2)[3].astype(int).tolist()
    [1, 1, 0, 0, 1, 1]
    """
    nodes = np.repeat(np.tril(np.ones((num_nodes, num_nodes), bool)), size, axis=0)
    return np.concatenate(
        [nodes, np.kron(np.eye(num_nodes, dtype=bool), np.tril(np.ones((size, size), bool)))], axis=1
    )


# --- drafting ---------------------------------------------------------------------------------------


class LookaheadParams(NamedTuple):
    """Weights and the stopping rule."""

    weights: Weights
    proceed: Continue | None = None


class LookaheadState(NamedTuple):
    """What the head will read: hidden states of the look-ahead rows behind the last token before the root."""

    hidden: Float[Array, "B K E"]
    ready: Bool[Array, " B"]  # whether there are any: not after a prompt


@functools.cache
def _method(config: LookaheadConfig, num_tokens: int, sample: bool) -> Method:
    offsets, prompts = _offsets(config, num_tokens), config.num_prompts
    width, size = num_tokens + 1, len(offsets)
    mask = group_mask(width, size)
    places = np.add.outer(np.arange(width, dtype=np.int32), offsets).reshape(-1)

    def init(params: LookaheadParams, prompt: Prompt, capacity: int, target: LanguageModel) -> LookaheadState:
        config.check_target(target.config)
        batch, dtype = prompt.lengths.shape[0], params.weights.net["embeddings"].dtype
        return LookaheadState(jnp.zeros((batch, num_tokens, config.width), dtype), jnp.zeros(batch, bool))

    def propose(
        params: LookaheadParams, state: LookaheadState, context: Context, keys: Keys
    ) -> tuple[Draft, LookaheadState]:
        weights, batch = params.weights, context.lengths.shape[0]
        logits = nets.logits(weights, context.target, context.params, state.hidden)

        def step(carry: tuple, token: Array, t: Array, active: Array) -> tuple[tuple, Array]:
            return carry, nets.spread(weights, logits[:, t], config.vocab_size)

        draft, _ = draft_chain(
            context,
            keys,
            step,
            (),
            num_tokens=num_tokens,
            sample=sample,
            proceed=params.proceed,
            room=jnp.where(state.ready, num_tokens, 0),
        )
        inputs = jnp.tile(_group(config, weights.net, num_tokens), (width, 1))[None]
        side = Block(
            tokens=jnp.full((batch, len(places)), -1, jnp.int32),
            positions=(context.lengths - 1)[:, None] + jnp.asarray(places)[None],
            mask=jnp.broadcast_to(jnp.asarray(mask)[None], (batch, *mask.shape)),
            inputs=jnp.broadcast_to(inputs, (batch, *inputs.shape[1:])),
        )
        return draft._replace(side=side), state

    def update(
        params: LookaheadParams,
        state: LookaheadState,
        context: Context,
        draft: Draft,
        verdict: Verdict,
        forward: Forward,
    ) -> LookaheadState:
        batch = verdict.num_emitted.shape[0]
        if draft.side is None:  # a prompt, in which no group ran
            return nets.keep_finished(state._replace(ready=jnp.zeros(batch, bool)), state, verdict)
        groups = forward.hidden[:, width:].reshape(batch, width, size, -1)[:, :, prompts:]
        last = jnp.maximum(verdict.num_emitted - 1, 0)
        node = jnp.take_along_axis(verdict.path, last[:, None], axis=1)
        found = nets.along(groups, node)[:, 0].astype(state.hidden.dtype)
        return nets.keep_finished(LookaheadState(found, jnp.ones(batch, bool)), state, verdict)

    return Method(
        init,
        propose,
        update,
        width=width,
        depth=num_tokens,
        side=width * size,
        draws="iid" if sample else "chosen",
    )


def lookahead_tokens(
    network: Network,
    weights: Weights,
    num_tokens: int | None = None,
    *,
    sample: bool = True,
    proceed: Continue | None = None,
) -> Drafter:
    """Draft what the target foresaw at look-ahead tokens beside its last verification.

    Lossless in law with any lossless rule: the tokens are drawn from laws that were fixed before the round.
    No forward but the target's, which is ``(K + 1) (1 + num_prompts + K)`` rows wide. The first round of a
    prompt drafts nothing. The laws of a draft know neither its root nor one another's tokens.

    Args:
      network, weights: of `lookahead_network`.
      num_tokens: K, at most the config's; None: that.
      sample: draw drafts, or take the argmax of each law (BiTA and PaSS at temperature 0).
      proceed: `confidence(threshold)` or `entropy_bound(threshold)`.
    Raises:
      ValueError: ``num_tokens`` out of its range; another network; weights of another head; a target of
        another width or vocabulary (when first run).

    Reference: Monea et al., arXiv 2311.13581 (PaSS); Lin et al., arXiv 2401.12522 (BiTA).
    """
    config = nets.given(network, weights)
    if not isinstance(config, LookaheadConfig):
        raise ValueError(f"network: expected one of lookahead_network, got one of {type(config).__name__}")
    nets.check_weights(config, weights)
    number = config.num_tokens if num_tokens is None else num_tokens
    config.check_tokens(number)
    return Drafter(LookaheadParams(weights, stopping(proceed)), _method(config, number, sample))
