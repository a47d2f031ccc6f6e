"""A language model of its own that fills a block of masks in one forward: PARD, and SpecDec's drafter."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jspec.checks import at_least
from jspec.drafters import nets
from jspec.drafters.autoregressive import Continue, draft_chain, fit_vocabulary, stopping
from jspec.drafters.common import root, take
from jspec.drafters.model import read, read_chunk, start
from jspec.drafters.nets import HeadKind, Network, Text, Weights
from jspec.models.params import Config, cache_dtype, init_params, language_model
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
class MaskedConfig:
    """The architecture, hashable; never a dtype, which is that of the weights.

    PARD: a decoder, ``causal``. SpecDec: an encoder-decoder with an encoder of its own, not ``causal``.
    Training teaches every mask of the anchors it draws: neither PARD's dropping of places (COD) nor SpecDec's
    glancing at some of a block's tokens is here.

    Raises:
      ValueError: a size below 1, or another head than the language model's.
    """

    vocab_size: int  # V, the target's; that of `lm` may be padded otherwise. Its width may be any
    lm: Config
    num_tokens: int = 8  # K, the most a round drafts; with a shared mask any number goes
    shared_mask: bool = True  # one trained vector for all places; else K - 1
    causal: bool = True  # rows of the block see those before them only
    head: HeadKind = "own"  # that of `lm`, a part of its weights
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        at_least(1, vocab_size=self.vocab_size, num_tokens=self.num_tokens)
        if self.head != "own":
            raise ValueError(f"head: expected 'own', the language model's, got {self.head!r}")
        if self.draft_vocab is not None:
            raise ValueError(
                f"draft_vocab: expected None, for the language model has its own head, got {self.draft_vocab}"
            )

    @property
    def num_masks(self) -> int:
        """Trained vectors."""
        return 1 if self.shared_mask else self.num_tokens - 1


class MaskedParams(NamedTuple):
    """Weights, and the stopping rule."""

    weights: Weights
    proceed: Continue | None = None


def check_tokens(config: MaskedConfig, num_tokens: int) -> None:
    """Refuse a block of no tokens, or of more than there are masks for."""
    at_least(1, num_tokens=num_tokens)
    if not config.shared_mask and num_tokens > config.num_tokens:
        raise ValueError(
            f"num_tokens: expected at most {config.num_tokens}, one for the root and one for each mask, "
            f"got {num_tokens}"
        )


def _inside(config: MaskedConfig, num_tokens: int) -> Bool[Array, "K K"]:
    """What the rows of a block see of it."""
    whole = jnp.ones((num_tokens, num_tokens), bool)
    return jnp.tril(whole) if config.causal else whole


def _masks(config: MaskedConfig, net: PyTree, num_tokens: int) -> Float[Array, "K E"]:
    """The input of every row of a block; the root's, row 0, is not read."""
    check_tokens(config, num_tokens)
    vectors = net["masks"]
    if config.shared_mask:
        return jnp.broadcast_to(vectors, (num_tokens, vectors.shape[1]))
    return jnp.pad(vectors[: num_tokens - 1], ((1, 0), (0, 0)))


@functools.cache
def masked_network(config: MaskedConfig) -> Network:
    """The network of a config, the same object for equal ones.

    ``net`` is ``{"lm": params of the language model, "masks": [M, E']}``. It may begin as a trained model:
    ``Weights(network.init(key) | {"lm": params})``. Nothing of the target is read but its text (and, by an
    encoder-decoder, its source), so one network serves every target of a vocabulary.

    ``teach`` runs the text once, causally, and then all blocks ``[root, mask, mask, ...]``; a block sees
    the text strictly before its root and its own rows. Each of the A K rows is scored against all others, so
    anchors should be a sample.
    """
    lm = language_model(config.lm)

    def init(key: jax.Array) -> PyTree:
        model_key, mask_key = jax.random.split(key)
        masks = jax.random.normal(mask_key, (config.num_masks, config.lm.width)) * config.lm.width**-0.5
        return {"lm": init_params(config.lm, model_key), "masks": masks}

    def teach(
        weights: Weights, target: LanguageModel, target_params: PyTree, text: Text, num_tokens: int
    ) -> Float[Array, "B A K V"]:
        params, masks = weights.net["lm"], _masks(config, weights.net, num_tokens)
        (batch, length), num_anchors = text.tokens.shape, text.anchors.shape[1]
        prompt = Prompt(text.tokens, text.lengths, text.source, text.source_lengths)
        cache = start(lm, params, prompt, 0)
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
        rows = lm.extend(params, cache, Block(text.tokens, positions)).rows

        # Rows of A blocks, one block after the other: block a in rows a K .. a K + K - 1.
        steps = jnp.arange(num_tokens, dtype=jnp.int32)
        places = (text.anchors[..., None] + steps[None, None]).reshape(batch, -1)
        first = jnp.tile(steps == 0, num_anchors)[None]
        tokens = jnp.where(first, take(text.tokens, places), -1)
        inputs = jnp.broadcast_to(jnp.tile(masks, (num_anchors, 1))[None], (*tokens.shape, masks.shape[1]))
        before = positions[:, None] < jnp.repeat(text.anchors, num_tokens, axis=1)[..., None]
        own = jnp.kron(jnp.eye(num_anchors, dtype=jnp.int32), _inside(config, num_tokens).astype(jnp.int32))
        own = jnp.broadcast_to(own.astype(bool)[None], (batch, *own.shape))
        block = Block(tokens, places, jnp.concatenate([before, own], axis=2), inputs)
        hidden = lm.extend(params, cache, block, pending=rows).hidden
        logits = lm.head(params, hidden)
        logits = fit_vocabulary(logits.reshape(-1, logits.shape[-1]), config.vocab_size)
        return logits.reshape(batch, num_anchors, num_tokens, -1)

    return Network(init, teach, (), config)


@functools.cache
def _masked(network: Network, num_tokens: int, sample: bool) -> Method:
    config: MaskedConfig = network.config
    lm = language_model(config.lm)
    limit = lm.config.context_length

    def init(params: MaskedParams, prompt: Prompt, capacity: int, target: LanguageModel) -> PyTree:
        own = params.weights.net["lm"]
        holding = language_model(config.lm, cache_dtype(own["embedding"].dtype))
        return start(holding, own, prompt, capacity)

    def propose(params: MaskedParams, cache: PyTree, context: Context, keys: Keys) -> tuple[Draft, PyTree]:
        net = params.weights.net
        masks = _masks(config, net, num_tokens)
        batch = context.lengths.shape[0]
        upto = jnp.where(context.budget > 0, jnp.minimum(context.lengths - 1, limit), cache.lengths)
        # One round of this drafter emits at most K + 1 tokens, which the block's forward reads along with it;
        # only what lies further behind (another drafter's rounds) is read before.
        spare = num_tokens + 1
        cache = read(lm, net["lm"], cache, context.tokens, upto - spare)
        missing = (upto - cache.lengths)[:, None]

        # Rows: [spare places for missing tokens, root, masks]. With 1 of 2 places used, K = 2 and a causal
        # block, the rows see (before them, the cache):
        #   text   1 . | . .       block  1 . | 1 .
        #          1 1 | . .              1 . | 1 1
        ahead = jnp.arange(spare, dtype=jnp.int32)[None]
        slots = cache.lengths[:, None] + ahead
        places = (context.lengths - 1)[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
        blank = jnp.full((batch, num_tokens - 1), -1, jnp.int32)
        tokens = jnp.concatenate([take(context.tokens, slots), root(context)[:, None], blank], axis=1)
        text = jnp.pad(jnp.tril(jnp.ones((spare, spare), bool)), ((0, 0), (0, num_tokens)))
        text = jnp.broadcast_to(text[None], (batch, *text.shape))
        own = jnp.broadcast_to(_inside(config, num_tokens)[None], (batch, num_tokens, num_tokens))
        before = jnp.broadcast_to((ahead < missing)[:, None], (batch, num_tokens, spare))
        mask = jnp.concatenate([text, jnp.concatenate([before, own], axis=2)], axis=1)
        inputs = jnp.pad(masks, ((spare, 0), (0, 0)))
        inputs = jnp.broadcast_to(inputs[None], (batch, *inputs.shape))
        block = Block(tokens, jnp.concatenate([slots, places], axis=1), mask, inputs)
        forward = lm.extend(net["lm"], cache, block)
        cache = lm.commit(cache, forward.rows, jnp.broadcast_to(ahead, slots.shape), missing[:, 0])
        logits = lm.head(net["lm"], forward.hidden[:, spare:])

        def step(carry: tuple[()], token: Array, t: Array, active: Array) -> tuple[tuple[()], Array]:
            return carry, jax.lax.dynamic_index_in_dim(logits, t, axis=1, keepdims=False)

        draft, _ = draft_chain(
            context,
            keys,
            step,
            (),
            num_tokens=num_tokens,
            sample=sample,
            proceed=params.proceed,
            room=limit - context.lengths + 1,
        )
        return draft, cache

    def update(
        params: MaskedParams,
        cache: PyTree,
        context: Context,
        draft: Draft,
        verdict: Verdict,
        forward: Forward,
    ) -> PyTree:
        # Rows of masks are no rows of tokens: what a round emits is read by the next forward, whole.
        if forward.logits is None:
            return read_chunk(lm, params.weights.net["lm"], cache, context, draft, verdict)
        return cache

    draws = "iid" if sample else "chosen"
    return Method(init, propose, update, width=num_tokens + 1, depth=num_tokens, draws=draws)


def masked(
    network: Network,
    weights: Weights,
    num_tokens: int | None = None,
    *,
    sample: bool = True,
    proceed: Continue | None = None,
) -> Drafter:
    """A chain from one forward of another language model over ``[unread tokens, root, mask, mask, ...]``.

    Lossless in law with any lossless rule. The root's row gives the law of the first token, mask k that of
    token k + 1; none depends on the others. A causal decoder is PARD (arXiv 2504.18583); a bidirectional
    block in an encoder-decoder, which reads the source itself, is the drafter of SpecDec (arXiv 2203.16487),
    whose own, lossy rule is `verify.top_beta`. Relative positions of T5's decoder tell no distance to rows
    ahead: there, masks of their own (``shared_mask=False``) keep the places apart.

    Where the draft model's positions end, drafting ends and decoding goes on plainly.

    Args:
      network, weights: of `masked_network(config)`.
      num_tokens: the longest draft; None: the config's.
      sample: draw drafts, or take the argmax of each law.
      proceed: `confidence(threshold)` or `entropy_bound(threshold)`.
    Raises:
      ValueError: ``num_tokens`` < 1, or more than there are masks for; another family's network.
    """
    config = nets.given(network, weights)
    if not isinstance(config, MaskedConfig):
        raise ValueError(f"network: expected one of masked_network, got one of {type(config).__name__}")
    num_tokens = config.num_tokens if num_tokens is None else num_tokens
    check_tokens(config, num_tokens)
    return Drafter(MaskedParams(weights, stopping(proceed)), _masked(network, num_tokens, sample))
