"""A study measured on models whose laws are known: tables over the letters of a byte-level tokenizer."""

import json

import numpy as np
import pytest
import rich.console
import tiny_text

from experiments import alpha, measurements, results, stages, study, study_report
from experiments.pipeline import Subject, Trained
from jspec import Model, drafters, testing
from jspec.drafters import NgramTable
from training import data

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


@pytest.fixture(scope="module")
def trained():
    q = model(Q)
    table = NgramTable(
        *map(np.asarray, (Q.mean(0), np.zeros(SIZE, np.float32), np.tile(np.arange(SIZE), (SIZE, 1)), Q))
    )
    counted = alpha.Laws(alpha.table_model(SIZE), table)
    return Trained(
        model(P),
        {
            "table": Subject("table", "small", alpha.Laws(q.lm, q.params), q),
            "counted": Subject("counted", "bigram", counted, None),
        },
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def config():
    return study.Study.model_validate(CONFIG)


RECORDS = [data.Record(source, "abab") for source in ("a", "bc", "d", "ab", "cda")]


def measured(config, trained, folder):
    quiet = rich.console.Console(quiet=True)
    kept = stages.Stages(folder, quiet)
    return measurements.measure(config, trained, RECORDS, folder, kept, quiet), kept


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


def test_rows(found):
    rows = found[0].rows
    assert [(row.drafter, row.batch_size, row.temperature) for row in rows] == [
        ("table", 1, 0.0),
        ("table", 1, 1.0),
        ("table", 2, 0.0),
        ("table", 2, 1.0),
    ]
    for row in rows:
        assert row.gamma == 3
        assert row.reference.drafter == "small"
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


def test_what_was_measured_is_not_measured_again(found, config, trained, folder):
    before = json.dumps(found[1].times)
    again, kept = measured(config, trained, folder)
    assert json.dumps(kept.times) == before
    assert results.named(again) == results.named(found[0])


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
