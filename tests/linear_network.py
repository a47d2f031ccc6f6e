"""The smallest draft network: token a + k from one linear map of the hidden state before the root."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jspec.drafters import nets
from jspec.drafters.autoregressive import draft_chain
from jspec.drafters.kinds import Kind
from jspec.drafters.nets import HeadKind, Network, Text, Weights
from jspec.types import Context, Drafter, Method, Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig:
    width: int
    vocab_size: int
    head: HeadKind = "target"
    draft_vocab: int | None = None
    taps: tuple[int, ...] = ()
    depth: int = 3

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"depth: expected a number >= 1, got {self.depth}")


@functools.cache
def linear_network(config: LinearConfig) -> Network:
    size = config.width * max(len(config.taps), 1)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        net = {"maps": jax.random.normal(key, (config.depth, size, config.width)) / size**0.5}
        if config.head == "own":
            net["head"] = jnp.zeros((config.width, config.draft_vocab or config.vocab_size))
        return net

    def details(weights: Weights, target: Any, target_params: Any, text: Text, num_tokens: int) -> Any:
        before = text.anchors - 1
        shown = nets.along(nets.features(config.taps, text), jnp.maximum(before, 0))
        shown = jnp.where((before >= 0)[..., None], shown, 0)
        maps = weights.net["maps"][:num_tokens]
        foreseen = jnp.einsum("baf,kfe->bake", shown.astype(maps.dtype), maps)
        logits = nets.logits(weights, target, target_params, foreseen)
        return logits, {"hidden": foreseen, "confidence": foreseen[..., 0]}

    def teach(*arguments: Any) -> jax.Array:
        return details(*arguments)[0]

    return Network(init, teach, config.taps, config, details)


@functools.cache
def _method(network: Network, num_tokens: int, sample: bool) -> Method:
    config = network.config

    def init(weights: Weights, prompt: Prompt, capacity: int, target: Any) -> jax.Array:
        return jnp.zeros((prompt.tokens.shape[0], weights.net["maps"].shape[1]))

    def propose(weights: Weights, state: jax.Array, context: Context, keys: Any) -> Any:
        foreseen = jnp.einsum("bf,kfe->bke", state, weights.net["maps"][:num_tokens])
        logits = nets.logits(weights, context.target, context.params, foreseen)
        logits = nets.spread(weights, logits, config.vocab_size)

        def step(carry: tuple[()], token: Any, t: Any, active: Any) -> Any:
            return carry, jnp.take(logits, t, axis=1)

        draft, _ = draft_chain(context, keys, step, (), num_tokens=num_tokens, sample=sample)
        return draft, state

    def update(weights: Any, state: Any, context: Any, draft: Any, verdict: Any, forward: Any) -> Any:
        shown = nets.last(nets.features(config.taps, forward), verdict)
        return nets.keep_finished(shown, state, verdict)

    width = num_tokens + 1
    return Method(
        init, propose, update, width, num_tokens, taps=network.taps, draws="iid" if sample else "chosen"
    )


def linear(network: Network, weights: Weights, num_tokens: int = 3, *, sample: bool = True) -> Drafter:
    return Drafter(weights, _method(network, num_tokens, sample))


LINEAR = Kind(LinearConfig, linear_network, linear)
