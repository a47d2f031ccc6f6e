"""`python -m experiments` from nothing to the table: training, a kill on the way, stand-ins for the Hub."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from experiments import prompts, study
from jspec.testing import tiny_checkpoint
from training import tokenizer

ROOT = prompts.HERE.parent.parent
CONFIGS = ROOT / "configs"
pytestmark = pytest.mark.slow

NOUNS = {"dog": "hund", "cat": "katze", "man": "mann", "bird": "vogel", "tree": "baum", "boat": "boot"}
VERBS = {"sees": "sieht", "finds": "findet", "likes": "mag", "paints": "malt"}


def pairs(number, seed):
    draw = random.Random(seed)
    for _ in range(number):
        a, b, verb = draw.choice(list(NOUNS)), draw.choice(list(NOUNS)), draw.choice(list(VERBS))
        yield f"a {a} {verb} a {b}", f"ein {NOUNS[a]} {VERBS[verb]} ein {NOUNS[b]}"


def environment(tmp_path, **more):
    # Compiled programs may be shared with other runs of the tests; nothing else is.
    return {
        **os.environ,
        "XDG_CACHE_HOME": str(ROOT / ".cache"),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        **more,
    }


def command(*arguments):
    return [sys.executable, "-m", "experiments", *map(str, arguments)]


def run(tmp_path, *arguments):
    done = subprocess.run(
        command(*arguments), cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout[-3000:]
    return done.stdout


ARCHITECTURE = {
    "kind": "encoder-decoder",
    "width": 32,
    "mlp_width": 64,
    "num_layers": 2,
    "num_encoder_layers": 1,
    "num_heads": 2,
    "head_dim": 16,
}


def toy_study(tmp_path):
    """A study that really learns its toy language, and the folder of its data."""
    for name, number in (("train", 400), ("val", 24), ("test", 24)):
        source, target = zip(*pairs(number, name), strict=True)
        (tmp_path / f"{name}.en").write_text("\n".join(source) + "\n")
        (tmp_path / f"{name}.de").write_text("\n".join(target) + "\n")
    parallel = {
        part: {"format": "parallel", "source": f"{name}.en", "target": f"{name}.de"}
        for part, name in (("train", "train"), ("validation", "val"), ("test", "test"))
    }
    training = {"optimizer": {"learning_rate": 3e-3, "warmup_steps": 10}, "checkpoint_every": 20}
    batching = {"batch_size": 32, "buckets": 1}
    values = {
        "kind": "study",
        "task": {"name": "toy", "paper": "ende"},
        "data": parallel,
        "max_new_tokens": 12,
        "target": {
            "finetune": {
                "tokenizer": {"vocab_size": 80},
                "architecture": ARCHITECTURE,
                "batching": batching,
                "training": {"steps": 150, **training},
            }
        },
        "recipes": {
            "fine-tuned": {"loss": "cross_entropy", "sources": [{"text": "references"}]},
            "distilled": {"loss": "forward_kl", "sources": [{"text": "target", "temperature": 1}]},
        },
        "drafters": {
            "small": {
                "paper": "small",
                "start": {"architecture": ARCHITECTURE | {"num_layers": 1, "width": 16}},
                "batching": batching,
                "training": {"steps": 60, **training},
            }
        },
        "ngrams": {"bigram": {"order": 2, "paper": "bigram", "source": {"text": "target", "temperature": 1}}},
        "measure": {
            "temperatures": [0, 1],
            "sentences": 4,
            "repeats": 2,
            "gamma": 2,
            "quality_batch": 12,
        },
    }
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def test_from_nothing_to_the_table_with_a_kill_on_the_way(tmp_path):
    path, out = toy_study(tmp_path), tmp_path / "out"
    arguments = ("table", "--config", path, "--data", tmp_path, "--output", out)
    process = subprocess.Popen(
        command(*arguments), cwd=ROOT, env=environment(tmp_path), stdout=subprocess.DEVNULL, text=True
    )
    try:
        until = time.monotonic() + 300
        while not list((out / "target" / "checkpoints").glob("[0-9]*")):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (out / "target" / "DONE").exists()

    run(tmp_path, *arguments)
    times = json.loads((out / "times.json").read_text())["stages"]
    assert times["target"]["attempts"] == 2
    assert times["small, distilled"] == {
        "seconds": times["small, distilled"]["seconds"],
        "attempts": 1,
        "done": True,
        "environment": 0,
    }
    content = json.loads((out / "table.json").read_text())
    rows = {(row["drafter"], row["temperature"]): row for row in content["results"]["rows"]}
    assert list(rows) == [
        (name, t) for t in (0.0, 1.0) for name in ("small, fine-tuned", "small, distilled", "bigram")
    ]
    for (_, temperature), row in rows.items():
        if temperature == 0:
            assert row["quality"]["flips"] == []
            assert row["quality"]["score"] == row["plain_quality"]["score"] > 50
        assert 0 < row["alpha"] <= 1
        assert row["line"]["tau"] >= 1
    assert rows["small, distilled", 0.0]["reference"]["measured"] == 3.4
    for name in ("table.md", "table.tex", "speedup_B1_T0.png"):
        assert (out / name).stat().st_size > 0

    # A second run trains and measures nothing.
    output = run(tmp_path, *arguments)
    assert json.loads((out / "times.json").read_text())["stages"] == times
    assert "target: there already" in output

    # The comparison of losses finds target and text where the study left them.
    losses = {
        "kind": "losses",
        "study": "toy.yaml",
        "drafter": "small",
        "steps": 10,
        "sources": [{"text": "target", "temperature": 1}],
        "losses": {"kl": {"loss": "forward_kl"}, "tv": {"loss": "total_variation"}},
        "seeds": [1, 2],
    }
    (tmp_path / "losses.yaml").write_text(yaml.safe_dump(losses))
    shared = ("--data", tmp_path, "--output", out)
    assert "highest at T=1" in run(tmp_path, "losses", "--config", tmp_path / "losses.yaml", *shared)
    outcomes = json.loads((out / "losses.json").read_text())["outcomes"]
    assert {name: len(values) for name, values in outcomes.items()} == {"kl": 2, "tv": 2}
    assert (out / "losses.md").exists()
    assert (out / "losses.png").read_bytes()[:4] == b"\x89PNG"


# --- stand-ins for the Hub ----------------------------------------------------------------------------


def stand_in_model(tmp_path, name, seed, **changes):
    """A tiny checkpoint in the Hub's cache, where `huggingface_hub` finds it without network."""
    commit = "0" * 40
    repository = tmp_path / "hf" / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    tiny_checkpoint(snapshot, "t5_v1_1", seed=seed, pad_token_id=0, eos_token_id=1, **changes)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    backend = tokenizer.build((text for pair in pairs(100, 0) for text in pair), 90)
    tokenizer.save(backend, snapshot)


def stand_in_data(folder, name, config, rows):
    """A data set in the layout of the Hub, below the data folder."""
    place = folder / name
    place.mkdir(parents=True)
    files = []
    for split in ("train", "validation", "test"):
        lines = [json.dumps(row) for row in rows(split)]
        (place / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        files.append({"split": split, "path": f"{split}.jsonl"})
    card = yaml.safe_dump({"configs": [{"config_name": config, "data_files": files}]})
    (place / "README.md").write_text(f"---\n{card}---\n")


def test_the_xxl_study_on_stand_ins(tmp_path):
    stand_in_model(tmp_path, "google/t5-v1_1-xxl", 0, num_decoder_layers=3)
    stand_in_model(tmp_path, "google/t5-v1_1-small", 1, d_model=16, num_decoder_layers=1, num_layers=1)
    stand_in_model(tmp_path, "google/t5-v1_1-base", 2, d_model=24, num_decoder_layers=1, num_layers=1)
    stand_in_data(
        tmp_path,
        "wmt/wmt14",
        "de-en",
        lambda split: [{"translation": {"en": en, "de": de}} for en, de in pairs(40, split)],
    )
    out = tmp_path / "out"
    path = CONFIGS / "t5_xxl_wmt14_tpu.yaml"
    run(tmp_path, "table", "--config", path, "--data", tmp_path, "--output", out, "--smoke")
    content = json.loads((out / "table.json").read_text())
    config = study.load(path, smoke=True)
    assert {row["drafter"] for row in content["results"]["rows"]} == {*config.rows(), *config.ngrams}
    assert content["results"]["lenient"][0]["factor"] == 0.3


def test_the_cnndm_study_on_stand_ins(tmp_path):
    stand_in_model(tmp_path, "kssteven/T5-large-cnndm", 0)
    stand_in_model(tmp_path, "kssteven/T5-small-cnndm", 1, d_model=16, num_decoder_layers=1, num_layers=1)
    stand_in_data(
        tmp_path,
        "abisee/cnn_dailymail",
        "3.0.0",
        lambda split: [{"article": en, "highlights": de, "id": ""} for en, de in pairs(20, split)],
    )
    out = tmp_path / "out"
    path = CONFIGS / "t5_large_cnndm_gpu.yaml"
    run(tmp_path, "table", "--config", path, "--data", tmp_path, "--output", out, "--smoke")
    rows = json.loads((out / "table.json").read_text())["results"]["rows"]
    assert {row["drafter"] for row in rows} == {"small (published)", "small, distilled", "bigram"}
    assert {row["batch_size"] for row in rows} == {1, 2}
    assert rows[0]["plain_quality"]["metric"] == "ROUGE-2"


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("t5_en_de_cpu", {"train": "train", "val": "val", "test": "test_2016_flickr"}),
        ("t5_en_de_gpu", {"train": "train", "val": "val", "test": "test_2016_flickr"}),
    ],
)
def test_smoke(tmp_path, name, files):
    """The whole pipeline of a configuration of the project; on quiet cores in less than three minutes."""
    toy_study(tmp_path)  # for its texts
    for short, long in files.items():
        for side in ("en", "de"):
            if short != long:
                shutil.copy(tmp_path / f"{short}.{side}", tmp_path / f"{long}.{side}")
    out, path = tmp_path / "out", CONFIGS / f"{name}.yaml"
    run(tmp_path, "table", "--config", path, "--data", tmp_path, "--output", out, "--smoke")
    rows = json.loads((out / "table.json").read_text())["results"]["rows"]
    config = study.load(path, smoke=True)
    expected = config.measure.drafters or (*config.rows(), *config.ngrams)
    assert {row["drafter"] for row in rows} == set(expected)
    assert all(f"| {drafter} |" in (out / "table.md").read_text() for drafter in expected)
