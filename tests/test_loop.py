"""The training loop: exact resume, bad ends, precision, accumulation, schedules."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax.sharding import AbstractMesh

from jspec.io import orbax
from jspec.models.layers import Dropout
from jspec.testing import tiny_decoder
from training import config, distill, forward, loop, losses, metrics, recipe
from training.checkpoint import Checkpoints
from training.config import Batching, Optimizer, Training
from training.data import Batches, Example
from training.lock import alone, held

STEPS = 40


# --- a tiny run -------------------------------------------------------------------------------------


def cross_entropy(lm, dropout=0.1):
    def objective(params, frozen, batch, key):
        noise = Dropout(key, dropout) if dropout else None
        logits = forward.logits(lm, params, batch, dropout=noise)
        return losses.sequence_mean(losses.cross_entropy(None, logits, batch.labels), batch.weights), {}

    return objective


LM, PARAMS = tiny_decoder(num_layers=1, vocab_size=32, width=16)
OBJECTIVE, PLAIN = cross_entropy(LM), cross_entropy(LM, dropout=0)
EXAMPLES = [Example([i % 30 + 2], [(i + j) % 30 + 2 for j in range(1, 3 + i % 5)]) for i in range(20)]
SETTINGS = Training(
    steps=STEPS, checkpoint_every=4, evaluate_every=10, log_every=3, optimizer=Optimizer(warmup_steps=3)
)


def batches(**options):
    return Batches(EXAMPLES, batch_size=8, buckets=[(0, 8)], **options)


def evaluate(params):
    return {"validation_loss": float(jnp.abs(params["embedding"]).sum())}


def train(folder, settings=SETTINGS, source=None, objective=OBJECTIVE, **options):
    folder.mkdir(exist_ok=True)
    rows = batches(rows_multiple=settings.accumulate)
    source = source or (lambda step, params: rows[step])
    options = {"evaluate": evaluate} | options
    return loop.fit(PARAMS, objective, source, settings, folder, **options)


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def distance(a, b):
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), a, b)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    return train(folder), folder


# --- resuming ---------------------------------------------------------------------------------------

CHILD = textwrap.dedent(
    """
    import os, signal, sys, threading
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    import conftest, test_loop

    step, delay = int(sys.argv[2]), float(sys.argv[3])
    rows = test_loop.batches()

    def source(number, params):
        if number == step:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return rows[number]

    test_loop.train(Path(sys.argv[1]), source=source)
    """
)


def test_killed_three_times_it_ends_as_if_undisturbed(undisturbed, tmp_path):
    """SIGKILL at a random step and a random moment after it, within a save more often than not."""
    params, reference = undisturbed
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    folder = tmp_path / "killed"
    child = CHILD.format(tests=str(Path(__file__).parent))
    for low in (1, 13, 25):
        step, delay = draw.randint(low, low + 10), draw.uniform(0, 0.05)
        command = [sys.executable, "-c", child, str(folder), str(step), str(delay)]
        killed = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert killed.returncode == -signal.SIGKILL, (seed, killed.stderr[-2000:])
        assert not (folder / "DONE").exists()
    assert_equal(train(folder), params)
    assert (folder / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes(), seed


def test_a_half_written_checkpoint_is_never_picked_up(undisturbed, tmp_path):
    _, reference = undisturbed
    folder = tmp_path / "run"
    shutil.copytree(reference, folder)
    checkpoints = folder / "checkpoints"
    shutil.copytree(checkpoints / "40", checkpoints / "44")  # not marked as complete
    (checkpoints / "44" / "commit_success.txt").unlink()
    shutil.copytree(checkpoints / "40", checkpoints / "48.orbax-checkpoint-tmp-1")
    (checkpoints / "52" / "params").mkdir(parents=True)
    assert orbax.complete_steps(checkpoints) == [36, 40]
    opened = Checkpoints(checkpoints, keep=2, best=False)
    assert opened.latest() == 40
    opened.close()
    assert sorted(path.name for path in checkpoints.iterdir()) == ["36", "40"]


def test_metrics_are_cut_back_to_the_checkpoint(undisturbed, tmp_path):
    params, reference = undisturbed
    folder = tmp_path / "run"
    shutil.copytree(reference, folder)
    shutil.rmtree(folder / "checkpoints" / "40")
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(whole + '{"step": 41, "loss": 1.0}\n{"step": 4')
    assert_equal(train(folder), params)
    assert (folder / "metrics.jsonl").read_text() == whole
    rows = metrics.read(folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "validation_loss" in row] == [10, 20, 30, 40]


def test_what_a_run_leaves(undisturbed):
    params, folder = undisturbed
    assert orbax.complete_steps(folder / "checkpoints") == [36, 40]
    done = json.loads((folder / "DONE").read_text())
    last = [row for row in metrics.read(folder / "metrics.jsonl") if "loss" in row][-1]
    assert (done["step"], done["loss"]) == (STEPS, last["loss"])
    assert done["validation_loss"] == evaluate(params)["validation_loss"]
    assert any((folder / "tensorboard").iterdir())
    assert all(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(PARAMS))  # not donated


def test_the_best_checkpoint_is_kept_and_handed_out(tmp_path):
    scores = iter([3.0, 1.0, 2.0, 4.0])
    best = {}

    def judge(params):
        score = next(scores)
        if score == 1.0:
            best["params"] = jax.tree.map(np.asarray, params)
        return {"validation_loss": score}

    settings = SETTINGS.model_copy(update={"best": True, "keep": 1, "checkpoint_every": 5})
    assert_equal(train(tmp_path / "run", settings, evaluate=judge), best["params"])
    assert orbax.complete_steps(tmp_path / "run" / "checkpoints") == [20, 40]
    assert json.loads((tmp_path / "run" / "DONE").read_text())["step"] == 20


def test_the_best_of_an_interrupted_run(tmp_path):
    """It was found before the interruption, and is no longer among the newest."""
    settings = SETTINGS.model_copy(update={"best": True, "keep": 1, "checkpoint_every": 5})
    rows = batches()
    best = {}

    def judge(scores):
        def score(params):
            found = next(scores)
            if found == 1.0:
                best["params"] = jax.tree.map(np.asarray, params)
            return {"validation_loss": found}

        return score

    def interrupted(step, params):
        if step == 25:
            raise KeyboardInterrupt
        return rows[step]

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", settings, source=interrupted, evaluate=judge(iter([3.0, 1.0])))
    assert orbax.complete_steps(tmp_path / "run" / "checkpoints") == [20, 25]
    found = train(tmp_path / "run", settings, evaluate=judge(iter([2.0, 4.0])))
    assert_equal(found, best["params"])
    assert json.loads((tmp_path / "run" / "DONE").read_text())["step"] == 20


# What `held` does, in a process that need not import JAX.
LOCKED = textwrap.dedent(
    """
    import fcntl, os, sys, time

    file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.write(file, str(os.getpid()).encode())
    print("held", flush=True)
    time.sleep(600)
    """
)


def test_two_processes_do_not_work_on_one_folder(tmp_path):
    """The second is told who the first is; who is killed holds nothing; a finished run is for everyone."""
    folder, lock = tmp_path / "run", tmp_path / ".run.lock"
    command = [sys.executable, "-c", LOCKED, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            message = rf"output: process {other.pid} works on {folder};"
            with pytest.raises(ValueError, match=message), held(folder):
                pass
            folder.mkdir()
            (folder / "DONE").write_text("{}")
            with held(folder):
                pass
            (folder / "DONE").unlink()
        finally:
            other.kill()
    assert lock.exists()
    with held(folder):
        assert lock.read_text() == f"{os.getpid()}\n"
        with pytest.raises(ValueError, match=f"process {os.getpid()} works on "), held(folder):
            pass
        run = alone(lambda config, corpus, output: "done")
        with pytest.raises(ValueError, match="works on "):
            run(None, None, folder)
    assert not lock.exists()
    assert run(None, None, output=folder) == "done"


# --- bad ends ---------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    rows = batches()

    def source(step, params):
        weights = rows[step].weights * (np.nan if step == 9 else 1)
        return rows[step]._replace(weights=weights)

    def objective(params, frozen, batch, key):
        loss, numbers = OBJECTIVE(params, frozen, batch, key)
        return loss + 0 * batch.weights.sum(), numbers

    for _ in range(2):  # and again when it is started again
        with pytest.raises(FloatingPointError, match=r"step 10: loss is nan, .*last good .* is step 8"):
            train(tmp_path / "run", source=source, objective=objective)
        assert orbax.complete_steps(tmp_path / "run" / "checkpoints") == [4, 8]
        assert [row["step"] for row in metrics.read(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 10))


def test_an_update_that_is_not_finite_is_in_no_checkpoint(tmp_path, monkeypatch):
    """Adam divides by 1 - b2: the loss and gradient of step 1 are fine, the params after it are not."""
    closed, close = [], Checkpoints.close
    monkeypatch.setattr(Checkpoints, "close", lambda self: closed.append(close(self)))

    def objective(params, frozen, batch, key):
        return (params["embedding"] ** 2).sum(), {}

    changes = {"checkpoint_every": 1, "optimizer": Optimizer.model_construct(b2=1.0)}
    with pytest.raises(FloatingPointError, match=r"step 1: loss is \d.*update_norm is nan; .* is none"):
        train(tmp_path / "run", SETTINGS.model_copy(update=changes), objective=objective)
    assert orbax.complete_steps(tmp_path / "run" / "checkpoints") == []
    assert closed == [None]  # whatever happens


def test_an_evaluation_that_is_not_finite_stops_the_run(undisturbed, tmp_path):
    shutil.copytree(undisturbed[1], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "40")
    message = r"the evaluation after step 40: validation_loss is nan; .* is step 36"
    with pytest.raises(FloatingPointError, match=message):
        train(tmp_path / "run", evaluate=lambda params: {"validation_loss": float("nan")})


def test_masters_of_another_dtype_are_refused(tmp_path):
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), PARAMS)
    with pytest.raises(ValueError, match=r"params: expected float32, .* got bfloat16"):
        loop.fit(rounded, PLAIN, lambda step, params: None, SETTINGS, tmp_path)


def test_a_full_disk_is_one_clear_error_and_nothing_is_lost(undisturbed, tmp_path):
    params, _ = undisturbed
    rows, limits = batches(), resource.getrlimit(resource.RLIMIT_FSIZE)

    def source(step, params):
        if step == 9:  # from here on no file can grow beyond this
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        return rows[step]

    try:
        with pytest.raises(OSError, match=r"could not write step 12 to .*last good checkpoint is step 8"):
            train(tmp_path / "run", source=source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert orbax.complete_steps(tmp_path / "run" / "checkpoints") == [4, 8]
    assert_equal(train(tmp_path / "run"), params)


def test_an_unfinished_checkpoint_may_still_be_written_to(tmp_path, monkeypatch):
    """By threads of a save that failed, where the run is opened again in the same process."""
    unfinished = tmp_path / "12.orbax-checkpoint-tmp"
    unfinished.mkdir()
    remove, left = shutil.rmtree, [OSError("Directory not empty"), OSError("Directory not empty")]

    def interrupted(path):
        if left:
            raise left.pop()
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    Checkpoints(tmp_path, keep=1, best=False).close()
    assert not left
    assert not unfinished.exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"output: cannot write to .*file/run"):
        recipe.open_folder(tmp_path / "file" / "run", SETTINGS, {})


def test_a_folder_of_another_run_is_refused(tmp_path):
    assert not recipe.open_folder(tmp_path / "run", SETTINGS, {"data": "a"})
    assert not recipe.open_folder(tmp_path / "run", SETTINGS, {"data": "a"})
    other = SETTINGS.model_copy(update={"steps": 50, "optimizer": Optimizer(b2=0.9)})
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    assert not recipe.open_folder(tmp_path / "run", other, {"data": "b"})  # nothing was to be lost
    assert not (tmp_path / "run" / "tokenizer.json").exists()
    (tmp_path / "run" / "DONE").write_text("{}")
    (tmp_path / "run" / "checkpoints" / "4").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "4" / "commit_success.txt").write_text("")
    assert recipe.open_folder(tmp_path / "run", other, {"data": "b"})
    message = r"differs in steps, optimizer\.warmup_steps, optimizer\.b2, data;"
    for name in ("DONE", "checkpoints"):
        with pytest.raises(ValueError, match=message):
            recipe.open_folder(tmp_path / "run", SETTINGS, {"data": "a"})
        path = tmp_path / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_mesh_that_would_change_the_batches_is_refused(tmp_path):
    """With max_tokens rows are multiples of what the mesh divides; a batch_size is what it is."""
    meshes = {data: AbstractMesh((data, 2), ("data", "model")) for data in (2, 4)}
    tokens, rows = Batching(max_tokens=80, buckets=1), Batching(batch_size=8)
    assert recipe.shape_inputs(rows, SETTINGS, meshes[2]) == {}
    inputs = {data: recipe.shape_inputs(tokens, SETTINGS, mesh) for data, mesh in meshes.items()}
    shapes = [
        recipe.batches(EXAMPLES, tokens, SETTINGS, (), mesh=mesh)[0].tokens.shape[0]
        for mesh in meshes.values()
    ]
    assert shapes == [10, 8]
    folder = tmp_path / "run"
    recipe.open_folder(folder, SETTINGS, inputs[4])
    recipe.open_folder(folder, SETTINGS, inputs[2])  # nothing was to be lost
    (folder / "checkpoints" / "4").mkdir(parents=True)
    (folder / "checkpoints" / "4" / "commit_success.txt").write_text("")
    assert not recipe.open_folder(folder, SETTINGS, inputs[2])
    with pytest.raises(ValueError, match=r"mesh: .* multiples of 2, expected .*, got multiples of 4 "):
        recipe.open_folder(folder, SETTINGS, inputs[4])
    (folder / "DONE").write_text("{}")
    assert recipe.open_folder(folder, SETTINGS, inputs[4])


def test_a_model_may_move(tmp_path):
    """It is known by its content; a place without one, as earlier versions left it, is all there is."""
    settings = {"drafter": {"checkpoint": "a"}, "target": "b", "training": {"steps": 1}}
    settings["token_filter"] = {"reference": "c"}
    first = distill.Distill.model_validate(settings)
    moved = distill.Distill.model_validate(
        settings | {"drafter": {"checkpoint": "A"}, "target": None, "token_filter": {"reference": "C"}}
    )
    inputs = {"target": "1", "drafter": "2", "reference": "3"}
    recipe.open_folder(tmp_path / "run", first, inputs)
    (tmp_path / "run" / "DONE").write_text("{}")
    assert recipe.open_folder(tmp_path / "run", moved, inputs)
    with pytest.raises(ValueError, match="differs in drafter;"):
        recipe.open_folder(tmp_path / "run", moved, inputs | {"drafter": "4"})
    (tmp_path / "run" / "inputs.json").write_text(json.dumps({"target": "1"}))
    with pytest.raises(ValueError, match=r"differs in drafter\.checkpoint, token_filter\.reference;"):
        recipe.open_folder(tmp_path / "run", moved, inputs)


def test_files_that_no_run_made_are_left_alone(tmp_path):
    checkpoint = tmp_path / "flan"
    checkpoint.mkdir()
    names = ["config.json", "config.yaml", "tokenizer.json"]
    for name in names:
        (checkpoint / name).write_text("{}")
    with pytest.raises(ValueError, match=r"output: .*flan holds files and is no run"):
        recipe.open_folder(checkpoint, SETTINGS, {})
    assert sorted(path.name for path in checkpoint.iterdir()) == names


def test_a_start_that_was_killed_is_made_again(tmp_path, monkeypatch):
    """At each of the two files, before and after its name appears."""
    folder, replace = tmp_path / "run", recipe.os.replace
    for killed, left in ((0, ["inputs.json.tmp"]), (1, ["config.yaml.tmp", "inputs.json"])):
        calls = iter(range(3))

        def die(*paths, killed=killed, calls=calls):
            if next(calls) == killed:
                raise KeyboardInterrupt
            replace(*paths)

        with monkeypatch.context() as patch:
            patch.setattr(recipe.os, "replace", die)
            with pytest.raises(KeyboardInterrupt):
                recipe.open_folder(folder, SETTINGS, {"data": "a"})
        assert sorted(path.name for path in folder.iterdir()) == left
    assert not recipe.open_folder(folder, SETTINGS, {"data": "a"})
    assert json.loads((folder / "inputs.json").read_text()) == {"data": "a"}
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "inputs.json"]


def test_a_folder_of_a_version_with_fewer_settings_is_read(tmp_path):
    folder = tmp_path / "run"
    recipe.open_folder(folder, SETTINGS, {"data": "a"})
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    for key in ("best", "rematerialise"):
        del stored[key]
    del stored["optimizer"]["clip_norm"]
    (folder / "config.yaml").write_text(yaml.safe_dump(stored))
    (folder / "DONE").write_text("{}")
    assert recipe.open_folder(folder, SETTINGS, {"data": "a", "model": "b"})
    other = SETTINGS.model_copy(update={"rematerialise": True})
    with pytest.raises(ValueError, match="differs in rematerialise, data;"):
        recipe.open_folder(folder, other, {"data": "b", "model": "b"})


# --- one step ---------------------------------------------------------------------------------------


def one_step(batch, objective, number=0, seed=0, **changes):
    settings = SETTINGS.model_copy(update=changes)
    static = loop._Static(
        objective,
        settings.optimizer,
        settings.steps,
        settings.accumulate,
        settings.dtype,
        settings.rematerialise,
    )
    state, _ = loop._first(PARAMS, settings, None)
    state = state._replace(step=jnp.int32(number))
    return loop._compiled(static, None)(state, (), batch, jnp.uint32(seed))


def test_accumulation_equals_the_large_batch():
    """Also where micro-batches have unequal numbers of sequences and of tokens, and one has none."""
    batch = batches()[0]
    weights = batch.weights * (np.arange(8) % 4 != 1)[:, None]
    weights[0, 2:] = 0
    batch = batch._replace(weights=weights)
    # A state moves by the sign of a gradient in Adam's first step; Adafactor's shows its size as well.
    optimizer = Optimizer(name="adafactor", learning_rate=0.1, clip_norm=None)
    whole, numbers = one_step(batch, PLAIN, optimizer=optimizer)
    parts, others = one_step(batch, PLAIN, optimizer=optimizer, accumulate=4)
    assert distance(whole.params, parts.params) < 1e-6
    for name in ("loss", "gradient_norm"):
        np.testing.assert_allclose(float(numbers[name]), float(others[name]), rtol=1e-5)
    empty = batch._replace(weights=np.zeros_like(weights))
    state, numbers = one_step(empty, PLAIN, optimizer=optimizer, accumulate=4)
    assert float(numbers["loss"]) == 0
    assert distance(state.params, PARAMS) == 0


@pytest.mark.slow
def test_rematerialisation_changes_nothing():
    kept, numbers = one_step(batches()[0], OBJECTIVE)
    again, others = one_step(batches()[0], OBJECTIVE, rematerialise=True)
    np.testing.assert_allclose(float(numbers["gradient_norm"]), float(others["gradient_norm"]), rtol=1e-5)
    assert distance(kept.params, again.params) < 1e-5


@pytest.mark.slow
def test_bfloat16_computes_and_float32_remembers(tmp_path):
    seen = []

    def objective(params, frozen, batch, key):
        seen.append(params["layers"][0]["mlp"]["up"]["kernel"].dtype)
        return OBJECTIVE(params, frozen, batch, key)

    # Steps of 1e-6 of a weight add up in float32; in bfloat16 they would be rounded away.
    optimizer = Optimizer(learning_rate=1e-6, schedule="constant")
    changes = {"dtype": "bfloat16", "optimizer": optimizer}
    state, numbers = one_step(batches()[0], objective, **changes)
    assert set(seen) == {jnp.dtype("bfloat16")}
    floats = [x for x in jax.tree.leaves(state[:2]) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}
    exact = one_step(batches()[0], OBJECTIVE)[1]
    np.testing.assert_allclose(float(numbers["loss"]), float(exact["loss"]), rtol=0.02)
    moved = train(tmp_path / "run", SETTINGS.model_copy(update=changes), objective=objective)
    moved = moved["embedding"] - PARAMS["embedding"]
    assert float(jnp.abs(moved).max()) > 3e-6


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_both_optimizers_learn(tmp_path, name):
    rate = {"adamw": 0.01, "adafactor": 0.1}[name]
    settings = Training(steps=60, optimizer=Optimizer(name=name, learning_rate=rate, weight_decay=1e-4))
    train(tmp_path / "run", settings, objective=PLAIN, evaluate=None)
    found = [row["loss"] for row in metrics.read(tmp_path / "run" / "metrics.jsonl")]
    assert found[-1] < 0.5 * found[0]


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_weight_decay_follows_the_learning_rate_and_spares_vectors(name):
    def nothing(params, frozen, batch, key):
        return 0 * params["embedding"].sum(), {}

    optimizer = Optimizer(name=name, learning_rate=0.1, weight_decay=0.5, schedule="constant")
    params = one_step(batches()[0], nothing, optimizer=optimizer)[0].params
    np.testing.assert_allclose(params["embedding"], 0.95 * PARAMS["embedding"], rtol=1e-6)
    np.testing.assert_array_equal(params["norm"]["scale"], PARAMS["norm"]["scale"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 0.9045, 0.6545, 0.3455]),
        ("inverse_sqrt", [0.25, 0.5, 0.75, 1.0, 0.8944, 0.8165, 0.7559]),
    ],
)
def test_schedules(name, expected):
    """Warm-up ends at the peak, the falling ones would be at their end one step after the last."""
    optimizer = Optimizer(learning_rate=1.0, schedule=name, warmup_steps=4)
    rate = loop.schedule(optimizer, 8)
    np.testing.assert_allclose([float(rate(step)) for step in range(7)], expected, atol=1e-4)
    if name in ("linear", "cosine"):
        rate = loop.schedule(optimizer.model_copy(update={"final_fraction": 0.1}), 8)
        assert float(rate(8)) == pytest.approx(0.1)


def test_dropout_differs_from_step_to_step_and_follows_the_seed():
    batch = batches()[0]

    def loss(number, seed):
        return float(one_step(batch, OBJECTIVE, number=number, seed=seed)[1]["loss"])

    assert loss(0, 0) == loss(0, 0)
    assert len({loss(0, 0), loss(1, 0), loss(0, 1)}) == 3


# --- configuration ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 3}, "step: unknown key"),
        ({"steps": 0}, "steps: .*got 0"),
        ({"optimizer": {"name": "sgd"}}, r"optimizer\.name: .*got 'sgd'"),
        ({"best": True}, "best: expected evaluate_every"),
        ({"optimizer": {"b2": 1}}, r"optimizer\.b2: .*got 1"),
        ({"optimizer": {"warmup_steps": 2}}, r"optimizer\.warmup_steps: expected at most 1 \(steps\), got 2"),
        ({"dtype": "float16"}, "dtype: .*got 'float16'"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        config.check({"steps": 1} | changes, Training, "x.yaml")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_configuration(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        config.load(tmp_path / "x.yaml", Training)
    (tmp_path / "x.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="not a YAML file"):
        config.load(tmp_path / "x.yaml", Training)
