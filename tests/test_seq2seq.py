"""Encoder-decoders: what they add to `test_decoder`, which runs its cases on them too."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_decoder import chain, close, empty, extend, head, made, start, texts

from jspec.models.layers import Dropout, Relative, sinusoids
from jspec.testing import tiny_decoder, tiny_seq2seq
from jspec.types import Block, Prompt


def bucket(relative: int, buckets: int, distance: int, bidirectional: bool) -> int:
    """Of the distance between a key and a query, in whole numbers: bucket ``exact + k`` begins where
    ``exact * (distance / exact) ** (k / (buckets - exact))`` does."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if relative > 0 else 0
        away = abs(relative)
    else:
        away = max(-relative, 0)
    exact = buckets // 2
    if away < exact:
        return first + away
    k = 0
    while k < buckets - exact - 1 and Fraction(distance, exact) ** (k + 1) <= Fraction(away, exact) ** (
        buckets - exact
    ):
        k += 1
    return first + exact + k


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (64, 256), (6, 9), (4, 3)])
def test_relative_buckets_equal_a_transcription_in_whole_numbers(buckets, distance, bidirectional):
    relative = np.arange(-400, 401)
    expected = [bucket(int(r), buckets, distance, bidirectional) for r in relative]
    found = Relative(buckets, distance, bidirectional).bucket(jnp.asarray(relative))
    np.testing.assert_array_equal(found, expected)


def test_the_bias_follows_positions_not_places():
    relative = Relative(8, 20)
    table = jax.random.normal(jax.random.key(0), (8, 3))
    queries, keys = jnp.array([[5, 5, 90]]), jnp.array([[4, 0, 5, 88], [60, 89, 2, 90]])
    bias = relative.bias(table, queries, keys)
    assert bias.shape == (2, 3, 3, 4)
    for b, n, m in np.ndindex(2, 3, 4):
        place = bucket(int(keys[b, m]) - int(queries[0, n]), 8, 20, False)
        np.testing.assert_array_equal(bias[b, :, n, m], table[place])


def test_too_few_buckets_are_refused():
    with pytest.raises(ValueError, match=r"relative_buckets, relative_distance: expected at least 4 buckets"):
        Relative(2, 9, bidirectional=True).bucket(jnp.arange(3))
    with pytest.raises(ValueError, match=r"distances beyond half of them, got 32 and 16"):
        Relative(32, 16).bucket(jnp.arange(3))


def test_sinusoids_are_sines_then_cosines():
    positions = np.array([[0, 3, 700]])
    for width in (8, 7):
        angles = positions[..., None] / 10000 ** (2 * np.arange(-(-width // 2)) / width)
        expected = np.concatenate([np.sin(angles), np.cos(angles)], -1)[..., :width]
        np.testing.assert_allclose(sinusoids(jnp.asarray(positions), width), expected, atol=1e-4)


# --- sources ------------------------------------------------------------------------------------------


def decode(model, params, source, lengths, tokens):
    rows = tokens.shape[0]
    begin = Prompt(tokens[:, :1], jnp.ones(rows, jnp.int32), source, lengths)
    return chain(model, params, start(model, params, begin, 16), tokens, jnp.zeros(rows, jnp.int32))[0]


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_padding_of_the_source_is_not_seen(name):
    model, params = made(name)
    source, lengths, tokens = texts(1, 2, 6), jnp.array([6, 3]), texts(2, 2, 5)
    expected = decode(model, params, source, lengths, tokens)
    assert np.isfinite(expected).all()
    inside = jnp.arange(6)[None] < lengths[:, None]
    broken = params | {"embedding": params["embedding"].at[63].set(jnp.nan)}  # a token that is read nowhere
    for padding in (0, 63, -1, 10**6):
        filled = jnp.where(inside, source, padding)
        close(decode(model, broken if padding == 63 else params, filled, lengths, tokens), expected)
    wide = jnp.pad(source, ((0, 0), (0, 10)), constant_values=5)
    close(decode(model, params, wide, lengths, tokens), expected)


def test_a_row_alone_equals_a_row_of_a_batch():
    model, params = made("t5")
    source, lengths, tokens = texts(1, 3, 8), jnp.array([8, 1, 4]), texts(2, 3, 5)
    together = decode(model, params, source, lengths, tokens)
    for row in range(3):
        one = slice(row, row + 1)
        alone = decode(model, params, source[one], lengths[one], tokens[one])
        close(alone[0], together[row])


def test_the_whole_source_is_seen_from_everywhere():
    model, params = made("t5")
    source, lengths, tokens = texts(1, 1, 6), jnp.array([6]), texts(2, 1, 2)
    expected = decode(model, params, source, lengths, tokens)
    for place in range(6):
        changed = source.at[0, place].set((source[0, place] + 1) % 64)
        assert np.abs(decode(model, params, changed, lengths, tokens) - expected).max() > 1e-3
    swapped = source.at[0, 1:3].set(source[0, 2:0:-1])
    assert np.abs(decode(model, params, swapped, lengths, tokens) - expected).max() > 1e-3


def test_an_empty_source_gives_numbers():
    model, params = made("t5")
    logits = decode(model, params, texts(1, 2, 4), jnp.array([0, 4]), texts(2, 2, 3))
    assert np.isfinite(logits).all()


def test_the_encoder_runs_at_the_start_only():
    model, params = made("t5")
    cache = empty(model, params, 2)
    assert cache.cross_keys[0].shape == (2, 4, 8, 8)
    block = Block(texts(2, 2, 3), jnp.arange(3)[None] + jnp.zeros((2, 1), jnp.int32))
    without = {key: value for key, value in params.items() if key != "encoder"}
    without["encoder"] = jax.tree.map(jnp.zeros_like, params["encoder"])
    close(extend(model, without, cache, block).hidden, extend(model, params, cache, block).hidden)


# --- numbers ------------------------------------------------------------------------------------------


def operands(jaxpr, names):
    """The dtypes that the primitives of these names read, in the whole program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in names:
            yield equation.invars[0].aval.dtype
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "jaxpr"):
                    yield from operands(inner.jaxpr, names)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_softmax_and_norms_of_a_low_precision_model_are_float32(name):
    model, params = made(name)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def run(params):
        cache = empty(model, params, 2)
        out = model.extend(params, cache, Block(texts(2, 2, 3), jnp.zeros((2, 3), jnp.int32)))
        return model.head(params, out.hidden), out.rows

    found = list(operands(jax.make_jaxpr(run)(low).jaxpr, ("exp", "rsqrt")))
    assert len(found) > 8
    assert set(found) == {jnp.dtype("float32")}
    logits, rows = jax.eval_shape(run, low)
    assert logits.dtype == jnp.float32
    assert rows.keys[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("settings", [{}, {"tied": True, "logit_scale": 32**-0.5}])
def test_random_models_begin_with_logits_of_about_unit_variance(settings):
    model, params = tiny_seq2seq(vocab_size=500, **settings)
    logits = decode(model, params, texts(1, 2, 6), jnp.array([6, 3]), texts(2, 2, 5))
    assert 0.5 < logits.std() < 2


def test_the_scale_of_the_logits_is_not_rounded_in_low_precision():
    """1 / sqrt(512) is 0.04419; in bfloat16 it is 0.0442, and every logit would be 0.13 percent too large."""
    scale = 512**-0.5
    (model, params), (plain, _) = (
        tiny_seq2seq(vocab_size=11, num_layers=1, num_encoder_layers=1, tied=True, logit_scale=s)
        for s in (scale, 1)
    )
    hidden = jax.random.normal(jax.random.key(1), (1, 2, 32), jnp.bfloat16)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    np.testing.assert_allclose(
        model.head(low, hidden), plain.head(low, hidden) * np.float32(scale), rtol=1e-6
    )


def test_dropout_is_noise_of_its_key_alone():
    model, params = made("t5")
    source, lengths, tokens = texts(1, 2, 6), jnp.array([6, 3]), texts(2, 2, 5)
    begin = Prompt(tokens[:, :1], jnp.ones(2, jnp.int32), source, lengths)
    block = Block(tokens, jnp.broadcast_to(jnp.arange(5)[None], tokens.shape))

    @jax.jit
    def run(key, encoder_rate, rate):
        cache = model.start(params, begin, 0, dropout=Dropout(key, encoder_rate))
        return model.extend(params, cache, block, dropout=Dropout(key, rate)).hidden

    key, other = jax.random.key(1), jax.random.key(2)
    expected = extend(model, params, start(model, params, begin, 0), block).hidden
    close(run(key, 0.0, 0.0), expected)
    np.testing.assert_array_equal(run(key, 0.3, 0.3), run(key, 0.3, 0.3))
    for changed in (run(key, 0.3, 0.0), run(key, 0.0, 0.3), run(other, 0.3, 0.3)):
        assert np.abs(changed - expected).max() > 0.01
        assert np.abs(changed - run(key, 0.3, 0.3)).max() > 0.01


# --- bad input ----------------------------------------------------------------------------------------


def test_wrong_arguments_are_named():
    model, params = made("bart")
    begin = Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match=r"prompt.source: expected the encoder's tokens and their lengths"):
        model.start(params, begin, 8)
    begin = begin._replace(source=jnp.zeros((1, 65), jnp.int32), source_lengths=jnp.array([2]))
    with pytest.raises(ValueError, match=r"prompt.source: the encoder has 64 positions and no more, got 65"):
        model.start(params, begin, 8)
    with pytest.raises(ValueError, match=r"capacity: the model has 512 positions and no more, got 513"):
        model.start(params, begin._replace(source=begin.source[:, :64]), 513)
    with pytest.raises(ValueError, match=r"bounded: expected true with learned positions.* 128\), got false"):
        tiny_seq2seq(positions="learned", source_length=128)
    with pytest.raises(ValueError, match=r"bounded: expected true with learned positions"):
        tiny_decoder(rotary=None)
    for name in ("num_encoder_layers", "source_length", "mlp_width"):
        with pytest.raises(ValueError, match=f"{name}: expected a whole number >= 1, got 0"):
            dataclasses.replace(model.config, **{name: 0})
    with pytest.raises(ValueError, match=r"num_layers: expected 1 to 2, got 3"):
        model.truncate(3)
    assert head(model, params, jnp.zeros((1, 1, 32))).shape == (1, 1, 64)
