"""Decoders: any way of cutting a sequence into blocks, trees and pending rows gives the same logits, whether
or not they look at an encoder's output."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import trees
from jspec.models import Seq2SeqConfig, cache_dtype, init_params, language_model
from jspec.models.layers import product
from jspec.models.rotary import Rotary
from jspec.testing import tiny_decoder, tiny_seq2seq
from jspec.types import Block, Prompt

V, T, CAPACITY = 64, 10, 20
close = functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)
ROTARY = Rotary((1.0, 0.3, 0.1), 1.1)
CONFIGS = {
    "window": {"windows": (None, 4, 2), "local_rotary": Rotary((1.0, 0.5, 0.2, 0.1)), "num_layers": 3},
    "softcap": {
        "windows": (3, None),
        "attention_softcap": 1.0,
        "logit_softcap": 2.0,
        "norm_placement": "both",
        "qk_norm": True,
        "embedding_scale": 5.0,
        "rotary": ROTARY,
        "tied": True,
    },
    "learned": {
        "rotary": None,
        "bounded": True,
        "num_kv_heads": 4,
        "norm": "layer",
        "gated": False,
        "activation": "relu",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    },
    "post_norm": {"norm_placement": "post", "norm": "layer", "activation": "gelu"},
}
SEQ2SEQ = {
    # So few buckets and so short a distance that a wrong position is felt.
    "t5": {"relative_buckets": 6, "relative_distance": 9},
    "bart": {
        "positions": "learned",
        "bounded": True,
        "context_length": 512,
        "source_length": 64,
        "norm": "layer",
        "norm_placement": "post",
        "embedding_norm": True,
        "gated": False,
        "bias": True,
        "head_bias": True,
        "attention_scale": 8**-0.5,
    },
    "marian": {"positions": "sinusoidal", "norm": "layer", "embedding_scale": 5.0, "bias": True},
}


@functools.cache
def made(name):
    make, settings = (tiny_seq2seq, SEQ2SEQ[name]) if name in SEQ2SEQ else (tiny_decoder, CONFIGS[name])
    model, params = make(seed=3, vocab_size=V, **settings)
    # Norms and biases of 1 and 0 would hide a mistake in them.
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = 0.1 if name in SEQ2SEQ else 0.2  # T5's scores are not scaled: large ones magnify rounding errors
    noisy = [x + noise * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return model, jax.tree.unflatten(structure, noisy)


def texts(seed=0, batch=2, length=T):
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, (batch, length)), jnp.int32)


def prompt(model, batch, first=0):
    """The beginning of rows ``first`` to ``first + batch``, each of which has a source of its own."""
    begin = Prompt(jnp.zeros((batch, 1), jnp.int32), jnp.ones(batch, jnp.int32))
    if not isinstance(model.config, Seq2SeqConfig):
        return begin
    source, lengths = texts(7, 3, 8)[first : first + batch], jnp.array([8, 5, 3])[first : first + batch]
    return begin._replace(source=source, source_lengths=lengths)


@functools.partial(jax.jit, static_argnums=(0, 3))
def start(model, params, begin, capacity):
    return model.start(params, begin, capacity)


def empty(model, params, batch, capacity=CAPACITY, first=0):
    return start(model, params, prompt(model, batch, first), capacity)


@functools.partial(jax.jit, static_argnums=0, static_argnames="taps")
def extend(model, params, cache, block, pending=None, taps=()):
    return model.extend(params, cache, block, pending, taps)


@functools.partial(jax.jit, static_argnums=0)
def head(model, params, hidden):
    return model.head(params, hidden)


@functools.partial(jax.jit, static_argnums=0)
def commit(model, cache, rows, path, count):
    return model.commit(cache, rows, path, count)


@functools.partial(jax.jit, static_argnums=0)
def chain(model, params, cache, tokens, count):
    """Logits of a chain after the cache, and the cache with its first ``count`` tokens."""
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    out = model.extend(params, cache, Block(tokens, cache.lengths[:, None] + steps))
    path = jnp.broadcast_to(steps, tokens.shape)
    return model.head(params, out.hidden), model.commit(cache, out.rows, path, count)


def in_blocks(model, params, tokens, size, first=0):
    cache, logits = empty(model, params, tokens.shape[0], first=first), []
    for i in range(0, tokens.shape[1], size):
        piece = tokens[:, i : i + size]
        out, cache = chain(model, params, cache, piece, jnp.full(tokens.shape[0], piece.shape[1]))
        logits.append(out)
    return jnp.concatenate(logits, 1), cache


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in ("bart", "marian", "window") else ())
        for n in CONFIGS | SEQ2SEQ
    ],
)
def test_every_cut_into_blocks_gives_the_same_logits(name):
    model, params = made(name)
    expected, whole = in_blocks(model, params, texts(), T)
    assert expected.dtype == jnp.float32
    assert expected.std() > 0.1
    without_cache, _ = chain(model, params, empty(model, params, 2, 0), texts(), jnp.zeros(2, jnp.int32))
    close(without_cache, expected)
    for size in (1, 2, 5):
        logits, cache = in_blocks(model, params, texts(), size)
        close(logits, expected)
        close(cache.keys[-1], whole.keys[-1])


@pytest.mark.parametrize("name", ["window", "softcap", "learned", "t5"])
def test_a_row_does_not_see_its_neighbours_nor_scratch_slots(name):
    model, params = made(name)
    tokens, lengths = texts(batch=3), jnp.array([2, 6, 10])
    cache = chain(model, params, empty(model, params, 3), tokens, lengths)[1]
    # A rejected block leaves nothing behind, whatever lies in the scratch slots.
    live = (jnp.arange(CAPACITY)[None] < lengths[:, None])[:, None, :, None]
    keys, values = jax.tree.map(lambda slab: jnp.where(live, slab, 7.0), (cache.keys, cache.values))
    cache = cache._replace(keys=keys, values=values)
    logits, _ = chain(model, params, cache, texts(5, 3, 3), jnp.zeros(3, jnp.int32))
    for row, length in enumerate(lengths.tolist()):
        alone = (
            jnp.zeros((1, T + 3), jnp.int32)
            .at[0, : length + 3]
            .set(jnp.concatenate([tokens[row, :length], texts(5, 3, 3)[row]]))
        )
        expected, _ = in_blocks(model, params, alone, T + 3, first=row)
        close(logits[row], expected[0, length : length + 3])


PARENTS = [-1, 0, 0, 1, 2, 2, 5, 6]


def tree_block(cache, tokens):
    parents = jnp.broadcast_to(jnp.array(PARENTS, jnp.int32)[None], tokens.shape)
    mask = trees.ancestors(parents)
    return Block(tokens, cache.lengths[:, None] + trees.depths(mask), mask)


def path_of(node):
    """Its path from the root, padded with 0 to the depth of the tree, and the path's length."""
    path = [node]
    while PARENTS[path[0]] >= 0:
        path.insert(0, PARENTS[path[0]])
    return jnp.array([path + [0] * (5 - len(path))] * 2), len(path)


def prefixed(model, params):
    """Two rows of committed prefixes of 6 and 3 tokens."""
    return chain(model, params, empty(model, params, 2), texts(), jnp.array([6, 3]))[1]


@pytest.mark.parametrize("name", ["window", "softcap", "learned", "t5"])
def test_tree_nodes_equal_their_own_paths(name):
    model, params = made(name)
    cache, tokens = prefixed(model, params), texts(2, 2, len(PARENTS))
    logits = head(model, params, extend(model, params, cache, tree_block(cache, tokens)).hidden)
    for node in range(len(PARENTS)):
        path, length = path_of(node)
        expected, _ = chain(model, params, cache, tokens[:, path[0]], jnp.zeros(2, jnp.int32))
        close(logits[:, node], expected[:, length - 1])


@pytest.mark.parametrize("name", ["window", "softcap", "learned", "t5"])
def test_pending_rows_equal_committed_ones(name):
    model, params = made(name)
    cache, tokens, more = prefixed(model, params), texts(2, 2, len(PARENTS)), texts(4)[:, :3]
    pending = extend(model, params, cache, tree_block(cache, tokens)).rows
    for node in (0, 3, 7):
        path, length = path_of(node)
        seen = np.zeros((2, 3, len(PARENTS) + 3), bool)
        seen[:, :, path[0, :length]] = True
        seen[:, :, len(PARENTS) :] = np.tril(np.ones((3, 3), bool))
        block = Block(more, cache.lengths[:, None] + length + jnp.arange(3)[None], jnp.asarray(seen))
        out = extend(model, params, cache, block, pending)

        committed = commit(model, cache, pending, path, jnp.full(2, length))
        expected, after = chain(model, params, committed, more, jnp.full(2, 3))
        close(head(model, params, out.hidden), expected)

        # Pending and new rows together commit as one path.
        joint = jnp.concatenate([path[:, :length], len(PARENTS) + jnp.arange(3)[None].repeat(2, 0)], 1)
        cached = commit(model, cache, out.rows, joint, jnp.full(2, length + 3))
        close(cached.keys[-1], after.keys[-1])
        np.testing.assert_array_equal(cached.lengths, after.lengths)


@pytest.mark.parametrize("name", ["softcap", "learned"])
def test_inputs_stand_in_for_tokens(name):
    model, params = made(name)
    cache, tokens = prefixed(model, params), texts(2, 2, 4)
    positions = cache.lengths[:, None] + jnp.arange(4)[None]
    expected = extend(model, params, cache, Block(tokens, positions)).hidden
    holes = jnp.where(jnp.arange(4)[None] % 2 == 0, -1, tokens)
    block = Block(holes, positions, inputs=model.embed(params, tokens))
    close(extend(model, params, cache, block).hidden, expected)


@pytest.mark.parametrize("name", ["window", "learned", "t5"])
def test_truncated_model_stops_at_the_tap(name):
    model, params = made(name)
    cache, tokens = prefixed(model, params), texts(2, 2, 4)
    block = Block(tokens, cache.lengths[:, None] + jnp.arange(4)[None])
    full = extend(model, params, cache, block, taps=(0, 1, model.config.num_layers))
    assert sorted(full.taps) == [0, 1, model.config.num_layers]
    short = model.truncate(1)
    assert short is model.truncate(1)
    out = extend(short, params, cache, block, taps=(1,))
    close(out.taps[1], full.taps[1])
    jax.tree.map(close, out.rows.keys, full.rows.keys[:1])
    assert out.hidden.shape == full.hidden.shape
    # The final norm and the head are the target's own: the last layer's tap leads to the same logits.
    whole = model.truncate(model.config.num_layers).extend(params, cache, block)
    close(whole.hidden, full.hidden)
    assert not np.allclose(out.hidden, full.hidden)
    # Its own cache has its own depth.
    own = empty(short, params, 2)
    assert len(own.keys) == 1
    assert short.commit(
        own, out.rows, jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32)
    ).lengths.tolist() == [1, 1]


@pytest.mark.parametrize("name", [*CONFIGS, *SEQ2SEQ])
def test_rows_are_made_from_taps(name):
    """What enters a layer gives the keys and values that the forward made of it."""
    model, params = made(name)
    cache, tokens = prefixed(model, params), texts(2, 2, 4)
    block = Block(tokens, cache.lengths[:, None] + jnp.arange(4)[None])
    full = extend(model, params, cache, block, taps=(0, 1))
    rows = model.rows(params, full.taps, block.positions)
    assert sorted(rows) == [0, 1]
    for layer, (keys, values) in rows.items():
        close(keys, full.rows.keys[layer])
        close(values, full.rows.values[layer])


def test_learned_positions_and_first_tap():
    model, params = made("learned")
    block = Block(jnp.array([[5, 6]]), jnp.array([[3, 3]]))
    tap = extend(model, params, empty(model, params, 1), block, taps=(0,)).taps[0]
    close(tap[0], params["embedding"][jnp.array([5, 6])] + params["positions"][3][None])


def test_window_counts_the_token_itself():
    model, params = tiny_decoder(num_layers=1, windows=(3,))
    tokens = texts(batch=1, length=8)
    changed = tokens.at[0, 4].add(1) % V
    hidden = [
        extend(model, params, empty(model, params, 1), Block(t, jnp.arange(8)[None])).hidden
        for t in (tokens, changed)
    ]
    differs = np.abs(hidden[0] - hidden[1])[0].max(-1) > 0
    assert differs.tolist() == [False] * 4 + [True] * 3 + [False]


def test_a_row_that_sees_nothing_is_finite():
    model, params = made("window")
    block = Block(texts(length=3), jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3, 3), bool))
    assert np.isfinite(extend(model, params, empty(model, params, 2), block).hidden).all()


@pytest.mark.parametrize("name", ["window", "softcap", "learned", "t5"])
def test_bfloat16(name):
    model, params = made(name)
    expected, _ = in_blocks(model, params, texts(), T)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    logits, cache = in_blocks(model, low, texts(), 5)
    assert logits.dtype == jnp.float32
    assert cache.keys[0].dtype == jnp.bfloat16
    assert np.abs(logits - expected).mean() < 0.05 * np.std(expected)
    out = extend(model, low, cache, Block(texts(length=2), cache.lengths[:, None] + jnp.arange(2)[None]))
    assert out.hidden.dtype == jnp.bfloat16


def test_products_are_summed_in_float32():
    """And rounded once: XLA's CPU backend is fast in bfloat16 only where it is asked for a float32 result."""
    rng = np.random.default_rng(0)
    x, kernel, dy = (rng.normal(size=shape) for shape in ((3, 4096), (4096, 5), (3, 5)))
    x, kernel, dy = (jnp.asarray(value, jnp.bfloat16) for value in (x, kernel, dy))
    value, pull = jax.vjp(product, x, kernel)
    wide = [np.asarray(array, np.float64) for array in (x, kernel, dy)]
    exact = (wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2])
    for got, expected in zip((value, *pull(dy)), exact, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=2**-8, atol=1e-5)


def test_a_model_in_16_bits_caches_in_float32_on_cpu():
    """XLA's CPU backend writes no 16-bit array in place; elsewhere the cache is the model's."""
    assert cache_dtype("float32") is None
    if jax.default_backend() != "cpu":
        assert cache_dtype("bfloat16") is None
        return
    model, params = made("window")
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    wide = language_model(model.config, cache_dtype("bfloat16"))
    assert wide is language_model(model.config, "float32")
    assert wide.truncate(1) is language_model(model.truncate(1).config, "float32")
    logits, cache = in_blocks(wide, low, texts(), 5)
    assert {leaf.dtype.name for leaf in cache.keys + cache.values} == {"float32"}
    expected, _ = in_blocks(model, low, texts(), 5)
    assert np.abs(logits - expected).mean() < 0.02 * np.std(expected)


def test_head_takes_any_leading_shape():
    model, params = made("softcap")
    hidden = jax.random.normal(jax.random.key(0), (2, 3, 4, 32))
    logits = head(model, params, hidden)
    assert logits.shape == (2, 3, 4, V)
    close(head(model, params, hidden[1, 2, 0]), logits[1, 2, 0])


def test_equal_configs_are_one_model():
    first, second = tiny_decoder()[0], tiny_decoder(seed=1)[0]
    assert first is second
    assert first is not tiny_decoder(windows=(None, 3))[0]
    assert init_params(first.config, jax.random.key(0), jnp.bfloat16)["norm"]["scale"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (tiny_decoder, {"num_kv_heads": 2, "windows": (None, 64) * 6}),
        (tiny_seq2seq, {"num_encoder_layers": 1}),
    ],
)
def test_temporaries_of_a_round_do_not_grow_with_the_cache(make, settings):
    model, params = make(width=64, num_layers=12, num_heads=2, **settings)
    tokens = jnp.zeros((2, 5), jnp.int32)

    @functools.partial(jax.jit, donate_argnums=1)
    def rounds(params, cache, count):
        def once(cache):
            return chain.__wrapped__(model, params, cache, tokens, count)[1]

        return jax.lax.while_loop(lambda cache: cache.lengths[0] < 9, once, cache)

    def measured(capacity):
        cache = empty(model, params, 2, capacity)
        memory = rounds.lower(params, cache, jnp.ones(2, jnp.int32)).compile().memory_analysis()
        return memory.temp_size_in_bytes, sum(leaf.nbytes for leaf in cache.keys + cache.values)

    small, large = measured(512), measured(2048)
    assert large[0] - small[0] < 0.1 * (large[1] - small[1])


def test_wrong_arguments_are_named():
    model, params = made("learned")
    cache = empty(model, params, 1)
    tokens, positions = texts(batch=1, length=2), jnp.arange(2)[None]
    rows = extend(model, params, cache, Block(tokens, positions)).rows
    with pytest.raises(ValueError, match=r"block.mask: needed to say which of 2 pending rows"):
        extend(model, params, cache, Block(tokens, positions), rows)
    with pytest.raises(ValueError, match=r"block.mask: expected \(1, 2, 4\), got \(1, 2, 2\)"):
        extend(model, params, cache, Block(tokens, positions, jnp.ones((1, 2, 2), bool)), rows)
    with pytest.raises(ValueError, match=r"taps: expected layers from 0 to 2"):
        extend(model, params, cache, Block(tokens, positions), taps=(3,))
    with pytest.raises(ValueError, match=r"num_layers: expected 1 to 2, got 3"):
        model.truncate(3)
    with pytest.raises(ValueError, match=r"capacity: the model has 512 positions"):
        empty(model, params, 1, 513)
    assert language_model(model.config) is model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "width: expected a whole number >= 1, got 0"),
        ({"num_layers": 0}, "num_layers: expected a whole number >= 1, got 0"),
        ({"num_kv_heads": 0}, "num_kv_heads: expected a whole number >= 1, got 0"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_kv_heads: expected a divisor of num_heads = 3, got 2"),
        ({"activation": "swish"}, "activation: expected one of silu, .*, got 'swish'"),
    ],
)
def test_an_architecture_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny_decoder()[0].config, **changes)


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 7), (7, 3)])
def test_the_gradient_of_a_product_is_that_of_matmul(inputs, outputs):
    """Whichever factor is the narrower; with and without a batch's axes."""
    rng = np.random.default_rng(0)
    for lead in ((5,), (2, 5), ()):
        x, kernel, dy = (
            jnp.asarray(rng.normal(size=shape), jnp.float32)
            for shape in ((*lead, inputs), (inputs, outputs), (*lead, outputs))
        )
        value, pull = jax.vjp(product, x, kernel)
        expected, pull_expected = jax.vjp(jnp.matmul, x, kernel)
        np.testing.assert_array_equal(value, expected)
        for ours, theirs in zip(pull(dy), pull_expected(dy), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
