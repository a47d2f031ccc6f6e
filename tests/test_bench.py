"""The bench: batches of encoder-decoder prompts, and what is made of trials."""

import jax
import numpy as np
import pytest

from experiments import cost, figures
from experiments.bench import PLAIN, Bench, Case, Setting
from experiments.cost import Drafting
from jspec import Model, drafters, generate, measure, testing, verify
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


@pytest.fixture(autouse=True)
def short_timings(monkeypatch):
    monkeypatch.setattr(measure, "LEAST_SECONDS", 0.0)


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


def test_repeats_draw_anew_above_temperature_0_only(decoded):
    for _, trials in decoded.values():
        for temperature, alike in ((0.0, True), (1.0, False)):
            first, second = (
                [[trial.tokens.tolist() for trial in mine] for mine in repeat]
                for repeat in trials[temperature]
            )
            assert (first[0] == second[0], first[1] == second[1]) == (alike, alike)
    # A repeat's streams are those of no other prompt in another one, whoever decodes.
    bench = decoded[1][0]
    seeds = [bench.options(1.0, [i], repeat).keys([0]) for repeat in range(2) for i in range(4)]
    assert len({str(key) for key in seeds}) == 8


def test_groups_and_capacity(decoded):
    bench = decoded[3][0]
    assert bench.groups == [[0, 1, 2], [3]]
    assert (bench.capacity([3]), bench.source) == (32, 16)
    assert Bench(model(0), cases(1), max_new_tokens=9, source=24).source == 24


def test_figures_of_batches(decoded, setting):
    for size, (bench, trials) in decoded.items():
        curve = CostCurve((1, 3), (0.001, 0.0015))
        drafting = [None, Drafting(0.0002, 0.0002)]
        plain, mine = figures.lines(bench, [PLAIN, setting], trials[0.0], drafting, curve, 0.0)
        assert (plain.tau, plain.baseline, plain.c, plain.speedup.median) == (1, True, None, 1)
        assert mine.flips == ()
        assert mine.c == pytest.approx(0.1)
        rounds = [
            figures.whole_rounds(bench, s, [t]) for s, t in zip([PLAIN, setting], trials[0.0][0], strict=True)
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
    # The second of the three rounds follows two drafts that were accepted whole: 0.2 = 2 / 3 .1 + 1 / 3 .4.
    assert figures.caught_up(bench, 2, [fast]) == pytest.approx(1 / 3)
    drafting = [None, Drafting(0.1, 0.4)]
    one, other = figures.lines(bench, [PLAIN, setting], [[plain, fast]], drafting, curve, 1.0)
    assert (one.decode.median, other.decode.median) == (10 / 6, 10 / 4)
    assert (one.overall.median, other.overall.median) == (10 / 8, 10 / 7)
    assert (other.speedup.median, other.overall_speedup.median) == (1.5, 8 / 7)
    assert other.tau == 10 / 5
    assert other.c == pytest.approx(0.05)  # a step's, where nothing has to be caught up with
    assert other.predicted == pytest.approx((10 / 3) / (10 / 6) / 1.4)
    # With 2 / 6 and 3 / 6 of plain decoding's time before the first round.
    assert other.predicted_overall == pytest.approx((1 + 2 / 6) / (1.4 / 2 + 3 / 6))
    assert other.round == pytest.approx((4 / 3, 1.2, 0.2))
    assert other.flips is None
    assert other.best_length is not None


def test_sampled_figures_are_of_all_repeats_and_of_unequal_counts(setting):
    """Two repeats that draw differently; the second writes 4 tokens where plain decoding writes 2."""
    bench = Bench(model(0), cases(1), max_new_tokens=6)
    first = [[trial([1] * 3, [0] * 3, 1.0, 3.0, 0)], [trial([3], [2], 1.0, 1.5)]]
    second = [[trial([1] * 2, [0] * 2, 1.0, 2.0, 0)], [trial([1, 3], [0, 2], 1.0, 3.0)]]
    curve = CostCurve((1, 3), (1.0, 1.3))
    drafting = [None, Drafting(0.2, 0.2)]
    _, mine = figures.lines(bench, [PLAIN, setting], [first, second], drafting, curve, 1.0)
    assert mine.tau == pytest.approx(7 / 3)
    assert mine.alpha == pytest.approx(4 / 5)
    # What is expected of decoding is what was measured here in both repeats, so that of the whole is, too.
    tau = mine.predicted * 1.5
    assert tau == pytest.approx(7 / 3)
    exact = [
        (1 + prompt / decode) / (1 / mine.predicted + prompt / decode * plain / own)
        for prompt, decode, plain, own in ((1, 3, 3, 3), (1, 2, 2, 4))
    ]
    assert mine.predicted_overall == pytest.approx(np.median(exact))
    single = figures.lines(bench, [PLAIN, setting], [second], [None, Drafting(0.2, 0.2)], curve, 1.0)[1]
    # 4 tokens in two rounds of 1.5 each, behind a prompt of 1, against 2 tokens in 2 steps behind 1.
    assert single.predicted_overall == pytest.approx((4 / (1 + 3)) / (2 / (1 + 2)))


def test_whether_drafts_are_chains_is_seen_from_them():
    def rounds(proposed, nodes):
        return Rounds(*map(np.array, ([1, 1], [0, 0], proposed, nodes)))

    assert rounds([2, 0], [3, 1]).are_chains
    # A tree as wide as a chain of its depth: 5 drafted nodes, of which 3 are one below the other.
    assert not rounds([3, 5], [6, 6]).are_chains


def test_the_gap_at_a_flip_is_that_after_the_given_text():
    """Not after what plain decoding would write alone, which may be another text, or shorter."""
    law = np.array([[0.1, 0.5, 0.4], [0.2, 0.2, 0.6], [0.25, 0.05, 0.7]])
    lm, params = testing.table_lm(law)
    chain = Model(lm, params, eos=(0,), name="chain")
    bench = Bench(chain, [Case("a", "", Request([1]))], max_new_tokens=8, slots=8)
    # Plain decoding writes 2 2 2 ...; here both texts begin with 1 and part after 1 1.
    (flip,) = bench.flips([[1, 1, 0]], [[1, 1, 2, 2]])
    assert (flip.position, flip.gap) == (2, pytest.approx(np.log(3), abs=1e-5))
    (end,) = bench.flips([[1, 1]], [[1, 1, 2]])
    assert (end.position, end.gap) == (2, flip.gap)


def test_a_banned_token_comes_out_as_little_as_when_served():
    """Here it is the likeliest after every token, and the draft model, whose law is the same, drafts it."""
    law = np.array([[0.3, 0.2, 0.5], [0.1, 0.2, 0.7], [0.4, 0.1, 0.5]])
    banning = Model(*testing.table_lm(law), banned=(2,))
    setting = Setting("draft", drafters.model(banning, 2), verify.token(), (3,))
    bench = Bench(banning, [Case("a", "", Request([1]))], max_new_tokens=5, slots=8)
    served = generate(banning, [[1]], max_new_tokens=5).tokens[0]
    assert served == [1] * 5
    assert bench.decode([0], setting, 0.0)[0].tokens.tolist() == served
    (flip,) = bench.flips([[1, 0]], [served])
    assert (flip.position, flip.gap) == (1, pytest.approx(np.log(2), abs=1e-5))  # of the two that may come


def test_a_draft_that_was_accepted_whole_is_caught_up_with():
    """The loop that measures drafting then runs the drafter's extra forward, and only then."""
    law = np.full((5, 5), 0.2)
    lm, params = testing.table_lm(law)
    widths = []

    def counted(params, cache, block, **more):
        jax.debug.callback(lambda: widths.append(block.tokens.shape[1]))
        return lm.extend(params, cache, block, **more)

    drafter = drafters.model(Model(lm._replace(extend=counted), params), 3)
    bench = Bench(Model(lm, params), [Case("a", "", Request([0]))] * 2, max_new_tokens=9, batch_size=2)
    bench.draft_seconds(Setting("x", drafter, verify.token(), (4,)), 1.0, rounds=0)
    jax.effects_barrier()
    # 7 repeats of one round after a whole draft; and of 3 steps each round, whatever came before.
    assert widths.count(2) == 7
    assert widths.count(1) % 3 == 0


def test_costs_of_a_batch_are_measured(setting):
    bench = Bench(model(0), cases(4), max_new_tokens=9, batch_size=3, slots=32)
    curve, fill = bench.curve((1, 3))
    assert curve.widths == (1, 3)
    assert fill == 1 + 9 // 2
    assert min(bench.draft_seconds(setting, 1.0, rounds=0)) > 0


def test_what_a_longer_draft_gains_on_the_curve():
    curve = CostCurve((1, 2, 3, 5, 9), (1.0, 1.1, 1.2, 1.4, 1.8))
    gains = [cost.speedup_on(curve, 0.7, gamma, 0.03) for gamma in range(1, 9)]
    assert cost.best_gamma_on(curve, 0.7, 0.03, 8) == 1 + int(np.argmax(gains))
    # Where width is free this is Theorem 3.8.
    flat = CostCurve((1, 9), (1.0, 1.0))
    for alpha in (0.3, 0.6, 0.8):
        gains = [cost.speedup(alpha, gamma, 0.1) for gamma in range(1, 65)]
        assert cost.best_gamma_on(flat, alpha, 0.1, 64) == 1 + int(np.argmax(gains))


def test_decoding_together_is_one_timing_for_all(setting):
    bench = decoded_once(setting)
    assert len({trial.decode_seconds for trial in bench}) == 1


def decoded_once(setting):
    bench = Bench(model(0), cases(4), max_new_tokens=9, batch_size=3, slots=32, seed=5)
    trials = bench.decode(bench.groups[1], setting, 0.0)
    assert isinstance(trials[0], measure.Trial)
    assert len(trials) == 1
    return bench.decode(bench.groups[0], setting, 0.0)
