"""An independent, smaller language model as the drafter, with a cache of its own."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.checks import at_least, shown
from jspec.drafters.autoregressive import Continue, draft_chain, stopping
from jspec.drafters.common import take
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

CATCH_UP = 2  # tokens a forward; a drafter whose own draft was taken whole is one token behind


class HasModel(Protocol):
    """What `jspec.load` returns: the functions of a model and its parameters."""

    @property
    def lm(self) -> LanguageModel:
        """The model's functions."""
        ...

    @property
    def params(self) -> PyTree:
        """Its parameters."""
        ...


class ModelParams(NamedTuple):
    """Weights and the stopping rule of a draft model, and its vocabulary (no leaves), by which the front
    door refuses a target of another one."""

    weights: PyTree
    proceed: Continue | None
    vocabulary: Any = None


class ModelState(NamedTuple):
    """The draft model's cache, and the tokens of the last draft: those after the root stand in the cache
    from slot ``lengths`` of the round on."""

    cache: PyTree
    drafted: Int[Array, "B D"]


def read(
    model: LanguageModel, weights: PyTree, cache: PyTree, tokens: Int[Array, "B S"], upto: Int[Array, " B"]
) -> PyTree:
    """The cache with ``tokens[:, :upto]`` read; a row that is there already costs and changes nothing."""

    def body(cache: PyTree) -> PyTree:
        slots = cache.lengths[:, None] + jnp.arange(CATCH_UP, dtype=jnp.int32)[None]
        count = jnp.clip(upto - cache.lengths, 0, CATCH_UP)
        forward = model.extend(weights, cache, Block(take(tokens, slots), slots))
        path = jnp.broadcast_to(jnp.arange(CATCH_UP, dtype=jnp.int32)[None], slots.shape)
        return model.commit(cache, forward.rows, path, count)

    return jax.lax.while_loop(lambda cache: jnp.any(cache.lengths < upto), body, cache)


def read_chunk(
    model: LanguageModel, weights: PyTree, cache: PyTree, context: Context, draft: Draft, verdict: Verdict
) -> PyTree:
    """The cache with a chunk of the prompt or of a next turn read, after what the last round left behind."""
    upto = jnp.where(verdict.num_emitted > 0, context.lengths - 1, cache.lengths)
    cache = read(model, weights, cache, context.tokens, upto)
    slots = cache.lengths[:, None] + jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
    rows = model.extend(weights, cache, Block(draft.tokens, slots)).rows
    return model.commit(cache, rows, verdict.path, verdict.num_emitted)


def start(model: LanguageModel, weights: PyTree, prompt: Prompt, capacity: int) -> PyTree:
    """An empty cache of a draft model. One with fewer positions than the target reads what it can, and drafts
    no further. What is cut off a source is mostly padding."""
    most = getattr(model.config, "source_length", None)
    if most is not None and prompt.source is not None and prompt.source.shape[1] > most:
        assert prompt.source_lengths is not None
        lengths = jnp.minimum(prompt.source_lengths, most)
        prompt = prompt._replace(source=prompt.source[:, :most], source_lengths=lengths)
    return model.start(weights, prompt, min(capacity, model.config.context_length))


@functools.cache
def _method(model: LanguageModel, num_tokens: int, sample: bool) -> Method:
    def init(params: ModelParams, prompt: Prompt, capacity: int, target: LanguageModel) -> ModelState:
        cache = start(model, params.weights, prompt, capacity)
        return ModelState(cache, jnp.full((prompt.lengths.shape[0], num_tokens), -1, jnp.int32))

    def propose(
        params: ModelParams, state: ModelState, context: Context, keys: Keys
    ) -> tuple[Draft, ModelState]:
        running = context.budget > 0
        limit = jnp.minimum(context.lengths - 1, model.config.context_length)
        cache = read(
            model, params.weights, state.cache, context.tokens, jnp.where(running, limit, state.cache.lengths)
        )

        def step(cache: PyTree, token: Array, t: Array, active: Array) -> tuple[PyTree, Array]:
            block = Block(token[:, None], cache.lengths[:, None])
            forward = model.extend(params.weights, cache, block)
            path = jnp.zeros((token.shape[0], 1), jnp.int32)
            cache = model.commit(cache, forward.rows, path, active.astype(jnp.int32))
            return cache, model.head(params.weights, forward.hidden[:, 0])

        draft, cache = draft_chain(
            context,
            keys,
            step,
            cache,
            num_tokens=num_tokens,
            sample=sample,
            proceed=params.proceed,
            room=model.config.context_length - context.lengths + 1,
        )
        drafted = jnp.where(running[:, None], draft.tokens[:, 1:], state.drafted)
        return draft, ModelState(cache, drafted)

    def update(
        params: ModelParams,
        state: ModelState,
        context: Context,
        draft: Draft,
        verdict: Verdict,
        forward: Forward,
    ) -> ModelState:
        if forward.logits is None:
            return state._replace(
                cache=read_chunk(model, params.weights, state.cache, context, draft, verdict)
            )
        # Keep what is a prefix of the emitted text, whoever drafted it, and never the new root.
        width = min(num_tokens, verdict.tokens.shape[1])
        depth = jnp.arange(width)[None]
        same = (state.drafted[:, :width] == verdict.tokens[:, :width]) & (
            depth < verdict.num_emitted[:, None]
        )
        matched = jnp.cumprod(same.astype(jnp.int32), axis=1).sum(1)
        kept = context.lengths + jnp.minimum(matched, verdict.num_emitted - 1)
        lengths = jnp.where(
            verdict.num_emitted > 0, jnp.minimum(state.cache.lengths, kept), state.cache.lengths
        )
        return state._replace(cache=state.cache._replace(lengths=lengths))

    draws = "iid" if sample else "chosen"
    return Method(init, propose, update, width=num_tokens + 1, depth=num_tokens, draws=draws)


def model(
    draft_model: HasModel, num_tokens: int = 5, *, sample: bool = True, proceed: Continue | None = None
) -> Drafter:
    """Draft with another model of the same vocabulary (Leviathan et al., arXiv 2211.17192, Algorithm 1).

    Lossless in law with any lossless rule. Where the draft model's positions end, drafting ends and
    decoding goes on plainly.

    Args:
      draft_model: what `jspec.load` returns; its padded vocabulary width may differ from the target's.
      num_tokens: the longest draft (gamma).
      sample: draw drafts from the draft model's law under the sampler of the request (temperature, top-p
        and the rest apply to it as to the target), or take the argmax of that law.
      proceed: `confidence(threshold)` or `entropy_bound(threshold)`: stop earlier where they fail.
    Raises:
      ValueError: ``num_tokens`` < 1, no model, or no stopping rule.
    """
    at_least(1, num_tokens=num_tokens)
    if not (hasattr(draft_model, "lm") and hasattr(draft_model, "params")):
        raise ValueError(f"draft_model: expected a model as jspec.load returns it, got {shown(draft_model)}")
    vocabulary = getattr(draft_model, "vocabulary", None)
    params = ModelParams(draft_model.params, stopping(proceed), vocabulary)
    return Drafter(params, _method(draft_model.lm, num_tokens, sample))
