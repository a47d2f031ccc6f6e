"""Drafting with networks that look at the target's keys and values: GLIDE with CaPE, Gemma 4's assistant.

`jspec.drafters.attend_nets` has the networks and says what they see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jspec.checks import at_least, instance
from jspec.drafters import nets
from jspec.drafters.attend_config import AssistantConfig, AttendConfig, GlideConfig, attend_config
from jspec.drafters.attend_nets import Assistant, Glide
from jspec.drafters.autoregressive import Continue, draft_chain, stopping
from jspec.drafters.common import root, take, top_k
from jspec.drafters.nets import Network, Text, Weights
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

__all__ = [
    "AssistantConfig",
    "Expansion",
    "GlideConfig",
    "attend",
    "attend_config",
    "attend_network",
]


def _kind(config: object) -> Callable[[Any, nnx.Rngs], Glide | Assistant]:
    if isinstance(config, GlideConfig):
        return Glide
    if isinstance(config, AssistantConfig):
        return Assistant
    raise ValueError(f"config: expected a GlideConfig or an AssistantConfig, got {type(config).__name__}")


@functools.cache
def _module(config: AttendConfig) -> functools.partial:
    """``net -> module``, from a nested dict of arrays."""
    kind = _kind(config)
    return functools.partial(nnx.merge, nnx.graphdef(nnx.eval_shape(lambda: kind(config, nnx.Rngs(0)))))


@functools.cache
def attend_network(config: GlideConfig | AssistantConfig) -> Network:
    """The network of an architecture. Cached: equal configs give the same object.

    ``teach`` makes the target's keys and values from what enters the layers that the net looks at, its taps,
    and shows an anchor a those strictly before a: the paper's block mask, with every token for the root of a
    block.

    >>> from jspec.testing import tiny_decoder
    >>> attend_network(attend_config(tiny_decoder(num_layers=2)[0].config)).taps
    (1,)

    Raises:
      ValueError: another family's config.
    """
    kind, module_of = _kind(config), _module(config)

    def init(key: jax.Array) -> PyTree:
        return nnx.to_pure_dict(nnx.state(kind(config, nnx.Rngs(params=key)), nnx.Param))

    def teach(
        weights: Weights, target: LanguageModel, target_params: PyTree, text: Text, num_tokens: int
    ) -> Float[Array, "B A K Vd"]:
        config.check_target(target.config)
        hidden = module_of(weights.net).teach(target, target_params, text, num_tokens)
        return nets.logits(weights, target, target_params, hidden)

    return Network(init, teach, tuple(sorted(set(config.layers))), config)


# --- proposal expansion -----------------------------------------------------------------------------


class Expansion(NamedTuple):
    """CaPE, confidence-aware proposal expansion (arXiv 2402.02082): beside the likeliest token
    of a step stand as many of the next likeliest ones as its confidence leaves room for.

    With b = len(bins), a step whose likeliest token has probability c adds ``bins[floor(c b)]`` siblings to
    it (c = 1: those of the last bin). They are leaves. ``num_nodes``, root included, bounds the draft: where
    they do not all fit, those of the earlier steps come first. The numbers are the authors'; the bound, and
    that all bins are equally wide, are not.
    """

    bins: tuple[int, ...] = (8, 8, 8, 6, 6, 6, 4, 4, 2, 2, 2, 2)
    num_nodes: int = 32

    def check(self, num_tokens: int, columns: int) -> None:
        """Refuse what no draft can be.

        Raises:
          ValueError: a number out of its range.
        """
        at_least(1, **{"expansion.num_nodes": self.num_nodes})
        for number in self.bins:
            at_least(0, **{"expansion.bins": number})
        if not self.bins or min(self.bins) < 0 or not 0 < max(self.bins) < columns:
            raise ValueError(
                f"expansion.bins: expected numbers in 0 .. {columns - 1}, one of them > 0, got {self.bins}"
            )
        most = 1 + num_tokens * (1 + max(self.bins))
        if not num_tokens + 2 <= self.num_nodes <= most:
            raise ValueError(
                f"expansion.num_nodes: expected {num_tokens + 2} to {most} with {num_tokens} tokens and "
                f"these bins, got {self.num_nodes}"
            )


def expand(
    root: Int[Array, " B"],
    tokens: Int[Array, "B K C"],
    confidence: Float[Array, "B K"],
    expansion: Expansion,
) -> Draft:
    """The draft of these candidates: C = 1 + max(bins) of each step, the likeliest first.

    The chain root, 1, ..., K comes first, then the siblings, those of the first step in front::

        root -> 1 -> 2         bins (2, 0), confidences .3 and .6: the first step's siblings 3 and 4,
             -> 3              children of the root; none beside node 2
             -> 4

    >>> tokens = jnp.array([[[5, 6, 7], [8, 9, 5]]])
    >>> draft = expand(jnp.array([4]), tokens, jnp.array([[0.3, 0.6]]), Expansion((2, 0), 6))
    >>> draft.tokens.tolist(), draft.parents.tolist(), draft.valid.sum().item()
    ([[4, 5, 8, 6, 7, 0]], [[-1, 0, 1, 0, 0, 0]], 5)
    """
    batch, depth, _ = tokens.shape
    bins = jnp.array(expansion.bins, jnp.int32)
    chosen = jnp.nan_to_num(confidence * len(expansion.bins)).astype(jnp.int32)
    count = bins[jnp.clip(chosen, 0, len(expansion.bins) - 1)]
    until = jnp.cumsum(count, axis=1)  # siblings of the steps up to this one
    index = jnp.arange(expansion.num_nodes - depth - 1, dtype=jnp.int32)[None]
    exists = index < until[:, -1:]
    step = jnp.sum(index[..., None] >= until[:, None], axis=2, dtype=jnp.int32)
    step = jnp.minimum(step, depth - 1)
    rank = index - take(until - count, step) + 1
    sibling = jax.vmap(lambda row, k, r: row[k, r])(tokens, step, jnp.where(exists, rank, 0))
    up = jnp.broadcast_to(jnp.arange(-1, depth, dtype=jnp.int32)[None], (batch, depth + 1))
    return Draft(
        tokens=jnp.concatenate([root[:, None], tokens[:, :, 0], jnp.where(exists, sibling, 0)], axis=1),
        parents=jnp.concatenate([up, jnp.where(exists, step, 0)], axis=1),
        valid=jnp.concatenate([jnp.ones((batch, depth + 1), bool), exists], axis=1),
    )


# --- drafting ---------------------------------------------------------------------------------------


class AttendParams(NamedTuple):
    """Weights and the stopping rule."""

    weights: Weights
    proceed: Continue | None = None


@functools.cache
def _method(config: AttendConfig, num_tokens: int, sample: bool, expansion: Expansion | None) -> Method:
    module_of = _module(config)

    def init(params: AttendParams, prompt: Prompt, capacity: int, target: LanguageModel) -> PyTree:
        config.check_target(target.config)
        return module_of(params.weights.net).start(prompt.lengths.shape[0], capacity)

    def propose(params: AttendParams, state: PyTree, context: Context, keys: Keys) -> tuple[Draft, PyTree]:
        module: Glide | Assistant = module_of(params.weights.net)

        def step(carry: PyTree, token: Array, t: Array, active: Array | None = None) -> tuple[PyTree, Array]:
            carry, hidden = module.step(state, carry, context, token, t)
            return carry, nets.logits(params.weights, context.target, context.params, hidden)

        carry = module.begin(state, num_tokens)
        if expansion is not None:
            return _expanded(params.weights, context, step, carry, num_tokens, expansion), state

        def spread(*arguments: PyTree) -> tuple[PyTree, Array]:
            carry, logits = step(*arguments)
            return carry, nets.spread(params.weights, logits, config.vocab_size)

        draft, _ = draft_chain(
            context, keys, spread, carry, num_tokens=num_tokens, sample=sample, proceed=params.proceed
        )
        return draft, state

    def update(
        params: AttendParams,
        state: PyTree,
        context: Context,
        draft: Draft,
        verdict: Verdict,
        forward: Forward,
    ) -> PyTree:
        return module_of(params.weights.net).absorb(state, context, draft, verdict, forward)

    width = num_tokens + 1 if expansion is None else expansion.num_nodes
    return Method(init, propose, update, width=width, depth=num_tokens, draws="iid" if sample else "chosen")


def _expanded(
    weights: Weights, context: Context, step: PyTree, carry: PyTree, num_tokens: int, expansion: Expansion
) -> Draft:
    """The likeliest chain and what stands beside it; q is the plain softmax."""

    def one(carry: tuple, t: Array) -> tuple[tuple, tuple]:
        inner, token = carry
        inner, logits = step(inner, token, t)
        best, column = top_k(logits, 1 + max(expansion.bins))
        tokens = column if weights.ids is None else weights.ids[column].astype(jnp.int32)
        confidence = jnp.exp(best[:, 0] - jax.nn.logsumexp(logits, axis=-1))
        return (inner, tokens[:, 0]), (tokens, confidence)

    _, (tokens, confidence) = jax.lax.scan(one, (carry, root(context)), jnp.arange(num_tokens))
    return expand(root(context), tokens.swapaxes(0, 1), confidence.swapaxes(0, 1), expansion)


def attend(
    network: Network,
    weights: Weights,
    num_tokens: int = 5,
    *,
    sample: bool = True,
    proceed: Continue | None = None,
    expansion: Expansion | None = None,
) -> Drafter:
    """Draft a chain with a network that looks at the target's cache.

    Lossless in law with any lossless rule: chains are drawn from q, expanded drafts are chosen. A token costs
    one pass of the network. GLIDE's own state is a cache of the text, to which one more pass adds the tokens
    of each round; the assistant's is one hidden state.

    Args:
      network: of `attend_network`.
      weights: its parameters; with a reduced vocabulary q = 0 outside of ``weights.ids``.
      num_tokens: the longest draft.
      sample: draw the chain from q under the sampler of the request, or take its argmax.
      proceed: `confidence(threshold)` or `entropy_bound(threshold)`: a chain stops earlier where they fail.
      expansion: CaPE: the likeliest chain, with siblings; ``sample`` does not matter then.
    Raises:
      ValueError: ``num_tokens`` < 1; another network; weights of another head; an impossible expansion, or
        one with ``proceed``; a target whose keys or sizes are others (when first run).

    Reference: Du et al., arXiv 2402.02082 (GLIDE, CaPE).
    """
    config = nets.given(network, weights)
    _kind(config)
    at_least(1, num_tokens=num_tokens)
    nets.check_weights(config, weights)
    if expansion is not None:
        instance(Expansion, "an Expansion or None", expansion=expansion)
        instance(Sequence, "a list of numbers", **{"expansion.bins": expansion.bins})
        expansion = expansion._replace(bins=tuple(expansion.bins))
        expansion.check(num_tokens, config.columns)
        if proceed is not None:
            raise ValueError("proceed: expected None with an expansion, got a stopping rule")
    method = _method(config, num_tokens, sample and expansion is None, expansion)
    return Drafter(AttendParams(weights, stopping(proceed)), method)
