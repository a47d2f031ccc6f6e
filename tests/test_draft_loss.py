"""Losses of draft networks: values computed by hand, where they have gradients, and where anchors are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters import nets
from jspec.testing import tiny_decoder
from training import anchors, losses
from training.draft_loss import DraftLoss, Known, Term, Weighting, acceptance
from training.laws import laws_of

# One sequence, two anchors, two depths; the second anchor's answer ends after one token. The drafter has two
# columns; the last number of a law is the mass of all other tokens.
P = np.array([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], [[0.6, 0.4, 0.0], [0.2, 0.2, 0.6]]])
Q = np.array([[[0.5, 0.5], [0.9, 0.1]], [[0.25, 0.75], [0.5, 0.5]]])
EXISTS = np.array([[True, True], [True, False]])


def log(x):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(x, np.float32))


def known(**changes):
    given = Known(
        target=log(P[..., :2])[None] + 3,  # logits, not logarithms of laws
        rest=log(P[..., 2])[None] + 3,
        inside=(P.argmax(-1) < 2)[None],
        best=P.argmax(-1).astype(np.int32)[None],
        labels=np.array([[[0, -1], [1, 0]]], np.int32),
        hidden=np.zeros((1, 2, 2, 2), np.float32),
        exists=EXISTS[None],
    )
    return given._replace(**changes)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradient(objective, known, logits, details):
    return jax.value_and_grad(lambda x: objective(known, x, details))(logits)


def loss_of(settings, given=None, logits=None, details=None):
    objective = DraftLoss.model_validate(settings).static()
    logits = log(Q)[None] - 1 if logits is None else logits
    value, gradient = value_and_gradient(objective, known() if given is None else given, logits, details)
    assert np.isfinite(np.asarray(gradient)).all()
    return float(value), np.asarray(gradient)[0]


def kl(p, q):
    p, q = np.asarray(p), np.asarray(q)
    return float((p * np.log(p / q)).sum())


ALPHA = np.minimum(P[..., :2], Q).sum(-1)  # [[.8, .2], [.65, .4]]
KL = {(0, 0): kl([5 / 8, 3 / 8], Q[0, 0]), (1, 0): kl([0.6, 0.4], Q[1, 0])}  # renormalised on the columns
UNIFORM = {"weighting": {"kind": "uniform"}}


def test_acceptance_is_of_the_whole_law():
    np.testing.assert_allclose(ALPHA[0], [0.8, 0.2])
    found = jax.jit(acceptance)(known(), log(Q)[None])
    np.testing.assert_allclose(found[0], np.where(EXISTS, ALPHA, 0), rtol=1e-5)
    renormalised = np.asarray(jax.jit(acceptance)(known(rest=None), log(Q)[None]))
    np.testing.assert_allclose(renormalised[0, 0, 0], min(5 / 8, 0.5) + min(3 / 8, 0.5), rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Depth 2 of the first anchor: the target's first choice is no column, nor is the label.
        ({"terms": [{"loss": "forward_kl"}]}, np.mean([*KL.values()])),
        ({"terms": [{"loss": "cross_entropy"}]}, -np.mean([np.log(0.5), np.log(0.75)])),
        ({"terms": [{"loss": "total_variation"}]}, np.mean([0.2, 0.8, 0.35])),
        ({"terms": [{"loss": "negative_log_acceptance"}]}, -np.mean(np.log([0.8, 0.2, 0.65]))),
        (
            {"terms": [{"loss": "forward_kl", "weight": 2}, {"loss": "total_variation", "weight": 0.5}]},
            2 * np.mean([*KL.values()]) + 0.5 * np.mean([0.2, 0.8, 0.35]),
        ),
        (
            {"terms": [{"loss": "lk_hybrid", "arguments": {"eta": 2}}]},
            np.mean(
                [
                    np.exp(-1.6) * KL[0, 0] + (1 - np.exp(-1.6)) * 0.2,
                    (1 - np.exp(-0.4)) * 0.8,
                    np.exp(-1.3) * KL[1, 0] + (1 - np.exp(-1.3)) * 0.35,
                ]
            ),
        ),
    ],
)
def test_terms_on_a_reduced_vocabulary(settings, expected):
    value, gradient = loss_of(settings | UNIFORM)
    assert value == pytest.approx(expected, rel=1e-5)
    assert not gradient[1, 1].any()
    assert gradient[1, 0].any()


@pytest.mark.parametrize(
    ("weighting", "depth_2"),
    [
        ({"kind": "decay", "decay": 0.6}, 0.6),
        ({"kind": "dflash", "gamma": 4}, np.exp(-0.25)),
        # (1 - s) alpha + s = .9, .6 at s = .5: w = .9 + .54, .54 for the first anchor; .825 for the second.
        ({"kind": "dpace"}, None),
    ],
)
def test_weights_of_depths(weighting, depth_2):
    value, _ = loss_of({"terms": [{"loss": "total_variation"}], "weighting": weighting})
    weights = np.array([1, depth_2, 1] if depth_2 is not None else [1.44, 0.54, 0.825])
    assert value == pytest.approx((weights * [0.2, 0.8, 0.35]).sum() / weights.sum(), rel=1e-5)


def test_a_long_answer_counts_no_more_than_a_short_one():
    """Two sequences; the second has one place only."""
    two = jax.tree.map(lambda x: np.concatenate([x, x]), known())
    exists = np.stack([EXISTS, [[False, False], [True, False]]])
    logits = np.concatenate([log(Q)[None]] * 2)
    value, _ = loss_of(
        {"terms": [{"loss": "total_variation"}]} | UNIFORM, two._replace(exists=exists), logits
    )
    assert value == pytest.approx((np.mean([0.2, 0.8, 0.35]) + 0.35) / 2, rel=1e-5)


def test_the_mean_of_a_batch_is_that_of_its_parts():
    """Of parts with equally many answers, whatever a term means something for: gradients are accumulated."""
    one = known()
    outside = known(inside=np.zeros((1, 2, 2), bool), labels=np.full((1, 2, 2), -1, np.int32))
    both = jax.tree.map(lambda a, b: np.concatenate([a, b]), one, outside)
    logits = log(Q)[None] - 1
    for name in ("cross_entropy", "forward_kl", "lk_hybrid", "total_variation"):
        terms = {"terms": [{"loss": name}]}
        parts = [loss_of(terms, part, logits)[0] for part in (one, outside)]
        whole, _ = loss_of(terms, both, np.concatenate([logits, logits]))
        assert whole == pytest.approx(np.mean(parts), rel=1e-5)


def test_regression_and_confidence():
    details = {
        "hidden": np.array([[[[0.5, 3.0], [0.0, 0.0]], [[2.0, 0.0], [9.0, 9.0]]]], np.float32),
        "confidence": np.array([[[0.0, 2.0], [-1.0, 50.0]]], np.float32),
    }
    base = {"terms": [{"loss": "total_variation"}]} | UNIFORM
    plain, _ = loss_of(base)
    value, _ = loss_of(base | {"regression": 2.0}, details=details)
    assert value - plain == pytest.approx(2 * np.mean([(0.125 + 2.5) / 2, 0, 1.5 / 2]), rel=1e-5)
    value, _ = loss_of(base | {"confidence": 1.0}, details=details)
    sure = 1 / (1 + np.exp(-np.array([0.0, 2.0, -1.0])))
    entropy = -(ALPHA[EXISTS] * np.log(sure) + (1 - ALPHA[EXISTS]) * np.log(1 - sure))
    assert value - plain == pytest.approx(entropy.mean(), rel=1e-5)


@pytest.mark.parametrize("name", losses.NAMES)
def test_gradients_are_finite_where_laws_are_zero(name):
    """A p of 0, logits of -inf, a row of them, and a batch without any anchor."""
    none = known(exists=np.zeros((1, 2, 2), bool))
    settings = {"terms": [{"loss": name}], "weighting": {"kind": "dpace"}, "confidence": 1, "regression": 1}
    details = {"hidden": np.zeros((1, 2, 2, 2), np.float32), "confidence": np.zeros((1, 2, 2), np.float32)}
    value, gradient = loss_of(settings, none, details=details)
    assert value == 0
    assert not gradient.any()
    zeros, logits = log(P[..., :2])[None], log(Q)[None]
    zeros[0, 0, 0, 0] = zeros[0, 1] = logits[0, 0, 0, 1] = logits[0, 0, 1] = -np.inf
    loss_of(settings, known(target=zeros), logits, details)


def test_wrong_settings():
    for settings, message in (
        ({"terms": [{"loss": "kl"}]}, "loss: expected one of"),
        ({"terms": [{"loss": "jsd", "arguments": {"eta": 1}}]}, "expected arguments among"),
        ({"weighting": {"kind": "decay", "decay": 0}}, "greater than 0"),
        ({"terms": []}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            DraftLoss.model_validate(settings)
    assert Weighting().decay == 0.8
    assert Term().loss == "forward_kl"
    assert hash(DraftLoss().static()) == hash(DraftLoss().static())
    assert DraftLoss().static() == DraftLoss().static()


# --- places -----------------------------------------------------------------------------------------


def test_anchors_are_a_sample_of_the_answer():
    weights = np.array([[0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]], np.float32)
    keys = jax.random.split(jax.random.key(0), 20)
    seen = set()
    for found in np.asarray(jax.jit(jax.vmap(lambda key: anchors.sample(key, weights, 2)))(keys)):
        assert found[0].min() >= 1
        assert found[0][0] < found[0][1] <= 4
        assert found[1:].tolist() == [[-1, 3], [-1, -1]]
        seen.add(tuple(found[0]))
    assert len(seen) >= 5
    every = anchors.sample(jax.random.key(0), weights, 9)
    assert every.tolist()[0] == [-1, -1, 1, 2, 3, 4]
    chosen = np.array([[3], [3], [-1]], np.int32)
    at, exists = jax.device_get(jax.jit(anchors.places, static_argnums=2)(chosen, weights, 3))
    assert at[0, 0].tolist() == [3, 4, 5]
    assert exists[:, 0].tolist() == [[True, True, False], [True, False, False], [False] * 3]


@pytest.mark.parametrize(
    ("reduced", "stored"), [(False, False), (True, False), (True, True)], ids=["whole", "reduced", "stored"]
)
def test_the_target_s_laws_are_those_of_its_forward(reduced, stored, monkeypatch):
    monkeypatch.setattr(anchors, "ROWS", 3)
    lm, params = tiny_decoder(vocab_size=13)
    random = np.random.default_rng(0)
    hidden = random.normal(size=(2, 7, lm.config.width)).astype(np.float32)
    labels = random.integers(0, 11, (2, 7)).astype(np.int32)
    weights = np.array([[0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0]], np.float32)
    ids = np.array([2, 3, 5, 8], np.int32) if reduced else None
    kernel = nets.rows_of_head(lm, params, jnp.asarray(ids)) if stored else None
    chosen = np.array([[1, 3], [-1, 4]], np.int32)

    @jax.jit
    def look(params, hidden):
        at, exists = anchors.places(chosen, weights, 2)
        kept = (laws_of(params, hidden, lm=lm, vocab_size=11), kernel) if stored else ()
        found = anchors.look(lm, params, hidden, jnp.asarray(labels), at, exists, ids, 11, 4, (), *kept)
        return at, found, lm.head(params, hidden)[..., :11]  # two are padding

    at, found, logits = jax.device_get(look(params, hidden))
    exists = found.exists
    columns = np.arange(11) if ids is None else ids
    for b, a, k in np.argwhere(exists):
        place = int(at[b, a, k])
        row = logits[b, place]
        np.testing.assert_allclose(found.target[b, a, k], row[columns], rtol=1e-5, atol=1e-5)
        assert int(found.best[b, a, k]) == row.argmax()
        assert bool(found.inside[b, a, k]) == (row.argmax() in columns)
        label = int(labels[b, place])
        assert int(found.labels[b, a, k]) == (list(columns).index(label) if label in columns else -1)
        np.testing.assert_array_equal(found.hidden[b, a, k], hidden[b, place])
        if reduced:
            others = np.delete(row, columns)
            assert float(found.rest[b, a, k]) == pytest.approx(np.log(np.exp(others).sum()), rel=1e-5)
    assert exists.sum() == 5
