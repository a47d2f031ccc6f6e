"""Models and drafters with known answers, for tests and examples."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec import sampling, trees
from jspec.drafters.common import chain, no_update, root, take
from jspec.models import DecoderConfig, Seq2SeqConfig, init_params, language_model
from jspec.models.decoder import Params
from jspec.models.rotary import Rotary
from jspec.tiny_checkpoints import tiny_checkpoint as tiny_checkpoint
from jspec.types import (
    Block,
    Context,
    Draft,
    Drafter,
    Draws,
    Forward,
    Keys,
    LanguageModel,
    Method,
    Prompt,
    PyTree,
)

# --- a language model with a known law ---------------------------------------------------------------


class TableConfig(NamedTuple):
    """The vocabulary is the table's side; positions have no end."""

    vocab_size: int
    context_length: int = 2**30


class TableCache(NamedTuple):
    """A first-order chain needs no keys and values, only to know how far it has read."""

    lengths: Int[Array, " B"]


def _table_start(params: Array, prompt: Prompt, capacity: int) -> TableCache:
    return TableCache(jnp.zeros_like(prompt.lengths))


def _table_embed(params: Array, tokens: Int[Array, "B N"]) -> Float[Array, "B N V"]:
    return (tokens[:, :, None] == jnp.arange(params.shape[0])[None, None]).astype(jnp.float32)


def _table_extend(
    params: Array, cache: TableCache, block: Block, pending: PyTree = None, taps: tuple[int, ...] = ()
) -> Forward:
    hidden = _table_embed(params, block.tokens)
    return Forward(hidden, dict.fromkeys(taps, hidden), rows=())


def _table_commit(
    cache: TableCache, rows: PyTree, path: Int[Array, "B R"], count: Int[Array, " B"]
) -> TableCache:
    return TableCache(cache.lengths + count)


def _table_head(params: Array, hidden: Float[Array, "... V"]) -> Float[Array, "... V"]:
    token = jnp.argmax(hidden, axis=-1)  # not a product: 0 * -inf is NaN
    return params[token]


@functools.cache
def _table_model(vocab_size: int) -> LanguageModel:
    return LanguageModel(
        start=_table_start,
        extend=_table_extend,
        commit=_table_commit,
        embed=_table_embed,
        head=_table_head,
        truncate=lambda num_layers: _table_model(vocab_size),
        config=TableConfig(vocab_size),
    )


def table_lm(law: Sequence[Sequence[float]] | np.ndarray) -> tuple[LanguageModel, Float[Array, "V V"]]:
    """A Markov chain as a language model: the next token's law is row ``law[last token]``.

    Returns the model and its params, the logits log(law) [V, V].

    >>> lm, params = table_lm([[0.5, 0.5], [1.0, 0.0]])
    >>> lm.head(params, lm.embed(params, jnp.array([[1]])))[0, 0].tolist()
    [0.0, -inf]
    """
    table = np.asarray(law, np.float32)
    logits = np.where(table > 0, np.log(np.where(table > 0, table, 1)), -np.inf).astype(np.float32)
    return _table_model(len(table)), jnp.asarray(logits)


# --- drafters that say what they are told ------------------------------------------------------------


@functools.cache
def _scripted(num_tokens: int) -> Method:
    def init(params: Array, prompt: Prompt, capacity: int, target: LanguageModel) -> tuple[()]:
        return ()

    def propose(params: Array, state: tuple[()], context: Context, keys: Keys) -> tuple[Draft, tuple[()]]:
        batch = context.lengths.shape[0]
        script = jnp.broadcast_to(params, (batch, params.shape[1]))
        index = context.lengths[:, None] + jnp.arange(num_tokens)[None]
        tokens = take(script, index)
        valid = (index < script.shape[1]) & (tokens >= 0)
        return chain(root(context), jnp.maximum(tokens, 0), valid), state

    return Method(init, propose, no_update, width=num_tokens + 1, depth=num_tokens)


def scripted(script: Sequence[int] | np.ndarray, num_tokens: int = 4) -> Drafter:
    """Drafts, for each position of the text, the token that stands there in ``script`` ([S] for all rows,
    or [B, S]); -1 ends a draft. Chosen tokens: lossless in law with any rule that takes them.

    >>> scripted([7, 8, 9], num_tokens=2).method.width
    3
    """
    return Drafter(jnp.atleast_2d(jnp.asarray(script, jnp.int32)), _scripted(num_tokens))


@functools.cache
def _sampled_tree(template: trees.Template, distinct: bool) -> Method:
    def init(params: Array, prompt: Prompt, capacity: int, target: LanguageModel) -> tuple[()]:
        return ()

    def propose(params: Array, state: tuple[()], context: Context, keys: Keys) -> tuple[Draft, tuple[()]]:
        batch = context.lengths.shape[0]
        tokens, laws, left = [root(context)], [], []
        for node in range(template.width):
            if node > 0:
                parent = template.parents[node]
                token = sampling.draw(sampling.fold(keys, node), left[parent])
                if distinct:
                    drawn = jnp.arange(params.shape[1], dtype=jnp.int32)[None] == token[:, None]
                    rest = jnp.where(drawn, 0, left[parent])
                    left[parent] = sampling.normalize(rest, laws[parent])
                tokens.append(token)
            laws.append(params[tokens[node]])
            left.append(laws[node])
        parents = jnp.broadcast_to(jnp.asarray(template.parents, jnp.int32)[None], (batch, template.width))
        valid = jnp.ones((batch, template.width), bool)
        return Draft(jnp.stack(tokens, 1), parents, valid, jnp.stack(laws, 1)), state

    draws: Draws = "distinct" if distinct else "iid"
    return Method(init, propose, no_update, template.width, template.depth, draws=draws)


def sampled_tree(law: np.ndarray, template: trees.Template, *, distinct: bool) -> Drafter:
    """A tree whose children are drawn from ``law[parent's token]`` ([V, V], rows sum to 1), each on its own
    (i.i.d.) or without replacement. Lossless in law with the rules that take such drafts.

    >>> sampled_tree(np.eye(2), trees.template(((0,), (1,))), distinct=False).method.draws
    'iid'
    """
    return Drafter(jnp.asarray(law, jnp.float32), _sampled_tree(template, distinct))


# --- random models in memory -------------------------------------------------------------------------


def tiny_decoder(
    seed: int = 0,
    vocab_size: int = 64,
    num_layers: int = 2,
    width: int = 32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    context_length: int = 512,
    **overrides: Any,
) -> tuple[LanguageModel, Params]:
    """A random Llama-like decoder in float32; ``overrides`` are fields of `DecoderConfig`.

    >>> model, params = tiny_decoder(vocab_size=20, windows=(None, 8))
    >>> model.config.windows, params["embedding"].shape
    ((None, 8), (20, 32))
    """
    head_dim = width // num_heads
    settings = {
        "vocab_size": vocab_size,
        "width": width,
        "mlp_width": 2 * width,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "context_length": context_length,
        "rotary": Rotary(tuple(10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2))),
    }
    config = DecoderConfig(**(settings | overrides))
    return language_model(config), init_params(config, jax.random.key(seed))


def tiny_seq2seq(
    seed: int = 0,
    vocab_size: int = 64,
    num_layers: int = 2,
    num_encoder_layers: int = 2,
    width: int = 32,
    num_heads: int = 4,
    **overrides: Any,
) -> tuple[LanguageModel, Params]:
    """A random T5-like encoder-decoder in float32; ``overrides`` are fields of `Seq2SeqConfig`.

    >>> model, params = tiny_seq2seq(vocab_size=20, relative_buckets=8)
    >>> params["relative_bias"].shape, params["encoder"]["relative_bias"].shape
    ((8, 4), (8, 4))
    """
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "width": width,
        "mlp_width": 2 * width,
        "num_layers": num_layers,
        "num_encoder_layers": num_encoder_layers,
        "num_heads": num_heads,
        "head_dim": width // num_heads,
    }
    config = Seq2SeqConfig(**(settings | overrides))
    return language_model(config), init_params(config, jax.random.key(seed))
