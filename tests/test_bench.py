"""The bench: batches of encoder-decoder prompts, and what is made of trials."""

import numpy as np
import pytest

from experiments import cost, figures
from experiments.bench import PLAIN, Bench, Case, Setting
from jspec import Model, drafters, measure, testing, verify
from jspec.batch import Request
from jspec.measure import CostCurve, Rounds, Trial

SIZES = {"vocab_size": 24, "num_layers": 1, "num_encoder_layers": 1, "width": 16, "num_heads": 2}


def model(seed):
    lm, params = testing.tiny_seq2seq(seed, **SIZES)
    return Model(lm, params, eos=(1,), decoder_start=(0,), name="tiny")


def cases(number):
    generator = np.random.default_rng(0)
    sources = [[*generator.integers(2, 24, 3 + 4 * i).tolist(), 1] for i in range(number)]
    return [Case(str(i), "", Request([0], source)) for i, source in enumerate(sources)]


@pytest.fixture(scope="module")
def setting():
    drafter = drafters.model(model(1), 2)
    return Setting("draft", drafter, verify.token(), (3,))


@pytest.fixture(scope="module")
def decoded(setting):
    """Four prompts by batches of 1 and of 3, the second of which is filled up."""
    found = {}
    for batch_size in (1, 3):
        bench = Bench(
            model(0), cases(4), max_new_tokens=9, repeats=2, batch_size=batch_size, slots=32, seed=5
        )
        bench.compile([PLAIN, setting])
        found[batch_size] = bench, {t: bench.trials([PLAIN, setting], t) for t in (0.0, 1.0)}
    return found


def test_a_prompt_is_decoded_alike_whatever_is_beside_it(decoded):
    for temperature in (0.0, 1.0):
        alone, together = (decoded[size][1][temperature] for size in (1, 3))
        for one, other in zip(alone[0], together[0], strict=True):
            for a, b in zip(one, other, strict=True):
                assert a.tokens.tolist() == b.tokens.tolist()
                assert a.rounds.accepted.tolist() == b.rounds.accepted.tolist()


def test_repeats_differ_in_time_only(decoded):
    for _, trials in decoded.values():
        first, second = trials[1.0]
        tokens = [[trial.tokens.tolist() for mine in repeat for trial in mine] for repeat in (first, second)]
        assert tokens[0] == tokens[1]


def test_groups_and_capacity(decoded):
    bench = decoded[3][0]
    assert bench.groups == [[0, 1, 2], [3]]
    assert (bench.capacity([3]), bench.source) == (32, 16)
    assert Bench(model(0), cases(1), max_new_tokens=9, source=24).source == 24


def test_figures_of_batches(decoded, setting):
    for size, (bench, trials) in decoded.items():
        curve = CostCurve((1, 3), (0.001, 0.0015))
        plain, mine = figures.lines(bench, [PLAIN, setting], trials[0.0], [None, 0.0002], curve, 0.0)
        assert (plain.tau, plain.baseline, plain.c, plain.speedup.median) == (1, True, None, 1)
        assert mine.flips == ()
        assert mine.c == pytest.approx(0.1)
        rounds = [
            figures.whole_rounds(bench, s, t) for s, t in zip([PLAIN, setting], trials[0.0][0], strict=True)
        ]
        steps = [len(r.widths) for r in rounds]
        longest = [
            [max(len(t.rounds.emitted) for t in part) for part in _parts(bench, t)] for t in trials[0.0][0]
        ]
        assert steps == [sum(counts) for counts in longest]
        # The same tokens in fewer rounds, each 1.5 + 0.2 times as dear.
        assert mine.predicted == pytest.approx(steps[0] / steps[1] / 1.7)
        assert mine.round.forward == pytest.approx(0.0015)
        assert mine.round.drafting == 0.0002
        assert mine.round.seconds * steps[1] == pytest.approx(
            sum(len(t.tokens) for t in trials[0.0][0][1]) / mine.decode.median
        )
        assert size == 1 or steps[0] < sum(len(t.tokens) for t in trials[0.0][0][0])


def _parts(bench, trials):
    return [[trials[i] for i in group] for group in bench.groups]


def trial(emitted, accepted, prompt, decode, proposed=2):
    emitted, accepted = np.array(emitted), np.array(accepted)
    rounds = Rounds(emitted, accepted, np.full_like(emitted, proposed), np.full_like(emitted, proposed + 1))
    return Trial(np.zeros(emitted.sum(), int), rounds, prompt, decode)


def test_figures_by_hand(setting):
    """One batch of two rows: plain decoding takes 6 steps and the draft 3 rounds for 10 tokens."""
    bench = Bench(model(0), cases(2), max_new_tokens=6, batch_size=2)
    plain = [trial([1] * n, [0] * n, 2.0, 6.0, proposed=0) for n in (4, 6)]
    fast = [trial([3, 1], [2, 0], 3.0, 4.0), trial([3, 2, 1], [2, 1, 0], 3.0, 4.0)]
    curve = CostCurve((1, 3), (1.0, 1.2))
    one, other = figures.lines(bench, [PLAIN, setting], [[plain, fast]], [None, 0.2], curve, 1.0)
    assert (one.decode.median, other.decode.median) == (10 / 6, 10 / 4)
    assert (one.overall.median, other.overall.median) == (10 / 8, 10 / 7)
    assert (other.speedup.median, other.overall_speedup.median) == (1.5, 8 / 7)
    assert other.tau == 10 / 5
    assert other.predicted == pytest.approx((10 / 3) / (10 / 6) / 1.4)
    # With 2 / 6 and 3 / 6 of plain decoding's time before the first round.
    assert other.predicted_overall == pytest.approx((1 + 2 / 6) / (1.4 / 2 + 3 / 6))
    assert other.round == pytest.approx((4 / 3, 1.2, 0.2))
    assert other.flips is None


def test_costs_of_a_batch_are_measured(setting):
    bench = Bench(model(0), cases(4), max_new_tokens=9, batch_size=3, slots=32)
    curve, fill = bench.curve((1, 3))
    assert curve.widths == (1, 3)
    assert fill == 1 + 9 // 2
    assert bench.draft_seconds(setting, 1.0, rounds=0) > 0


def test_what_a_longer_draft_gains_on_the_curve():
    curve = CostCurve((1, 2, 3, 5, 9), (1.0, 1.1, 1.2, 1.4, 1.8))
    gains = [cost.speedup_on(curve, 0.7, gamma, 0.03) for gamma in range(1, 9)]
    assert cost.best_gamma_on(curve, 0.7, 0.03, 8) == 1 + int(np.argmax(gains))
    # Where width is free this is Theorem 3.8, with its best gamma.
    flat = CostCurve((1, 9), (1.0, 1.0))
    for alpha in (0.3, 0.6, 0.8):
        assert cost.best_gamma_on(flat, alpha, 0.1, 64) == cost.best_gamma(alpha, 0.1)


def test_decoding_together_is_one_timing_for_all(setting):
    bench = decoded_once(setting)
    assert len({trial.decode_seconds for trial in bench}) == 1


def decoded_once(setting):
    bench = Bench(model(0), cases(4), max_new_tokens=9, batch_size=3, slots=32, seed=5)
    trials = bench.decode(bench.groups[1], setting, 0.0)
    assert isinstance(trials[0], measure.Trial)
    assert len(trials) == 1
    return bench.decode(bench.groups[0], setting, 0.0)
