"""Blockwise decoding as an experiment: its settings, its tables, and the whole of it on a toy language."""

import json
from pathlib import Path

import pytest
import rich.console
import typer.testing
import yaml
from test_study_command import run, toy_study

from experiments import __main__ as command
from experiments import blockwise, config, sheets, study
from experiments.blockwise import COLUMNS, TABLE_1, TIMED, Compared, Results
from experiments.laboratory import Scored
from experiments.report import Flip, Line, Speed
from experiments.results import Quality, unpacked
from experiments.stages import Stages

CONFIGS = Path(__file__).parents[1] / "configs"
LOOP = {"batching": {"batch_size": 32, "buckets": 1}, "training": {"steps": 20}}
CONTENT = {
    "kind": "blockwise",
    "study": "toy.yaml",
    "drafter": "small, distilled",
    "block_sizes": [2, 4],
    "mlp_width": 16,
    "frozen": {"anchors": 4, **LOOP},
    "joint": LOOP,
    "masked": {"model": {"layers": [0]}, "anchors": 2, **LOOP},
    "draft_length": 2,
    "sentences": 4,
    "repeats": 2,
}


def settings(**changes):
    return config.Blockwise.model_validate(CONTENT | changes)


# --- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoke", [False, True])
def test_the_project_s_own(smoke):
    loaded = study.load(CONFIGS / "t5_blockwise_cpu.yaml", smoke=smoke)
    base = study.load(CONFIGS / loaded.study, smoke=smoke)
    assert loaded.drafter in base.rows()
    layers = loaded.block(COLUMNS["both"].source).model.layers
    assert max(layers) < base.target.finetune.architecture["num_layers"]
    # Its distilled text is among the study's, so that nothing is written twice.
    assert COLUMNS["both"].source in [source.model_copy(update={"weight": 1.0}) for source in sources(base)]
    if not smoke:
        assert set(loaded.block_sizes) <= TABLE_1["both"].keys()  # the paper's stand beside them


def sources(base):
    return [source for how in base.recipes.values() for source in how.sources]


def test_recipes_follow_from_the_block_size():
    loaded, source = settings(), COLUMNS["distillation"].source
    heads = loaded.heads(4, source)
    assert (heads.kind, heads.num_tokens, heads.network) == (
        "blockwise",
        3,
        {"num_heads": 3, "mlp_width": 16},
    )
    assert (heads.sources, heads.anchors, heads.features) == ((source,), 4, "float16")
    joined = loaded.joined(4, source)
    assert (joined.block_size, joined.mlp_width, joined.sources) == (4, 16, (source,))
    block = loaded.block(source)
    assert (block.kind, block.num_tokens, block.features) == ("masked", 2, None)
    assert block.network == {"num_tokens": 2, "causal": False, "shared_mask": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": [2]}, "blocks\n.*Extra inputs are not permitted"),
        ({"block_sizes": [1]}, r"block_sizes\.0\n.*greater than or equal to 2"),
        ({"block_sizes": []}, "block_sizes\n.*at least 1 item"),
        ({"block_sizes": [2, 2]}, r"block_sizes: expected different numbers, got \(2, 2\)"),
        ({"frozen": LOOP | {"anchor": 3}}, "frozen: anchor: unknown key"),
        ({"frozen": LOOP | {"num_tokens": 3}}, r"frozen\.num_tokens: expected none, it follows from"),
        ({"joint": LOOP | {"limits": {"source": 8}}}, r"joint\.limits: expected none, it follows from the"),
        ({"joint": {"training": {"steps": 1, "accumulate": 2}}}, r"joint: training\.accumulate: expected 1"),
        ({"masked": LOOP | {"features": "float16"}}, r"masked\.features: expected none, it follows from"),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter": "large"}, "expected a study with a row 'large', got"),
        ({"study": "x.yaml"}, "expected a study with a row 'small, distilled', got"),
        ({"kind": "losses"}, "unknown key"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, changes, message):
    toy_study(tmp_path)
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(CONTENT | changes))
    ran = typer.testing.CliRunner().invoke(command.app, ["blockwise", "--config", str(tmp_path / "x.yaml")])
    assert ran.exit_code == 1
    assert message in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


# --- tables -------------------------------------------------------------------------------------------


def cell(score, tau, flips=()):
    return Scored(Quality(score, "BLEU", "s", 9, 99, flips), tau)


def line(name, speedup, tau=1.5):
    speed = Speed(speedup, speedup - 0.1, speedup + 0.1)
    return Line(name, tau, (0.5,), 0.5, 0.1, 1.0, 1.0, speed, speed, speed, speed, (), 4)


def results():
    cells = {name: {2: cell(30.5, 1.5), 4: cell(30.25, 1.75)} for name in COLUMNS}
    cells["both"][4] = cell(29.0, 2.5, (Flip("7", 3, 1e-5),))
    speeds = {name: {2: line("a", 1.3), 4: line("b", 1.2)} for name in TIMED}
    compared = [
        Compared("BPD, k=2, both", 1, 1_500_000, line("a", 1.3), cell(30.5, 1.5)),
        Compared("masked", 5, 9_000_000, line("m", 0.9), cell(30.0, 1.2)),
    ]
    return Results(Quality(30.0, "BLEU", "s", 9, 99), cells, speeds, compared)


def test_the_first_table_has_the_paper_s_shape():
    base = study.load(CONFIGS / "t5_en_de_cpu.yaml")
    sheet = blockwise.table_1(base, settings(), results())
    assert sheet.headings == ("k", *COLUMNS, *(f"Stern, {name}" for name in COLUMNS))
    assert [row[0] for row in sheet.rows] == ["1", "2", "4"]
    plain, two, four = sheet.rows
    assert plain[1:] == ("30.00 / 1.00", "30.00 / 1.00", "-", "-", "26.00 / 1.00", "26.41 / 1.00", "-", "-")
    assert two[1:5] == ("30.50 / 1.50",) * 4
    assert four[4:] == ("29.00 / 2.50", "25.84 / 1.73", "26.31 / 1.85", "25.05 / 2.69", "26.36 / 3.27")
    assert any(note.startswith("both, k=4: 1 of 9 sentences differ") for note in sheet.notes)
    assert "| 4 |" in sheets.markdown(sheet)


def test_the_paper_s_figures():
    """Training base and heads together costs BLEU and has more accepted; so does each larger block."""
    assert all({2, 4, 6, 8, 10} <= row.keys() for row in TABLE_1.values())
    for k in (2, 4, 6, 8, 10):
        block = {name: row[k][1] for name, row in TABLE_1.items()}
        assert block["regular"] < block["distillation"] < block["both"]
        assert block["regular"] < block["fine tuning"] < block["both"]


def test_the_other_tables_and_the_picture(tmp_path):
    found = results()
    by_k = blockwise.speeds(settings(), found)
    assert by_k.rows == [
        ("2", "1.30 (1.20-1.40)", "1.30 (1.20-1.40)", "1.72"),
        ("4", "1.20 (1.10-1.30)", "1.20 (1.10-1.30)", "2.69"),
    ]
    assert blockwise.best(found.speeds["both"]) == 2
    compared = blockwise.comparison(settings(), found)
    assert compared.rows[0][:5] == ("BPD, k=2, both", "1", "1.5M", "1.50", "0.100")
    assert compared.rows[1][-3:] == ("0.90 (0.80-1.00)", "30.00", "yes")
    kept = Stages(tmp_path, rich.console.Console(quiet=True))
    kept.kept("blockwise, test, plain, T=0", {}, lambda: 1)
    blockwise.write(settings(), study.load(CONFIGS / "t5_en_de_cpu.yaml"), found, kept)
    text = (tmp_path / "blockwise.md").read_text()
    assert all(f"## {sheet.title}" in text for sheet in (by_k, compared))
    assert "Made by (blockwise, test, plain):" in text
    assert (tmp_path / "blockwise.png").read_bytes()[:4] == b"\x89PNG"
    content = json.loads((tmp_path / "blockwise.json").read_text())["results"]
    assert unpacked(Scored, content["cells"]["both"]["4"]) == found.cells["both"][4]


# --- the whole of it ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_from_nothing_to_the_tables(tmp_path):
    path = toy_study(tmp_path)
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(CONTENT | {"block_sizes": [2, 3]}))
    shared = ("--config", tmp_path / "x.yaml", "--data", tmp_path, "--output", tmp_path / "out")
    run(tmp_path, "blockwise", *shared)
    out = tmp_path / "out"
    found = json.loads((out / "blockwise.json").read_text())["results"]
    assert {name: [*row] for name, row in found["cells"].items()} == {name: ["2", "3"] for name in COLUMNS}
    for name, row in found["cells"].items():
        for cell in row.values():
            assert 1 <= cell["tau"] <= 3
            assert cell["quality"]["flips"] == []
            # A frozen base answers as it does without heads.
            if not COLUMNS[name].joint:
                assert cell["quality"]["score"] == found["plain"]["score"]
    names = [row["name"] for row in found["compared"]]
    assert [name.split(",")[0] for name in names] == ["BPD", "BPD", "masked", "small"]
    assert "Stern, both" in (out / "blockwise.md").read_text()
    times = (out / "times.json").read_text()
    run(tmp_path, "blockwise", *shared)  # it trains and measures nothing
    assert (out / "times.json").read_text() == times
    assert study.load(path).rows()["small, distilled"]
