"""Losses against numbers written out, an independent float64 formula, finite differences and their optima."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from training import losses

LOSSLESS = [name for name in losses.NAMES if name != "cross_entropy"]
SETTINGS = [(name, {}) for name in LOSSLESS] + [("jsd", {"beta": 0.25}), ("lk_hybrid", {"eta": 10.0})]
LABELS = [("cross_entropy", {}), ("cross_entropy", {"smoothing": 0.1})]


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / np.where(p > 0, q, 1)), 0).sum(-1)


def formula(name: str, p: np.ndarray, q: np.ndarray, beta: float = 0.5, eta: float = 3.0) -> np.ndarray:
    """The losses as the papers write them, in float64."""
    alpha = np.minimum(p, q).sum(-1)
    mixture = beta * p + (1 - beta) * q
    share = np.exp(-eta * alpha)
    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: beta * kl(p, mixture) + (1 - beta) * kl(q, mixture),
        "total_variation": lambda: np.abs(p - q).sum(-1) / 2,
        "negative_log_acceptance": lambda: -np.log(alpha),
        "lk_hybrid": lambda: share * kl(p, q) + (1 - share) * (1 - alpha),
    }[name]()


def softmax(z: np.ndarray) -> np.ndarray:
    z = np.asarray(z, np.float64)
    weights = np.exp(z - z.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def log(law: np.ndarray) -> jax.Array:
    """Logits, -inf where the law is 0, and not normalised, as a model's are."""
    law = np.asarray(law, np.float64)
    return jnp.asarray(np.where(law > 0, np.log(np.where(law > 0, law, 1)) + 2, -np.inf), jnp.float32)


# --- values -------------------------------------------------------------------------------------------

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("forward_kl", {}, 0.36006244),  # .5 ln 2.5 + .3 ln 1.5 + .2 ln(1/3)
        ("reverse_kl", {}, 0.39481621),  # .2 ln .4 + .2 ln(2/3) + .6 ln 3
        # m = (.35, .25, .4): half of .5 ln(10/7) + .3 ln 1.2 + .2 ln .5 = .09440450
        # and of .2 ln(4/7) + .2 ln .8 + .6 ln 1.5 = .08672720
        ("jsd", {}, 0.09056585),
        ("jsd", {"beta": 0.25}, 0.06710043),  # m = (.275, .225, .5)
        ("total_variation", {}, 0.4),  # alpha = .2 + .2 + .2
        ("negative_log_acceptance", {}, 0.51082562),  # -ln .6
        ("lk_hybrid", {}, 0.39339837),  # l = exp(-1.8) = .16529889
        ("lk_hybrid", {"eta": 10.0}, 0.39990100),  # l = exp(-6) = .00247875
        ("cross_entropy", {}, 1.60943791),  # -ln .2, the label being 0
        ("cross_entropy", {"smoothing": 0.1}, 1.57281750),  # -.9 ln .2 - (2 ln .2 + ln .6) / 30
    ],
)
def test_values_by_hand(name, settings, expected):
    value = float(losses.named(name, **settings)(log(P), log(Q), jnp.array(0)))
    assert value == pytest.approx(expected, abs=5e-7)
    if name != "cross_entropy":
        assert formula(name, P, Q, **settings) == pytest.approx(expected, abs=1e-8)


def test_nothing_is_spread_over_tokens_that_cannot_come_out():
    """Label smoothing of three tokens, one of them banned, is that of two."""

    def loss(logits):
        return losses.cross_entropy(None, logits, jnp.array(0), smoothing=0.1)

    few, gradient = jax.value_and_grad(loss)(log([0.25, 0.75]))
    found = jax.value_and_grad(loss)(log([0.25, 0.75, 0]))
    assert float(found[0]) == pytest.approx(float(few), abs=1e-6)
    np.testing.assert_allclose(found[1], [*gradient, 0], atol=1e-6)


def test_a_law_that_forbids_a_token():
    """p = (1/2, 1/2, 0), q = (0, 1/4, 3/4): alpha = 1/4, the mixture is (1/4, 3/8, 3/8)."""
    p, q = log(np.array([0.5, 0.5, 0])), log(np.array([0, 0.25, 0.75]))
    assert float(losses.acceptance(p, q)) == pytest.approx(0.25)
    assert float(losses.total_variation(p, q)) == pytest.approx(0.75)
    assert float(losses.negative_log_acceptance(p, q)) == pytest.approx(np.log(4), rel=1e-6)
    # .25 ln 2 + .25 ln(4/3) + .125 ln(2/3) + .375 ln 2
    assert float(losses.jsd(p, q)) == pytest.approx(0.45445436, abs=1e-6)
    assert float(losses.forward_kl(p, q)) == np.inf
    assert float(losses.forward_kl(q, p)) == np.inf
    # .25 ln .5 + .75 ln(.75 / 2**-126)
    assert float(losses.reverse_kl(p, q)) == pytest.approx(65.11336, rel=1e-6)


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_a_batch_equals_the_formula(name, settings):
    """At 50 tokens, in several dtypes, and whatever constant is added to the logits."""
    rng = np.random.default_rng(0)
    target, drafter = 3 * rng.normal(size=(2, 2, 7, 50)).astype(np.float32)
    loss = losses.named(name, **settings)
    expected = formula(name, softmax(target), softmax(drafter), **settings)
    np.testing.assert_allclose(loss(target, drafter, None), expected, rtol=2e-5)
    np.testing.assert_allclose(loss(target + 100, drafter - 100, None), expected, rtol=2e-4)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (target, drafter)]
    exact = [np.asarray(x.astype(jnp.float32)) for x in low]
    expected = formula(name, *map(softmax, exact), **settings)
    value = loss(*low, None)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=2e-5)


def test_total_variation_is_what_is_not_accepted():
    rng = np.random.default_rng(1)
    target, drafter = 3 * rng.normal(size=(2, 1000, 9)).astype(np.float32)
    alpha = losses.acceptance(target, drafter)
    expected = 1 - np.abs(softmax(target) - softmax(drafter)).sum(-1) / 2
    np.testing.assert_allclose(alpha, expected, atol=1e-6)
    np.testing.assert_allclose(losses.total_variation(target, drafter), 1 - alpha, atol=1e-7)
    np.testing.assert_allclose(losses.acceptance(target, target), 1, atol=1e-6)


# --- gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "settings"), SETTINGS + LABELS)
def test_gradients_equal_finite_differences(name, settings):
    """Central differences of the float64 formulas; the share of lk_hybrid is held where it was."""
    rng = np.random.default_rng(2)
    target, drafter = 2 * rng.normal(size=(2, 5, 6)).astype(np.float32)
    labels = jnp.arange(5)
    p = softmax(target)
    alpha = np.minimum(p, softmax(drafter)).sum(-1)

    def exact(z: np.ndarray) -> np.ndarray:
        q = softmax(z)
        if name == "lk_hybrid":
            share = np.exp(-settings.get("eta", 3.0) * alpha)
            return share * kl(p, q) + (1 - share) * (1 - np.minimum(p, q).sum(-1))
        if name == "cross_entropy":
            smoothing = settings.get("smoothing", 0.0)
            log_q = np.log(q)
            return -(1 - smoothing) * log_q[np.arange(5), labels] - smoothing * log_q.mean(-1)
        return formula(name, p, q, **settings)

    expected = np.zeros((5, 6))
    for v in range(6):
        step = 1e-5 * (np.arange(6) == v)
        expected[:, v] = (exact(drafter + step) - exact(drafter - step)) / 2e-5
    loss = losses.named(name, **settings)
    scale = jnp.arange(1.0, 6.0)  # another cotangent at each position
    to_target, gradient = jax.grad(lambda t, d: (scale * loss(t, d, labels)).sum(), (0, 1))(
        jnp.asarray(target), jnp.asarray(drafter)
    )
    np.testing.assert_allclose(gradient, expected * np.arange(1, 6)[:, None], atol=2e-5)
    assert not np.asarray(to_target).any()
    low = jax.grad(lambda d: loss(target, d, labels).sum())(jnp.asarray(drafter, jnp.bfloat16))
    assert low.dtype == jnp.bfloat16


@pytest.mark.parametrize(("name", "settings"), SETTINGS + LABELS)
@pytest.mark.parametrize("hole", [-np.inf, -1e30, -200.0])
def test_gradients_are_finite_at_zeros(name, settings, hole):
    """p = 0, q = 0, both, disjoint laws, one-hot laws, rows without any token."""
    o, x = hole, 1.0
    target, drafter = np.array(
        [
            [[x, 2, o, o], [x, 2, 3, 4]],  # p = 0
            [[x, 2, 3, 4], [x, 2, o, o]],  # q = 0
            [[x, 2, o, o], [o, 2, x, o]],
            [[x, 2, o, o], [o, o, 2, x]],  # nothing in common
            [[x, o, o, o], [o, o, o, x]],
            [[x, 2, 3, 4], [o, o, o, o]],
            [[o, o, o, o], [x, 2, 3, 4]],
            [[o, o, o, o], [o, o, o, o]],
        ],
        np.float32,
    ).swapaxes(0, 1)
    loss = losses.named(name, **settings)
    labels = jnp.arange(8) % 4

    def weighted(drafter: jax.Array, weights: jax.Array) -> jax.Array:
        return losses.sequence_mean(loss(target, drafter, labels)[None], weights[None])

    value, gradient = jax.value_and_grad(weighted)(jnp.asarray(drafter), jnp.arange(8.0))
    assert not np.isnan(value)
    assert np.isfinite(gradient).all()
    # Positions without weight: no gradient, and no value however bad the loss there is.
    value, gradient = jax.value_and_grad(weighted)(jnp.asarray(drafter), jnp.zeros(8))
    assert value == 0
    assert not np.asarray(gradient).any()
    first = (jnp.arange(8) == 0).astype(jnp.float32)
    value, gradient = jax.value_and_grad(weighted)(jnp.asarray(drafter), first)
    assert np.isfinite(value) or name == "cross_entropy"
    assert not np.asarray(gradient)[1:].any()


def test_a_finite_gradient_points_the_right_way():
    """Where the laws share nothing, the finite gradients are still those that bring them together."""
    target, drafter = jnp.array([3.0, 2.0, -jnp.inf]), jnp.array([-300.0, -301.0, 0.0])

    def gradient(name: str) -> np.ndarray:
        return np.asarray(jax.grad(lambda d: losses.named(name)(target, d, None))(drafter))

    np.testing.assert_allclose(gradient("forward_kl"), [-0.7310586, -0.2689414, 1], atol=1e-5)
    # q restricted to where it falls short of p: both tokens, in proportion e : 1
    np.testing.assert_allclose(gradient("negative_log_acceptance"), [-0.7310586, -0.2689414, 1], atol=1e-5)
    assert not gradient("total_variation").any()  # the cold start that the LK losses are for


# --- sequences, names, filter -------------------------------------------------------------------------


def test_sequence_mean_counts_every_sequence_once():
    values = jnp.array([[1.0, 2.0, 6.0], [5.0, 7.0, jnp.nan], [jnp.inf, 0.0, 1.0]])
    weights = jnp.array([[1.0, 1.0, 1.0], [0.5, 1.5, 0.0], [0.0, 0.0, 0.0]])
    assert float(losses.sequence_mean(values, weights)) == pytest.approx((3 + 6.5) / 2)
    gradient = jax.grad(losses.sequence_mean)(values, weights)
    np.testing.assert_allclose(gradient, [[1 / 6] * 3, [0.125, 0.375, 0], [0] * 3], rtol=1e-6)
    assert float(losses.sequence_mean(values, jnp.zeros((3, 3)))) == 0


def test_names_are_static_and_checked():
    assert set(losses.NAMES) == {*LOSSLESS, "cross_entropy"}
    step = jax.jit(lambda z, loss: loss(z, 2 * z, None), static_argnames="loss")
    for settings in ({}, {"beta": 0.5}, {"beta": 0.25}):
        step(jnp.ones(3), loss=losses.named("jsd", **settings))
    assert step._cache_size() == 2
    for message, call in (
        ("loss: expected one of cross_entropy, .*, got 'kl'", lambda: losses.named("kl")),
        (r"jsd: expected arguments among \['beta'\], got 'eta'", lambda: losses.named("jsd", eta=1)),
        (r"beta: expected a number in \]0, 1\[, got 1", lambda: losses.named("jsd", beta=1)),
        ("smoothing: .* got 1.5", lambda: losses.named("cross_entropy", smoothing=1.5)),
        ("eta: expected a number >= 0, got -1", lambda: losses.named("lk_hybrid", eta=-1)),
        (r"target_logits: .* \(4,\), got \(3,\)", lambda: losses.jsd(jnp.ones(3), jnp.ones(4))),
        (
            r"keep: expected a number in \]0, 1\], got 0",
            lambda: losses.token_filter(*[jnp.ones(1)] * 4, keep=0),
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("keep", [0.1, 0.4, 0.99, 1.0])
def test_token_filter_keeps_the_tokens_furthest_behind(keep):
    """Against a sort in plain Python: a share of all tokens of the batch, with masks and equals."""
    rng = np.random.default_rng(3)
    shape = (4, 10)
    target, drafter, reference = rng.integers(0, 2, (3, *shape, 3)).astype(np.float32)  # many equal ones
    weights = rng.integers(0, 3, shape).astype(np.float32)
    weights[2] = 0
    behind = kl(softmax(target), softmax(drafter)) - kl(softmax(target), softmax(reference))
    mine = [(r, c) for r in range(4) for c in range(10) if weights[r, c] > 0]
    # What is equal in exact arithmetic must be so in the sort, too: 1e-5 is far less than any other gap.
    mine.sort(key=lambda at: (-round(behind[at], 5), at))
    expected = np.zeros(shape, np.float32)
    for at in mine[: round(keep * len(mine))]:
        expected[at] = weights[at]
    filtered = jax.jit(losses.token_filter, static_argnames="keep")
    kept = filtered(target, drafter, reference, weights, keep=keep)
    assert (np.asarray(kept) > 0).sum() == round(keep * len(mine))
    cut = round(keep * len(mine)) - 1
    sure = np.abs(behind - behind[mine[cut]]) > 1e-5  # float32 may order equal gaps in another way
    np.testing.assert_array_equal(np.where(sure, kept, 0), np.where(sure, expected, 0))


def test_token_filter_of_nearly_nothing():
    logits = jnp.zeros((1, 3, 2))
    for weights, kept in (([0, 0, 0], [0, 0, 0]), ([0, 2, 0], [0, 2, 0]), ([0, 2, 3], [0, 2, 0])):
        weights = jnp.array([weights], jnp.float32)
        assert losses.token_filter(logits, logits, logits, weights, 0.1).tolist() == [kept]
    # A reference that is infinitely far from the target, as the drafter is: not a reason to keep a token.
    far = jnp.array([[[-jnp.inf, 0], [-jnp.inf, 0], [0, 1.0]]])
    kept = losses.token_filter(logits, far, far.at[0, 2].set(0), jnp.ones((1, 3)), 0.4)
    assert kept.tolist() == [[0, 0, 1]]


# --- optima -------------------------------------------------------------------------------------------

LAWS = np.array([[0.40, 0.25, 0.15, 0.10, 0.07, 0.03], [0.05, 0.10, 0.02, 0.30, 0.03, 0.50]])
SHARES = np.array([0.65, 0.35])  # how often each of the two contexts occurs
TIED = np.kron(np.eye(2), np.ones((3, 1)))  # [6, 2]: the first three tokens have one logit, the others one

#: Shape of the free parameters, and from them to the logits of both contexts.
DRAFTERS = {
    "free": ((2, 6), lambda z: z),
    "shared": ((1, 6), lambda z: jnp.broadcast_to(z, (2, 6))),
    "tied": ((2, 2), lambda z: z @ jnp.asarray(TIED.T, jnp.float32)),
}


@functools.cache
def descend(name: str, drafter: str, steps: int = 4000) -> np.ndarray:
    """The laws that plain gradient descent arrives at, at a rate that falls linearly to 0."""
    shape, logits = DRAFTERS[drafter]
    loss, target = losses.named(name), jnp.log(jnp.asarray(LAWS, jnp.float32))
    shares = jnp.asarray(SHARES, jnp.float32) * 2

    def objective(z: jax.Array) -> jax.Array:
        return (shares * loss(target, logits(z), None)).sum()

    @jax.jit
    def run(z: jax.Array) -> jax.Array:
        def step(t: jax.Array, z: jax.Array) -> jax.Array:
            return z - 0.5 * (1 - t.astype(jnp.float32) / steps) * jax.grad(objective)(z)

        return jax.lax.fori_loop(0, steps, step, z)

    return softmax(np.asarray(logits(run(jnp.zeros(shape)))))


def mean_alpha(laws: np.ndarray) -> float:
    return float(SHARES @ np.minimum(LAWS, laws).sum(-1))


def best_alpha(drafter: str) -> float:
    """The greatest mean alpha of a restricted drafter: max sum t, t <= p, t <= q, q linear in r on a simplex,
    as a linear programme per law that the drafter may choose."""

    def solve(laws: np.ndarray, shares: np.ndarray, spread: np.ndarray) -> float:
        contexts, size = laws.shape
        free = spread.shape[1]
        cost = np.concatenate([-np.repeat(shares, size), np.zeros(free)])
        below = np.hstack([np.eye(contexts * size), -np.tile(spread, (contexts, 1))])
        total = np.concatenate([np.zeros(contexts * size), np.ones(free)])[None]
        bounds = [(0, value) for value in laws.ravel()] + [(0, 1)] * free
        result = scipy.optimize.linprog(cost, below, np.zeros(contexts * size), total, [1.0], bounds)
        return -result.fun

    if drafter == "shared":
        return solve(LAWS, SHARES, np.eye(6))
    return sum(
        share * solve(law[None], np.ones(1), TIED / 3) for law, share in zip(LAWS, SHARES, strict=True)
    )


def best_value(name: str) -> float:
    """The least mean loss of one law for both contexts, by a general solver in float64. -log alpha has kinks,
    which the solver is spared by variables t <= p, t <= q as above."""
    if name == "negative_log_acceptance":

        def objective(x: np.ndarray) -> float:
            return -SHARES @ np.log(x[6:].reshape(2, 6).sum(-1))

        constraints = [{"type": "ineq", "fun": lambda x: np.tile(x[:6], 2) - x[6:]}]
        bounds = [(0, 1)] * 6 + [(0, value) for value in LAWS.ravel()]
        start = np.concatenate([np.full(6, 1 / 6), np.minimum(LAWS, 1 / 6).ravel()])
    else:

        def objective(x: np.ndarray) -> float:
            return SHARES @ formula(name, LAWS, np.stack([x, x]))

        constraints, bounds, start = [], [(1e-9, 1)] * 6, np.full(6, 1 / 6)
    constraints.append({"type": "eq", "fun": lambda x: x[:6].sum() - 1})
    result = scipy.optimize.minimize(
        objective, start, bounds=bounds, constraints=constraints, method="SLSQP", options={"ftol": 1e-12}
    )
    assert result.success
    return result.fun


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_free_drafter_becomes_the_target(name):
    alpha = np.minimum(LAWS, descend(name, "free")).sum(-1)
    print(name, "alpha", alpha)
    assert (alpha > 0.999).all()


@pytest.mark.parametrize("drafter", ["shared", "tied"])
def test_a_restricted_drafter_reaches_the_best_alpha(drafter):
    """TV reaches what the linear programme says is possible; KL, which aims elsewhere, does not."""
    best = best_alpha(drafter)
    reached = {name: mean_alpha(descend(name, drafter)) for name in LOSSLESS}
    print(drafter, f"best {best:.4f}", {name: round(alpha, 4) for name, alpha in reached.items()})
    assert reached["total_variation"] == pytest.approx(best, abs=1e-3)
    if drafter == "tied":  # one law a context, so that -log alpha has its optimum where alpha has
        assert reached["negative_log_acceptance"] == pytest.approx(best, abs=1e-3)
    assert reached["forward_kl"] < best - 0.004
    assert reached["forward_kl"] < reached["lk_hybrid"] <= best + 1e-6


@pytest.mark.parametrize("name", [name for name in LOSSLESS if name != "lk_hybrid"])
def test_a_shared_drafter_reaches_the_optimum_of_each_objective(name):
    reached = descend(name, "shared")
    assert SHARES @ formula(name, LAWS, reached) == pytest.approx(best_value(name), abs=1e-3)
    if name == "forward_kl":
        np.testing.assert_allclose(reached[0], SHARES @ LAWS, atol=1e-4)
    if name == "reverse_kl":
        geometric = np.exp(SHARES @ np.log(LAWS))
        np.testing.assert_allclose(reached[0], geometric / geometric.sum(), atol=1e-4)
