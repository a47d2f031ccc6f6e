"""The speed table: configuration, prompts, the report, and a whole run on a toy model."""

import errno
import json
import re
import types

import numpy as np
import pytest
import rich.console
import typer.testing

from experiments import __main__ as command
from experiments import bench, config, cost, prompts, report, study, table
from jspec import drafters, engine, measure, models, testing, verify
from jspec.batch import Request
from jspec.text import Model

CYCLE = [[0, 1, 0], [0, 0, 1], [1, 0, 0]]  # 0 -> 1 -> 2 -> 0


# --- configuration ----------------------------------------------------------------------------------

GOOD = """
target: smollm2-135m
prompts: {file: demo.jsonl}
drafters:
  - {name: plain, drafter: none}
  - {name: suffix, drafter: suffix, arguments: {num_tokens: 5}, widths: [1, 3]}
"""


def write(tmp_path, text, name="x.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_defaults(tmp_path):
    loaded = study.load(write(tmp_path, GOOD))
    assert (loaded.dtype, loaded.max_new_tokens, loaded.temperatures, loaded.repeats) == (
        "float32",
        128,
        (0.0,),
        3,
    )
    assert loaded.curve == (1, 2, 4, 5, 8, 16, 24)
    assert loaded.drafters[1].widths == (1, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "repeat: 3\n", "repeat: unknown key"),
        (GOOD.replace("widths:", "width:"), r"drafters\.1\.width: unknown key"),
        (GOOD.replace("drafter: suffix", "drafter: sufix"), r"drafters\.1\.drafter: .*'suffix'.*got 'sufix'"),
        (GOOD.replace("name: suffix", "name: plain"), "drafters: two rows have the same name"),
        (
            GOOD.replace("drafter: none", "drafter: none, arguments: {a: 1}"),
            r"takes no arguments, got \['a'\]",
        ),
        (GOOD + "max_new_tokens: 0\n", "max_new_tokens: .*got 0"),
        (GOOD + "temperatures: [-1.0]\n", r"temperatures\.0: .*got -1"),
        (GOOD + "dtype: int4\n", "dtype: .*got 'int4'"),
        (GOOD.replace("target: smollm2-135m", ""), "target: Field required"),
        ("- a\n- b\n", "expected keys and values, got list"),
        ("a: [", "not a YAML file"),
        (GOOD + "seed: 1\nseed: 2\n", "not a YAML file: the key 'seed' twice"),
    ],
)
def test_a_bad_configuration_is_one_clear_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        study.load(write(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["demo_smollm2", "specbench12"])
def test_the_project_s_own_configurations(name):
    loaded = study.load(prompts.HERE.parent.parent / "configs" / f"{name}.yaml")
    assert loaded.drafters[0].drafter == "none"
    config_of_target = types.SimpleNamespace(num_layers=30, vocab_size=100)
    lm = types.SimpleNamespace(config=config_of_target)
    model = types.SimpleNamespace(lm=lm, params=None, vocab_size=100)
    for row in loaded.drafters:
        if row.drafter not in ("auto", "trained"):  # for these see test_auto.py, test_shipped.py
            table.build(row, model)
    if name == "demo_smollm2":
        assert prompts.read(prompts.find(loaded.prompts.file), loaded.prompts.ids)
    else:
        assert loaded.prompts.ids == (81, 82, 121, 122, 161, 162, 243, 321, 322, 401, 402, 481)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arguments": {"num_token": 5}}, "drafters: 'row': .*num_token"),
        ({"arguments": {"num_tokens": 0}}, "drafters: 'row': num_tokens"),
        ({"verify": "tokens"}, "drafters: 'row': verify: expected one of token, .*got 'tokens'"),
        ({"verify": "kseq"}, "drafters: 'row': verify"),
        ({"widths": [1, 99]}, "drafters: 'row': widths"),
        ({"drafter": "model"}, "drafters: 'row': the argument 'draft_model' is missing"),
    ],
)
def test_a_row_that_cannot_be_built(changes, message):
    row = config.Row.model_validate({"name": "row", "drafter": "suffix"} | changes)
    with pytest.raises(ValueError, match=message):
        table.build(row, Model(*testing.table_lm(CYCLE)))


def test_a_draft_model_of_another_kind(monkeypatch):
    sizes = {"width": 8, "mlp_width": 8, "num_layers": 1, "num_encoder_layers": 1, "num_heads": 1}
    other = models.Seq2SeqConfig(vocab_size=3, head_dim=8, **sizes)
    loaded = Model(models.language_model(other), {}, eos=(1,), decoder_start=(0,))
    monkeypatch.setattr("jspec.load", lambda *_, **__: loaded)
    row = config.Row(name="row", drafter="model", arguments={"draft_model": "x"})
    with pytest.raises(
        ValueError, match="drafters: 'row': draft_model: expected a model of the target's kind"
    ):
        table.build(row, Model(*testing.table_lm(CYCLE)))


# --- prompts ----------------------------------------------------------------------------------------


def test_both_kinds_of_prompt_file(tmp_path):
    path = write(
        tmp_path, '{"question_id": 7, "category": "qa", "turns": ["a", "b"]}\n\n{"prompt": "c"}\n', "p.jsonl"
    )
    assert prompts.read(path) == [(7, "qa", "a"), (3, "", "c")]
    assert [question.text for question in prompts.read(path, [3, 7])] == ["c", "a"]


@pytest.mark.parametrize(
    ("text", "ids", "message"),
    [
        ('{"text": "a"}', None, "line 1: expected a JSON object with 'turns' or 'prompt'"),
        ('{"prompt": "a"}\n[1]', None, "line 2: expected a JSON object"),
        ("{", None, "line 1: expected a JSON object"),
        ('{"turns": []}', None, "line 1: expected a JSON object"),
        ('{"prompt": ""}', None, "line 1: expected a prompt that is a string"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}', None, "line 2: the id 1 occurs twice"),
        ('{"prompt": "a"}', [1, 5], "has no row 5"),
        ("", None, "no prompt in"),
    ],
)
def test_bad_prompt_files(tmp_path, text, ids, message):
    with pytest.raises(ValueError, match=message):
        prompts.read(write(tmp_path, text, "p.jsonl"), ids)


def test_where_prompt_files_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("JSPEC_DATA", raising=False)
    assert prompts.find("demo.jsonl").parent == prompts.HERE
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, "{}", "demo.jsonl")
    monkeypatch.setenv("JSPEC_DATA", str(tmp_path / "second"))
    assert prompts.find("demo.jsonl") == tmp_path / "second" / "demo.jsonl"
    assert prompts.find("demo.jsonl", tmp_path / "first") == tmp_path / "first" / "demo.jsonl"
    with pytest.raises(FileNotFoundError, match=r"other\.jsonl.*--data"):
        prompts.find("other.jsonl")


def test_an_encoder_decoder_s_prompts_are_its_sources():
    lm, params = testing.tiny_seq2seq(positions="learned", bounded=True, context_length=9, source_length=3)
    tokenizer = types.SimpleNamespace(encode=lambda text: [len(text), 3, 1])
    model = Model(lm, params, tokenizer=tokenizer, eos=(1,), decoder_start=(0,))  # type: ignore[arg-type]
    question = prompts.Question(7, "qa", "abcd")
    (case,) = table.tokenize(model, [question], False, 8)
    assert case.request == Request([0], [4, 3, 1])
    with pytest.raises(ValueError, match="prompts: 7 has 1 tokens, with max_new_tokens=9 it needs more"):
        table.tokenize(model, [question], False, 9)
    with pytest.raises(ValueError, match="chat: expected False, because model is an encoder-decoder"):
        table.tokenize(model, [question], True, 8)


# --- a run ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def short_timings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "LEAST_SECONDS", 0.01)
        yield


def settings(*rows):
    return [
        table.Setting(name, drafter, verify.target_only(), engine.block_widths(drafter))
        for name, drafter in rows
    ]


def toy_config(**changes):
    content = {
        "target": "toy",
        "prompts": {"file": "none"},
        "max_new_tokens": 12,
        "repeats": 2,
        "curve": [1, 2, 4],
        "drafters": [{"name": "plain", "drafter": "none"}],
    }
    return config.Table.model_validate(content | changes)


@pytest.fixture(scope="module")
def measured():
    """The chain 0 1 2 0 1 2 ...: a script that knows it, and one that is always wrong."""
    right = testing.scripted(np.arange(40) % 3, num_tokens=3)
    wrong = testing.scripted((np.arange(40) + 1) % 3, num_tokens=3)
    rows = settings(("plain", drafters.plain()), ("right", right), ("wrong", wrong))
    cases = [table.Case("a", "x", Request([0])), table.Case("b", "y", Request([0, 1, 2, 0, 1]))]
    console = rich.console.Console(quiet=True)
    return table.run(toy_config(), Model(*testing.table_lm(CYCLE), name="toy"), cases, rows, console)


def test_figures_of_a_run(measured):
    (section,) = measured.sections
    lines = section.lines
    assert "toy, float32, greedy, 2 prompts, 12 new tokens, one row at a time" in section.title
    plain, right, wrong = lines
    assert (plain.tau, plain.c, plain.alpha, plain.baseline) == (1, None, None, True)
    # 12 tokens in rounds of 4, of which 3 are drafted; always the whole draft.
    assert (right.tau, right.alpha, right.accepted_by_position) == (4, 1, (1, 1, 1))
    assert (wrong.tau, wrong.alpha, wrong.accepted_by_position) == (1, 0, (0, 0, 0))
    assert right.theory == pytest.approx(4 / (1 + 3 * right.c))
    # Not 3 c: two of its three rounds follow a draft that was accepted whole.
    drafting = right.round.drafting / section.curve.seconds[0]
    curve = cost.predict_from_curve(4, [4], drafting, section.curve)
    assert right.predicted == pytest.approx(curve)
    assert right.best_length[0] <= 3
    assert (
        wrong.best_length[1] >= 1
    )  # no draft is accepted, but which of two forwards was measured as dearer?
    assert plain.best_length is None
    # Round by round a wrong draft of 3, and less where the budget ends.
    assert wrong.predicted < 1
    for line in lines:
        assert line.flips == ()
        assert line.decode.low <= line.decode.median <= line.decode.high
        assert line.overall.median < line.decode.median
    assert plain.speedup == report.Speed(1, 1, 1)


def test_rounds_of_a_run(measured):
    rows = measured.sections[0].rounds
    a = rows["right"]["a"]
    # One entry a repeat.
    assert a["tokens"] == [[1, 2, 0] * 4] * 2
    assert [a[name] for name in ("emitted", "accepted", "proposed", "width")] == [
        [[number] * 3] * 2 for number in (4, 3, 3, 4)
    ]
    assert len(a["decode_seconds"]) == 2
    assert rows["plain"]["b"]["width"] == [[1] * 12] * 2
    assert rows["wrong"]["b"]["proposed"] == [[3] * 9 + [2, 1, 0]] * 2
    assert rows["wrong"]["b"]["width"] == [[4] * 11 + [1]] * 2


def test_a_flip_is_found_and_its_gap_reported():
    """A lossy rule takes every draft, so the output leaves plain decoding where the script does."""
    script = np.arange(40) % 3
    script[5] = 1  # plain decoding has 2 there
    rule = verify.synthetic([1.0, 1.0, 1.0])
    drafter = testing.scripted(script, num_tokens=3)
    rows = [table.PLAIN, table.Setting("lossy", drafter, rule, (1, 4))]
    law = 0.5 * np.asarray(CYCLE) + [[0.25, 0.0, 0.25], [0.25, 0.25, 0.0], [0.0, 0.25, 0.25]]
    model = Model(*testing.table_lm(law), name="toy")
    out = table.run(
        toy_config(), model, [table.Case("a", "", Request([0]))], rows, rich.console.Console(quiet=True)
    )
    lines = out.sections[0].lines
    (flip,) = lines[1].flips
    # The first new token is number 1 of the text, so token 5 is new token 4; log(.5 / .25) apart.
    assert (flip.prompt, flip.position, flip.gap) == ("a", 4, pytest.approx(np.log(2), abs=1e-5))
    assert report.equality(lines[1]) == "NO (1 of 1 prompts)"


def test_plain_decoding_is_added_and_temperatures_and_batch_sizes_get_a_table_each(monkeypatch):
    drafted = []

    def draft_seconds(self, setting, temperature):
        drafted.append((self.batch_size, setting.name, temperature))
        return cost.Drafting(1e-4, 1e-4)

    monkeypatch.setattr(bench.Bench, "draft_seconds", draft_seconds)
    rows = settings(("right", testing.scripted(np.arange(40) % 3, num_tokens=3)))
    model = Model(*testing.table_lm(CYCLE), name="toy")
    cases = [table.Case(name, "", Request([0, 1, 2][:n])) for n, name in enumerate("abc", 1)]
    changed = toy_config(temperatures=[0.0, 1.0], batch_sizes=[1, 2], repeats=1)
    out = table.run(changed, model, cases, rows, rich.console.Console(quiet=True))
    titles = [section.title for section in out.sections]
    assert [("2 rows at a time" in title, "greedy" in title) for title in titles] == [
        (False, True),
        (False, False),
        (True, True),
        (True, False),
    ]
    greedy, sampled = out.sections[2:]
    assert [line.name for line in greedy.lines] == ["plain", "right"]
    assert (greedy.lines[1].tau, report.equality(greedy.lines[1])) == (4, "yes")
    assert [greedy.rounds["right"][name]["tokens"] for name in "abc"] == [
        out.sections[0].rounds["right"][name]["tokens"] for name in "abc"
    ]
    assert sampled.lines[1].flips is None
    assert report.equality(sampled.lines[1]) == "in law"
    # What drafting costs depends on both.
    assert drafted == [(size, "right", temperature) for size in (1, 2) for temperature in (0.0, 1.0)]
    # One cost curve a batch size, below its tables.
    text = report.markdown(out, {})
    assert [text.count(word) for word in ("## toy", "| n | 1 | 2 | 4 |")] == [4, 2]
    assert text.index(titles[1]) < text.index("| n | 1 |") < text.index(titles[2])


# --- the report -------------------------------------------------------------------------------------


def line(**changes):
    speed = report.Speed(1.5, 1.4, 1.6)
    base = report.Line(
        "row", 1.8, (0.5, 0.2), 0.6, 0.01, 1.7, 1.4, speed, speed, speed, speed, flips=(), num_prompts=4
    )
    return base._replace(**changes)


def test_equality():
    near, far = report.Flip("a", 3, 9e-4), report.Flip("b", 5, 1e-3)
    assert report.equality(line()) == "yes"
    assert report.equality(line(flips=(near, near))) == "yes (2 near-ties)"
    assert report.equality(line(flips=(near, far))) == "NO (1 of 4 prompts)"
    assert report.equality(line(flips=None)) == "in law"
    assert report.equality(line(flips=None, lossless=False)) == "no: a lossy rule"


def report_of(*lines):
    """A report of these lines alone."""
    curve = cost.CostCurve((1, 2), (1e-3, 1.2e-3))
    return report.Report([report.Section("t", list(lines), curve, 7, {})], report.NEAR_TIE["float32"])


def test_a_slower_row_says_so():
    slow = line(speedup=report.Speed(0.9, 0.8, 0.95))
    assert "0.90 (0.80-0.95) slower" in report.cells(slow)
    text = report.markdown(report_of(slow), {"commit": "abc"})
    assert "slower |" in text
    assert "* commit: abc" in text


def test_a_name_cannot_break_the_table():
    noted = line(name="a|b", best_length=(1, 1.2))
    text = report.markdown(report_of(noted, line()), {})
    head, rule, first, second = text.split("\n\n")[1].splitlines()
    assert first.startswith(r"| a\|b | 1.80 |")
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in (head, rule, first, second)} == {13}
    assert rule == "|---" + 10 * "|---:" + "|---|"
    assert text.split("\n\n")[2].startswith("* a|b: by its acceptance")


def test_files(measured, tmp_path, capsys):
    report.write(tmp_path, rich.console.Console(width=200), measured, {"seed": 0})
    markdown = (tmp_path / "table.md").read_text()
    assert "| right |" in markdown
    assert "| n | 1 | 2 | 4 |" in markdown
    assert "python -m experiments" in markdown
    content = json.loads((tmp_path / "rounds.json").read_text())
    assert content["config"] == {"seed": 0}
    assert [curve["widths"] for curve in content["curves"].values()] == [[1, 2, 4]]
    assert (tmp_path / "speedup.png").read_bytes()[:4] == b"\x89PNG"
    assert "t(n) / t(1)" in capsys.readouterr().out


def test_first_difference():
    assert bench.first_difference(np.array([1, 2]), np.array([1, 2])) is None
    assert bench.first_difference(np.array([1, 2]), np.array([1])) == 1
    assert bench.first_difference(np.array([1, 2, 3, 4]), np.array([1, 0, 3, 0])) == 1


# --- the command ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "nonsense: 1\n", "nonsense: unknown key"),
        (GOOD.replace("demo.jsonl", "missing.jsonl"), "prompts.file: no such file"),
        (GOOD.replace("target: smollm2-135m", "target: ./no-such-folder"), "no-such-folder"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, text, message):
    arguments = ["table", "--config", str(write(tmp_path, text)), "--output", str(tmp_path / "out")]
    result = typer.testing.CliRunner().invoke(command.app, arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_such_configuration():
    result = typer.testing.CliRunner().invoke(command.app, ["table", "--config", "no-such.yaml"])
    assert (result.exit_code, "no such file" in result.stderr) == (1, True)


def test_a_full_disk_is_one_line_and_a_mistake_of_ours_is_none(tmp_path, monkeypatch):
    def measured(error):
        def measure():
            raise error

        monkeypatch.setattr(command, "_loaded", lambda *_: measure)
        return typer.testing.CliRunner().invoke(command.app, ["table", "--config", path])

    path = str(write(tmp_path, GOOD))
    full = measured(OSError(errno.ENOSPC, "No space left on device", "table.md"))
    assert (full.exit_code, full.stderr) == (1, "error: [Errno 28] No space left on device: 'table.md'\n")
    assert isinstance(measured(ValueError("ours")).exception, ValueError)


@pytest.mark.slow
@pytest.mark.smollm2
def test_the_command_on_the_real_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = (
        GOOD.replace("file: demo.jsonl", "file: demo.jsonl, ids: [d09]") + "max_new_tokens: 16\nrepeats: 1\n"
    )
    arguments = ["table", "--config", str(write(tmp_path, text)), "--output", str(tmp_path / "out")]
    result = typer.testing.CliRunner().invoke(command.app, arguments)
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "out" / "rounds.json").read_text())
    ((_, rows),) = content["rows"].items()
    assert rows["suffix"]["d09"]["tokens"] == rows["plain"]["d09"]["tokens"]
    assert len(rows["suffix"]["d09"]["emitted"][0]) < 16
