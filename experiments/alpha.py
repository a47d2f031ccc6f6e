"""alpha of Leviathan et al. (arXiv 2211.17192): the mean of sum_x min(p, q) over text of the target.

Measured with two forwards over fixed text (`training.acceptance.simulate`), not from the rounds of a
decoding: every position of the text counts once, as in the paper's Table 3, whatever was drafted there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec import Model
from jspec.drafters import NgramTable
from jspec.types import Block, Forward, LanguageModel, PyTree
from training import acceptance, forward, recipe
from training.config import Batching, Training
from training.data import Batch, Example

ROWS = 32  # of a batch: the logits of two models at all its positions are in memory at once


class Laws(NamedTuple):
    """Anything that gives logits at every position of a text: a model, or an n-gram table."""

    lm: LanguageModel
    params: PyTree
    dtype: str = "float32"  # that its forward computes in


class _TableConfig(NamedTuple):
    vocab_size: int
    context_length: int = 1 << 30


@functools.cache
def table_model(vocab_size: int) -> LanguageModel:
    """An `NgramTable` (as the params) as a language model that can be teacher-forced.

    Its hidden states are its log-probabilities. It has no cache and cannot decode: `jspec.drafters.ngram`
    does that.

    >>> table = NgramTable(*map(jnp.array, ([0.5, 0.5], [0.5, 1.0], [[1], [0]], [[0.5], [0.0]])))
    >>> lm = table_model(2)
    >>> block = Block(jnp.array([[0, 1]]), jnp.array([[0, 1]]))
    >>> jnp.exp(lm.head(table, lm.extend(table, None, block).hidden)).tolist()
    [[[0.25, 0.75], [0.5, 0.5]]]
    """

    def extend(
        params: NgramTable, cache: None, block: Block, pending: Any = None, taps: tuple[int, ...] = ()
    ) -> Forward:
        # Whoever casts the params of a model to float32 casts these ids, too.
        table = params._replace(successors=params.successors.astype(jnp.int32))
        laws = table.law(block.tokens.reshape(-1)).reshape(*block.tokens.shape, vocab_size)
        return Forward(jnp.log(laws), {}, ())

    def none(*_: Any) -> Any:
        return None

    return LanguageModel(
        start=none,
        extend=extend,
        commit=none,
        embed=none,
        head=lambda params, hidden: hidden,
        truncate=none,
        config=_TableConfig(vocab_size),
    )


@functools.cache
def served(lm: LanguageModel, vocab_size: int, banned: tuple[int, ...]) -> LanguageModel:
    """``lm`` as decoding sees it: its logits are those of what can come out.

    >>> from jspec import testing
    >>> lm, params = testing.table_lm([[0.5, 0.25, 0.25]] * 3)
    >>> hidden = lm.embed(params, jnp.array([[0]]))
    >>> jax.nn.softmax(served(lm, 3, (0,)).head(params, hidden))[0, 0].tolist()
    [0.0, 0.5, 0.5]
    """

    def head(params: PyTree, hidden: Float[Array, "... E"]) -> Float[Array, "... V"]:
        return forward.possible(lm.head(params, hidden), vocab_size, banned)

    return lm._replace(head=head)


def together(target: Model, drafter: Laws) -> tuple[LanguageModel, LanguageModel]:
    """Both models under the target's bans."""
    return (
        served(target.lm, target.vocab_size, target.banned),
        served(drafter.lm, target.vocab_size, target.banned),
    )


def batches(target: Model, examples: Sequence[Example]) -> list[Batch]:
    """Every example once."""
    return recipe.held_out(examples, Batching(batch_size=ROWS), Training(steps=1), target.decoder_start)


def alpha(target: Model, drafter: Laws, examples: Sequence[Example], temperature: float) -> float:
    """Mean over the positions of the targets of sum_x min(p, q), both laws at ``temperature``; at 0, where
    both are one-hot, the share of positions at which the two have the same first choice."""
    p, q = together(target, drafter)
    found = acceptance.simulate(
        p,
        target.params,
        q,
        drafter.params,
        batches(target, examples),
        width=target.vocab_size,
        temperatures=(temperature,) if temperature else (),
        dtype=drafter.dtype,
    )
    return found[f"alpha_{temperature:g}"] if temperature else found["greedy_agreement"]


@functools.partial(jax.jit, static_argnames=("target", "drafter", "width"))
def _lenient_sums(
    target_params: PyTree,
    drafter_params: PyTree,
    batch: PyTree,
    factors: Float[Array, " F"],
    temperature: Float[Array, ""],
    *,
    target: LanguageModel,
    drafter: LanguageModel,
    width: int,
) -> tuple[Float[Array, " F"], Float[Array, ""]]:
    p = forward.logits(target, target_params, batch)
    q = forward.logits(drafter, drafter_params, batch)
    p, q = (jax.nn.softmax(logits[..., :width] / temperature, axis=-1) for logits in (p, q))

    def one(factor: Float[Array, ""]) -> Float[Array, ""]:
        return (jnp.minimum(p / factor, q).sum(-1) * batch.weights).sum()

    return jax.lax.map(one, factors), batch.weights.sum()


def lenient_alphas(
    target: Model, drafter: Laws, examples: Sequence[Example], factors: Sequence[float], temperature: float
) -> list[float]:
    """For each lenience l the mean of sum_x min(p / l, q), as in Table 5. ``temperature`` is > 0."""
    p, q = together(target, drafter)
    total, positions = jnp.zeros(len(factors)), 0.0
    for batch in batches(target, examples):
        sums, weight = _lenient_sums(
            target.params,
            drafter.params,
            batch,
            jnp.asarray(factors, jnp.float32),
            jnp.float32(temperature),
            target=p,
            drafter=q,
            width=min(target.vocab_size, drafter.lm.config.vocab_size),
        )
        total, positions = total + sums, positions + float(weight)
    return [float(value) / positions for value in total]
