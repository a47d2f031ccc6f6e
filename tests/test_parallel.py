"""Meshes: layouts as tables here, results on simulated devices in child processes (`simulated_mesh.py`)."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jspec import engine, models, parallel, testing
from jspec.models import DecoderConfig, Seq2SeqConfig
from jspec.types import Prompt, PyTree

P = PartitionSpec
FULL = parallel.FULLY_SHARDED
SCRIPT = Path(__file__).parent / "simulated_mesh.py"


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SCRIPT.parent.parent)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(SCRIPT), *arguments], env=environment, **pipes)


def result(child: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = child.communicate(timeout=900)
    assert child.returncode == 0, err
    return json.loads(out.splitlines()[-1])


# --- layouts ----------------------------------------------------------------------------------------


def mesh(data: int, model: int) -> AbstractMesh:
    return AbstractMesh((data, model), ("data", "model"))


def specs(shardings: PyTree) -> dict[str, PartitionSpec]:
    """Every leaf's layout by its path, dimensions that are whole left out at the end."""
    found = {}
    for path, sharding in jax.tree_util.tree_leaves_with_path(shardings):
        axes = list(sharding.spec)
        while axes and axes[-1] is None:
            axes.pop()
        found[jax.tree_util.keystr(path, simple=True, separator=".")] = P(*axes)
    return found


T5 = Seq2SeqConfig(
    vocab_size=64, width=32, mlp_width=48, num_layers=1, num_encoder_layers=1, num_heads=8, head_dim=4
)


def test_layout_of_an_encoder_decoder():
    found = specs(parallel.param_shardings(mesh(2, 4), models.abstract_params(T5), T5))
    for stack in ("", "encoder."):
        layer = f"{stack}layers.0"
        for name in ("query", "key", "value"):
            assert found[f"{layer}.attention.{name}.kernel"] == P(None, "model")
        assert found[f"{layer}.attention.out.kernel"] == P("model")
        assert found[f"{layer}.mlp.gate.kernel"] == found[f"{layer}.mlp.up.kernel"] == P(None, "model")
        assert found[f"{layer}.mlp.down.kernel"] == P("model")
        assert found[f"{layer}.attention_norm.scale"] == found[f"{stack}norm.scale"] == P()
        assert found[f"{stack}relative_bias"] == P(None, "model")
    assert found["layers.0.cross.key.kernel"] == P(None, "model")
    assert found["embedding"] == P("model")
    assert found["unembedding.kernel"] == P(None, "model")


def test_layout_of_biases_and_learned_positions():
    settings = {"positions": "learned", "context_length": 16, "source_length": 16, "bounded": True}
    config = dataclasses.replace(
        T5, **settings, norm="layer", bias=True, head_bias=True, gated=False, tied=True
    )
    found = specs(parallel.param_shardings(mesh(2, 4), models.abstract_params(config), config))
    assert found["layers.0.attention.query.bias"] == found["layers.0.mlp.up.bias"] == P("model")
    assert found["layers.0.attention.out.bias"] == found["layers.0.mlp.down.bias"] == P()
    assert found["head_bias"] == P("model")
    assert found["positions"] == P()
    whole = specs(parallel.param_shardings(mesh(2, 4), models.abstract_params(config), config, FULL))
    assert whole["positions"] == P(None, "data")
    assert whole["layers.0.mlp.down.bias"] == P("data")


def test_fully_sharded_cuts_weights_along_both_axes():
    params = models.abstract_params(T5)
    found = specs(parallel.param_shardings(mesh(2, 4), params, T5, FULL))
    assert found["layers.0.mlp.down.kernel"] == P("model", "data")
    assert found["layers.0.cross.query.kernel"] == P("data", "model")
    assert found["embedding"] == P("model", "data")
    assert found["norm.scale"] == P()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "cut"),
    [(8, 8, 4, True), (8, 2, 4, False), (8, 2, 2, True), (6, 6, 4, False)],
)
def test_attention_is_cut_between_key_value_heads_only(heads, kv_heads, devices, cut):
    """The width of two heads of 8 divides by 4, but a device would hold half a head."""
    lm, params = testing.tiny_decoder(num_heads=heads, num_kv_heads=kv_heads, width=8 * heads, num_layers=1)
    found = specs(parallel.param_shardings(mesh(1, devices), params, lm.config))
    names = ("query", "key", "value")
    assert {found[f"layers.0.attention.{name}.kernel"] for name in names} == {
        P(None, "model") if cut else P()
    }
    assert found["layers.0.attention.out.kernel"] == (P("model") if cut else P())
    assert found["layers.0.mlp.up.kernel"] == P(None, "model")


def test_what_does_not_divide_is_whole():
    lm, params = testing.tiny_decoder(vocab_size=61, num_layers=1)
    found = specs(parallel.param_shardings(mesh(1, 2), params, lm.config))
    assert found["embedding"] == found["unembedding.kernel"] == P()
    assert found["layers.0.mlp.up.kernel"] == P(None, "model")


def test_params_of_a_model_without_named_parts_are_whole():
    lm, params = testing.table_lm(np.eye(4))
    assert parallel.param_shardings(mesh(2, 2), params, lm.config).spec == P()


def test_optimizer_state_follows_its_params():
    config = DecoderConfig(
        **{"vocab_size": 512, "width": 256, "mlp_width": 256, "num_layers": 1, "num_heads": 4},
        **{"num_kv_heads": 2, "head_dim": 128, "context_length": 8, "bounded": True},
    )
    params = models.abstract_params(config)
    placed = parallel.param_shardings(mesh(2, 2), params, config, FULL)

    def layout(rule: optax.GradientTransformation) -> dict[str, PartitionSpec]:
        state = jax.eval_shape(rule.init, params)
        shardings = parallel.optimizer_shardings(state, params, placed)
        for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
            sharding.shard_shape(leaf.shape)  # raises where an axis does not divide
        return specs(shardings)

    adam = layout(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    for moment in ("mu", "nu"):
        mine = {key: spec for key, spec in adam.items() if f".{moment}." in key}
        assert list(mine.values()) == list(specs(placed).values())
    counts = [spec for key, spec in adam.items() if key.endswith("count")]
    assert counts
    assert set(counts) == {P()}

    factored = layout(optax.adafactor(1e-3))
    kernels = ("query.kernel", "key.kernel", "out.kernel", "up.kernel")
    by = {
        (kind, name): next(s for key, s in factored.items() if f".{kind}." in key and key.endswith(name))
        for kind in ("v_row", "v_col", "v")
        for name in (*kernels, "embedding", "attention_norm.scale")
    }
    # query is [256, 512]: rows lack the longer dimension; up is square, and its rows lack the last one.
    assert by["v_row", "query.kernel"] == P("data")
    assert by["v_col", "query.kernel"] == P("model")
    assert by["v_row", "out.kernel"] == P("data")
    assert by["v_col", "out.kernel"] == P("model")
    assert by["v_row", "up.kernel"] == by["v_row", "key.kernel"] == P("data")
    assert by["v_col", "up.kernel"] == P("model")
    assert by["v_row", "embedding"] == P("data")
    assert by["v_col", "embedding"] == P("model")
    assert by["v", "query.kernel"] == by["v_row", "attention_norm.scale"] == P()


def test_state_goes_by_rows_and_caches_by_heads_too():
    lm, params = testing.tiny_seq2seq(num_heads=4)
    counts = jax.ShapeDtypeStruct((8,), jnp.int32)
    prompt = Prompt(
        jax.ShapeDtypeStruct((8, 1), jnp.int32), counts, jax.ShapeDtypeStruct((8, 5), jnp.int32), counts
    )
    cache = jax.eval_shape(lambda params, prompt: lm.start(params, prompt, 8), params, prompt)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    state = engine.State(prompt.tokens, *[counts] * 5, keys, (), cache, {"own": cache})
    found = specs(parallel.state_shardings(mesh(2, 4), state))
    assert found["tokens"] == found["lengths"] == found["keys"] == P("data")
    for cached in ("cache.", "drafter_state.own."):
        for name in ("keys", "values", "cross_keys", "cross_values"):
            assert found[f"{cached}{name}.0"] == P("data", "model")
        assert found[f"{cached}source_lengths"] == P("data")
    assert specs(parallel.state_shardings(mesh(8, 1), state))["cache.keys.0"] == P("data", "model")
    assert specs(parallel.state_shardings(mesh(3, 8), state))["cache.keys.0"] == P()


# --- the mesh ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 0}, "data: expected a whole number >= 1, got 0"),
        ({"model": -1}, "model: expected a whole number >= 1, got -1"),
        ({"model": 1000}, "model: expected a divisor of 1 devices, got 1000"),
        ({"data": 2, "model": 8}, "mesh: expected at most 1 devices, got 2 x 8"),
    ],
)
def test_a_mesh_that_cannot_be(sizes, message, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=message):
        parallel.make_mesh(**sizes)


def test_a_mesh_of_several_processes_has_all_their_devices(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="mesh: expected all of 2 processes' 8 devices, got 1 x 4"):
        parallel.make_mesh(1, 4)


def test_a_coordinator_needs_two_numbers(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "second")
    with pytest.raises(
        ValueError, match="JAX_PROCESS_ID: expected a number beside localhost:1, got 'second'"
    ):
        parallel.initialize_distributed()


def test_numbers_need_a_coordinator(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"JAX_COORDINATOR_ADDRESS: .* beside JAX_PROCESS_ID=0, got none"):
        parallel.initialize_distributed(process=0)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(ValueError, match=r"JAX_COORDINATOR_ADDRESS: .* beside JAX_NUM_PROCESSES=2, got none"):
        parallel.initialize_distributed()


def test_a_cluster_that_cannot_be_joined_is_an_error(monkeypatch):
    def alone():
        raise ValueError("coordinator_address should be defined.")

    def broken():
        raise ValueError("SLURM_NTASKS is not a number")

    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jax.distributed, "initialize", alone)
    parallel.initialize_distributed()
    monkeypatch.setattr(jax.distributed, "initialize", broken)
    with pytest.raises(ValueError, match="SLURM_NTASKS"):
        parallel.initialize_distributed()


def test_a_drafter_may_be_bound_to_no_device_or_to_the_targets():
    """One elsewhere is refused: `test_a_run_on_other_meshes`."""
    alone = SingleDeviceSharding(jax.devices()[0])
    one = NamedSharding(parallel.make_mesh(1, 1), P())  # the same device
    weights = {name: jax.device_put(jnp.ones(2), where) for name, where in (("alone", alone), ("mesh", one))}
    for drafter in ((), jnp.ones(2), np.ones(2), "name", *weights.values()):
        for target in (jnp.ones(2), *weights.values()):
            parallel.check_together("drafter", {"weights": drafter}, {"weights": target})


def test_mesh_of_arrays():
    _, params = testing.tiny_decoder(num_layers=1)
    assert parallel.mesh_of(params) is None
    there = parallel.make_mesh(1, 1)
    lm, params = testing.tiny_decoder(num_layers=1)
    placed = parallel.shard(params, parallel.param_shardings(there, params, lm.config))
    assert parallel.mesh_of({"none": None, "number": 3, "params": placed}) == there
    assert parallel.bytes_per_device(placed) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_collectives_of_a_program():
    text = """
      %a.1 = bf16[8,4]{1,0:T(8,128)(2,1)} all-gather(bf16[2,4]{1,0} %p), dimensions={0}
      ROOT %b = (f32[2]{0}, f32[3,4]{1,0}) all-reduce(f32[2]{0} %x, f32[3,4]{1,0} %y), to_apply=%add
      %c = f32[2]{0} all-reduce-start(f32[2]{0} %x)
      %d = f32[2]{0} all-reduce-done(f32[2]{0} %c)
      %e = f32[2]{0} add(f32[2]{0} %all-reduce.3, f32[2]{0} %x)
    """
    assert parallel.collectives(text) == {
        ("all-gather", "bf16[8,4]"): 1,
        ("all-reduce", "(f32[2], f32[3,4])"): 1,
        ("all-reduce", "f32[2]"): 1,
    }


# --- on eight devices -------------------------------------------------------------------------------

QUICK = ("model:2x4", "tree:2x4")
REST = (
    *("model:8x1", "model:1x8", "tree:8x1", "tree:1x8", "plain:2x4", "plain:8x1", "plain:1x8"),
    *("grouped:2x4", "refill:2x4", "refill:8x1"),
)


def generated(tmp_path: Path, cases: tuple[str, ...]) -> dict[str, Any]:
    kinds = dict.fromkeys(case.split(":")[0] for case in cases)
    return result(start("generation", str(tmp_path), *(f"{kind}:one" for kind in kinds), *cases))


def check_tokens(found: dict[str, Any], cases: tuple[str, ...]) -> None:
    for case in cases:
        kind = case.split(":")[0]
        assert found[case] == found[f"{kind}:one"], case
        if kind != "plain":
            assert found[case]["tau"] > 1.05, "nothing was accepted, so nothing was tested"


def test_tokens_are_those_of_one_device(tmp_path):
    """Greedy and sampled rows, with a draft model and with a tree."""
    found = generated(tmp_path, QUICK)
    check_tokens(found, QUICK)
    assert found["model:2x4"]["tokens"][::2] == found["tree:2x4"]["tokens"][::2]  # the greedy rows


@pytest.mark.slow
def test_tokens_are_those_of_one_device_everywhere(tmp_path):
    """The other meshes; plain decoding; rows that are refilled; key-value heads that do not divide."""
    check_tokens(generated(tmp_path, REST), REST)


def check_programs(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name, program in result(start("programs", str(tmp_path), *names)).items():
        assert program["moved"] == [], name
        for kind, shape in program["collectives"]:
            # What is gathered of a cache (37 slots) may be the rows that are put into it, two of eight.
            if ",37" in shape and kind != "all-reduce":
                assert name.endswith("insert"), (name, kind, shape)
                assert shape.split("[")[1].startswith(("1,", "2,")), (name, kind, shape)


@pytest.mark.slow
def test_no_program_gathers_the_cache(tmp_path):
    """And every leaf of the state comes out of a round where it went in, so that nothing compiles twice."""
    check_programs(tmp_path, ("model",))


@pytest.mark.slow
def test_no_program_gathers_the_cache_of_other_drafters(tmp_path):
    check_programs(tmp_path, ("tree", "grouped"))


@pytest.mark.slow
def test_losses_are_those_of_one_device(tmp_path):
    found = result(start("training", str(tmp_path), "2x4", "8x1", "1x8"))
    one = found["losses"].pop("one")
    for name, losses in found["losses"].items():
        np.testing.assert_allclose(losses, one, rtol=1e-5, err_msg=name)
        assert found["distance"][name] < 1e-3, name  # Adam divides small gradients by their own size
    assert found["misplaced"] == [], "evaluations want weights whole along data"


@pytest.mark.slow
def test_distillation_is_that_of_one_device(tmp_path):
    """Texts of target and drafter among the sources, and what evaluations say."""
    found = result(start("distillation", str(tmp_path), "one", "2x4"))
    assert found.pop("misplaced") == []
    for name, values in found["2x4"].items():
        assert values, name
        np.testing.assert_allclose(values, found["one"][name], rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_a_run_changes_its_mesh(tmp_path):
    """The same losses on one device, on (4, 2), and on (2, 4) from a checkpoint of (4, 2)."""
    found = result(start("topologies", str(tmp_path)))
    assert found["one"] == found["2x4"] == 0
    assert found["placed"] == []
    assert found["alone"][0] > found["alone"][-1]
    np.testing.assert_allclose(found["losses"], found["alone"], rtol=1e-5)
    np.testing.assert_allclose(found["resumed"], found["alone"], rtol=1e-5)
    assert found["refused"].startswith(
        "drafter: expected params on the target's devices ([8] of them), got others"
    )
    assert found["after"] < 1e-3  # Adam divides small gradients by their own size


def test_a_model_is_loaded_onto_a_mesh(tmp_path):
    assert result(start("loading", str(tmp_path))) == {"distance": 0, "placed": []}


@pytest.mark.slow
def test_two_processes_compute_what_one_does(tmp_path):
    """Two hosts of four devices: the same tokens, losses and checkpoint on both, equal to those of one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    children = [start("processes", str(tmp_path), address, str(process)) for process in range(2)]
    first, second = map(result, children)
    assert first == second
    assert first["devices"] == 8
    assert first["told"] == [["0", "äääää"], ["nothing there"]]  # by process 0
    one = result(start("generation", str(tmp_path), "refill:one"))
    assert first["tokens"] == one["refill:one"]["tokens"]
    trained = result(start("training", str(tmp_path / "alone")))
    np.testing.assert_allclose(first["losses"], trained["losses"]["one"], rtol=1e-5)
