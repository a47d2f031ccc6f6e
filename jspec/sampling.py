"""From logits to laws and tokens: processors, the sampler, keys, and the two sources of randomness.

One pipeline serves target, drafter, recovered and bonus tokens alike, in this order: penalties, banned and
allowed tokens, minimum length, first-token rules, the user's processors, then temperature, top-k, top-p,
min-p (each filter acts on the law the one before left; ties at a threshold are all kept).
A temperature below `GREEDY` is temperature 0: all mass on the argmax, the lowest index on ties.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int

from jspec.types import Keys, PyTree, Sampler

GREEDY = 1e-5
NEG_INF = -jnp.inf


# --- randomness -------------------------------------------------------------------------------------


def fold(keys: Keys, data: Int[Array, " B"] | int) -> Keys:
    """``fold_in`` per row; ``data`` is one number or one a row."""
    return jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(jnp.asarray(data, jnp.uint32), keys.shape))


def row_keys(seeds: Int[Array, " B"]) -> Keys:
    """One key a row from one integer seed a row."""
    return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))


def accept(keys: Keys, p: Float[Array, " B"], q: Float[Array, " B"]) -> Bool[Array, " B"]:
    """True with probability min(1, p / q); never where p = 0.

    The comparison ``u * q < p`` is strict and u is in [0, 1): with ``<=`` a draw of exactly 0 would let
    a token through that the target forbids.
    """
    return jax.vmap(jax.random.uniform)(keys) * q < p


def argmax(values: Float[Array, "... V"]) -> Int[Array, ...]:
    """The first index of each row's maximum. Two plain reductions: on a CPU several times faster than
    `jnp.argmax`, whose reduction of pairs is not vectorised.

    >>> argmax(jnp.array([[1.0, 3.0, 3.0]])).tolist()
    [1]
    """
    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    best = values == values.max(-1, keepdims=True)
    return jnp.where(best, index, values.shape[-1] - 1).min(-1)


LANES = 128  # of a block of `draw`


def _invert(u: Float[Array, " B"], masses: Float[Array, "B K"]) -> Int[Array, " B"]:
    """An index in proportion to ``masses``: where their running sum passes the share u in [0, 1) of it.

    Only an index of positive mass is ever found. The sum alone would not see to that: it is computed in
    parallel, and rounding can make it grow, or fall, where a mass is 0.
    """
    index = jnp.arange(masses.shape[1], dtype=jnp.int32)[None]
    sums = jnp.cumsum(masses, axis=1)
    target = u * sums[:, -1]
    beyond = (masses > 0) & (sums > target[:, None])
    last = jnp.where(masses > 0, index, 0).max(1)
    return jnp.where(beyond, index, last[:, None]).min(1)


def draw(keys: Keys, law: Float[Array, "B V"]) -> Int[Array, " B"]:
    """A token from each row's law; a token of probability 0 never comes out.

    First a block of `LANES` tokens is drawn, then a token of it, with a uniform number each: one number of
    23 bits for all would round the probabilities of a large vocabulary to multiples of 1e-7. One pass over
    [B, V], where Gumbel noise would need V random numbers; and a one-hot law (greedy) gives its token
    whatever the numbers are. A law without mass (all 0, or NaN) gives -1, which the engine ends as `nan`.
    """
    batch, width = law.shape
    lanes = min(LANES, width)
    blocks = jnp.pad(law, ((0, 0), (0, -width % lanes))).reshape(batch, -1, lanes)
    u = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    masses = blocks.sum(-1)
    block = _invert(u[:, 0], masses)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return jnp.where((masses > 0).any(1), block * lanes + _invert(u[:, 1], inside), -1)


def normalize(weights: Float[Array, "B V"], fallback: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """``weights`` scaled to sum 1, or ``fallback`` where they are all 0 (p and q equal up to rounding)."""
    total = weights.sum(-1, keepdims=True)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), fallback)


# --- processors -------------------------------------------------------------------------------------


class Processor(NamedTuple):
    """A rule on logits that may depend on the tokens before them; all three fields are `Partial`.

    ``init(tokens [B, T], lengths [B]) -> h`` reads a prompt; ``push(h, token [B]) -> h``;
    ``apply(h, logits [B, V]) -> logits``. Every leaf of h leads with B.
    """

    init: Callable[..., PyTree]
    push: Callable[..., PyTree]
    apply: Callable[..., Float[Array, "B V"]]


def _no_init(tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> tuple[()]:
    return ()


def _no_push(history: tuple[()], token: Int[Array, " B"]) -> tuple[()]:
    return ()


def stateless(function: Callable[[Float[Array, "B V"]], Float[Array, "B V"]]) -> Processor:
    """A processor from ``logits -> logits``. Make it once: a new function is a new program to compile.

    >>> double = stateless(lambda logits: 2 * logits)
    >>> double.apply((), jnp.array([[1.0, 2.0]])).tolist()
    [[2.0, 4.0]]
    """
    return Processor(Partial(_no_init), Partial(_no_push), Partial(_ignore_history, Partial(function)))


def _ignore_history(function: Any, history: tuple[()], logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    return function(logits)


class Counts(NamedTuple):
    """Occurrences of every token, in the prompt (yes or no) and in the output."""

    prompt: Bool[Array, "B V"]
    output: Int[Array, "B V"]


@functools.cache
def _counts_init(vocab_size: int) -> Callable[[Int[Array, "B T"], Int[Array, " B"]], Counts]:
    # Cached, so that the sampler of equal settings is an equal jit argument; a number bound with `Partial`
    # would be a leaf, hence a tracer, where a shape is needed.
    def init(tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Counts:
        batch, width = tokens.shape
        # Padding is sent to a column that does not exist, so that it is dropped.
        columns = jnp.where(jnp.arange(width)[None] < lengths[:, None], tokens, vocab_size)
        seen = jnp.zeros((batch, vocab_size), bool)
        seen = seen.at[jnp.arange(batch)[:, None], columns].set(True, mode="drop")
        return Counts(seen, jnp.zeros((batch, vocab_size), jnp.int32))

    return init


def _counts_push(history: Counts, token: Int[Array, " B"]) -> Counts:
    return history._replace(output=history.output.at[jnp.arange(token.shape[0]), token].add(1))


def _penalize(
    repetition: Float[Array, " B"],
    presence: Float[Array, " B"],
    frequency: Float[Array, " B"],
    history: Counts,
    logits: Float[Array, "B V"],
) -> Float[Array, "B V"]:
    seen = history.prompt | (history.output > 0)
    factor = jnp.where(seen, repetition[:, None], 1)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = logits - jnp.where(history.output > 0, presence[:, None], 0)
    return logits - frequency[:, None] * history.output.astype(jnp.float32)


def penalties(
    vocab_size: int,
    repetition: Float[Array, " B"],
    presence: Float[Array, " B"],
    frequency: Float[Array, " B"],
) -> Processor:
    """Repetition (prompt and output, divides positive and multiplies negative logits), presence and
    frequency (output only, subtracted) penalties, as in vLLM; 1, 0 and 0 change nothing."""
    count = Partial(_counts_init(vocab_size))
    return Processor(count, Partial(_counts_push), Partial(_penalize, repetition, presence, frequency))


def _mask(allowed: Bool[Array, "1_or_B V"], logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    return jnp.where(allowed, logits, NEG_INF)


def allow(allowed: Bool[Array, "1_or_B V"]) -> Processor:
    """Only the tokens marked in ``allowed`` (one row for all, or one each) may come out."""
    return Processor(Partial(_no_init), Partial(_no_push), Partial(_ignore_history, Partial(_mask, allowed)))


def _count_init(tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Int[Array, " B"]:
    return jnp.zeros_like(lengths)


def _count_push(history: Int[Array, " B"], token: Int[Array, " B"]) -> Int[Array, " B"]:
    return history + 1


def _mask_before(
    steps: Int[Array, " B"],
    allowed: Bool[Array, "1_or_B V"],
    history: Int[Array, " B"],
    logits: Float[Array, "B V"],
) -> Float[Array, "B V"]:
    return jnp.where(allowed | (history >= steps)[:, None], logits, NEG_INF)


def allow_before(steps: Int[Array, " B"], allowed: Bool[Array, "1_or_B V"]) -> Processor:
    """Only ``allowed`` may come out as one of the first ``steps`` new tokens: a minimum length (allow all
    but the end tokens), or a rule for the first token (``steps`` = 1)."""
    return Processor(Partial(_count_init), Partial(_count_push), Partial(_mask_before, steps, allowed))


# --- filters on the law -----------------------------------------------------------------------------


def _threshold(
    law: Float[Array, "B V"], enough: Callable[[Float[Array, "B V"]], Bool[Array, " B"]]
) -> Float[Array, " B"]:
    """The greatest t >= 0 with ``enough(law restricted to entries >= t)``, exactly, without a sort.

    ``enough`` is monotone. Non-negative floats are ordered as their bit patterns are, so 31 halvings of
    an integer interval find t; each is one pass over [B, V], where a sort of 50,000 costs 50 times that.
    """
    one = jax.lax.bitcast_convert_type(jnp.float32(2), jnp.int32)

    def halve(
        _: int, bounds: tuple[Int[Array, " B"], Int[Array, " B"]]
    ) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        low, high = bounds  # enough at low, not at high
        middle = low + (high - low) // 2
        t = jax.lax.bitcast_convert_type(middle, jnp.float32)
        good = enough(jnp.where(law >= t[:, None], law, 0))
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    low = jnp.zeros(law.shape[:1], jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, one)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def _keep(law: Float[Array, "B V"], threshold: Float[Array, " B"]) -> Float[Array, "B V"]:
    return normalize(jnp.where(law >= threshold[:, None], law, 0), law)


class Settings(NamedTuple):
    """Per-row settings of `sampler`; None leaves the step out of the compiled program."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"] | None = None  # 0: off for the row
    top_p: Float[Array, " B"] | None = None
    min_p: Float[Array, " B"] | None = None


def law_from_logits(settings: Settings, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Temperature, top-k, top-p, min-p. Greedy rows get a one-hot law; filters act on sampled rows only
    and cost nothing when every row is greedy. A row without a possible token (NaN, or everything banned)
    gets a law without mass, from which `draw` draws -1."""
    logits = logits.astype(jnp.float32)
    greedy = settings.temperature < GREEDY

    def one_hot(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        best = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None] == argmax(logits)[:, None]
        return (best & (logits.max(-1, keepdims=True) > NEG_INF)).astype(jnp.float32)

    def sampled(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        top = logits.max(-1, keepdims=True)
        # Logits of +inf leave no room for others, as the limit of large ones does.
        shifted = jnp.where(top == jnp.inf, jnp.where(logits == top, 0, NEG_INF), logits - top)
        law = jax.nn.softmax(shifted / jnp.where(greedy, 1, settings.temperature)[:, None], axis=-1)
        if settings.top_k is not None:
            k = jnp.where(settings.top_k > 0, settings.top_k, law.shape[-1])
            law = _keep(law, _threshold(law, lambda kept: (kept > 0).sum(-1) >= k))
        if settings.top_p is not None:
            # At 1 nothing may be cut, although the sum of a float32 law can fall short of 1.
            mass = jnp.where(settings.top_p < 1, settings.top_p, 0)
            law = jnp.where(
                (settings.top_p < 1)[:, None],
                _keep(law, _threshold(law, lambda kept: kept.sum(-1) >= mass)),
                law,
            )
        if settings.min_p is not None:
            law = _keep(law, settings.min_p * law.max(-1))
        return jnp.where(greedy[:, None], one_hot(logits), law)

    return jax.lax.cond(jnp.all(greedy), one_hot, sampled, logits)


# --- the sampler ------------------------------------------------------------------------------------


def _sampler_init(
    processors: tuple[Processor, ...], tokens: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> tuple[PyTree, ...]:
    return tuple(processor.init(tokens, lengths) for processor in processors)


def _sampler_push(
    processors: tuple[Processor, ...], history: tuple[PyTree, ...], token: Int[Array, " B"]
) -> tuple[PyTree, ...]:
    return tuple(processor.push(h, token) for processor, h in zip(processors, history, strict=True))


def _sampler_law(
    processors: tuple[Processor, ...],
    settings: Settings,
    history: tuple[PyTree, ...],
    logits: Float[Array, "B V"],
) -> Float[Array, "B V"]:
    logits = logits.astype(jnp.float32)
    for processor, h in zip(processors, history, strict=True):
        logits = processor.apply(h, logits)
    return law_from_logits(settings, logits)


def sampler(settings: Settings, processors: Sequence[Processor] = ()) -> Sampler:
    """The pipeline of this module as a `Sampler`.

    >>> s = sampler(Settings(jnp.array([0.0, 1.0])))
    >>> s.law((), jnp.log(jnp.array([[0.2, 0.8], [0.25, 0.75]]))).round(2).tolist()
    [[0.0, 1.0], [0.25, 0.75]]
    """
    processors = tuple(processors)
    return Sampler(
        Partial(_sampler_init, processors),
        Partial(_sampler_push, processors),
        Partial(_sampler_law, processors, settings),
    )


def greedy(batch: int) -> Sampler:
    """Temperature 0 for every row."""
    return sampler(Settings(jnp.zeros(batch)))
