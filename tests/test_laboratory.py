"""A study measured on models whose laws are known: tables over the letters of a byte-level tokenizer."""

import io
import json
import re

import numpy as np
import pytest
import rich.console
import tiny_text

from experiments import alpha, environment, measurements, pipeline, results, stages, study, study_report
from experiments.laboratory import Costs, Laboratory, Timed
from experiments.pipeline import Subject, Texts, Trained
from experiments.results import Curve
from jspec import Model, drafters, measure, models, testing
from jspec.drafters import NgramTable
from jspec.measure import CostCurve
from training import data, text, tokenizer
from training.distill import EVALUATION_SEED

LETTERS = [2 + byte for byte in b"abcd"]
END = 1
SIZE = 261  # tokens of the tokenizer; the fifth outcome of a law is its end token


def laws(seed, like=None, share=0.0):
    """P(x | w) over four letters and the end, after a letter; rows of other tokens repeat that of "a"."""
    generator = np.random.default_rng(seed)
    small = generator.dirichlet(np.ones(5), 4)
    small[:, 4] = 0.15
    small /= small.sum(1, keepdims=True)
    law = np.zeros((SIZE, SIZE), np.float32)
    law[:, [*LETTERS, END]] = small[0]
    for token, row in zip(LETTERS, small, strict=True):
        law[token, [*LETTERS, END]] = row
    return law if like is None else (1 - share) * like + share * law


P = laws(0)
Q = laws(1, P, 0.5)
CONFIG = {
    "kind": "study",
    "task": {"name": "letters", "paper": "ende"},
    "data": {name: {"format": "tsv", "file": "x"} for name in ("train", "validation", "test")},
    "max_new_tokens": 16,
    "target": {"model": "unused"},
    "drafters": {"table": {"model": "unused", "paper": "small"}},
    "ngrams": {"counted": {"order": 2, "paper": "bigram"}},
    "measure": {
        "temperatures": [0, 1],
        "batch_sizes": [1, 2],
        "drafters": ["table"],
        "sentences": 3,
        "repeats": 2,
        "gamma": 3,
        "quality_batch": 4,
        "sweep": {"drafter": "table", "gammas": [1, 3], "sentences": 2},
        "lenience": {"drafter": "table", "factors": [1.0, 0.5]},
    },
}


def model(law):
    spoken = tiny_text.tokenizer()
    lm, params = testing.table_lm(law)
    return Model(lm, params, spoken, (END,), "table", vocab_size=SIZE)


@pytest.fixture(autouse=True, scope="module")
def short_timings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "LEAST_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def trained(config):
    q = model(Q)
    table = NgramTable(
        *map(np.asarray, (Q.mean(0), np.zeros(SIZE, np.float32), np.tile(np.arange(SIZE), (SIZE, 1)), Q))
    )
    counted = alpha.Laws(alpha.table_model(SIZE), table)
    target = model(P)
    return Trained(
        target,
        {
            "table": Subject("table", "small", alpha.Laws(q.lm, q.params), q),
            "counted": Subject("counted", "bigram", counted, None),
        },
        pipeline.encode_test(config, target, RECORDS, QUIET)[0],
        pipeline.encode_test(config, target, RECORDS[::-1], QUIET)[0],
        {"train": 0, "validation": 0, "test": 1},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def config():
    return study.Study.model_validate(CONFIG)


QUIET = rich.console.Console(quiet=True)
RECORDS = [data.Record(source, "abab") for source in ("a", "bc", "d", "ab", "cda")]
TEXTS = Texts(RECORDS * 3, RECORDS[::-1], RECORDS, (7, 0, 0))


def measured(config, trained, folder):
    quiet = rich.console.Console(quiet=True)
    kept = stages.Stages(folder, quiet)
    return measurements.measure(config, trained, TEXTS, folder, kept, quiet), kept


@pytest.fixture(scope="module")
def found(config, trained, folder):
    return measured(config, trained, folder)


def overlaps(answers, measure):
    """The mean of ``measure(p, q)`` over all positions of the answers to all records."""
    values = []
    for record, answer in zip(RECORDS, answers, strict=True):
        before = tiny_text.tokenizer().encode(record.source)[-1]
        for token in answer:
            values.append(measure(P[before], Q[before]))
            before = token
    return np.mean(values), len(values)


def all_answers(trained, temperature, folder):
    from training.generation import generate_answers

    encoded = [trained.target.tokenizer.encode(record.source) for record in RECORDS]
    return generate_answers(
        trained.target,
        encoded,
        temperature=temperature,
        max_new_tokens=16,
        batch_size=4,
        cache=folder / "answers",
    )


def test_alphas_are_those_of_the_laws(found, trained, folder):
    got = found[0]
    sampled, greedy = (all_answers(trained, t, folder) for t in (1.0, 0.0))
    expected, positions = overlaps(sampled, lambda p, q: np.minimum(p, q).sum())
    assert got.alpha_tokens[1.0] == positions
    for name in ("table", "counted"):  # the same laws, once as a model and once as a table
        assert got.alphas[name][1.0] == pytest.approx(expected, abs=1e-5)
    expected, _ = overlaps(greedy, lambda p, q: float(p.argmax() == q.argmax()))
    assert got.alphas["table"][0.0] == got.alphas["counted"][0.0] == pytest.approx(expected)
    for index, factor in enumerate((1.0, 0.5)):
        expected, _ = overlaps(sampled, lambda p, q, f=factor: np.minimum(p / f, q).sum())
        assert got.lenient_alphas["table"][index] == pytest.approx(expected, abs=1e-5)


def test_alpha_is_that_of_the_laws_under_the_target_s_bans():
    p, q = np.array([[0.1, 0.3, 0.6]] * 3), np.array([[0.4, 0.4, 0.2]] * 3)
    banning = Model(*testing.table_lm(p), banned=(2,))
    drafter, text = alpha.Laws(*testing.table_lm(q)), [data.Example([0], [1, 0])]
    # (1/4, 3/4) and (1/2, 1/2): without bans they would share 0.6, and 2 would be p's first choice.
    assert alpha.alpha(banning, drafter, text, 1.0) == pytest.approx(0.75)
    assert alpha.lenient_alphas(banning, drafter, text, [1.0, 0.5], 1.0) == pytest.approx([0.75, 1.0])


def test_rows(found):
    rows = found[0].rows
    assert [(row.drafter, row.batch_size, row.temperature) for row in rows] == [
        ("table", 1, 0.0),
        ("table", 1, 1.0),
        ("table", 2, 0.0),
        ("table", 2, 1.0),
    ]
    for row in rows:
        assert (row.gamma, row.choice_alpha) == (3, None)
        # The paper decodes one sequence at a time.
        assert (None if row.reference is None else row.reference.drafter) == {1: "small"}.get(row.batch_size)
        assert row.line.num_prompts == 3
        assert row.c > 0
    assert rows[0].quality.flips == ()
    assert rows[0].quality.score == rows[0].plain_quality.score
    assert rows[1].quality.flips is None
    assert rows[2].quality is None
    assert rows[0].line.flips == rows[2].line.flips == ()
    # What a drafter and its target do does not depend on who is decoded beside whom.
    assert rows[0].line.tau == rows[2].line.tau


def test_lenience_and_sweep(found):
    got = found[0]
    exact, lossy = got.lenient
    assert (exact.factor, exact.paper_alpha, lossy.factor, lossy.paper_alpha) == (1.0, 0.62, 0.5, 0.71)
    assert exact.alpha < lossy.alpha
    assert not lossy.line.lossless
    assert [(point.temperature, point.gamma) for point in got.sweep] == [(0, 1), (0, 3), (1, 1), (1, 3)]
    assert all(1 <= point.line.tau <= point.gamma + 1 for point in got.sweep)
    assert exact.paper_speedup is lossy.paper_speedup is None  # which are at the best gamma of each


def test_what_was_measured_is_not_measured_again(found, config, trained, folder):
    before = json.dumps(found[1].times)
    again, kept = measured(config, trained, folder)
    assert json.dumps(kept.times) == before
    assert results.named(again) == results.named(found[0])


def test_whoever_writes_is_told_of_on_the_console_and_timed(config, trained, tmp_path, monkeypatch):
    told = []

    def answered(model, examples, writing, temperature, seed, *, console=None):
        told.append((seed, console))
        return list(examples)

    monkeypatch.setattr(text, "answered", answered)
    monkeypatch.setattr(pipeline, "load", lambda *_, **__: trained.target)
    kept = stages.Stages(tmp_path, QUIET)
    lab = Laboratory(altered(config, temperatures=(1.0,)), trained, RECORDS, tmp_path, kept, QUIET)
    lab.validated(1.0)
    pipeline.Workshop(config, TEXTS, tmp_path, kept, QUIET).write_answers(
        [text.Source(text="target", seed=3)]
    )
    # The first pass of each is within its stage; in the second the answers are there.
    assert told == [(seed, QUIET) for seed in (0, 0, EVALUATION_SEED, EVALUATION_SEED, 3)]
    assert list(kept.times) == [
        "test, plain, T=1",
        "answers on validation, T=1, 5",
        "answers, T=0, seed 3, all",
    ]


class Pretended(stages.Stages):
    """Which stages would be measured, and by which inputs; what was measured before is the answer."""

    def __init__(self, folder):
        super().__init__(folder, rich.console.Console(quiet=True))
        self.missing = []

    def kept(self, name, inputs, function):
        path = self.folder / "measured" / (re.sub(r"[^\w.=]+", "-", name) + ".json")
        stored = json.loads(path.read_text())
        if stored["inputs"] != json.loads(json.dumps(inputs)):
            self.missing.append(name)
        return stored["value"]


def missing(config, trained, folder):
    """Stages that a study of these models has to measure again."""
    kept = Pretended(folder)
    measurements.measure(config, trained, TEXTS, folder, kept, rich.console.Console(quiet=True))
    return kept.missing


def altered(config, **changes):
    return config.model_copy(update={"measure": config.measure.model_copy(update=changes)})


SPEEDS = [f"speed, batch {b}, T={t}" for b in (1, 2) for t in (0, 1)]
SWEEPS = ["sweep, T=0", "sweep, T=1"]
COSTS = ["costs, batch 1", "costs, batch 2"]


def test_what_a_timing_depends_on(found, config, trained, folder, monkeypatch):
    assert missing(config, trained, folder) == []
    assert missing(altered(config, temperatures=(1.0, 0.0)), trained, folder) == COSTS
    turned = altered(config, batch_sizes=(2, 1))
    assert missing(turned, trained, folder) == ["lenience"]  # which runs at the first batch size
    on_mesh = config.model_copy(update={"mesh": study.Mesh(data=1)})
    timed = [*COSTS, *SPEEDS, "lenience", *SWEEPS]
    assert missing(on_mesh, trained, folder) == timed
    monkeypatch.setattr(environment, "machine", lambda: {"hardware": "another", "jax": "0"})
    assert missing(config, trained, folder) == timed


def test_lines_belong_to_their_drafters_in_any_order(found, config, trained, tmp_path):
    """A study whose drafters stand in another order never gets the speed of one for that of the other."""
    q = model(laws(2, P, 0.9))
    other = Subject("other", None, alpha.Laws(q.lm, q.params), q)
    both = trained._replace(subjects={"table": trained.subjects["table"], "other": other})
    turned = both._replace(subjects=dict(reversed(both.subjects.items())))
    short = altered(config, drafters=None, sweep=None, lenience=None, quality=False, repeats=1)
    short = altered(short, batch_sizes=(1,), temperatures=(0.0,))
    first, _ = measured(short, both, tmp_path)
    assert missing(short, turned, tmp_path) == ["costs, batch 1", "speed, batch 1, T=0"]
    # Kept lines are found by their names: here those of the first order, asked for in the second.
    lab = Laboratory(short, turned, RECORDS, tmp_path, Pretended(tmp_path), rich.console.Console(quiet=True))
    entries = [lab.entry(subject, 3, 0.0) for subject in turned.subjects.values()]
    timed = lab.speed("speed, batch 1, T=0", entries, 0.0, batch_size=1)
    assert [line.name for line in timed.lines] == ["plain", "table", "other"]
    assert [timed.line(entry).name for entry in entries] == ["other", "table"]
    assert [row.line.name for row in first.rows] == ["table", "other"]


def test_draft_lengths_are_chosen_on_validation(found, config, trained, folder, monkeypatch):
    best = altered(config, gamma="best", max_gamma=2, quality=False)
    chosen = []

    def best_gamma(self, costs, alpha, subject, temperature):
        chosen.append((subject.name, temperature, round(alpha, 6)))
        return 1 + len(chosen) % 2

    def speed(self, title, entries, temperature, *, batch_size, sentences=None):
        line = found[0].rows[0].line
        lines = [line, *(line._replace(name=entry.name) for entry in entries)]
        return Timed(lines, {}, Curve(CostCurve((1, 2), (1.0, 1.5)), 3))

    monkeypatch.setattr(Laboratory, "best_gamma", best_gamma)
    monkeypatch.setattr(Laboratory, "speed", speed)
    monkeypatch.setattr(Laboratory, "costs", lambda self, batch_size: Costs(found[0].curves["lenience"], {}))
    got, kept = measured(best, trained, folder)
    assert "alpha on validation, table, T=1" in kept.times
    assert "lenient alpha on validation, table" in kept.times
    wanted = [row.choice_alpha for row in got.rows]
    assert [alpha for _, _, alpha in chosen[:4]] == [round(alpha, 6) for alpha in wanted]
    # The validation answers are of a seed of their own: at T = 1 another text.
    assert wanted[1] != got.alphas["table"][1.0]
    # A lenience each its own, by its own alpha.
    assert [row.gamma for row in got.lenient] == [2, 1]
    assert chosen[4][2] < chosen[5][2]
    assert [row.paper_speedup for row in got.lenient] == [2.5, 3.1]
    assert [row.quality for row in got.lenient] == [None, None]


@pytest.mark.parametrize("start", ["model", "tokenizer", "checkpoint"])
def test_an_unusable_test_set_is_refused_before_anything_is_trained(
    config, trained, tmp_path, monkeypatch, start
):
    """Whether the target is used as it is, gets a tokenizer from the texts, or has one already."""

    def train(*_, **__):
        raise AssertionError

    monkeypatch.setattr(pipeline, "load", lambda *_, **__: trained.target)
    monkeypatch.setattr(pipeline.finetune, "run", train)
    short, scratch = {"training": {"steps": 1}}, {"architecture": {"kind": "encoder-decoder"}}
    folder, out = tmp_path / "checkpoint", tmp_path / "out"
    tokenizer.save(tokenizer.build(["abcd"], 20), folder)
    (folder / "config.json").write_text('{"model_type": "t5"}')
    targets = {
        "model": study.Target(model="unused"),
        "tokenizer": study.Target(finetune=scratch | {"tokenizer": {"vocab_size": 20}} | short),
        "checkpoint": study.Target(finetune={"checkpoint": str(folder)} | short),
    }
    mine = config.model_copy(update={"target": targets[start]})
    bad = TEXTS._replace(test=[*RECORDS, data.Record("a", "" if start == "model" else "b</s>a")])
    with pytest.raises(ValueError, match=r"data\.test: expected 6 usable pairs"):
        pipeline.train(mine, bad, out, stages.Stages(out, QUIET), QUIET)
    assert list(out.iterdir()) == []


def test_a_given_drafter_of_another_kind_is_refused_before_anything_is_written(
    config, trained, tmp_path, monkeypatch
):
    """Also where it speaks the same tokens."""
    sizes = {"width": 8, "mlp_width": 8, "num_layers": 1, "num_encoder_layers": 1, "num_heads": 1}
    kind = models.Seq2SeqConfig(vocab_size=SIZE, head_dim=8, **sizes)
    lm = models.language_model(kind)
    other = Model(lm, {}, tiny_text.tokenizer(), (END,), decoder_start=(0,))
    loaded = iter([trained.target, other])
    monkeypatch.setattr(pipeline, "load", lambda *_, **__: next(loaded))
    message = r"drafters\.table\.model: expected a model of the target's kind, decoder, got encoder-decoder"
    with pytest.raises(ValueError, match=message):
        pipeline.train(config, TEXTS, tmp_path, stages.Stages(tmp_path, QUIET), QUIET)
    assert list(tmp_path.iterdir()) == []


def test_test_sources_that_are_cut_are_counted_and_said(config, trained):
    short = config.model_copy(update={"limits": data.Limits(source=2)})
    said = io.StringIO()
    console = rich.console.Console(file=said)
    examples, counts = pipeline.encode_test(short, trained.target, RECORDS, console)
    assert max(len(example.source) for example in examples) == 2
    assert counts.truncated_sources == 1  # "cda"
    assert "test: " in said.getvalue()


def test_another_drafter_has_another_fingerprint(trained):
    """By which `Stages.kept` tells a measurement of one from that of the other."""
    q = model(laws(2, P, 0.9))
    other = Subject("table", "small", alpha.Laws(q.lm, q.params), q)
    prints = {other.fingerprint, *(subject.fingerprint for subject in trained.subjects.values())}
    assert len(prints) == 3


def test_the_report_s_files(found, config, tmp_path):
    got, kept = found
    console = rich.console.Console(width=200, record=True, quiet=True)
    study_report.write(tmp_path, config, got, {"table": "small", "counted": "bigram"}, kept, console)
    markdown = (tmp_path / "table.md").read_text()
    for heading in ("## letters, float32", "## alpha of every drafter", "LOSSY below l = 1", "## time"):
        assert heading in markdown
    assert "| train | x | 15 | 7 | 0 |" in markdown
    assert "| test | x | 5 | 0 | 1 |" in markdown
    assert "* commit: " in markdown
    # Every curve that expectations rest on, none that they do not.
    assert [curve for curve in got.curves if f"| {curve} | " in markdown] == list(got.curves)
    assert list(got.curves) == [*COSTS, *SPEEDS, "lenience", *SWEEPS]
    assert "| counted |" in markdown
    assert r"\begin{tabular}" in (tmp_path / "table.tex").read_text()
    content = json.loads((tmp_path / "table.json").read_text())
    assert content["config"]["max_new_tokens"] == 16
    assert content["results"]["rows"][0]["line"]["tau"] == got.rows[0].line.tau
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == [
        "gamma.png",
        "lenience.png",
        *(f"speedup_B{b}_T{t}.png" for b in (1, 2) for t in (0, 1)),
    ]
    for name in pictures:
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
        assert f"({name})" in markdown


def test_a_drafter_of_the_table_drafts(trained):
    for subject in trained.subjects.values():
        method = subject.drafter(4).method
        assert (method.depth, method.draws) == (4, "iid")
    assert (
        drafters.model(trained.subjects["table"].model, 4).method
        == trained.subjects["table"].drafter(4).method
    )


def test_greedy_decoding_takes_greedy_drafts(found, config, trained, folder):
    lab = Laboratory(config, trained, RECORDS, folder, Pretended(folder), QUIET)
    cold, warm = (lab.entry(trained.subjects["table"], 3, temperature) for temperature in (0.0, 1.0))
    assert (cold.setting.drafter.method.draws, cold.rule.name) == ("chosen", "target_only")
    assert (warm.setting.drafter.method.draws, warm.rule.name) == ("iid", "token")
