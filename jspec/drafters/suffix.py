"""Copying: the text so far is searched for its own end, and what followed there is the draft.

One array ``m`` serves the whole family (prompt lookup, LLMA, vLLM's n-gram proposer, suffix automata):
``m[i]`` is how many tokens before and at position i equal the last tokens of the text. For the text
1 2 3 9 1 2 3 8 1 2, whose end is 1 2::

    text   1 2 3 9 1 2 3 8 1 2
    m      0 2 0 0 0 2 0 0 0 .      the last token is never compared with itself

A rule (`Lookup`) chooses an occurrence by length and place, and copies what follows it. With an
encoder-decoder the text is the source and, after it, what the decoder has written: summaries copy from what
they summarise.
"""

from __future__ import annotations

import functools
import math
from numbers import Real
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jspec.checks import at_least, check
from jspec.drafters.common import chain, merge_branches, root, take
from jspec.types import Context, Draft, Drafter, Forward, Keys, LanguageModel, Method, Prompt, Verdict

OCCURRENCES = 8  # branches of a voted tree; with 16 the mean accepted length changed by less than 0.002
MAX_WEIGHT = 16  # log2 of the largest vote, so that sums stay within int32


class Lookup(NamedTuple):
    """Which occurrence is copied, and how much of what follows it.

    An occurrence of length n at position i means that the n tokens ending at i equal the last n of the
    text. Longer ones win (lengths above ``max_match`` count as ``max_match``), then the place decides.
    """

    num_tokens: int = 5  # copied at most
    min_match: int = 1
    max_match: int = 32
    earliest: bool = False  # among the longest: the first occurrence instead of the last
    whole: bool = False  # only occurrences that are followed by num_tokens known tokens
    apart: bool = False  # n only so large that one token or more lies between occurrence and suffix
    prompt_only: bool = False  # match the new tokens, in the prompt
    periodic: bool = True  # what follows is continued with its own beginning where the text ends
    withheld: int = 0  # that many last tokens of the text are not copied
    factor: float = 0.0  # a match of length n is worth floor(factor * n + offset) tokens
    offset: float | None = None  # None: 0, or num_tokens where factor is 0


PRESETS = {
    # apoorvumang/prompt-lookup-decoding, find_candidate_pred_tokens
    "pld": Lookup(10, max_match=3, earliest=True, whole=True, apart=True, periodic=False),
    # transformers, PromptLookupCandidateGenerator
    "transformers": Lookup(10, max_match=2, earliest=True, periodic=False),
    # LLMA, arXiv 2304.04487, at n = 1, k = 20 (one token of the 20 is the model's own)
    "llma": Lookup(19, max_match=5, earliest=True, prompt_only=True, periodic=False),
    # vLLM, NgramProposer, at its fall-back n = 5; num_speculative_tokens has no default there
    "vllm_ngram": Lookup(5, min_match=5, max_match=5, earliest=True, periodic=False),
    # SAM-Decoding, arXiv 2411.10666, the dynamic automaton alone: 40 positions with the root, alpha = 4
    "sam": Lookup(39, max_match=64, earliest=True, periodic=False, withheld=1, factor=4.0, offset=0.0),
}


class SuffixParams(NamedTuple):
    """Thresholds: they may change without a recompilation."""

    min_match: np.int32
    factor: np.float32
    offset: np.float32
    min_probability: np.float32


def match_lengths(tokens: Int[Array, "B S"], lengths: Int[Array, " B"], longest: int) -> Int[Array, "B S"]:
    """Length of the common suffix of ``tokens[b, :i + 1]`` and the text ``tokens[b, :lengths[b]]``, at most
    ``longest``; 0 from the last token on. ``longest`` shifted comparisons, fused into one pass.

    >>> match_lengths(jnp.array([[1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 7]]), jnp.array([10]), 4).tolist()
    [[0, 2, 0, 0, 0, 2, 0, 0, 0, 0, 0]]
    """
    width = tokens.shape[1]
    longest = min(longest, width)
    tail = take(tokens, lengths[:, None] - 1 - jnp.arange(longest)[None])
    shifted = jnp.pad(tokens, ((0, 0), (longest, 0)), constant_values=-1)
    running = jnp.arange(width)[None] < (lengths - 1)[:, None]
    match = jnp.zeros_like(tokens)
    for j in range(longest):
        # tokens[i - j] against the j-th token from the end. Before the text stands -1, which no token is.
        running = running & (shifted[:, longest - j : longest - j + width] == tail[:, j][:, None])
        match = match + running.astype(jnp.int32)
    return match


def _occurrences(
    params: SuffixParams, lookup: Lookup, context: Context, end: Int[Array, " B"], count: int
) -> tuple[Int[Array, "B R"], Int[Array, "B R"]]:
    """Places and lengths of the best ``count`` occurrences, best first (length 0: there is none).
    Tokens from ``end`` on are not copied."""
    position = jnp.arange(context.tokens.shape[1], dtype=jnp.int32)[None]
    lengths, end = context.lengths[:, None], end[:, None]
    match = match_lengths(context.tokens, context.lengths, lookup.max_match)
    if lookup.prompt_only:
        match = jnp.where(position < end, jnp.minimum(match, lengths - end), 0)
    if lookup.apart:
        match = jnp.minimum(match, lengths - 2 - position)
    if lookup.whole:
        match = jnp.where(end - 1 - position >= lookup.num_tokens, match, 0)
    match = jnp.where(match >= params.min_match, match, 0)

    width = context.tokens.shape[1]
    place = width - 1 - position if lookup.earliest else position
    key = jnp.where(match > 0, match * width + place, -1)
    places, found = [], []
    for _ in range(count):
        best = jnp.argmax(key, axis=1).astype(jnp.int32)[:, None]
        places.append(best)
        found.append(jnp.maximum(take(key, best), 0) // width)
        key = jnp.where(position == best, -1, key)
    return jnp.concatenate(places, axis=1), jnp.concatenate(found, axis=1)


def _continuations(
    params: SuffixParams,
    lookup: Lookup,
    context: Context,
    end: Int[Array, " B"],
    places: Int[Array, "B R"],
    found: Int[Array, "B R"],
) -> tuple[Int[Array, "B R K"], Bool[Array, "B R K"]]:
    """What follows each occurrence: tokens and which of them count."""
    batch, count = places.shape
    step = jnp.arange(lookup.num_tokens, dtype=jnp.int32)[None, None]
    follow = (end[:, None] - 1 - places)[:, :, None]  # known tokens after the occurrence
    room = jnp.floor(params.factor * found.astype(jnp.float32) + params.offset)
    room = jnp.where(found > 0, jnp.minimum(room, float(lookup.num_tokens)), 0).astype(jnp.int32)
    valid = step < room[:, :, None]
    if lookup.periodic:
        step = step % jnp.maximum(follow, 1)  # text a b c a: draft b c a b c a ...
    else:
        valid = valid & (step < follow)
    index = places[:, :, None] + 1 + step
    tokens = take(context.tokens, index.reshape(batch, -1)).reshape(batch, count, -1)
    return tokens, valid


class SuffixState(NamedTuple):
    """What the text holds besides the decoder's tokens, and how much of it is prompt."""

    prompt: Int[Array, " B"] | None  # its length, with `Lookup.prompt_only`
    source: Int[Array, "B Ts"] | None  # an encoder's, shifted to the right end; -1 before it


def _shifted(source: Int[Array, "B Ts"], lengths: Int[Array, " B"]) -> Int[Array, "B Ts"]:
    """Right padded to left padded, with -1: (4, 5, 0, 0) of length 2 is (-1, -1, 4, 5)."""
    width = source.shape[1]
    index = jnp.arange(width, dtype=jnp.int32)[None] - (width - lengths)[:, None]
    return jnp.where(index >= 0, take(source, jnp.maximum(index, 0)), -1)


@functools.cache
def _suffix(lookup: Lookup, num_nodes: int | None) -> Method:
    def init(params: SuffixParams, prompt: Prompt, capacity: int, target: LanguageModel) -> SuffixState:
        source = None
        if prompt.source is not None and prompt.source_lengths is not None:
            source = _shifted(prompt.source, prompt.source_lengths)
        return SuffixState(prompt.lengths if lookup.prompt_only else None, source)

    def propose(
        params: SuffixParams, state: SuffixState, context: Context, keys: Keys
    ) -> tuple[Draft, SuffixState]:
        before = 0
        if state.source is not None:
            before = state.source.shape[1]
            context = context._replace(
                tokens=jnp.concatenate([state.source, context.tokens], axis=1),
                lengths=before + context.lengths,
            )
        end = context.lengths - lookup.withheld if state.prompt is None else before + state.prompt
        count = 1 if num_nodes is None else OCCURRENCES
        places, found = _occurrences(params, lookup, context, end, count)
        tokens, valid = _continuations(params, lookup, context, end, places, found)
        if num_nodes is None:
            return chain(root(context), tokens[:, 0], valid[:, 0]), state
        votes = jnp.where(found > 0, 2 ** jnp.minimum(found, MAX_WEIGHT), 0)
        draft, weight = merge_branches(root(context), tokens, valid, votes, num_nodes)
        share = weight.astype(jnp.float32) / jnp.maximum(weight[:, :1], 1).astype(jnp.float32)
        likely = (share >= params.min_probability).at[:, 0].set(True)
        return draft._replace(valid=draft.valid & likely), state

    def update(
        params: SuffixParams,
        state: SuffixState,
        context: Context,
        draft: Draft,
        verdict: Verdict,
        forward: Forward,
    ) -> SuffixState:
        if state.prompt is None or forward.logits is not None:
            return state
        # All that is absorbed is prompt, and so is the token after it.
        absorbed = jnp.where(verdict.num_emitted > 0, context.lengths + verdict.num_emitted, 0)
        return state._replace(prompt=jnp.maximum(state.prompt, absorbed))

    width = 1 + lookup.num_tokens if num_nodes is None else num_nodes
    return Method(init, propose, update, width=width, depth=lookup.num_tokens)


def suffix(
    num_tokens: int | None = None,
    preset: str | Lookup | None = None,
    *,
    num_nodes: int | None = None,
    min_match: int | None = None,
    max_match: int | None = None,
    factor: float | None = None,
    offset: float | None = None,
    min_probability: float = 0.0,
) -> Drafter:
    """Draft what followed the longest earlier occurrence of the text's own end, in prompt and output.

    Lossless in law with any lossless rule: every token is chosen. No weights; a round costs
    O(max_match * S) comparisons. Where nothing matches the draft is empty and the round a plain step.

    With m[i] the length of the common suffix of text[:i + 1] and the text, and L the text's length::

        i* = argmax_{i < L - 1} (m[i], i)          the longest, of those the latest
        draft[k] = text[i* + 1 + (k mod (L - 1 - i*))],   k < min(num_tokens, factor * m[i*] + offset)

    ``preset`` names another rule: ``"pld"``, ``"transformers"``, ``"llma"``, ``"vllm_ngram"`` or ``"sam"``
    reproduce these originals draft for draft (``"sam"`` but for matches beyond 64 tokens, which count as
    64), or a `Lookup` of one's own. What is None is the preset's.

    Args:
      num_tokens: tokens drafted at most.
      num_nodes: None for a chain; else a tree of that many nodes, root included: the continuations of the
        best 8 occurrences are merged into a trie, an occurrence of length n votes with weight 2^n, and the
        nodes with the most votes are kept.
      min_match: shorter occurrences are not used.
      max_match: longer ones are told apart by their place only.
      factor, offset: length of the draft in tokens by length n of the match, ``floor(factor * n + offset)``
        (SAM-Decoding, SuffixDecoding). Without them it is ``num_tokens`` always; ``factor=1, offset=1``
        drafts under 60 % of the tokens for 97 % of the mean accepted length. ``factor`` alone: offset 0.
      min_probability: of a tree, nodes with a smaller share of the votes are dropped.

    Raises:
      ValueError: unknown preset; a number out of its range.

    >>> text = jnp.array([[1, 2, 3, 9, 1, 2, 3, 8, 1, 2]])
    >>> context = Context(text, jnp.array([10]), jnp.array([99]), (), *[None] * 4)
    >>> method = suffix(3).method
    >>> draft, _ = method.propose(suffix(3).params, SuffixState(None, None), context, None)
    >>> draft.tokens.tolist()
    [[2, 3, 8, 1]]

    Reference: Saxena 2023 (prompt lookup decoding); Yang et al., arXiv 2304.04487; Hu et al., arXiv
    2411.10666; Oliaro et al., arXiv 2411.04975 (votes).
    """
    known = preset in PRESETS if isinstance(preset, str) else isinstance(preset, Lookup | None)
    check(known, "preset", f"one of {', '.join(sorted(PRESETS))} or a Lookup", preset)
    lookup = PRESETS[preset] if isinstance(preset, str) else preset or Lookup()
    given = {
        "num_tokens": num_tokens,
        "min_match": min_match,
        "max_match": max_match,
        "factor": factor,
        "offset": offset,
    }
    lookup = lookup._replace(**{name: value for name, value in given.items() if value is not None})
    at_least(1, **{name: getattr(lookup, name) for name in ("num_tokens", "min_match", "max_match")})
    check(_finite(lookup.factor) and lookup.factor >= 0, "factor", "a number >= 0", lookup.factor)
    check(lookup.offset is None or _finite(lookup.offset), "offset", "a number or None", lookup.offset)
    if lookup.min_match > lookup.max_match:
        raise ValueError(
            f"min_match: expected at most max_match = {lookup.max_match}, got {lookup.min_match}"
        )
    at_least(2, num_nodes=num_nodes)
    most = 1 + OCCURRENCES * lookup.num_tokens
    if num_nodes is not None and num_nodes > most:
        raise ValueError(f"num_nodes: expected at most {most}, got {num_nodes}")
    if not 0 <= min_probability <= (0 if num_nodes is None else 1):
        raise ValueError(
            f"min_probability: expected a number from 0 to 1, and 0 for a chain, got {min_probability}"
        )
    default = 0 if lookup.factor else lookup.num_tokens
    params = SuffixParams(
        np.int32(lookup.min_match),
        np.float32(lookup.factor),
        np.float32(default if lookup.offset is None else lookup.offset),
        np.float32(min_probability),
    )
    # Thresholds are parameters: drafters that differ in them alone share one compilation.
    return Drafter(params, _suffix(lookup._replace(min_match=1, factor=0.0, offset=None), num_nodes))


def _finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
