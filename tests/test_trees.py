"""Token trees: ancestor masks, templates, the best static tree."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec import trees


def random_parents(width: int) -> st.SearchStrategy[list[int]]:
    return st.tuples(st.just(-1), *(st.integers(0, i - 1) for i in range(1, width))).map(list)


ancestors = jax.jit(trees.ancestors)
batches = st.sampled_from([1, 2, 5, 8, 17]).flatmap(
    lambda width: st.lists(random_parents(width), min_size=3, max_size=3)
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(batches)
def test_ancestors_and_depths_against_a_loop(batch):
    mask = np.asarray(ancestors(jnp.array(batch)))
    depths = mask.sum(-1) - 1
    assert np.array_equal(trees.depths(mask), depths)
    width = len(batch[0])
    for row, parents in enumerate(batch):
        for node in range(width):
            path, at = set(), node
            while at >= 0:
                path.add(at)
                at = parents[at]
            assert set(np.flatnonzero(mask[row, node]).tolist()) == path
            assert int(depths[row, node]) == len(path) - 1


@pytest.mark.parametrize("width", [1, 2, 4, 7, 16, 33])
def test_chain(width):
    """The deepest tree there is: every power of two must be reached."""
    parents = trees.chain_parents(2, width)
    assert parents.tolist() == [list(range(-1, width - 1))] * 2
    mask = trees.ancestors(parents)
    assert np.array_equal(mask[1], np.tril(np.ones((width, width), bool)))
    assert trees.depths(mask)[0].tolist() == list(range(width))


def test_template():
    tree = trees.template(((1,), (0,), (0, 0), (1, 0), (0, 1), (1, 0, 2)))
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 5)
    assert tree.ranks == (0, 0, 1, 0, 1, 0, 2)
    assert tree.depths == (0, 1, 1, 2, 2, 2, 3)
    assert (tree.width, tree.depth) == (7, 3)
    assert trees.template(()) == trees.Template((-1,), (0,), (0,))
    with pytest.raises(ValueError, match=r"paths: \(0, 1\) has no parent \(0,\)"):
        trees.template(((0, 1),))


def value(paths: set[tuple[int, ...]], accuracies: np.ndarray) -> float:
    return sum(np.prod([accuracies[d, r] for d, r in enumerate(path)]) for path in paths)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.floats(0.01, 0.9), min_size=2, max_size=2), min_size=3, max_size=3),
    st.integers(1, 6),
)
def test_grow_is_the_best_of_all_trees(accuracies, num_nodes):
    accuracies = -np.sort(-np.array(accuracies), axis=1)
    nodes = [path for d in (1, 2, 3) for path in itertools.product(range(2), repeat=d)]
    best = max(
        value(set(chosen), accuracies)
        for chosen in itertools.combinations(nodes, num_nodes - 1)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    )
    tree = trees.grow(accuracies, num_nodes)
    assert tree.width == num_nodes
    paths = [()]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        paths.append((*paths[parent], rank))
    assert abs(value(set(paths[1:]), accuracies) - best) < 1e-12


def in_order(paths: tuple[tuple[int, ...], ...]) -> bool:
    return all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths for path in paths)


def every_tree(accuracies: np.ndarray, depth: int) -> list[tuple[tuple[tuple[int, ...], ...], float]]:
    """All trees of 2 to 6 nodes and at most that depth, with their expected tokens."""
    ranks = range(accuracies.shape[1])
    nodes = [path for d in range(1, depth + 1) for path in itertools.product(ranks, repeat=d)]
    return [
        (chosen, 1 + value(set(chosen), accuracies))
        for size in range(1, 6)
        for chosen in itertools.combinations(nodes, size)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_sequoia_and_fastest_against_all_trees(seed):
    """Accuracies that grow with the rank, too; costs of any shape."""
    rng = np.random.default_rng(seed)
    accuracies = rng.uniform(0.05, 0.6, (3, 2))
    costs = 1 + np.cumsum(rng.uniform(0, 0.3, 6))
    best_rate = {False: 0.0, True: 0.0}
    for depth in (1, 2, 3):
        found: dict[int, float] = {}
        for chosen, tokens in every_tree(accuracies, depth):
            size, levels = len(chosen) + 1, max(map(len, chosen))
            rate = tokens / (costs[size - 1] + 0.1 * levels)
            best_rate[False] = max(best_rate[False], rate)
            if in_order(chosen):
                found[size] = max(found.get(size, 0), tokens)
                best_rate[True] = max(best_rate[True], rate)
        for size, tokens in found.items():
            tree = trees.sequoia(accuracies, size, depth)
            assert (tree.width, tree.depth <= depth) == (size, True)
            assert in_order(paths_of(tree))
            assert trees.expected_tokens(tree, accuracies) == pytest.approx(tokens, abs=1e-12)
    for ordered, rate in best_rate.items():
        tree = trees.fastest(accuracies, costs, level_cost=0.1, in_order=ordered)
        took = costs[tree.width - 1] + 0.1 * tree.depth
        assert trees.expected_tokens(tree, accuracies) / took == pytest.approx(rate, abs=1e-12)


def paths_of(tree: trees.Template) -> tuple[tuple[int, ...], ...]:
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        paths.append((*paths[parent], rank))
    return tuple(paths[1:])


@pytest.mark.parametrize("num_nodes", [2, 9, 33])
def test_sequoia_is_grow_where_accuracies_fall_with_the_rank(num_nodes):
    row = np.array([0.6, 0.2, 0.07, 0.02])
    laid = np.broadcast_to(row, (num_nodes, 4))
    greedy, planned = trees.grow(laid, num_nodes), trees.sequoia(row, num_nodes)
    assert trees.expected_tokens(planned, row) == pytest.approx(trees.expected_tokens(greedy, row))


def test_fastest_weighs_levels_and_width():
    accuracies = np.array([0.7, 0.15, 0.05])
    flat = [1.0] * 12
    assert trees.fastest(accuracies, flat).width == 12
    assert (
        trees.fastest(accuracies, flat, level_cost=0.0).depth
        > trees.fastest(accuracies, flat, level_cost=0.5).depth
    )
    steep = [float(n) for n in range(1, 13)]
    assert trees.fastest(accuracies, steep, in_order=True).width == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: trees.sequoia(np.array([0.5]), 0), "num_nodes: expected at most 2"),
        (lambda: trees.sequoia(np.array([[0.5, 0.2]]), 4), "num_nodes: expected at most 3"),
        (lambda: trees.sequoia(np.array([[0.5]]), 2, depth=2), "depth: expected 1 to 1, got 2"),
        (lambda: trees.sequoia(np.array([1.5]), 2), r"accuracies: expected probabilities .*got \[1.5\]"),
        (lambda: trees.fastest(np.array([0.5]), [1.0]), "costs, level_cost: expected 2 or more"),
        (lambda: trees.fastest(np.array([0.5]), [1.0, 0.0]), "costs, level_cost: expected 2 or more"),
    ],
)
def test_bad_trees_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_grow_puts_likely_nodes_into_a_valid_tree():
    tree = trees.grow(np.array([[0.6, 0.3, 0.05], [0.5, 0.2, 0.1], [0.9, 0.05, 0.01]]), 8)
    assert tree.depth == 3
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert list(tree.depths) == sorted(tree.depths)


def test_grow_refuses_more_nodes_than_there_are():
    with pytest.raises(ValueError, match="num_nodes: expected at most 7"):
        trees.grow(np.full((2, 2), 0.5), 8)
