"""The contract: what a model, a drafter and a verifier are, and the arrays they exchange.

Shape legend of the whole package (never redefined elsewhere)::

    B rows          T prompt tokens    N draft nodes (root included)    M side rows    Ts source tokens
    P pending rows  D depth of a draft R = D + 1 tokens of a round      Q laws
    V vocabulary    S cache slots      E model width

Words: p is the target's law, q the drafter's (Leviathan's notation; Chen et al. swap them). A *round* is
one propose -> verify -> commit. The *root* is the last emitted token, whose key and value are not yet in
the target's cache. A *chosen* child was picked by a rule (top-k, copied), a *drawn* child was sampled
from a law. Arrays are int32, float32 and bool unless a model computes in another dtype; ``keys`` is
always a [B] array of typed PRNG keys, one stream per row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int

PyTree = Any
Keys = jax.Array
Draws = Literal["chosen", "iid", "distinct", "mixed"]


class Prompt(NamedTuple):
    """A batch of prompts, right padded; ``tokens[b, lengths[b]:]`` carries no meaning.

    For an encoder-decoder, ``tokens`` are where the decoder begins and ``source`` is what the encoder reads.
    """

    tokens: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    source: Int[Array, "B Ts"] | None = None  # run once, by `LanguageModel.start`
    source_lengths: Int[Array, " B"] | None = None


class Block(NamedTuple):
    """Tokens to run through a model in one forward. Committed slots are always seen."""

    tokens: Int[Array, "B N"]  # -1: read `inputs` here
    positions: Int[Array, "B N"]  # absolute; siblings share one
    mask: Bool[Array, "B N P+N"] | None = None  # pending rows, then this block; None: causal and P = 0
    inputs: Float[Array, "B N E"] | None = None


class Forward(NamedTuple):
    """What a forward returns. Nothing has been written: `LanguageModel.commit` does that."""

    hidden: Float[Array, "B N E"]  # what `head` reads (after the final norm)
    taps: dict[int, Float[Array, "B N E"]]  # tap l: the input of layer l; l = num_layers: the last output
    rows: PyTree  # uncommitted keys and values of pending + block; every leaf [B, P+N, ...]
    logits: Float[Array, "B N V"] | None = None  # of draft nodes only, filled in by the engine


class LanguageModel(NamedTuple):
    """A model as pure functions. Static, and equal by config (made by a cached factory).

    ``start(params, prompt, capacity) -> cache`` makes an empty cache with a field ``lengths [B]`` (an encoder
    runs here, once);
    ``extend(params, cache, block, pending=None, taps=()) -> Forward`` reads the cache and never writes it
    (``pending`` is an earlier Forward's ``rows``); ``commit(cache, rows, path [B, R], count [B]) -> cache``
    is the only writer: it appends the first ``count`` of the rows ``path`` names, and drops what lies beyond
    the capacity; slots at or beyond ``lengths`` are scratch. ``embed(params, tokens) -> [B, N, E]``;
    ``head(params, hidden [..., E]) -> logits [..., V]`` float32; ``truncate(num_layers) -> LanguageModel``
    runs the first layers of the same params and the same cache. ``start`` and ``extend`` of a model that can
    be trained also take ``dropout``, None by default. ``config`` is hashable and has at least ``vocab_size``
    and ``context_length`` (positions the model was made for). ``rows(params, inputs, positions [B, N]) ->
    {layer: (keys, values)}``, [B, N, K, h] each, are what ``extend`` makes of the layers' ``inputs``
    {layer: [B, N, E]} (its taps); None: the model has none to show.
    """

    start: Callable[..., PyTree]
    extend: Callable[..., Forward]
    commit: Callable[..., PyTree]
    embed: Callable[..., Float[Array, "B N E"]]
    head: Callable[..., Float[Array, "... V"]]
    truncate: Callable[[int], LanguageModel]
    config: Any
    rows: Callable[..., dict[int, tuple[Float[Array, "B N K h"], Float[Array, "B N K h"]]]] | None = None


class Sampler(NamedTuple):
    """Logits to law, as an automaton over the tokens before them. The three are `tree_util.Partial`:
    settings per row are their leaves, so that nothing recompiles when a value changes."""

    init: Callable[..., PyTree]  # (tokens [B, T], lengths [B]) -> history, every leaf [B, ...]
    push: Callable[..., PyTree]  # (history, token [B]) -> history
    law: Callable[..., Float[Array, "B V"]]  # (history, logits [B, V]) -> law, float32, rows sum to 1


class Context(NamedTuple):
    """The world before the round, for `propose` and `update` alike. Built inside the trace."""

    tokens: Int[Array, "B S"]  # slots at or beyond `lengths` may hold anything
    lengths: Int[Array, " B"]  # root included: the root is tokens[b, lengths[b] - 1]
    budget: Int[Array, " B"]  # tokens the row may still emit; 0 for a finished row
    history: PyTree
    sampler: Sampler
    target: LanguageModel
    params: PyTree  # the target's
    cache: PyTree  # the target's, read only; holds the tokens before the root


class Draft(NamedTuple):
    """A token tree in topological order, node 0 the root; a chain has ``parents = arange(N) - 1``."""

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]  # parent[0] = -1, parents[i] < i
    valid: Bool[Array, "B N"]  # closed under parents; decided before node i is drawn
    laws: Float[Array, "B Q V"] | None = None  # the laws children were drawn from; None: all chosen
    law: Int[Array, "B N"] | None = None  # row of `laws` of node i, -1 = chosen; None: its parent's index
    side: Block | None = None  # rows that ride along, never committed; mask [B, M, N+M]


class Verdict(NamedTuple):
    """What a round keeps. The verifier sets num_emitted = num_accepted + 1; the engine cuts both at EOS,
    stops and budget, and to 0 for a finished row."""

    path: Int[Array, "B R"]  # node at each depth, path[:, 0] = 0; beyond num_accepted any node
    num_accepted: Int[Array, " B"]
    tokens: Int[Array, "B R"]  # tokens[:, d] follows node path[:, d]; beyond num_emitted 0
    num_emitted: Int[Array, " B"]


class Method(NamedTuple):
    """The whole interface of a drafting method. Static: hashable, equal for equal settings.

    ``init(params, prompt, capacity, target) -> state`` (every leaf leads with B);
    ``propose(params, state, context, keys) -> (Draft, state)``;
    ``update(params, state, context, draft, verdict, forward) -> state`` after every round, by whatever
    author the draft is, and for the prompt too, which arrives in chunks as a forced chain with
    ``forward.logits = None``. A row with ``num_emitted = 0`` must keep its state.
    """

    init: Callable[..., PyTree]
    propose: Callable[..., tuple[Draft, PyTree]]
    update: Callable[..., PyTree]
    width: int  # N of every draft
    depth: int  # D: the deepest node's depth
    side: int = 0  # M
    taps: tuple[int, ...] = ()
    draws: Draws = "chosen"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafter:
    """Parameters (leaves: weights, thresholds) and a static method: an ordinary jit argument."""

    params: PyTree
    method: Method = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verifier:
    """An acceptance rule: ``rule(sampler, history, logits [B, N, V], draft, depth, keys) -> Verdict``.

    ``rule`` is a `tree_util.Partial` (thresholds are its leaves), ``depth`` the method's, a Python int.
    ``draws`` names the kinds of drafts the rule is right for; the engine refuses any other.
    """

    rule: Callable[..., Verdict]
    draws: frozenset[str] = dataclasses.field(metadata={"static": True})
    lossless: bool = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(metadata={"static": True})


class Info(NamedTuple):
    """What a round shows to `record`; never carried."""

    draft: Draft
    verdict: Verdict
    forward: Forward
