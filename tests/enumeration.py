"""The exact joint law of a round, by enumeration.

All ways a round can go are the rows of one batch: every assignment of tokens to the draft's nodes, times
every outcome of every coin, times every outcome of every draw. `sampling.accept` and `sampling.draw` are
replaced by functions that return each row's scripted outcome and multiply the row's weight by its
probability, so one run of the compiled rule gives the law of the tokens without sampling error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.tree_util import Partial

from jspec import sampling
from jspec.types import Draft, Sampler, Verdict, Verifier

ROWS = 1 << 14  # of every run, so that a rule is compiled once
Law = Callable[[np.ndarray], np.ndarray]  # prefix [M, k] -> law [M, V]


# --- laws ---------------------------------------------------------------------------------------------


def random_tables(vocab_size: int, depth: int, seed: int, zeros: float = 0.0) -> list[np.ndarray]:
    """A random law after every prefix of up to ``depth`` tokens: element k has shape [V] * k + [V].

    About a share ``zeros`` of the entries is 0, never all of a law."""
    rng = np.random.default_rng(seed)
    tables = []
    for k in range(depth + 1):
        weights = rng.gamma(1.0, size=(vocab_size,) * (k + 1))
        keep = rng.random(weights.shape) >= zeros
        keep[..., 0] |= ~keep.any(-1)
        weights = np.where(keep, weights, 0)
        tables.append(weights / weights.sum(-1, keepdims=True))
    return tables


def lookup(tables: list[np.ndarray], prefix: np.ndarray) -> np.ndarray:
    """The law after each prefix: [M, k] -> [M, V]."""
    laws = tables[prefix.shape[1]][tuple(prefix.T)]
    return np.broadcast_to(laws, (len(prefix), laws.shape[-1]))


def table_law(tables: list[np.ndarray]) -> Law:
    return functools.partial(lookup, tables)


@dataclasses.dataclass
class Target:
    """A model (``tables``: its logits after every prefix), a sampler, and ``law``: what the two should
    give, computed without the sampler."""

    tables: list[np.ndarray]
    law: Law
    sampler: Sampler
    history: Callable[[int], object]  # rows -> history before the round

    @property
    def vocab_size(self) -> int:
        return self.tables[0].shape[-1]


def _never(tokens: jax.Array, lengths: jax.Array) -> None:
    raise AssertionError("a rule does not start a history")


def _push_count(history: jax.Array, token: jax.Array) -> jax.Array:
    return history.at[jnp.arange(token.shape[0]), token].add(1.0)


def _damp(damping: jax.Array, history: jax.Array, logits: jax.Array) -> jax.Array:
    weights = logits * damping**history
    return weights / weights.sum(-1, keepdims=True)


def damped(tables: list[np.ndarray], damping: float = 0.5) -> Target:
    """The tables are laws, and a token is damped by its number of occurrences in the round: the law at a
    node is right only if the history holds that node's ancestors, no more and no less."""
    vocab_size = tables[0].shape[-1]

    def law(prefix: np.ndarray) -> np.ndarray:
        counts = (prefix[:, :, None] == np.arange(vocab_size)).sum(1)
        weights = lookup(tables, prefix) * damping**counts
        return weights / weights.sum(-1, keepdims=True)

    sampler = Sampler(Partial(_never), Partial(_push_count), Partial(_damp, jnp.float32(damping)))
    return Target(tables, law, sampler, lambda rows: jnp.zeros((rows, vocab_size)))


# --- drafts -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Source:
    """A row of `Draft.laws`: a law given the tokens down to ``node``, or given nothing (None)."""

    node: int | None
    law: Law


@dataclasses.dataclass
class Tree:
    """A drafting method in miniature.

    ``law[i]`` is the row of ``sources`` that node i is drawn from, -1 for a chosen node. Chosen nodes take
    every token in turn, and the law must be exact for each assignment by itself. Without ``explicit``
    the field `Draft.law` is left to its default. ``valid`` maps tokens [M, N] to bool [M, N].
    """

    parents: tuple[int, ...]
    law: tuple[int, ...]
    sources: tuple[Source, ...] = ()
    distinct: bool = False
    explicit: bool = True
    valid: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def width(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        return max(len(self.path(i)) for i in range(self.width))

    @property
    def visits(self) -> int:
        """The most coins that a walk can toss while rows stand at the same depth."""
        levels: dict[int, int] = {}
        for node in range(self.width):
            level = len(self.path(node))
            levels[level] = max(levels.get(level, 0), self.parents.count(node))
        return sum(levels.values())

    def path(self, node: int) -> tuple[int, ...]:
        return () if node == 0 else (*self.path(self.parents[node]), node)


def chain(depth: int) -> tuple[int, ...]:
    return tuple(range(-1, depth))


def chosen(parents: tuple[int, ...]) -> Tree:
    return Tree(parents, (-1,) * len(parents))


def drawn(parents: tuple[int, ...], q: Law, distinct: bool = False) -> Tree:
    """Every child is drawn from q after its parent."""
    return Tree(parents, parents, tuple(Source(i, q) for i in range(len(parents))), distinct, explicit=False)


def _laws(tree: Tree, tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    rows = [s.law(tokens[:, () if s.node is None else list(tree.path(s.node))]) for s in tree.sources]
    return np.stack(rows, 1) if rows else np.zeros((len(tokens), 0, vocab_size))


def _weights(tree: Tree, tokens: np.ndarray, laws: np.ndarray) -> np.ndarray:
    """Probability of each assignment [M, N] given its chosen tokens."""
    rows = np.arange(len(tokens))
    weights = np.ones(len(tokens))
    for i in range(1, tree.width):
        if tree.law[i] < 0:
            continue
        q = laws[:, tree.law[i]].copy()
        if tree.distinct:
            for j in range(1, i):
                if tree.parents[j] == tree.parents[i] and tree.law[j] == tree.law[i]:
                    q[rows, tokens[:, j]] = 0
            total = q.sum(-1, keepdims=True)
            # Where nothing is left to draw, any token may stand there: it has q = 0 and is skipped.
            q = np.where(total > 0, q / np.where(total > 0, total, 1), 1 / q.shape[-1])
        weights *= q[rows, tokens[:, i]]
    return weights


# --- coin by coin -------------------------------------------------------------------------------------


class _Recorder:
    """Every row's script, its weight so far, and the keys it used."""

    def start(self, coins: np.ndarray, draws: np.ndarray, weights: np.ndarray) -> None:
        self.coins, self.draws, self.weights = coins, draws, weights.copy()
        self.num_coins = self.num_draws = 0
        self.keys = jnp.broadcast_to(jax.random.key(1), (len(weights),))
        self.used = [self._number(jax.random.key_data(self.keys))]

    @staticmethod
    def _number(keys: jax.Array) -> np.ndarray:
        words = np.asarray(keys).astype(np.uint64)
        return words[:, 0] << np.uint64(32) | words[:, 1]

    def _fresh(self, keys: jax.Array, asking: np.ndarray) -> None:
        number = self._number(keys)
        for earlier in self.used:
            assert not (asking & (earlier == number)).any(), "a random key was used twice"
        # Rows that asked for nothing used nothing; 0 stands for no key.
        self.used.append(np.where(asking, number, np.uint64(0)))

    def accept(self, keys: jax.Array, p: jax.Array, q: jax.Array) -> np.ndarray:
        p, q, alive = np.asarray(p, np.float64), np.asarray(q, np.float64), self.weights > 0
        assert np.isfinite(p[alive]).all()
        assert (q[alive] >= 0).all()
        self._fresh(keys, alive & (p > 0) & (p < q))
        assert self.num_coins < self.coins.shape[1], "more coins than the bound given"
        probability = np.where(q > 0, np.minimum(1, p / np.where(q > 0, q, 1)), p > 0)
        outcome = self.coins[:, self.num_coins]
        self.num_coins += 1
        self.weights *= 2 * np.where(outcome, probability, 1 - probability)
        return outcome

    def draw(self, keys: jax.Array, law: jax.Array) -> np.ndarray:
        law, alive = np.asarray(law, np.float64), self.weights > 0
        assert np.abs(law[alive].sum(-1) - 1).max(initial=0) < 1e-5, "a law that does not sum to 1"
        assert (law[alive] >= 0).all()
        self._fresh(keys, alive & (law.max(-1) < 1))
        assert self.num_draws < self.draws.shape[1], "more draws than the bound given"
        outcome = self.draws[:, self.num_draws]
        self.num_draws += 1
        self.weights *= law.shape[1] * law[np.arange(len(law)), outcome]
        return outcome.astype(np.int32)


_recorder = _Recorder()


def _accept(keys: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct(p.shape, jnp.bool_)
    return io_callback(_recorder.accept, result, jax.random.key_data(keys), p, q, ordered=True)


def _draw(keys: jax.Array, law: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct(law.shape[:1], jnp.int32)
    return io_callback(_recorder.draw, result, jax.random.key_data(keys), law, ordered=True)


@contextlib.contextmanager
def _scripted() -> Iterator[None]:
    accept, draw = sampling.accept, sampling.draw
    sampling.accept, sampling.draw = _accept, _draw
    try:
        yield
    finally:
        sampling.accept, sampling.draw = accept, draw


# Unoptimised code: the rows are few and the rules many, so the compiler would take most of the time.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnames="depth", compiler_options=FAST_COMPILE)
def _run(verifier, sampler, history, logits, draft, depth, keys) -> Verdict:
    return verifier.rule(sampler, history, logits, draft, depth, keys)


@dataclasses.dataclass
class Result:
    joint: np.ndarray  # [I, V^R]: law of the round's R tokens for each assignment of chosen tokens
    expected: np.ndarray  # [V^R]: p's
    length: np.ndarray  # [I]: mean number of tokens emitted

    @property
    def error(self) -> float:
        """Greatest difference of a probability."""
        return float(np.abs(self.joint - self.expected).max())

    @property
    def deviation(self) -> float:
        """Greatest total variation."""
        return float(np.abs(self.joint - self.expected).sum(-1).max() / 2)


def _grid(base: int, length: int) -> np.ndarray:
    """All words of ``length`` digits: [base^length, length]."""
    return np.indices((base,) * length).reshape(length, -1).T if length else np.zeros((1, 0), int)


def _code(words: np.ndarray, base: int) -> np.ndarray:
    return (
        (words * base ** np.arange(words.shape[1])[::-1]).sum(1)
        if words.shape[1]
        else np.zeros(len(words), int)
    )


def law_of_round(
    verifier: Verifier, tree: Tree, target: Target, coins: int, draws: int, shape: tuple[int, int]
) -> Result:
    """The joint law of R = depth + 1 tokens after the root, when one round is judged by ``verifier`` and,
    where it emits fewer, plain sampling from p goes on.

    ``coins`` and ``draws`` bound the number of calls of `accept` and `draw` in a round. ``shape`` (N, D) is
    what the draft is padded to with invalid nodes, so that different trees share one compiled rule.
    """
    size, depth = target.vocab_size, shape[1]
    words = _grid(size, tree.width - 1)
    tokens = np.concatenate([np.zeros((len(words), 1), int), words], 1)
    draft, logits, weights = _drafts(tree, target, tokens, shape[0])
    coin_words, draw_words = _grid(2, coins).astype(bool), _grid(size, draws)
    outcomes = (len(words), len(coin_words), len(draw_words))

    instance = _code(tokens[:, [i for i in range(1, tree.width) if tree.law[i] < 0]], size)
    emitted = [np.zeros((instance.max() + 1, size**k)) for k in range(depth + 2)]  # by number of tokens
    # A run holds whole drafts, for all rounds of a draft must have been asked for the same coins; it is
    # filled up with repetitions of weight 0, so that all runs have one shape.
    rounds = len(coin_words) * len(draw_words)
    drafts = ROWS // rounds
    assert drafts > 0, "more outcomes of one draft than rows"
    for first in range(0, len(words), drafts):
        index = np.arange(first * rounds, first * rounds + ROWS)
        inside = index < min(first + drafts, len(words)) * rounds
        row, coin, draw = np.unravel_index(np.where(inside, index, 0), outcomes)
        _recorder.start(coin_words[coin], draw_words[draw], np.where(inside, weights[row], 0))
        arrays = jax.tree.map(lambda x, row=row: jnp.asarray(x[row]), (logits, draft))
        with _scripted():
            verdict = _run(verifier, target.sampler, target.history(ROWS), *arrays, depth, _recorder.keys)
            verdict = jax.tree.map(np.asarray, verdict)
        # A coin or draw not asked for left all its outcomes in the batch: each counts its share.
        weight = _recorder.weights / 2**coins / size**draws
        alive = weight > 0
        verdict, weight, row = jax.tree.map(lambda x, alive=alive: x[alive], (verdict, weight, row))
        _check_form(verdict, jax.tree.map(lambda x, row=row: x[row], draft))
        for k in range(1, depth + 2):
            here = verdict.num_emitted == k
            cells = (instance[row[here]], _code(verdict.tokens[here, :k], size))
            np.add.at(emitted[k], cells, weight[here])

    outputs = _grid(size, depth + 1)
    joint, rest = np.zeros((len(emitted[0]), len(outputs))), np.ones(len(outputs))
    for k in range(depth + 1, 0, -1):  # rest: p of the tokens from k on
        joint += emitted[k][:, _code(outputs[:, :k], size)] * rest
        rest = rest * target.law(outputs[:, : k - 1])[np.arange(len(outputs)), outputs[:, k - 1]]
    assert np.abs(joint.sum(-1) - 1).max() < 1e-5, "the rounds enumerated are not all there are"
    length = np.sum([k * mass.sum(-1) for k, mass in enumerate(emitted)], axis=0)
    return Result(joint, rest, length)


def _drafts(
    tree: Tree, target: Target, tokens: np.ndarray, width: int
) -> tuple[Draft, np.ndarray, np.ndarray]:
    """Drafts, logits [M, N, V] and weights [M] of the assignments ``tokens`` [M, n], padded to N nodes."""
    laws = _laws(tree, tokens, target.vocab_size)
    logits = [lookup(target.tables, tokens[:, list(tree.path(i))]) for i in range(tree.width)]
    valid = np.ones(tokens.shape, bool) if tree.valid is None else tree.valid(tokens)

    def pad(array: np.ndarray, fill: float) -> np.ndarray:
        missing = [(0, 0), (0, width - array.shape[1])] + [(0, 0)] * (array.ndim - 2)
        return np.pad(array, missing, constant_values=fill)

    def static(values: tuple[int, ...]) -> np.ndarray:
        return pad(np.broadcast_to(np.array(values, np.int32), tokens.shape), 0)

    draft = Draft(
        pad(tokens.astype(np.int32), 0),
        static(tree.parents),
        pad(valid, False),
        pad(laws.astype(np.float32), 1 / target.vocab_size) if tree.sources else None,
        static(tree.law) if tree.sources and tree.explicit else None,
    )
    return draft, pad(np.stack(logits, 1).astype(np.float32), 1), _weights(tree, tokens, laws)


def _check_form(verdict: Verdict, draft: Draft) -> None:
    """What the contract says of a verdict, whatever the rule."""
    rows, d = np.arange(len(verdict.path)), np.arange(verdict.path.shape[1])
    assert (verdict.num_emitted == verdict.num_accepted + 1).all()
    assert (verdict.path[:, 0] == 0).all()
    assert (verdict.tokens[d[None] >= verdict.num_emitted[:, None]] == 0).all()
    for i in range(1, len(d)):
        on = verdict.num_accepted >= i
        node = verdict.path[on, i]
        assert (draft.parents[rows[on], node] == verdict.path[on, i - 1]).all()
        assert draft.valid[rows[on], node].all()
        assert (draft.tokens[rows[on], node] == verdict.tokens[on, i - 1]).all()
