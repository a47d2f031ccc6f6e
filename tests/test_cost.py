"""The theory against the published tables, predictions against simulation, the cost curve."""

import numpy as np
import pytest

from experiments import cost
from jspec import drafters, measure, options, testing, verify
from jspec.batch import Request
from jspec.measure import CostCurve

# alpha, gamma, speed-up: Table 1 of arXiv 2211.17192 (c = 0).
TABLE_1 = [
    (0.6, 2, 1.96),
    (0.7, 3, 2.53),
    (0.8, 2, 2.44),
    (0.8, 5, 3.69),
    (0.9, 2, 2.71),
    (0.9, 10, 6.86),
]
# alpha, c, gamma, predicted: Table 4 of the same paper (T5-XXL with T5-small, -base and -large as drafters).
TABLE_4 = [
    (0.75, 0.02, 7, 3.2),
    (0.80, 0.04, 7, 3.3),
    (0.82, 0.11, 7, 2.5),
    (0.62, 0.02, 7, 2.3),
    (0.68, 0.04, 5, 2.4),
    (0.65, 0.02, 5, 2.4),
    (0.73, 0.04, 5, 2.6),
    (0.74, 0.11, 3, 2.0),
    (0.53, 0.02, 5, 1.9),
    (0.55, 0.04, 3, 1.8),
]


@pytest.mark.parametrize(("alpha", "gamma", "speed"), TABLE_1)
def test_table_1(alpha, gamma, speed):
    assert cost.speedup(alpha, gamma, 0.0) == pytest.approx(speed, abs=0.005)
    assert cost.tau(alpha, gamma) == cost.speedup(alpha, gamma, 0.0)


@pytest.mark.parametrize(("alpha", "c", "gamma", "predicted"), TABLE_4)
def test_table_4(alpha, c, gamma, predicted):
    assert cost.speedup(alpha, gamma, c) == pytest.approx(
        predicted, abs=0.06
    )  # alpha is printed with two digits


def test_limits():
    assert cost.tau(1.0, 4) == 5
    assert cost.tau(1 - 1e-9, 4) == pytest.approx(5)
    assert cost.tau(0.0, 4) == 1
    assert cost.speedup(0.5, 0, 0.3) == 1


def test_a_gain_is_possible_just_where_alpha_exceeds_c():
    """Corollary 3.9."""
    for alpha in np.linspace(0.05, 0.95, 19):
        for c in np.linspace(0.023, 0.973, 17):
            best = max(cost.speedup(alpha, gamma, c) for gamma in range(1, 65))
            assert (best > 1) == (alpha > c)


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (cost.speedup, (1.5, 2, 0.1), "alpha"),
        (cost.speedup_on, (CostCurve((1, 2), (1.0, 1.0)), 0.5, -1, 0.1), "gamma"),
        (cost.speedup, (0.5, 2, -0.1), "c:"),
        (cost.estimate_alpha, ([3], [2]), "accepted"),
    ],
)
def test_bad_numbers_are_refused(function, arguments, name):
    with pytest.raises(ValueError, match=name):
        function(*arguments)


def simulated_rounds(alpha: float, lengths: np.ndarray) -> measure.Rounds:
    """Rounds of the theory's world: every draft token accepted with probability alpha, independently."""
    generator = np.random.default_rng(0)
    wins = generator.random((len(lengths), lengths.max())) < alpha
    accepted = np.minimum(np.cumprod(wins, axis=1).sum(1), lengths)
    return measure.Rounds(accepted + 1, accepted, lengths, lengths + 1)


def test_alpha_is_recovered_from_rounds_of_changing_length():
    lengths = np.random.default_rng(1).integers(0, 7, 40_000)
    rounds = simulated_rounds(0.7, lengths)
    assert cost.estimate_alpha(rounds.accepted, rounds.judged) == pytest.approx(0.7, abs=0.01)
    # What the theory makes of it is the simulation's own mean.
    c = 0.1
    truth = rounds.emitted.mean() / (1 + c * lengths).mean()
    assert cost.predict_from_theory(0.7, lengths.tolist(), c) == pytest.approx(truth, rel=0.01)
    assert cost.estimate_alpha([0], [0]) == 0


def test_a_round_cut_by_an_end_token_refuses_nothing():
    rounds = measure.Rounds(np.array([3, 2]), np.array([2, 2]), np.array([4, 4]), np.array([5, 5]))
    assert rounds.judged.tolist() == [3, 2]
    assert rounds.survival(4).tolist() == [1, 1, 0, 0]


def test_curve_interpolates_and_extrapolates():
    curve = CostCurve((1, 2, 4, 8), (2.0, 3.0, 4.0, 5.0))
    assert [curve.relative(n) for n in (1, 2, 3, 4, 8, 12)] == [1, 1.5, 1.75, 2, 2.5, 3]
    assert CostCurve((1,), (2.0,)).relative(9) == 1


def test_prediction_from_curve():
    curve = CostCurve((1, 5), (1.0, 2.0))
    # Half the rounds draft nothing: cost (1 + 2) / 2 + 0.1.
    assert cost.predict_from_curve(1.6, [1, 5, 1, 5], 0.1, curve) == pytest.approx(1.0)


def test_best_length_is_the_best_by_trying_all():
    curve = CostCurve((1, 2, 4, 5, 8, 16), (1.0, 1.3, 1.5, 1.65, 1.9, 2.6))
    survival = np.cumprod([0.6, 0.75, 0.8, 0.8, 0.7, 0.5, 0.5, 0.4])
    for drafting in (1.0, 0.4):
        for draft_cost in (0.0, 0.05):
            gains = [1.0] + [
                (1 + survival[:n].sum()) / (drafting * curve.relative(n + 1) + 1 - drafting + n * draft_cost)
                for n in range(1, 9)
            ]
            length, gain = cost.best_length(
                survival.tolist(), curve, draft_cost=draft_cost, drafting=drafting
            )
            assert (length, gain) == (int(np.argmax(gains)), pytest.approx(max(gains)))
    # On a device where width is free the longest draft is the best; where nothing is accepted, none.
    assert cost.best_length(survival.tolist(), CostCurve((1, 16), (1.0, 1.0)))[0] == 8
    assert cost.best_length([0.0, 0.0], curve) == (0, 1.0)


def test_the_curve_is_measured(monkeypatch):
    monkeypatch.setattr(measure, "LEAST_SECONDS", 0.0)
    target, params = testing.table_lm(np.full((5, 5), 0.2))
    steps = []
    curve = measure.measure_curve(target, params, (4, 2), repeats=2, advance=lambda: steps.append(1))
    assert curve.widths == (1, 2, 4)
    assert all(seconds > 0 for seconds in curve.seconds)
    assert len(steps) == 3 * (1 + 2)
    with pytest.raises(ValueError, match=r"widths: expected numbers in 1 \.\. 8"):
        measure.measure_curve(target, params, (9,), fill=8, capacity=16)
    with pytest.raises(ValueError, match=r"fill: expected a whole number >= 0, got -1"):
        measure.measure_curve(target, params, (9,), fill=-1, capacity=16)


def test_a_replay_ends_with_the_text():
    drafter = drafters.suffix(num_tokens=3)
    replayed = measure.replay(drafter, Request([7, 7]), [7, 7, 7, 7], capacity=16, rows=8)
    assert replayed.accepted.tolist() == [3, 3, 2, 1]
    assert replayed.proposed.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize(("num_tokens", "min_match"), [(2, 1), (6, 3)])
def test_a_replay_is_the_run(num_tokens, min_match):
    """The rounds that a replay predicts from the plain text are those of the engine, one by one."""
    generator = np.random.default_rng(3)
    target, params = testing.table_lm(np.eye(9)[generator.permutation(9)])
    prompt = generator.integers(0, 9, 30).tolist()
    chosen = options.resolve({}, prompts=1, samples=1, width=9, vocab=9, ends=(), special_id=None)
    drafter = drafters.suffix(num_tokens=num_tokens, min_match=min_match)
    trial = measure.decode(
        params,
        Request(prompt),
        chosen.keys([0]),
        target=target,
        drafter=drafter,
        verify=verify.target_only(),
        sampler=chosen.sampler([0]),
        stops=chosen.stops(),
        max_new_tokens=24,
    )
    longest = drafters.suffix(num_tokens=6, min_match=min_match)
    replayed = measure.replay(longest, Request(prompt), trial.tokens, capacity=64, rows=32)
    places = np.cumsum(trial.rounds.emitted) - trial.rounds.emitted
    proposed = np.minimum(np.minimum(replayed.proposed[places], num_tokens), 24 - places - 1)
    assert proposed.tolist() == trial.rounds.proposed.tolist()
    assert np.minimum(replayed.accepted[places], proposed).tolist() == trial.rounds.accepted.tolist()
    assert trial.rounds.accepted.sum() > 0
    # Where a block of any width costs t(1), the time is the number of rounds.
    assert replayed.cost(num_tokens, CostCurve((1, 8), (1.0, 1.0))) == len(trial.rounds.emitted)
    steep = CostCurve((1, 2, 3), (1.0, 2.0, 3.0))
    assert replayed.cost(num_tokens, steep) == ((proposed > 0) * num_tokens + 1).sum()
