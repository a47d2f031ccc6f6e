"""What test_parallel.py looks at, on simulated CPU devices: ``simulated_mesh.py SECTION FOLDER CASE...``.

A process that runs tests has one device, hence a script. Each section prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jspec
from experiments import dryrun
from jspec import drafters, engine, models, parallel, sampling, testing, verify
from jspec.io import orbax
from jspec.types import Drafter, Prompt, PyTree, Verifier
from training import acceptance, distill, finetune, hosts, loop, recipe, text
from training import config as configs
from training.config import Batching, Optimizer, Training
from training.data import Example

MESHES = {"one": None, "2x4": (2, 4), "8x1": (8, 1), "1x8": (1, 8)}
V, CAPACITY = 64, 37  # no other dimension is 37
SOURCES = [[5, 9, 11, 1], [3, 1], [8, 8, 2, 30, 4, 1], [60, 1], [17, 23, 1], [7, 7, 7, 1], [41, 2, 1], [9, 1]]


def mesh_of(name: str) -> Any:
    sizes = MESHES[name]
    return None if sizes is None else parallel.make_mesh(*sizes)


def placed(model: jspec.Model, mesh: Mesh | None) -> jspec.Model:
    if mesh is None:
        return model
    shardings = parallel.param_shardings(mesh, model.params, model.lm.config)
    return dataclasses.replace(model, params=parallel.shard(model.params, shardings))


def encoder_decoder() -> jspec.Model:
    sizes = {"num_layers": 1, "num_encoder_layers": 1, "num_heads": 8}
    return jspec.Model(*testing.tiny_seq2seq(seed=2, vocab_size=V, **sizes), decoder_start=(0,))


def grouped() -> jspec.Model:
    """Two key-value heads, which four devices do not divide."""
    sizes = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
    return jspec.Model(*testing.tiny_decoder(seed=1, vocab_size=V, **sizes))


def near(model: jspec.Model) -> jspec.Model:
    """A draft model that is often right: the weights with some noise."""
    leaves, structure = jax.tree.flatten(model.params)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    noisy = [x * (1 + jax.random.normal(key, x.shape) / 4) for x, key in zip(leaves, keys, strict=True)]
    return dataclasses.replace(model, params=jax.tree.unflatten(structure, noisy))


def drafting(kind: str, model: jspec.Model, mesh: Mesh | None) -> tuple[Drafter, Verifier]:
    if kind == "plain":
        return drafters.plain(), verify.target_only()
    if kind == "tree":
        return drafters.token_recycling(6, k=2), verify.tree()
    return drafters.model(placed(near(model), mesh), 3), verify.block()


# --- generation -------------------------------------------------------------------------------------


def generation(folder: Path, *cases: str) -> dict[str, Any]:
    """Tokens and mean accepted length of ``kind:mesh``, greedy and sampled rows in turn."""
    found: dict[str, Any] = {}
    for case in cases:
        kind, name = case.split(":")
        model, mesh = (grouped() if kind == "grouped" else encoder_decoder()), mesh_of(name)
        draft, rule = drafting(kind, model, mesh)
        count = 10 if kind == "refill" else 8  # two sequences wait until rows are free
        output = jspec.generate(
            placed(model, mesh),
            [*SOURCES, *SOURCES[:2]][:count],
            drafter=draft,
            verify=rule,
            batch_size=8,
            max_new_tokens=[9, 5, 10, 8, 7, 6, 4, 8, 6, 6][:count],
            temperature=[0.0, 1.0] * (count // 2),
            seed=[*range(count)],
            widths=(draft.method.width,),
            capacity=24,
        )
        found[case] = {"tokens": output.tokens, "tau": output.stats.mean_accepted_length}
    return found


# --- the compiled programs --------------------------------------------------------------------------


def programs(folder: Path, *names: str) -> dict[str, Any]:
    """Collectives of reading prompts, of a round and of refilling rows on a (2, 4) mesh, and where the state
    lies before and after."""
    mesh, batch = mesh_of("2x4"), len(SOURCES)
    found: dict[str, Any] = {}
    for name in names:
        model = grouped() if name == "grouped" else encoder_decoder()
        draft, rule = drafting(name, model, mesh)
        model = placed(model, mesh)
        source = jnp.zeros((batch, 6), jnp.int32), jnp.full(batch, 6)
        prompt = Prompt(jnp.ones((batch, 20), jnp.int32), jnp.full(batch, 20), *source)
        shared = {"target": model.lm, "drafter": draft, "sampler": sampling.greedy(batch)}
        state = engine.start(
            model.params,
            prompt,
            sampling.row_keys(jnp.arange(batch)),
            max_new_tokens=17,
            capacity=CAPACITY,
            record=engine.statistics,
            **shared,
        )
        wanted = parallel.state_shardings(mesh, state)
        found[f"{name} start"] = {"moved": moved(state, places(state), wanted), "collectives": []}
        rest = {"stops": engine.no_stops(), "record": engine.statistics, "widths": (1, draft.method.width)}
        one_round = functools.partial(engine.round, verify=rule, **shared, **rest)
        round_ = jax.jit(lambda params, state, one_round=one_round: one_round(params, state)[0])
        found[f"{name} round"] = compiled(round_.lower(model.params, state), wanted)
        if name != "tree":
            absorb = engine._absorb.lower(
                model.params, state, draft, shared["sampler"], target=model.lm, chunk=16
            )
            found[f"{name} absorb"] = compiled(absorb, wanted)
            some = jax.eval_shape(lambda state: jax.tree.map(lambda leaf: leaf[:2], state), state)
            some = parallel.abstract(some, parallel.state_shardings(mesh, some))
            insert = engine._insert.lower(state, jnp.arange(2), some)
            found[f"{name} insert"] = compiled(insert, wanted)
    return found


def moved(arrays: PyTree, placed: PyTree, wanted: PyTree) -> list[str]:
    """The leaves (``arrays`` has their shapes) that are not placed where they should be."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    pairs = zip(leaves, jax.tree.leaves(placed), jax.tree.leaves(wanted), strict=True)
    return [jax.tree_util.keystr(p) for (p, x), got, want in pairs if not got.is_equivalent_to(want, x.ndim)]


def places(arrays: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.sharding, arrays)


def compiled(lowered: Any, wanted: PyTree) -> dict[str, Any]:
    program = lowered.compile()
    arrays = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), lowered.out_info)
    kinds = parallel.collectives(program.as_text())
    return {
        "moved": moved(arrays, program.output_shardings, wanted),
        "collectives": sorted([kind, shape] for kind, shape in kinds),
    }


# --- training ---------------------------------------------------------------------------------------

STEPS = 4
SETTINGS = finetune.Finetune(
    architecture={
        "kind": "encoder-decoder",
        **{"vocab_size": V, "width": 16, "mlp_width": 48, "num_layers": 1, "num_encoder_layers": 1},
        **{"num_heads": 8, "head_dim": 4},
    },
    eos=1,
    decoder_start=0,
    batching=Batching(batch_size=8, buckets=1),
    training=Training(steps=STEPS, checkpoint_every=2, optimizer=Optimizer(learning_rate=0.01)),
)


EXAMPLES = [Example(source, [*source[-2::-1], 1]) for source in SOURCES * 4]
CORPUS = recipe.Corpus(EXAMPLES, EXAMPLES[:8])
EVALUATED: list[str] = []  # leaves that an evaluation got elsewhere than decoding has them


def watch(name: str, mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Within it, `acceptance.validate` or `acceptance.simulate` look at where their params lie."""
    original = getattr(acceptance, name)

    def look(*arguments: Any, **settings: Any) -> dict[str, float]:
        models_and_params = arguments[:-1]
        for lm, params in zip(models_and_params[::2], models_and_params[1::2], strict=True):
            if mesh is not None:
                wanted = parallel.param_shardings(mesh, params, lm.config)
                EVALUATED.extend(moved(params, places(params), wanted))
        return original(*arguments, **settings)

    return mock.patch.object(acceptance, name, look)


def numbers(folder: Path, name: str) -> list[float]:
    """A column of a run's metrics."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def train(folder: Path, mesh: Mesh | None) -> tuple[jspec.Model, list[float]]:
    with watch("validate", mesh):
        model = finetune.run(SETTINGS, CORPUS, folder, mesh=mesh)
    return model, numbers(folder, "loss")


def distance(a: PyTree, b: PyTree) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs)


def misplaced(model: jspec.Model, mesh: Mesh) -> list[str]:
    wanted = parallel.param_shardings(mesh, model.params, model.lm.config)
    return moved(model.params, places(model.params), wanted)


def training(folder: Path, *names: str) -> dict[str, Any]:
    """Losses on one device and on meshes, and how far the weights are from those of one device."""
    model, losses = train(folder / "one", None)
    found: dict[str, Any] = {"losses": {"one": losses}, "distance": {}}
    for name in names:
        other, found["losses"][name] = train(folder / name, mesh_of(name))
        found["distance"][name] = distance(model.params, other.params)
    return found | {"misplaced": EVALUATED}


def distillation(folder: Path, *names: str) -> dict[str, Any]:
    """Losses and simulated acceptance on one device and on meshes: a drafter learns from references, from
    what the target writes and from what it writes itself."""
    settings = distill.Distill(
        drafter=distill.Drafter(architecture={**(SETTINGS.architecture or {}), "width": 8}),
        loss="lk_hybrid",
        sources=(
            text.Source(text="references"),
            text.Source(text="target", temperature=1.0, examples=8),
            text.Source(text="drafter", temperature=1.0, examples=8, every=4),
        ),
        batching=SETTINGS.batching,
        max_new_tokens=6,
        generation_batch=8,
        evaluation_text="target",
        training=SETTINGS.training.model_copy(update={"steps": 6}),
    )
    found: dict[str, Any] = {}
    for name in names:
        mesh, run = mesh_of(name), folder / name
        with watch("simulate", mesh):
            distill.run(settings, CORPUS, run, target=placed(encoder_decoder(), mesh), mesh=mesh)
        found[name] = {key: numbers(run, key) for key in ("loss", "alpha_1", "greedy_agreement")}
    return found | {"misplaced": EVALUATED}


def topologies(folder: Path) -> dict[str, Any]:
    """A run on (4, 2): read on (2, 4) and on one device, and gone on with on (2, 4) from its first half. And
    the same run on one device."""
    run, alone = folder / "run", train(folder / "alone", None)
    model, losses = train(run, parallel.make_mesh(4, 2))
    mesh = mesh_of("2x4")
    found = {
        "alone": alone[1],
        "one": distance(model.params, jspec.load(run).params),
        "2x4": distance(model.params, (there := jspec.load(run, mesh=mesh)).params),
        "placed": misplaced(there, mesh),
        "losses": losses,
    }
    try:
        jspec.generate(there, [1, 2], drafter=jspec.load(run))
    except ValueError as error:
        found["refused"] = str(error)
    (run / "DONE").unlink()
    shutil.rmtree(run / "checkpoints" / str(STEPS))
    other, found["resumed"] = train(run, mesh)
    return found | {"after": distance(alone[0].params, other.params)}


def loading(folder: Path) -> dict[str, Any]:
    """A Hugging Face folder, read onto a mesh."""
    testing.tiny_checkpoint(folder, "llama")
    mesh = mesh_of("2x4")
    one, there = jspec.load(folder), jspec.load(folder, mesh=mesh)
    return {"distance": distance(one.params, there.params), "placed": misplaced(there, mesh)}


def processes(folder: Path, address: str, process: str) -> dict[str, Any]:
    """Two hosts with four devices each: what each of them gets."""
    parallel.initialize_distributed(address, 2, int(process))
    parallel.initialize_distributed(address, 2, int(process))  # nothing the second time
    tokens = generation(folder, "refill:2x4")["refill:2x4"]["tokens"]
    _, losses = train(folder / "run", mesh_of("2x4"))
    told = [hosts.on_first(lambda: [process, "ä" * 5])]

    def wrong() -> None:
        raise FileNotFoundError("nothing there")

    try:
        hosts.on_first(wrong)
    except OSError as error:
        told.append([str(error)])
    return {"devices": jax.device_count(), "tokens": tokens, "losses": losses, "told": told}


def zeros(config: models.Config, dtype: Any) -> PyTree:
    shapes = jax.eval_shape(lambda params: models.cast(params, dtype), models.abstract_params(config))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def dry_run(folder: Path, path: str) -> dict[str, Any]:
    """What a dry run says of a small model, and what the first device holds of the real one."""
    settings = configs.load(path, dryrun.DryRun)
    (layout,) = dryrun.run(settings)
    mesh = parallel.make_mesh(layout.devices.data, layout.devices.model)
    target, drafter = (orbax.architecture(values) for values in (settings.target, settings.drafter))
    masters = zeros(target, jnp.float32)
    layout_of_masters = parallel.param_shardings(mesh, masters, target, parallel.FULLY_SHARDED)
    masters = parallel.shard(masters, layout_of_masters)
    held: dict[str, Any] = {"params, float32": masters}
    for optimizer in settings.step.optimizers:
        rule = loop.transformation(optimizer, 1)
        shapes = jax.eval_shape(rule.init, masters)
        where = parallel.optimizer_shardings(shapes, masters, layout_of_masters)
        held[f"optimizer state, {optimizer.name}"] = jax.jit(rule.init, out_shardings=where)(masters)
    served, small = (
        placed(
            jspec.Model(
                models.language_model(config),
                zeros(config, jnp.bfloat16),
                decoder_start=(0,),
            ),
            mesh,
        )
        for config in (target, drafter)
    )
    rows, decoding = settings.decoding.batch_size, settings.decoding
    counts = jnp.ones(rows, jnp.int32)
    state = engine.start(
        served.params,
        Prompt(jnp.zeros((rows, 1), jnp.int32), counts, jnp.ones((rows, decoding.source), jnp.int32), counts),
        sampling.row_keys(counts),
        target=served.lm,
        drafter=drafters.model(small, decoding.gamma),
        sampler=sampling.greedy(rows),
        max_new_tokens=2,
        capacity=decoding.capacity,
    )
    held |= {"params, bfloat16": served.params, "the drafter's params": small.params}
    held |= {"cache": state.cache, "the drafter's state": state.drafter_state}
    first = {
        name: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        for name, tree in held.items()
    }
    programs = [[p.name, p.layers, dict(p.collectives), p.temporaries] for p in layout.programs]
    return {"said": layout.training | layout.decoding, "held": first, "programs": programs}


SECTIONS = {
    section.__name__: section
    for section in (generation, programs, training, distillation, topologies, loading, processes, dry_run)
}

if __name__ == "__main__":
    section, folder, *cases = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 4 if section == "processes" else 8)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".cache" / "jax"))
    if section != "processes":
        parallel.initialize_distributed()  # does nothing on one machine
    print(json.dumps(SECTIONS[section](Path(folder), *cases)))
