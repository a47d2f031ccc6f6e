"""The cache: what commit writes, what it drops, and that nothing is copied."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.cache import Rows, commit, empty

B, K, S, H, LAYERS, M = 3, 2, 6, 4, 2, 5


def rows(seed=0):
    rng = np.random.default_rng(seed)
    keys, values = (
        tuple(jnp.asarray(rng.standard_normal((B, M, K, H), np.float32)) for _ in range(LAYERS))
        for _ in range(2)
    )
    return Rows(keys, values, jnp.zeros((B, M), jnp.int32))


def start(lengths):
    cache = empty(B, S, LAYERS, K, H)
    return cache._replace(lengths=jnp.array(lengths, jnp.int32))


def test_commit_appends_the_path_of_each_row_at_its_own_length():
    new = rows()
    cache = commit(start([0, 3, 1]), new, jnp.array([[0, 2, 4], [0, 1, 2], [0, 3, 1]]), jnp.array([3, 0, 2]))
    assert cache.lengths.tolist() == [3, 3, 3]
    for slabs, sources in ((cache.keys, new.keys), (cache.values, new.values)):
        for slab, source in zip(slabs, sources, strict=True):
            expected = np.zeros((B, K, S, H), np.float32)
            for row, slot, node in ((0, 0, 0), (0, 1, 2), (0, 2, 4), (2, 1, 0), (2, 2, 3)):
                expected[row, :, slot] = source[row, node]
            np.testing.assert_array_equal(slab, expected)


def test_what_does_not_fit_is_dropped_and_live_slots_stay():
    filled = commit(start([0, 0, 0]), rows(1), jnp.arange(5)[None].repeat(B, 0), jnp.full(B, 5))
    cache = commit(filled, rows(2), jnp.arange(3)[None].repeat(B, 0), jnp.array([3, 1, 0]))
    np.testing.assert_array_equal(cache.keys[0][:, :, :5], filled.keys[0][:, :, :5])
    np.testing.assert_array_equal(cache.keys[0][:2, :, 5], rows(2).keys[0][:2, 0])
    np.testing.assert_array_equal(cache.keys[0][2], filled.keys[0][2])


def test_rows_that_are_not_tokens_are_never_written():
    new = rows()._replace(positions=jnp.full((B, M), -1))
    cache = commit(start([0, 0, 0]), new, jnp.zeros((B, 1), jnp.int32), jnp.ones(B, jnp.int32))
    assert not cache.keys[0].any()


def test_nodes_outside_the_rows_are_dropped():
    cache = commit(start([0, 0, 0]), rows(), jnp.full((B, 2), M + 3), jnp.full(B, 2))
    assert not cache.values[1].any()


def test_commit_is_in_place():
    path, count = jnp.zeros((B, 2), jnp.int32), jnp.full(B, 1)

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(cache, new):
        return jax.lax.fori_loop(0, 3, lambda _, cache: commit(cache, new, path, count), cache)

    cache = empty(B, 4096, LAYERS, K, H)
    size = sum(leaf.nbytes for leaf in cache.keys + cache.values)
    memory = loop.lower(cache, rows()).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 50


def test_rows_of_another_depth_are_refused():
    new = rows()
    with pytest.raises(ValueError, match="rows: expected those of 2 layers, got 1"):
        commit(start([0, 0, 0]), new._replace(keys=new.keys[:1]), jnp.zeros((B, 1), jnp.int32), jnp.ones(B))
