"""Encoding against its rules, batches against what an epoch must hold."""

from __future__ import annotations

import collections
import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_text import END, START
from tiny_text import tokenizer as byte_tokenizer

from training import tokenizer
from training.buckets import choose_edges
from training.data import Batches, Counts, Example, Limits, Mixture, Record, encode, widths

# --- records to examples ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def t5_like(tmp_path_factory):
    backend = tokenizer.build(["a b c d e f g h"], 20)
    return tokenizer.save(backend, tmp_path_factory.mktemp("tokenizer"))


def ids(spoken, text):
    return spoken.encode(text)[:-1]


def test_sources_and_targets_end_once(t5_like):
    records = [Record("a b", "c"), Record("d", "e f g")]
    found, counts = encode(records, t5_like, encoder=True)
    assert found[0] == Example([*ids(t5_like, "a b"), 1], [*ids(t5_like, "c"), 1])
    assert counts == Counts(2, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="tokenizer: expected one that puts no end token behind a decoder's"):
        encode(records, t5_like, encoder=False)


def test_prompts_of_a_decoder_begin_once_and_answers_do_not():
    spoken = byte_tokenizer(add_bos_token=True)
    found, _ = encode([Record("a", "b")], spoken, encoder=False)
    assert found == [Example([START, 2 + ord("a")], [2 + ord("b"), END])]
    chat, _ = encode([Record("a", "b")], spoken, encoder=False, chat=True)
    assert chat == [Example(spoken.chat([{"role": "user", "content": "a"}]), [2 + ord("b"), END])]


def test_long_sides_are_cut_or_dropped_and_counted(t5_like):
    records = [Record("a b c d", "a b"), Record("a", "b c d e"), Record("a b", "c"), Record("a b c", "b c d")]
    limit = {"source": 3, "target": 3}  # end token included

    def run(**choice):
        return encode(records, t5_like, encoder=True, limits=Limits(**limit, **choice))

    found, counts = run()
    abc = ids(t5_like, "a b c")
    assert [example.source for example in found] == [[*abc[:2], 1], [*abc[:2], 1]]
    assert counts == Counts(2, 1, 0, 0, 2, 0)
    found, counts = run(long_targets="truncate")
    assert [example.target[-1] == 1 for example in found] == [True, False, True, False]
    assert found[1].target == ids(t5_like, "b c d")
    assert counts == Counts(4, 2, 2, 0, 0, 0)
    found, counts = run(long_sources="drop", long_targets="truncate")
    assert [example.source for example in found] == [[abc[0], 1], [*abc[:2], 1]]
    assert counts == Counts(2, 0, 1, 2, 0, 0)
    assert encode(records, t5_like, encoder=True)[1] == Counts(4, 0, 0, 0, 0, 0)


def test_answers_are_cut_by_their_own_rules(t5_like):
    """As for Marian, which has a model of each language."""
    backend = t5_like.backend

    def cut(text=None, text_target=None, **options):
        return backend(text.lower() if text_target is None else text_target.upper(), **options)

    both = dataclasses.replace(t5_like, backend=Sides(backend, cut))
    found, _ = encode([Record("a B", "c")], both, encoder=True)
    assert found == [Example([*ids(t5_like, "a b"), 1], [*ids(t5_like, "C"), 1])]
    assert both.encode("A") == t5_like.encode("a")
    assert t5_like.encode_target("a b") == t5_like.encode("a b")


class Sides:
    """A tokenizer that cuts by ``call``."""

    def __init__(self, backend, call):
        self._backend, self._call = backend, call

    def __call__(self, *arguments, **options):
        return self._call(*arguments, **options)

    def __getattr__(self, name):
        return getattr(self._backend, name)


def test_half_a_chat_is_never_kept():
    records = [Record("a" * 50, "b"), Record("a", "b")]
    limits = Limits(source=40, long_sources="truncate")
    found, counts = encode(records, byte_tokenizer(), encoder=False, limits=limits, chat=True)
    assert len(found) == 1
    assert counts == Counts(1, 0, 0, 1, 0, 0)


def test_sides_without_tokens_or_with_an_early_end_are_counted(t5_like):
    records = [Record("\x01", "a"), Record("a", " "), Record("a", "b </s> c"), Record("a", "b")]
    _, counts = encode(records, t5_like, encoder=True)
    assert counts == Counts(1, 0, 0, 0, 0, 3)
    assert sum(counts) == len(records)
    last = t5_like.encode("b")[0]
    assert encode([*records, Record("b", "a")], t5_like, encoder=True, banned=[last])[1].unusable == 4
    with pytest.raises(ValueError, match=r"expected at least one example, got none: Counts\(.*unusable=3"):
        encode(records[:3], t5_like, encoder=True)
    with pytest.raises(ValueError, match="chat: expected False"):
        encode(records, t5_like, encoder=True, chat=True)


# --- batches ----------------------------------------------------------------------------------------


def examples(count, seed=0, longest=30):
    """All different, of correlated lengths; ids up to 99, the end is 1."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        length = int(rng.integers(1, longest))
        around = int(np.clip(length + rng.integers(-4, 5), 1, longest))
        source = [100 + i, *rng.integers(2, 100, length).tolist(), 1]
        found.append(Example(source, [*rng.integers(2, 100, around).tolist(), 1]))
    return found


def contents(batch, start):
    """The examples in a batch, read back from its arrays."""
    found = []
    for row, length in enumerate(batch.lengths):
        if not batch.weights[row].any():
            assert length == 1
            continue
        text = [*batch.tokens[row, :length].tolist(), int(batch.labels[row, length - 1])]
        assert batch.labels[row, :length].tolist() == text[1:]
        assert not batch.tokens[row, length:].any()
        weighted = np.flatnonzero(batch.weights[row])
        first = int(weighted[0]) + 1
        assert weighted.tolist() == list(range(first - 1, length))
        assert set(batch.weights[row, weighted]) == {1}
        if start:
            assert text[:first] == list(start)
            source = batch.source[row, : batch.source_lengths[row]].tolist()
            assert not batch.source[row, batch.source_lengths[row] :].any()
        else:
            source = text[:first]
        found.append(Example(source, text[first:]))
    return found


def counted(found):
    return collections.Counter((tuple(source), tuple(target)) for source, target in found)


def same(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in leaves)


SHAPES = st.fixed_dictionaries(
    {
        "rows": st.sampled_from([{"batch_size": 4}, {"batch_size": 6}, {"max_tokens": 300}]),
        "buckets": st.sampled_from([1, 3, 5]),
        "seed": st.integers(0, 2**32 - 1),
        "shuffle": st.booleans(),
    }
)
STARTS = [(), (0,), (0, 7, 8)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.sampled_from(STARTS), SHAPES)
def test_an_epoch_holds_every_example_once(count, start, shape):
    given_examples = examples(count)
    rows = shape.pop("rows")
    batches = Batches(given_examples, decoder_start=start, **rows, **shape, rows_multiple=2)
    shapes = {(bucket.rows, bucket.target, bucket.source) for bucket in batches.buckets}
    for epoch in range(2):
        found, partial = [], 0
        for step in range(batches.steps_per_epoch):
            batch = batches[epoch * batches.steps_per_epoch + step]
            width = batch.source.shape[1] if start else 0
            assert (*batch.tokens.shape, width) in shapes
            assert (batch.source is None) == (not start)
            found += contents(batch, start)
            partial += not batch.weights.any(1).all()
        assert counted(found) == counted(given_examples)
        assert partial <= 1
    for bucket in batches.buckets:
        assert bucket.rows % 2 == 0
        if "max_tokens" in rows:
            size = bucket.source + bucket.target
            assert 300 - 2 * size < bucket.rows * size <= 300


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(6)), SHAPES)
def test_a_batch_depends_on_its_step_alone(first, order, shape):
    rows = shape.pop("rows")
    given_examples = examples(40)
    straight = Batches(given_examples, decoder_start=(0,), **rows, **shape)
    wanted = [straight[first + step] for step in range(6)]
    resumed = Batches(given_examples, decoder_start=(0,), **rows, **shape)
    for step in order:
        assert same(resumed[first + step], wanted[step])
    assert [resumed.rows(first + i).tolist() for i in range(6)] == [
        straight.rows(first + i).tolist() for i in range(6)
    ]


def test_the_order_changes_with_epoch_and_seed_and_only_with_shuffle():
    given_examples = examples(64)

    def order(epoch, **options):
        batches = Batches(given_examples, batch_size=4, buckets=2, **options)
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        return [batches.rows(step).tolist() for step in steps]

    assert order(0) != order(1)
    assert order(0) != order(0, seed=1)
    assert sorted(map(sorted, order(0))) != sorted(map(sorted, order(1)))  # not only the order of batches
    assert order(0, shuffle=False) == order(1, shuffle=False, seed=1)
    flat = [row for batch in order(0, shuffle=False) for row in batch]
    assert flat != sorted(flat)  # by bucket, and in order within each
    widths_of = [len(given_examples[row].source) + len(given_examples[row].target) for row in flat]
    assert np.mean(widths_of[:16]) < np.mean(widths_of[-16:])


def test_the_order_is_the_same_on_every_machine():
    batches = Batches([Example([i, 1], [2, 1]) for i in range(10)], batch_size=5, seed=7)
    order = [batches.rows(step).tolist() for step in range(3)]
    assert order == [[2, 8, 7, 5, 1], [6, 3, 4, 9, 0], [4, 5, 9, 0, 6]]


def test_every_example_is_met_early_and_late():
    # The mean position over many epochs is near the middle for each example: nothing is left to the end.
    batches = Batches(examples(20, longest=4), batch_size=4, buckets=2)
    position = np.zeros(20)
    epochs = 300
    for step in range(epochs * batches.steps_per_epoch):
        rows = batches.rows(step)
        position[rows[rows >= 0]] += step % batches.steps_per_epoch
    middle = (batches.steps_per_epoch - 1) / 2
    assert np.abs(position / epochs - middle).max() < 0.4


def test_pytrees_go_through_jit():
    batch = Batches(examples(4), decoder_start=(0,), batch_size=4)[0]
    total = jax.jit(lambda b: b.weights.sum().astype(int) + b.source_lengths.sum())(batch)
    assert int(total) == sum(len(s) + len(t) for s, t in examples(4))
    assert (batch.tokens.dtype, batch.weights.dtype) == (np.int32, np.float32)


# --- buckets ----------------------------------------------------------------------------------------


def padded(needed, edges):
    first = (needed[:, None] <= np.array(edges)[None]).all(-1).argmax(1)
    return int(np.array(edges).sum(1)[first].sum())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.sampled_from([1, 4, 8]))
def test_edges_are_nested_multiples_that_hold_everything(seed, count, multiple):
    needed = widths(examples(50, seed=seed), (0,))
    edges = choose_edges(needed, count, multiple)
    assert 1 <= len(edges) <= count
    assert all(a[0] <= b[0] and a[1] <= b[1] and a != b for a, b in zip(edges, edges[1:], strict=False))
    assert all(edge % multiple == 0 for pair in edges for edge in pair)
    assert (needed.max(0) <= edges[-1]).all()
    assert (needed.max(0) > np.array(edges[-1]) - multiple).all()
    if count > 1:
        assert padded(needed, edges) <= padded(needed, choose_edges(needed, count - 1, multiple))


def test_edges_are_the_best_of_all_chains():
    needed = np.array([[1, 2]] * 5 + [[3, 1]] * 4 + [[6, 6]] * 3 + [[9, 2]])
    pairs = [(a, b) for a in (1, 3, 6, 9) for b in (1, 2, 6)]
    chains = [
        [a, b, (9, 6)]
        for a in pairs
        for b in pairs
        if a[0] <= b[0] and a[1] <= b[1] and (needed <= np.array((9, 6))).all()
    ]
    best = min(padded(needed, chain) for chain in chains)
    assert padded(needed, choose_edges(needed, 3, multiple=1)) == best


def test_decoder_only_needs_no_columns_for_sources():
    assert choose_edges(widths(examples(30), ()), 2)[-1][0] == 0
    batches = Batches(examples(30), batch_size=2, buckets=[(0, 24), (0, 64)])
    assert {bucket.target for bucket in batches.buckets} == {24, 64}


# --- mixtures ---------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=4))
def test_shares_are_kept_and_no_step_is_lost(weights):
    parts = [Batches(examples(9, seed=i), batch_size=2, buckets=1) for i in range(len(weights))]
    mixture = Mixture(parts, weights)
    counts = np.zeros(len(weights), int)
    for step in range(120):
        index, own = mixture.part(step)
        assert own == counts[index]
        counts[index] += 1
        shares = np.array(weights) / sum(weights) * (step + 1)
        assert np.abs(counts - shares).max() <= 1.5
    assert same(mixture[77], mixture.parts[mixture.part(77)[0]][mixture.part(77)[1]])


# --- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "batch_size, max_tokens: expected one of them, got None, None"),
        ({"batch_size": 2, "max_tokens": 50}, "batch_size, max_tokens: expected one of them"),
        ({"batch_size": 0}, "batch_size: expected a multiple of 1, got 0"),
        ({"batch_size": 6, "rows_multiple": 4}, "batch_size: expected a multiple of 4, got 6"),
        ({"max_tokens": 60}, r"max_tokens: expected at least \d+, 1 rows of \d+ \+ \d+, got 60"),
        ({"batch_size": 2, "buckets": 0}, "buckets: expected a number >= 1, got 0"),
        ({"batch_size": 2, "buckets": []}, "buckets: expected at least one, got none"),
        ({"batch_size": 2, "buckets": [(40, 40), (8, 8)]}, "buckets: expected each to hold the one before"),
        ({"batch_size": 2, "buckets": [(8, 8)]}, r"buckets: .* \(8, 8\) does not hold example \d+ with"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Batches(examples(20), decoder_start=(0,), **options)


def test_examples_without_tokens_and_bad_steps_are_refused():
    for bad in ([], [Example([], [1])], [Example([1], [])]):
        with pytest.raises(ValueError, match="examples: expected at least one"):
            Batches(bad, batch_size=1)
    batches = Batches(examples(2), batch_size=1)
    with pytest.raises(IndexError, match="step: expected a number >= 0, got -1"):
        batches[-1]
    with pytest.raises(IndexError, match="step: expected a number >= 0"):
        Mixture([batches], [1])[-1]
    for weights in ([], [1, 0], [1]):
        with pytest.raises(ValueError, match="weights: expected 2 numbers > 0"):
            Mixture([batches, batches], weights)
