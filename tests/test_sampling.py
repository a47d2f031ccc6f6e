"""The sampling pipeline against plain numpy, and the two sources of randomness."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.tree_util import Partial

from jspec import sampling
from jspec.sampling import Settings

SIZE = 8


def row(*values: float) -> jax.Array:
    return jnp.array([values], jnp.float32)


def one(value: float) -> jax.Array:
    return jnp.full(1, value, jnp.float32)


# --- temperature --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6, 1e-5, 1e-3, 1.0, 100.0])
def test_temperatures_near_zero_are_finite_and_greedy(temperature, dtype):
    """Logits spread over 100: below the documented threshold one-hot, above it all the same to rounding."""
    logits = jnp.linspace(-50, 50, SIZE).astype(dtype)[jnp.array([3, 7, 0, 1, 6, 2, 5, 4])][None]
    law = sampling.law_from_logits(Settings(one(temperature), jnp.array([3]), one(0.9), one(0.1)), logits)
    assert law.dtype == jnp.float32
    assert np.isfinite(law).all()
    assert abs(float(law.sum()) - 1) < 1e-6
    assert int(law.argmax()) == 1
    if temperature < sampling.GREEDY:
        assert law[0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    elif temperature < 1:
        assert float(law[0, 1]) == 1


def test_greedy_ties_go_to_the_lowest_index():
    for temperature in (0.0, 1e-8, 1e-6):
        law = sampling.law_from_logits(Settings(one(temperature)), row(1, 4, 2, 4, 4))
        assert law.tolist() == [[0, 1, 0, 0, 0]]
    tied = sampling.law_from_logits(Settings(one(1e-5)), row(1, 4, 2, 4, 4))
    assert np.allclose(tied, [[0, 1 / 3, 0, 1 / 3, 1 / 3]])


def test_temperature_divides_logits():
    p = np.array([0.5, 0.3, 0.2])
    law = sampling.law_from_logits(Settings(one(0.5)), jnp.log(row(*p)))
    assert np.allclose(law[0], p**2 / (p**2).sum(), atol=1e-6)  # (.658, .237, .105)


# --- filters ------------------------------------------------------------------------------------------


def reference(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, margin: float = 1e-5
) -> np.ndarray | None:
    """Sort, cut, renormalise, in float64; tokens tied with the last one kept are kept.

    None where a decision hangs on rounding: a mass or a ratio within ``margin`` of its threshold."""
    if temperature < sampling.GREEDY:
        return np.eye(len(logits))[logits.argmax()]
    law = np.exp((logits - logits.max()) / temperature)
    law /= law.sum()
    if top_k > 0:
        law = np.where(law >= np.sort(law)[::-1][min(top_k, len(law)) - 1], law, 0)
        law /= law.sum()
    if top_p < 1:
        ranked = np.sort(law)[::-1]
        mass = ranked.cumsum()
        if np.abs(mass - top_p).min() < margin:
            return None
        law = np.where(law >= ranked[np.argmax(mass >= top_p)], law, 0)
        law /= law.sum()
    if min_p > 0:
        if np.abs(law / law.max() - min_p).min() < margin:
            return None
        law = np.where(law >= min_p * law.max(), law, 0)
        law /= law.sum()
    return law


def quarters(low: int, high: int) -> st.SearchStrategy[float]:
    """Coarse numbers, so that ties are common."""
    return st.integers(low * 4, high * 4).map(lambda n: n / 4)


ROWS = 4
filters = st.tuples(
    st.lists(quarters(-3, 3), min_size=SIZE, max_size=SIZE),
    st.sampled_from([0.0, 1e-8, 0.5, 1.0, 2.0]),
    st.integers(0, SIZE + 2),
    st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)


@jax.jit
def all_filters(s: Settings, logits: jax.Array) -> jax.Array:
    return sampling.law_from_logits(s, logits)


def columns(cases: list[tuple]) -> tuple[Settings, jax.Array]:
    logits, temperature, top_k, top_p, min_p = (list(column) for column in zip(*cases, strict=True))
    values = (jnp.array(x, jnp.float32) for x in (temperature, top_p, min_p))
    temperature, top_p, min_p = values
    return Settings(temperature, jnp.array(top_k), top_p, min_p), jnp.array(logits, jnp.float32)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(filters, min_size=ROWS, max_size=ROWS))
def test_filters_against_sorting(cases):
    """Four rows of different settings at once, and every one as if it were alone."""
    expected = [reference(np.array(case[0]), *case[1:]) for case in cases]
    assume(all(law is not None for law in expected))
    law = np.asarray(all_filters(*columns(cases)))
    assert np.array_equal(law > 0, np.array(expected) > 0)
    assert np.abs(law - expected).max() < 1e-6
    for i, case in enumerate(cases):
        alone = np.asarray(all_filters(*columns([case] * ROWS)))
        assert np.array_equal(alone[0], law[i])


def test_filters_off_change_nothing():
    """top_k = 0 or V, top_p = 1 and min_p = 0, where float32 sums fall short of 1."""
    logits = jax.random.normal(jax.random.key(0), (3, 20_000)) * 4
    plain = sampling.law_from_logits(Settings(jnp.ones(3)), logits)
    off = Settings(jnp.ones(3), jnp.array([0, 20_000, 30_000]), jnp.ones(3), jnp.zeros(3))
    law = sampling.law_from_logits(off, logits)
    assert (law > 0).all()
    assert np.allclose(law, plain, rtol=1e-5)


def test_a_large_vocabulary_against_sorting():
    logits = jax.random.normal(jax.random.key(1), (1, 20_000)) * 3
    for top_k, top_p in ((50, 1.0), (0, 0.9), (1000, 0.5)):
        law = sampling.law_from_logits(Settings(one(1.0), jnp.array([top_k]), one(top_p)), logits)
        expected = reference(np.asarray(logits[0], np.float64), 1.0, top_k, top_p, 0.0, margin=0.0)
        assert expected is not None
        assert abs(int((law > 0).sum()) - int((expected > 0).sum())) <= 1  # sums differ in the last bits
        assert np.abs(np.asarray(law[0]) - expected).max() < 1e-4
        assert top_p < 1 or int((law > 0).sum()) == top_k


def test_each_filter_acts_on_what_the_one_before_left():
    logits = jnp.log(row(0.4, 0.3, 0.2, 0.1))
    # .4 of all is not enough mass, .4 / .7 of the two kept is.
    both = sampling.law_from_logits(Settings(one(1.0), jnp.array([2]), one(0.5)), logits)
    assert both.tolist() == [[1, 0, 0, 0]]
    only = sampling.law_from_logits(Settings(one(1.0), None, one(0.5)), logits)
    assert np.allclose(only, [[4 / 7, 3 / 7, 0, 0]], atol=1e-6)
    # Temperature 2 flattens the law before top-p sees it.
    hot = sampling.law_from_logits(Settings(one(2.0), None, one(0.39)), logits)
    assert (hot > 0).sum() == 2


# --- processors ---------------------------------------------------------------------------------------


def law_after(
    processors: list[sampling.Processor],
    logits: jax.Array,
    prompt: list[int] = [0],  # noqa: B006
    length: int = 1,
    output: tuple[int, ...] = (),
) -> np.ndarray:
    sampler = sampling.sampler(Settings(one(1.0)), processors)
    history = sampler.init(jnp.array([prompt]), jnp.array([length]))
    for token in output:
        history = sampler.push(history, jnp.array([token]))
    return np.asarray(sampler.law(history, logits))[0]


def softmax(*logits: float) -> np.ndarray:
    weights = np.exp(np.array(logits) - max(logits))
    return weights / weights.sum()


def test_penalties_by_hand():
    logits = row(2, -1, 0.5, 3, -0.5)
    # Prompt 0, padding 3, output 1 1 4. Seen: 0 1 4, positive logits halved, negative ones doubled.
    penalty = sampling.penalties(5, one(2.0), one(0.5), one(0.25))
    law = law_after([penalty], logits, [0, 3], 1, (1, 1, 4))
    assert np.allclose(law, softmax(1, -2 - 0.5 - 2 * 0.25, 0.5, 3, -1 - 0.5 - 0.25), atol=1e-6)
    neutral = sampling.penalties(5, one(1.0), one(0.0), one(0.0))
    assert np.allclose(
        law_after([neutral], logits, [0, 3], 1, (1, 1, 4)), softmax(2, -1, 0.5, 3, -0.5), atol=1e-6
    )
    reward = sampling.penalties(5, one(1.0), one(0.0), one(-2.0))
    assert np.allclose(law_after([reward], logits, [0], 1, (2,)), softmax(2, -1, 2.5, 3, -0.5), atol=1e-6)


def test_allowed_tokens():
    """One mask for all rows, or one a row."""
    allowed = jnp.array([[True, False, True]])
    assert np.allclose(law_after([sampling.allow(allowed)], row(1, 9, 1)), [0.5, 0, 0.5])
    masks = jnp.array([[True, False, True], [False, True, False]])
    sampler = sampling.sampler(Settings(jnp.array([1.0, 0.0])), [sampling.allow(masks)])
    law = sampler.law(sampler.init(jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32)), jnp.ones((2, 3)))
    assert np.allclose(law, [[0.5, 0, 0.5], [0, 1, 0]])


def test_allowed_before():
    """A minimum length per row: the end token 2 is banned from the first 0, 1 and 2 new tokens."""
    rule = sampling.allow_before(jnp.array([0, 1, 2]), jnp.array([[True, True, False]]))
    sampler = sampling.sampler(Settings(jnp.zeros(3)), [rule])
    history = sampler.init(jnp.zeros((3, 4), jnp.int32), jnp.array([4, 1, 2]))
    logits = jnp.broadcast_to(row(0, 1, 2), (3, 3))
    out = []
    for _ in range(3):
        token = sampler.law(history, logits).argmax(-1).astype(jnp.int32)
        history = sampler.push(history, token)
        out.append(token.tolist())
    assert out == [[2, 1, 1], [2, 2, 1], [2, 2, 2]]


def test_processors_apply_in_order_before_temperature():
    double = sampling.stateless(lambda logits: 2 * logits)
    plus = sampling.stateless(lambda logits: logits + jnp.array([[1.0, 0, 0]]))
    assert np.allclose(law_after([double, plus], row(1, 0, 0)), softmax(3, 0, 0), atol=1e-6)
    assert np.allclose(law_after([plus, double], row(1, 0, 0)), softmax(4, 0, 0), atol=1e-6)
    # A ban holds after penalties, and a penalty cannot lift it.
    ban = sampling.allow(jnp.array([[False, True, True]]))
    penalty = sampling.penalties(3, one(3.0), one(-5.0), one(-5.0))
    assert law_after([penalty, ban], row(5, 0, 0), [0], 1, (0,))[0] == 0
    # Temperature acts on what the processors leave.
    sampler = sampling.sampler(Settings(one(0.5)), [plus])
    assert np.allclose(sampler.law(((),), row(1, 0, 0))[0], softmax(4, 0, 0), atol=1e-6)


def test_a_processor_of_the_user():
    """Forbid to repeat the last token: an automaton with one integer a row."""

    def init(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        return jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]

    def push(last: jax.Array, token: jax.Array) -> jax.Array:
        return token

    def apply(last: jax.Array, logits: jax.Array) -> jax.Array:
        return jnp.where(jnp.arange(3)[None] == last[:, None], -jnp.inf, logits)

    rule = sampling.Processor(Partial(init), Partial(push), Partial(apply))
    assert law_after([rule], row(1, 1, 1), [2, 0, 1], 3).tolist() == [0.5, 0, 0.5]
    assert law_after([rule], row(1, 1, 1), [2, 0, 1], 3, (0,)).tolist() == [0, 0.5, 0.5]


def test_settings_are_leaves():
    """New values reuse the compiled program, new objects of the same settings too."""
    traces = []

    @jax.jit
    def law(sampler: sampling.Sampler, logits: jax.Array) -> jax.Array:
        traces.append(1)
        history = sampler.init(jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32))
        return sampler.law(sampler.push(history, jnp.zeros(1, jnp.int32)), logits)

    for value in (0.0, 0.5, 1.0):
        processors = [
            sampling.penalties(3, one(1 + value), one(value), one(value)),
            sampling.allow(jnp.array([[True, value > 0.7, True]])),
            sampling.allow_before(jnp.array([int(2 * value)]), jnp.array([[True, False, True]])),
        ]
        values = Settings(one(value), jnp.array([int(2 * value)]), one(0.5 + value / 2), one(value))
        law(sampling.sampler(values, processors), row(1, 2, 3))
    assert len(traces) == 1


def test_rows_do_not_influence_each_other():
    """Greedy and sampled rows, filters and penalties: a batch equals its rows."""
    rows = 6
    logits = jax.random.normal(jax.random.key(2), (rows, SIZE)) * 3
    temperature = jnp.array([0.0, 1.0, 0.7, 0.0, 2.0, 1.0])
    penalty = (jnp.linspace(1, 2, rows), jnp.linspace(0, 1, rows), jnp.linspace(0, 0.5, rows))
    tokens = jnp.arange(rows * 3).reshape(rows, 3) % SIZE
    lengths = jnp.array([1, 2, 3, 1, 2, 3])
    top = (jnp.array([0, 2, 3, 1, 0, 0]), jnp.array([1.0, 0.9, 0.5, 0.3, 1.0, 0.7]))

    @jax.jit
    def law(penalty, temperature, top, tokens, lengths, logits) -> jax.Array:
        sampler = sampling.sampler(Settings(temperature, *top), [sampling.penalties(SIZE, *penalty)])
        history = sampler.push(sampler.init(tokens, lengths), tokens[:, 2])
        return sampler.law(history, logits)

    arrays = (penalty, temperature, top, tokens, lengths, logits)
    together = law(*arrays)
    for i in range(rows):
        alone = law(*jax.tree.map(lambda x, i=i: x[i : i + 1], arrays))
        assert np.array_equal(alone[0], together[i])


# --- randomness ---------------------------------------------------------------------------------------


def test_accept_frequencies():
    rows = 40_000
    for p, q, rate in ((0.3, 0.6, 0.5), (0.05, 0.5, 0.1), (0.6, 0.3, 1.0), (0.0, 0.5, 0.0), (1.0, 1.0, 1.0)):
        keys = sampling.row_keys(jnp.arange(rows))
        accepted = sampling.accept(keys, jnp.full(rows, p), jnp.full(rows, q)).mean()
        assert abs(float(accepted) - rate) < 5 * np.sqrt(rate * (1 - rate) / rows) + 1e-9


@pytest.mark.parametrize("u", [0.0, 1 - 2**-23])
def test_accept_is_strict_at_the_ends(u, monkeypatch):
    """u = 0 must not let a forbidden token through, u just below 1 must not stop a certain one."""
    monkeypatch.setattr(jax.random, "uniform", lambda key: jnp.float32(u))
    keys = sampling.row_keys(jnp.arange(6))
    p = jnp.array([0.0, 0.0, 0.3, 1.0, 0.7, 0.2])
    q = jnp.array([0.5, 0.0, 0.3, 1.0, 0.5, 0.4])
    expected = [False, False, True, True, True, u == 0]
    assert sampling.accept(keys, p, q).tolist() == expected


def test_draw_frequencies_and_zeros():
    rows = 40_000
    p = np.array([0.0, 0.4, 0.0, 0.3, 0.2, 0.1, 0.0])
    law = jnp.broadcast_to(jnp.asarray(p, jnp.float32), (rows, 7))
    tokens = np.asarray(sampling.draw(sampling.row_keys(jnp.arange(rows)), law))
    counts = np.bincount(tokens, minlength=7)
    assert (counts[p == 0] == 0).all()
    chi_square = ((counts - rows * p) ** 2)[p > 0] / (rows * p[p > 0])
    assert chi_square.sum() < 30  # 3 degrees of freedom: 1e-6


def test_draw_of_sharp_laws():
    """One-hot rows give their token, with and without sampled rows beside them."""

    def keys(rows: int = 64) -> jax.Array:
        return sampling.row_keys(jnp.arange(rows))

    hot = jnp.eye(64, dtype=jnp.float32)
    assert sampling.draw(keys(), hot).tolist() == list(range(64))
    flat = hot.at[::2].set(1 / 64)
    mixed = sampling.draw(keys(), flat)
    assert mixed[1::2].tolist() == list(range(1, 64, 2))
    assert len(set(mixed[::2].tolist())) > 10
    assert sampling.draw(keys(1), flat[:1])[0] == mixed[0]
    tiny = jnp.array([[2e-38, 0.0, 2e-38]])  # smaller numbers are 0 on a CPU that flushes denormals
    assert int(sampling.draw(keys(1), tiny)[0]) in (0, 2)


def test_draw_where_a_running_sum_errs():
    """Sums in parallel may grow or fall where the mass is 0; u on such a step must not find that token."""
    masses = np.random.default_rng(0).gamma(0.3, size=(500, 1200)).astype(np.float32)
    masses *= np.random.default_rng(1).random(masses.shape) < 0.1
    sums = np.asarray(jnp.cumsum(masses, axis=1))
    row, step = np.nonzero((masses[:, 1:] == 0) & (np.diff(sums, axis=1) != 0))
    assert len(row) > 100
    for u in (sums[row, step] / sums[row, -1], sums[row, step + 1] / sums[row, -1]):
        found = np.asarray(sampling._invert(jnp.minimum(u, 1 - 2.0**-23), jnp.asarray(masses[row])))
        assert (masses[row, found] > 0).all()


def test_draw_of_a_large_flat_law():
    """Small probabilities are not rounded to the steps of one uniform number."""
    rows, size = 20_000, 60_000
    law = jnp.full((1, size), 1 / size)
    draw = jax.jit(jax.vmap(lambda key: sampling.draw(key[None], law)[0]))
    tokens = np.sort(np.asarray(draw(sampling.row_keys(jnp.arange(rows)))))
    gap = np.abs((tokens + 0.5) / size - (np.arange(rows) + 0.5) / rows).max()
    assert gap < 1.95 / np.sqrt(rows)  # Kolmogorov and Smirnov, 1e-3
    assert len(np.unique(tokens)) > size * (1 - np.exp(-rows / size)) - 5 * np.sqrt(rows)


def test_keys_belong_to_rows():
    """A row's key depends on its seed and what is folded in, not on the batch."""
    keys = sampling.fold(sampling.row_keys(jnp.array([5, 6, 5])), jnp.array([1, 1, 2]))
    data = np.asarray(jax.random.key_data(keys))
    assert len({tuple(key) for key in data}) == 3
    alone = sampling.fold(sampling.row_keys(jnp.array([5])), 1)
    assert np.array_equal(jax.random.key_data(alone)[0], data[0])
    reference = jax.random.fold_in(jax.random.key(5), 1)
    assert np.array_equal(jax.random.key_data(reference), data[0])


def test_normalize():
    weights = jnp.array([[1.0, 3.0], [0.0, 0.0], [1e-30, 3e-30]])
    law = sampling.normalize(weights, jnp.array([[9.0, 9.0], [0.2, 0.8], [9.0, 9.0]]))
    assert np.allclose(law, [[0.25, 0.75], [0.2, 0.8], [0.25, 0.75]])
