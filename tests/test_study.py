"""Studies: configurations, stages, sheets, scores. No model is trained here."""

import io
import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import rich.console
import typer.testing
import yaml

from experiments import __main__ as command
from experiments import environment, prompts, quality, report, results, sheets, stages, study

CONFIGS = prompts.HERE.parent.parent / "configs"
STUDIES = ["t5_en_de_cpu", "t5_summarization_cpu", "t5_en_de_gpu", "t5_xxl_wmt14_tpu", "t5_large_cnndm_gpu"]

# --- configuration ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("smoke", [False, True])
def test_the_project_s_own_studies(name, smoke):
    loaded = study.load(CONFIGS / f"{name}.yaml", smoke=smoke)
    assert isinstance(loaded, study.Study)
    assert loaded.rows()


#: Those with results (docs/results) of the settings that they have now.
RUN = {"demo_smollm2", "specbench12", "specbench40"}
RUN |= {"drafters_smollm2", "drafter_eagle3_smollm2", "shipped_smollm2"}
RUN |= {
    "t5_en_de_cpu",
    "t5_losses_cpu",
    "t5_blockwise_cpu",
    "finetune_en_de",
    "distill_en_de",
}  # the latter two are parts of the first


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_what_was_not_run_says_so_first(path):
    first = path.read_text().splitlines()[0]
    assert first.startswith(("# Not run", "# Not a run")) == (path.stem not in RUN)


def test_the_project_s_own_losses():
    loaded = study.load(CONFIGS / "t5_losses_cpu.yaml")
    assert len(loaded.losses) >= 6
    assert len(loaded.seeds) == 2
    base = study.load(CONFIGS / loaded.study)
    assert loaded.drafter in base.drafters
    # The same text as the study's, so that nothing is written twice.
    assert set(loaded.sources) == set(base.recipes["distilled"].sources)


TRAINING = {"batching": {"batch_size": 8}, "training": {"steps": 3}}
PARALLEL = {"format": "parallel", "source": "a", "target": "b"}
OWN = {"text": "drafter", "every": 1, "examples": 1}
LOSSES = {
    "study": "x.yaml",
    "drafter": "public",
    "steps": 1,
    "sources": [{"text": "target"}],
    "losses": {"kl": {"loss": "forward_kl"}},
}


def content(**changes):
    base = {
        "kind": "study",
        "task": {"name": "toy"},
        "data": {"train": PARALLEL, "validation": PARALLEL, "test": PARALLEL},
        "max_new_tokens": 8,
        "target": {"model": "x"},
        "recipes": {"distilled": {"loss": "forward_kl", "sources": [{"text": "target"}]}},
        "drafters": {"small": {"start": {"checkpoint": "y"}, **TRAINING}},
        "measure": {"temperatures": [0, 1]},
    }
    return base | changes


def write(tmp_path, values):
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_rows_are_drafters_times_recipes(tmp_path):
    drafters = {
        "small": {"start": {"checkpoint": "y"}, **TRAINING},
        "base": {"start": {"layers": [0]}, "recipes": ["distilled"], **TRAINING},
        "public": {"model": "z"},
    }
    recipes = content()["recipes"] | {
        "fine-tuned": {"loss": "cross_entropy", "sources": [{"text": "references"}]}
    }
    loaded = study.load(write(tmp_path, content(drafters=drafters, recipes=recipes)))
    assert loaded.rows() == {
        "small, distilled": ("small", "distilled"),
        "small, fine-tuned": ("small", "fine-tuned"),
        "base, distilled": ("base", "distilled"),
        "public": ("public", None),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "stduy"}, "kind: expected one of speed, study, losses, drafters, blockwise, got 'stduy'"),
        ({"nonsense": 1}, "nonsense: unknown key"),
        ({"target": {}}, "target: expected one of model and finetune"),
        ({"drafters": {"a": {"model": "x", **TRAINING}}}, "drafters.a: expected either model, or start"),
        ({"drafters": {"a": {"start": {"checkpoint": "y"}}}}, "drafters.a: expected start, batching and tra"),
        ({"drafters": {}}, "drafters: expected at least one"),
        (
            {"recipes": {"x": {"loss": "kl", "sources": [{"text": "target"}]}}},
            "recipes.x: loss: expected one of",
        ),
        (
            {"recipes": {"x": {"loss": "forward_kl", "sources": [OWN], "features": "float16"}}},
            "recipes.x: features: expected none with text of the drafter",
        ),
        ({"kind": "losses", **LOSSES, "sources": [OWN], "features": "float16"}, "features: expected none"),
        (
            {"drafters": {"a": {"start": {"checkpoint": "y"}, "recipes": ["x"], **TRAINING}}},
            "drafters.a.recipes: expected among",
        ),
        ({"ngrams": {"small, distilled": {"order": 2}}}, "drafters, ngrams: expected different names"),
        ({"ngrams": {"b": {"order": 2, "source": {"text": "drafter", "every": 1, "examples": 1}}}}, "source"),
        ({"measure": {"temperatures": [0], "verify": "tokens"}}, "verify: expected one of"),
        ({"measure": {"temperatures": [0], "gamma": 0}}, "measure.gamma"),
        ({"measure": {"temperatures": [0], "lenience": {"drafter": "small, distilled"}}}, "1 among temp"),
        ({"measure": {"temperatures": [1], "lenience": {"drafter": "small"}}}, "expected a drafter among"),
        (
            {"measure": {"temperatures": [1], "batch_sizes": [4], "sweep": {"drafter": "small, distilled"}}},
            "1 among batch_sizes",
        ),
        ({"smoke": {"measure": {"temperature": [0]}}}, "with smoke: measure.temperature: unknown key"),
    ],
)
def test_a_bad_study_is_one_clear_line(tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        study.load(write(tmp_path, changes if changes.get("kind") == "losses" else content(**changes)))

    assert "\n" not in str(caught.value)


def test_smoke_lies_over_the_other_values(tmp_path):
    drafters = {"small": {"training": {"steps": 1}}}
    path = write(tmp_path, content(smoke={"drafters": drafters, "max_new_tokens": 2}))
    full, short = study.load(path), study.load(path, smoke=True)
    assert (full.max_new_tokens, full.drafters["small"].training.steps) == (8, 3)
    assert (short.max_new_tokens, short.drafters["small"].training.steps) == (2, 1)
    assert short.drafters["small"].batching == full.drafters["small"].batching
    with pytest.raises(ValueError, match="smoke: expected the values"):
        study.load(write(tmp_path, content()), smoke=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table"], "no such file: {data}"),
        (["losses"], "kind: expected losses, got study"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, arguments, message):
    path, out = write(tmp_path, content()), tmp_path / "out"
    shared = ["--config", str(path), "--data", str(tmp_path / "none"), "--output", str(out)]
    result = typer.testing.CliRunner().invoke(command.app, [*arguments, *shared])
    assert result.exit_code == 1
    assert message.format(data=tmp_path / "none") in result.stderr
    assert result.stderr.count("\n") == 1
    assert not out.exists()


def test_losses_of_a_drafter_that_is_not_trained_are_refused_before_anything_runs(tmp_path):
    write(tmp_path, content(drafters={"public": {"model": "z"}}))
    path = tmp_path / "losses.yaml"
    path.write_text(yaml.safe_dump({"kind": "losses", **LOSSES}))
    arguments = ["losses", "--config", str(path), "--output", str(tmp_path / "out")]
    result = typer.testing.CliRunner().invoke(command.app, arguments)
    assert result.exit_code == 1
    assert "drafter: expected one that" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["table", "losses"])
def test_a_missing_package_is_one_line(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = typer.testing.CliRunner().invoke(
        command.app,
        [name, "--config", str(write(tmp_path, content())), "--output", str(tmp_path / "out")],
    )
    assert result.exit_code == 1
    assert "matplotlib" in result.stderr
    assert result.stderr.count("\n") == 1


# --- stages -----------------------------------------------------------------------------------------


def quiet():
    return rich.console.Console(quiet=True)


def test_times_add_up_over_attempts(tmp_path):
    first = stages.Stages(tmp_path, quiet())
    with pytest.raises(KeyboardInterrupt), first.timed("slow"):
        time.sleep(0.15)
        raise KeyboardInterrupt
    second = stages.Stages(tmp_path, quiet())
    assert second.times["slow"]["done"] is False
    with second.timed("slow"):
        time.sleep(0.15)
    with second.timed("slow", done=True):
        pass
    stored = json.loads((tmp_path / stages.TIMES).read_text())
    assert stored["stages"]["slow"] == {
        "seconds": pytest.approx(0.3, abs=0.2),
        "attempts": 2,
        "done": True,
        "environment": 0,
    }
    assert stored["environments"] == [environment.current()]
    assert stored["total"] == stored["stages"]["slow"]["seconds"]


def test_the_time_of_a_killed_stage_is_known(tmp_path, monkeypatch):
    """The file is brought up to date while a stage runs, not only at its end."""
    monkeypatch.setattr(stages, "BEAT", 0.05)
    running = stages.Stages(tmp_path, quiet())
    with running.timed("long"):
        until = time.monotonic() + 10
        while json.loads((tmp_path / stages.TIMES).read_text())["stages"]["long"]["seconds"] < 0.1:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_a_full_disk_does_not_stop_the_beat(tmp_path, monkeypatch):
    tries = []

    def full(*_):
        tries.append(1)
        raise OSError

    monkeypatch.setattr(stages, "BEAT", 0.02)
    running, until = stages.Stages(tmp_path, quiet()), time.monotonic() + 10
    with running.timed("long"), monkeypatch.context() as patch:
        patch.setattr(stages.orbax, "write_json", full)
        while len(tries) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert running.times["long"]["done"]


def test_every_stage_says_by_which_code_it_was_made(tmp_path, monkeypatch):
    """Also where the file is of a version that did not write that down, and where a report is made later."""
    old = {"total": 1.0, "stages": {"target": {"seconds": 1.0, "attempts": 1, "done": True}}}
    (tmp_path / stages.TIMES).write_text(json.dumps(old))
    for commit, names in (("first", ("a, x", "b")), ("second", ("a, y", "b"))):
        monkeypatch.setattr(environment, "current", lambda commit=commit: {"commit": commit})
        running = stages.Stages(tmp_path, quiet())
        for name in names:
            with running.timed(name):
                pass
    running.kept("c", {}, lambda: 1)
    monkeypatch.setattr(environment, "current", lambda: {"commit": "third"})
    later = stages.Stages(tmp_path, quiet())
    assert later.kept("c", {}, lambda: 2) == 1
    assert later.total == pytest.approx(1.0, abs=0.5)
    assert later.origins(lambda name: name.partition(",")[0]) == (
        "Made by (target):\n\n* not recorded\n\n"
        "Made by (a):\n\n* commit: first\n\n"
        "Made by (b; a; c):\n\n* commit: second"
    )
    kept = json.loads((tmp_path / "measured" / "c.json").read_text())
    assert kept["environment"] == {"commit": "second"}


def test_a_measurement_is_kept_by_its_inputs(tmp_path):
    calls = []

    def measured():
        calls.append(1)
        return [len(calls), (1, 2)]

    for _ in range(2):
        kept = stages.Stages(tmp_path, quiet())
        assert kept.kept("a, b", {"x": (1, 2)}, measured) == [1, [1, 2]]
    assert kept.kept("a, b", {"x": (1, 3)}, measured) == [2, [1, 2]]
    assert kept.kept("a, b", {"x": (3, 1)}, measured) == [3, [1, 2]]
    assert [path.name for path in (tmp_path / "measured").iterdir()] == ["a-b.json"]


# --- sheets and scores ------------------------------------------------------------------------------


def test_latex_is_escaped_and_has_symbols():
    sheet = sheets.Sheet("a 5% & b", ("Mq", "alpha T=0", "tau"), [("x_y", "0.5†", "1")], ("#1",))
    text = sheets.latex(sheet)
    assert r"\caption{a 5\% \& b}" in text
    assert r"$M_q$ & $\alpha$ T=0 & $\tau$ \\" in text
    assert r"x\_y & 0.5\textdagger{} & 1 \\" in text
    assert r"\begin{tabular}{lrr}" in text
    assert text.count("{") == text.count("}")


def test_markdown_cells_cannot_break_the_table():
    assert r"| a\|b |" in sheets.markdown(sheets.Sheet("t", ("h",), [("a|b",)]))


def test_bleu_is_sacrebleu_s():
    import sacrebleu

    answers, references = ["the cat sat on the mat", "a dog"], ["the cat sat on a mat", "a dog barks"]
    found = quality.score("bleu", answers, references)
    assert found.value == pytest.approx(sacrebleu.corpus_bleu(answers, [references]).score, abs=1e-4)
    assert "tok:13a" in found.signature


def test_rouge_2_by_hand():
    # Bigrams: 2 of 3 in the answer and 2 of 4 in the reference are common, F1 = 4 / 7; then 1.
    found = quality.score("rouge2", ["a b c d", "x y"], ["a b c e f", "x y"])
    assert found.value == pytest.approx(100 * (4 / 7 + 1) / 2, abs=1e-3)


@pytest.mark.parametrize(
    ("metric", "answers", "message"),
    [("rouge", ["a"], "metric: expected"), ("bleu", [], "answers: expected 1")],
)
def test_bad_scores_are_refused(metric, answers, message):
    with pytest.raises(ValueError, match=message):
        quality.score(metric, answers, ["a"])


def line(**changes):
    speed = report.Speed(1.5, 1.4, 1.6)
    base = report.Line("x", 2.0, (0.5,), 0.5, 0.01, 1.4, 1.5, speed, speed, speed, speed, (), 3)
    base = base._replace(predicted_overall=1.5, round=report.Round(0.010, 0.007, 0.001), lossless=True)
    return base._replace(**changes)


def test_results_survive_their_file():
    row = lenient_row(line=line(flips=(report.Flip("a", 1, 0.25),), best_length=(2, 1.5)))
    stored = json.loads(json.dumps(results.named(row)))
    assert results.unpacked(results.LenientRow, stored) == row
    # They are read by name: in any order, and not at all where a field has another name.
    turned = dict(reversed(stored.items()))
    assert results.unpacked(results.LenientRow, turned) == row
    del turned["gamma"]
    with pytest.raises(ValueError, match="gamma"):
        results.unpacked(results.LenientRow, turned | {"lenience": 4})


def test_the_form_of_a_kept_value_is_known():
    """By which a value that an older version kept is measured again."""
    assert results.fields(list[float]) == results.fields(float) == []
    (found,) = results.fields(list[results.LenientRow])
    assert list(found) == list(results.LenientRow._fields)
    assert found["line"]["flips"] == [[{"prompt": [], "position": [], "gap": []}]]


SCORE = results.Quality(20.0, "BLEU", "signature", 3, 30)


def lenient_row(**changes):
    return results.LenientRow(0.5, 0.6, 4, line(), SCORE, None, None)._replace(**changes)


def row(**changes):
    base = results.Row(
        task="toy",
        drafter="small, distilled",
        paper="small",
        temperature=0.0,
        batch_size=1,
        gamma=4,
        choice_alpha=None,
        alpha=0.7,
        c=0.03,
        theory=2.0,
        line=line(),
        plain=line(name="plain", round=report.Round(0.006, 0.005, 0.0), baseline=True),
        quality=SCORE._replace(flips=()),
        plain_quality=SCORE,
        reference=None,
    )
    return base._replace(**changes)


def test_what_is_far_from_its_expectation_is_explained():
    from experiments import study_report

    assert study_report.explanation(row()) == ""
    slow = row(line=line(predicted=1.8))
    assert slow.off == pytest.approx(1.5 / 1.8 - 1)
    text = study_report.explanation(slow)
    assert "-17% (decoding)" in text
    assert "A round takes 10.00 ms (forward 7.00, drafting 1.00, left 2.00)" in text
    assert "a plain step 6.00 ms (forward 5.00, drafting 0.00, left 1.00)" in text
    only_whole = row(line=line(predicted_overall=1.2))
    assert "+25% (whole inference)" in study_report.explanation(only_whole)


def measured(**changes):
    fields = {"rows": [row()], "sweep": [], "lenient": [], "sweep_drafter": ""}
    fields |= {key: {} for key in ("parts", "alphas", "alpha_tokens", "curves", "lenient_alphas", "rounds")}
    return results.Results(**fields | changes)


def config(task=None, **measure):
    return study.Study.model_validate(
        content(task={"name": "toy", "paper": task}, measure={"temperatures": [0, 1]} | measure)
    )


def test_the_main_sheet():
    from experiments import paper, study_report

    found = measured(
        rows=[
            row(reference=paper.find("ende", "small", 0)),
            row(batch_size=4, quality=None, line=line(predicted=3.0, flips=(report.Flip("2", 5, 0.5),))),
            row(batch_size=4, quality=None),
        ]
    )
    sheet = study_report.main_sheet(found, "t", config())
    assert "B" in sheet.headings
    cells = [dict(zip(sheet.headings, cells, strict=True)) for cells in sheet.rows]
    # Whose figures these are: the texts may be others.
    assert cells[0][sheet.headings[-1]] == "WMT En-De, small: 7 / 0.75 / 0.02 / 3.2 / 3.4"
    assert cells[0]["speed-up"] == "1.50 (1.40-1.60)"
    assert (cells[0]["BLEU plain"], cells[0]["BLEU speculative"]) == ("20.00", "20.00")
    assert cells[0]["same tokens"] == "yes"
    assert cells[1]["speed-up"] == "1.50 (1.40-1.60)†"
    assert cells[1]["same tokens"] == "NO (1 of 3 prompts)"
    assert cells[2]["same tokens"] == "yes (3 sentences)"  # not the whole test set
    # In bfloat16, whose logits are coarser, a smaller gap is a near-tie.
    near = measured(rows=[row(quality=SCORE._replace(flips=(report.Flip("2", 5, 0.2),)))])
    same = {
        dtype: study_report.main_sheet(near, "t", config(dtype=dtype)).rows[0][-2]
        for dtype in ("float32", "bfloat16")
    }
    assert same == {"float32": "NO (1 of 3 prompts)", "bfloat16": "yes (1 near-tie)"}
    assert len(sheet.notes) == 1


def test_a_draft_length_at_its_limit_is_noted():
    from experiments import study_report

    found = measured(rows=[row(gamma=4, choice_alpha=0.7), row(gamma=3, choice_alpha=0.7), row(gamma=4)])
    (note,) = study_report.main_sheet(found, "t", config(max_gamma=4)).notes
    assert "gamma is the greatest allowed" in note


def test_figures_of_the_paper_stand_beside_their_own_task():
    from experiments import study_report

    found = measured(
        rows=[row(drafter="bigram", paper="bigram")],
        lenient=[lenient_row(line=line(name="small, distilled, l=0.5"))],
        lenient_alphas={"small, distilled": [0.6]},
    )
    beside = {"small, distilled": "small"}
    assert "its bigram model on WMT En-De" in study_report.main_sheet(found, "t", config("ende")).notes[0]
    assert study_report.main_sheet(found, "t", config("cnndm")).notes == ()
    alphas = {t: study_report.lenience_sheets(found, config(t), beside)[1] for t in ("ende", "cnndm")}
    assert alphas["ende"].rows == [("small, distilled", "0.60", "0.71")]
    assert alphas["cnndm"].rows == [("small, distilled", "0.60", "-")]
    assert ["WMT En-De" in alphas[t].title for t in alphas] == [True, False]
    assert "CNN/DM" in study_report.alpha_sheet(found, "cnndm", beside).title


def test_a_fixed_gamma_is_stated_under_lenience():
    from experiments import study_report

    found = measured(lenient=[lenient_row(line=line(name="x, l=0.5"), quality=None, paper_speedup=3.1)])
    best, fixed = (study_report.lenience_sheets(found, config(gamma=g), {})[0] for g in ("best", 5))
    assert best.rows[0][-3:] == ("-", "-", "3.1")
    assert "for each l" in best.notes[1]
    assert "gamma is 5 for every l" in fixed.notes[1]


def test_where_texts_come_from():
    from experiments import study_report

    hub = {"format": "hub", "id": "a/b", "config": "de-en", "split": "test", "source": "x", "target": "y"}
    data = study.Data.model_validate(
        {"train": PARALLEL, "validation": {"format": "tsv", "file": "c.tsv"}, "test": hub}
    )
    parts = {"train": results.Part(3, 1, 2), "validation": results.Part(2, 0, 0)}
    parts["test"] = results.Part(1, 0, 1)
    assert study_report.data_sheet(data, parts).rows == [
        ("train", "a, b", "3", "1", "2"),
        ("validation", "c.tsv", "2", "0", "0"),
        ("test", "a/b de-en test", "1", "0", "1"),
    ]


def test_what_is_left_out_of_the_texts_is_said_and_counted(tmp_path):
    from experiments import pipeline

    for name, lines in (("train", "a\tb\n\tc\nd\t\n"), ("validation", "a\tb\n"), ("test", "\tb\na\tb\n")):
        (tmp_path / name).write_text(lines)
    parts = ("train", "validation", "test")
    data = {name: {"format": "tsv", "file": name, "skip_empty": True} for name in parts}
    said = io.StringIO()
    found = pipeline.read(study.Data.model_validate(data), tmp_path, rich.console.Console(file=said))
    assert (len(found.train), len(found.test), found.skipped) == (1, 1, (2, 0, 1))
    assert said.getvalue().splitlines() == [
        "train: left out 2 pairs with an empty side",
        "test: left out 1 pairs with an empty side",
    ]


def test_losses_whose_ranges_overlap_are_not_separated():
    from experiments import losses

    def outcomes(*values):
        return [losses.Outcome(value, value, 0.0, 0.0) for value in values]

    found = {"a": outcomes(0.50, 0.60), "b": outcomes(0.52, 0.53), "c": outcomes(0.40, 0.49)}
    assert losses.standing(found, "alpha_1") == "a, not separated from b"
    assert losses.standing({"b": found["b"], "c": found["c"]}, "alpha_1") == "b"
    settings = study.load(CONFIGS / "t5_losses_cpu.yaml")
    sheet = losses.sheet(settings, {"a": outcomes(0.1, 0.2, 0.6)})
    assert sheet.rows[0][:2] == ("a", "0.200 (0.100-0.600)")  # the median, as in the picture


def test_times_of_a_kind_are_summed(tmp_path):
    from experiments import study_report

    times = stages.Stages(tmp_path, quiet())
    for name, seconds in (("small, distilled", 5.0), ("alpha, small, T=0", 1.0), ("alpha, small, T=1", 2.0)):
        times.times[name] = {"seconds": seconds, "attempts": 1, "done": True}
    assert study_report.times_sheet(times).rows == [
        ("small, distilled", "5.0 s", "1"),
        ("alpha", "3.0 s", "2"),
        ("total", "8.0 s", ""),
    ]


@pytest.fixture
def pictures(monkeypatch):
    """What is drawn, by the file's name, in place of files."""
    found = {}
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, path, **_: found.update({path.stem: self})
    )
    return found


def points(axis, label):
    """The line of that label, as (x, y)."""
    (line,) = [line for line in axis.lines if line.get_label() == label]
    return [tuple(point) for point in line.get_xydata().tolist()]


def spreads(axis):
    """Of each series with error bars: its points, and the ends of its bars."""
    return {
        bars.get_label(): (bars[0].get_xydata().tolist(), np.array(bars[2][0].get_segments()).tolist())
        for bars in axis.containers
    }


def test_the_picture_of_draft_lengths(pictures):
    from experiments import cost, plots
    from jspec.measure import CostCurve

    def measured(temperature, gamma):
        at = gamma + temperature / 10
        speed = report.Speed(1 + at, 0.75 + at, 1.5 + at)
        return results.SweepPoint(temperature, gamma, 0.02, line(alpha=at / 10, tau=at, speedup=speed))

    alphas, curve = {0.0: 0.7, 1.0: 0.6}, CostCurve((1, 6), (1.0, 1.5))
    swept = [measured(t, g) for t in alphas for g in (1, 5)]
    plots.sweep(Path("gamma.png"), swept, alphas, dict.fromkeys(alphas, curve))
    acceptance, tokens, speed = pictures["gamma"].axes
    assert [axis.get_xlabel() for axis in (acceptance, tokens, speed)] == ["gamma"] * 3
    assert [axis.get_title() for axis in (acceptance, tokens, speed)] == [
        "acceptance",
        "tokens a round",
        "speed",
    ]
    for t, alpha in alphas.items():
        label, at = f"T={t:g}", {g: g + t / 10 for g in (1, 5)}
        assert points(acceptance, label) == [(g, at[g] / 10) for g in (1, 5)]
        assert points(tokens, label) == [(g, at[g]) for g in (1, 5)]
        middle, bars = spreads(speed)[label]
        assert middle == [[g, 1 + at[g]] for g in (1, 5)]
        assert bars == [[[g, pytest.approx(0.75 + at[g])], [g, pytest.approx(1.5 + at[g])]] for g in (1, 5)]
        theory = [(g, cost.speedup(alpha, g, 0.02)) for g in range(1, 6)]
        assert points(speed, f"{label}, Theorem 3.8") == theory
        on_curve = [(g, cost.speedup_on(curve, alpha, g, 0.02)) for g in range(1, 6)]
        assert points(speed, f"{label}, with measured t(n)") == on_curve
    drawn = [list(line.get_ydata()) for line in acceptance.lines if line.get_linestyle() == "--"]
    assert drawn == [[0.7, 0.7], [0.6, 0.6]]
    drawn = [list(line.get_ydata()) for line in tokens.lines if line.get_linestyle() == "--"]
    assert drawn == [[cost.tau(alpha, g) for g in range(1, 6)] for alpha in alphas.values()]


def test_the_picture_of_lenience(pictures):
    from experiments import plots

    speeds = {1.0: report.Speed(1.5, 1.25, 1.75), 0.5: report.Speed(2.0, 1.5, 2.25)}
    rows = [
        lenient_row(
            factor=f,
            alpha=a,
            paper_alpha=b,
            quality=SCORE._replace(score=score),
            line=line(overall_speedup=speeds[f], speedup=report.Speed(9, 9, 9)),
        )
        for f, a, b, score in ((1.0, 0.6, 0.62, 21.0), (0.5, 0.7, None, 20.0))
    ]
    plots.lenience(Path("lenience.png"), rows)
    alphas, speed, scores = pictures["lenience"].axes
    assert [axis.get_ylabel() for axis in (alphas, speed, scores)] == [
        "alpha",
        "speed-up of whole inference",
        "BLEU",
    ]
    assert all(axis.xaxis_inverted() for axis in (alphas, speed, scores))  # exact on the left
    assert points(alphas, "here") == [(1.0, 0.6), (0.5, 0.7)]
    assert points(alphas, "paper") == [(1.0, 0.62)]
    ((middle, bars),) = spreads(speed).values()
    assert middle == [[1.0, 1.5], [0.5, 2.0]]
    assert bars == [[[1.0, 1.25], [1.0, 1.75]], [[0.5, 1.5], [0.5, 2.25]]]
    assert scores.lines[0].get_xydata().tolist() == [[1.0, 21.0], [0.5, 20.0]]
    plots.lenience(Path("unscored.png"), [row._replace(quality=None) for row in rows])
    assert len(pictures["unscored"].axes) == 2


def test_the_picture_of_losses(pictures):
    from experiments import plots

    def spread(median):
        return report.Speed(median, median - 0.125, median + 0.25)

    plots.losses(Path("losses.png"), {"a": (spread(0.25), spread(0.625)), "b": (spread(0.375), spread(0.5))})
    (axis,) = pictures["losses"].axes
    # The best at temperature 1 is on top.
    assert [label.get_text() for label in axis.get_yticklabels()] == ["b", "a"]
    assert axis.get_yticks().tolist() == [0, 1]
    found = spreads(axis)
    assert [[x for x, _ in found[label][0]] for label in ("T=0", "T=1")] == [[0.375, 0.25], [0.5, 0.625]]
    assert [[round(y) for _, y in found[label][0]] for label in ("T=0", "T=1")] == [[0, 1], [0, 1]]
    assert [[x for x, _ in bar] for bar in found["T=1"][1]] == [[0.375, 0.75], [0.5, 0.875]]


def test_the_chart_of_speeds(pictures):
    slow, fast = report.Speed(0.5, 0.25, 0.75), report.Speed(1.5, 1.25, 2.0)
    drawn = [line(name="plain", baseline=True), line(name="x", speedup=fast, predicted=1.75, theory=None)]
    drawn.append(line(name="y", speedup=slow, predicted=0.625, theory=2.5))
    report.chart(Path("speedup.png"), "title", drawn)
    (axis,) = pictures["speedup"].axes
    assert pictures["speedup"].get_suptitle() == "title"
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "x",
        "y",
    ]  # plain decoding is the line at 1
    assert [bar.get_width() for bar in axis.patches] == [1.5, 0.5]
    assert [bar.get_facecolor()[0] > 0.5 for bar in axis.patches] == [False, True]  # red: slower
    (bars,) = [container for container in axis.containers if hasattr(container, "has_xerr")]
    assert np.array(bars[2][0].get_segments())[:, :, 0].tolist() == [[1.25, 2.0], [0.25, 0.75]]
    assert points(axis, "predicted: tau and t(n)/t(1)") == [(1.75, 0), (0.625, 1)]
    assert points(axis, "predicted: Theorem 3.8")[1] == (2.5, 1)
    assert np.isnan(points(axis, "predicted: Theorem 3.8")[0][0])
    assert axis.get_xlim()[1] > 2.5


def test_a_stage_begins_with_room_for_its_programs(tmp_path, monkeypatch):
    """A long run compiles until the kernel grants no more memory mappings, where the compiler crashes."""
    maps, cleared = tmp_path / "maps", []
    monkeypatch.setattr(environment, "MAPS", maps)
    monkeypatch.setattr(environment.jax, "clear_caches", lambda: cleared.append(1))
    running = stages.Stages(tmp_path, quiet())
    maps.write_text("a mapping\n" * (environment.MANY + 1))
    with running.timed("many programs before"):
        assert cleared == [1]
    maps.write_text("a mapping\n" * environment.MANY)
    with running.timed("fewer"):
        assert cleared == [1]


def test_programs_that_are_needed_together_are_refused_in_time(tmp_path, monkeypatch):
    """XLA's compiler crashes where the next one finds no memory mapping."""
    maps, limit = tmp_path / "maps", tmp_path / "limit"
    monkeypatch.setattr(environment, "MAPS", maps)
    monkeypatch.setattr(environment, "LIMIT", limit)
    environment.check_room()  # no Linux
    limit.write_text("100\n")
    maps.write_text("a mapping\n" * 90)
    environment.check_room()
    maps.write_text("a mapping\n" * 91)
    with pytest.raises(OSError, match=r"programs take 91 of the 100 memory mappings .* vm\.max_map_count="):
        environment.check_room()
