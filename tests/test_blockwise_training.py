"""A base and its heads learn together: what a step learns, what a run leaves, what is refused."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import shaken

import jspec
from jspec.drafters import stored
from jspec.testing import tiny_decoder, tiny_seq2seq
from training import blockwise, finetune, forward, metrics, recipe, text
from training.data import Example

VOCAB, END = 24, 1
EXAMPLES = [
    Example([4 + i % 18, 2 + i % 3, 3][: 1 + i % 3], [5 + i % 3, 6, 9 + i % 2, 7, END][i % 2 :])
    for i in range(24)
]
CORPUS = recipe.Corpus(EXAMPLES[:16], EXAMPLES[16:])
K = 3


@functools.cache
def target(kind="encoder-decoder"):
    if kind == "encoder-decoder":
        lm, params = tiny_seq2seq(vocab_size=VOCAB, num_layers=1, num_encoder_layers=1)
        return jspec.Model(lm, params, eos=(END,), decoder_start=(0,), vocab_size=VOCAB - 2)
    lm, params = tiny_decoder(vocab_size=VOCAB, num_layers=1)
    return jspec.Model(lm, params, eos=(END,), vocab_size=VOCAB - 2)


def settings(**changes):
    given = {
        "block_size": K,
        "mlp_width": 8,
        "batching": {"batch_size": 8, "buckets": 1},
        "max_new_tokens": 6,
        "generation_batch": 8,
        "training": {
            "steps": 24,
            "dropout": 0.1,
            "optimizer": {"learning_rate": 0.01},
            "evaluate_every": 12,
            "checkpoint_every": 9,
        },
    }
    return blockwise.Blockwise.model_validate(given | changes)


def canned(model, examples, writing, temperature, seed, **_):
    """Answers as if written: what is compiled to generate them is not what these tests are about."""
    random = np.random.default_rng(seed)
    return [
        Example(e.source, [*random.integers(2, 20, random.integers(2, 5)).tolist(), END]) for e in examples
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "answered", canned)
        return blockwise.run(settings(), CORPUS, folder, target=target()), folder


def steps_of(folder):
    return [row for row in metrics.read(folder / metrics.FILE) if "loss" in row]


# --- the objective ------------------------------------------------------------------------------------


def objective_of(kind, **changes):
    model = target(kind)
    network = blockwise.network_of(settings(), model)
    params = {
        "base": model.params,
        "heads": shaken(stored.Weights(network.init(jax.random.key(1))), seed=2).net,
    }
    sizes = {"vocab_size": model.vocab_size, "dropout": 0.0} | changes
    return model, params, blockwise.OneHead(model.lm, network.config, **sizes)


@pytest.mark.parametrize("kind", ["encoder-decoder", "decoder"])
def test_a_step_s_loss_is_that_of_one_head(kind):
    """Row by row in numpy, from what the base shows of the text, for every head that is drawn."""
    model, params, objective = objective_of(kind)
    config = settings()
    (batch,) = recipe.held_out(EXAMPLES[:8], config.batching, config.training, model.decoder_start)
    hidden = forward.hidden(model.lm, params["base"], batch).hidden
    before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    network = blockwise.network_of(config, model)
    module = blockwise.binder(network.config)(
        stored.Weights(params["heads"]), model.lm, params["base"]
    ).module
    outputs = {1: hidden} | {i: module.at_once(before, K - 1)[..., i - 2, :] for i in range(2, K + 1)}
    laws = {
        i: np.asarray(jax.nn.log_softmax(model.lm.head(params["base"], x)[..., : model.vocab_size]))
        for i, x in outputs.items()
    }
    step = jax.jit(objective)
    seen = {}
    for number in range(12):
        loss, numbers = step(params, (), batch, jax.random.key(number))
        seen[int(numbers["head"])] = float(loss)
    assert sorted(seen) == [1, 2, 3]
    for i, loss in seen.items():
        means = []
        for row, e in enumerate(EXAMPLES[:8]):
            texts = [*model.decoder_start, *([] if model.decoder_start else e.source), *e.target]
            first = len(texts) - len(e.target)
            # Index of a root, where the next token belongs to the answer; p_1 has no root to wait for.
            roots = range(first - 1, len(texts) - 1)
            terms = [
                -laws[i][row, at, texts[at + max(i - 1, 1)]]
                for at in roots
                if at + max(i - 1, 1) < len(texts)
            ]
            if terms:
                means.append(np.mean(terms))
        assert loss == pytest.approx(np.mean(means), rel=1e-4), i


def test_one_head_s_output_is_its_column_of_all():
    model, params, objective = objective_of("decoder")
    module = blockwise.binder(objective.config)(stored.Weights(params["heads"]), model.lm, {}).module
    hidden = jax.random.normal(jax.random.key(0), (2, 3, model.lm.config.width))
    every = module.at_once(hidden, K - 1)
    for k in range(K - 1):
        np.testing.assert_allclose(module.one(hidden, jnp.int32(k)), every[..., k, :], atol=1e-5)


def test_the_first_head_learns_as_fine_tuning_does():
    """p_1 is the base's own: same loss, same gradient, none for the other heads."""
    model, params, objective = objective_of("encoder-decoder", vocab_size=VOCAB)
    config = settings()
    (batch,) = recipe.held_out(EXAMPLES[:8], config.batching, config.training, model.decoder_start)
    plain = finetune.CrossEntropy(model.lm, 0.0, 0.0)
    step = jax.jit(jax.value_and_grad(objective, has_aux=True))
    fitted = jax.jit(jax.value_and_grad(plain, has_aux=True))
    heads = []
    while 1 not in heads:
        (loss, numbers), found = step(params, (), batch, jax.random.key(len(heads)))
        heads.append(int(numbers["head"]))
    (wanted, _), base = fitted(params["base"], (), batch, jax.random.key(0))
    assert loss == pytest.approx(float(wanted), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found["base"], base)
    assert not any(x.any() for x in jax.tree.leaves(found["heads"]))


# --- a run --------------------------------------------------------------------------------------------


def test_a_run_learns_base_and_heads(trained):
    found, folder = trained
    rows = steps_of(folder)
    heads = [row["head"] for row in rows]
    assert {*heads} == {1, 2, 3}
    for head in (1, 2, 3):
        mine = [row["loss"] for row in rows if row["head"] == head]
        assert mine[-1] < 0.9 * mine[0]
    curve = [row for row in metrics.read(folder / metrics.FILE) if "tau_0" in row]
    assert [row["step"] for row in curve] == [12, 24]
    for row in curve:
        assert row["tau_0"] == pytest.approx(1 + row["accepted_1"] + row["accepted_2"])
        assert {"validation_loss", "accuracy"} <= row.keys()
    before, after = target().params["embedding"], found.base.params["embedding"]
    assert (before != after).any()


def test_what_a_run_leaves_is_read_as_any_model_and_drafter(trained):
    """And its greedy decoding is the trained base's own."""
    found, folder = trained
    base = jspec.load(folder / blockwise.BASE)
    assert (base.eos, base.decoder_start, base.vocab_size) == ((END,), (0,), VOCAB - 2)
    jax.tree.map(np.testing.assert_array_equal, base.params, found.base.params)
    again = stored.load(folder, base)
    assert (again.kind, again.num_tokens) == ("blockwise", K - 1)
    jax.tree.map(np.testing.assert_array_equal, again.weights, found.heads.weights)
    sources = [e.source for e in EXAMPLES[:4]]
    plain = jspec.generate(base, sources, max_new_tokens=8)
    drafter = jspec.drafters.load(folder, base, sample=False)
    drafted = jspec.generate(base, sources, max_new_tokens=8, drafter=drafter)
    assert drafted.tokens == plain.tokens
    assert plain.tokens != jspec.generate(target(), sources, max_new_tokens=8).tokens


def test_a_run_goes_on_exactly(trained, tmp_path, monkeypatch):
    """Interrupted between two checkpoints: same heads, same losses, same weights."""
    whole, folder = trained
    batch = text.Texts.batch

    def interrupted(self, step, params):
        if step == 13:
            raise KeyboardInterrupt
        return batch(self, step, params)

    monkeypatch.setattr(text, "answered", canned)
    with monkeypatch.context() as patch:
        patch.setattr(text.Texts, "batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            blockwise.run(settings(), CORPUS, tmp_path / "run", target=target())
    assert not (tmp_path / "run" / stored.CONFIG).exists()
    again = blockwise.run(settings(), CORPUS, tmp_path / "run", target=target())
    jax.tree.map(np.testing.assert_array_equal, again.base.params, whole.base.params)
    assert (tmp_path / "run" / metrics.FILE).read_bytes() == (folder / metrics.FILE).read_bytes()
    assert (tmp_path / "run" / stored.TENSORS).read_bytes() == (folder / stored.TENSORS).read_bytes()


def test_a_finished_run_is_read_and_another_one_refused(trained, monkeypatch):
    found, folder = trained
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    again = blockwise.run(settings(), CORPUS, folder, target=target())
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before
    jax.tree.map(np.testing.assert_array_equal, again.base.params, found.base.params)
    with pytest.raises(ValueError, match="differs in block_size"):
        blockwise.run(settings(block_size=4), CORPUS, folder, target=target())
    # Killed after the last step and before the drafter was written: it comes to the same end.
    monkeypatch.setattr(text, "answered", canned)
    written = (folder / stored.TENSORS).read_bytes()
    (folder / stored.CONFIG).unlink()
    blockwise.run(settings(), CORPUS, folder, target=target())
    assert json.loads((folder / stored.CONFIG).read_text())["num_tokens"] == K - 1
    assert (folder / stored.TENSORS).read_bytes() == written


@pytest.mark.slow
def test_text_that_the_base_writes(tmp_path):
    """Sequence-level distillation, of a decoder-only base from a folder, in bfloat16."""
    model = target("decoder")
    blockwise._keep(tmp_path / "target", model)
    training = {"steps": 2, "dtype": "bfloat16"}
    config = settings(target=str(tmp_path / "target"), sources=[{"text": "target"}], training=training)
    found = blockwise.run(config, CORPUS, tmp_path / "run")
    assert list((tmp_path / "run" / "text").iterdir())
    prompts = [e.source for e in EXAMPLES[:3]]
    plain = jspec.generate(found.base, prompts, max_new_tokens=6)
    drafted = jspec.generate(found.base, prompts, max_new_tokens=6, drafter=stored.drafter(found.heads))
    assert drafted.tokens == plain.tokens


def test_heads_to_go_on_from(tmp_path, monkeypatch):
    class Begun(Exception):
        pass

    def begin(params, *_, **__):
        raise Begun(params)

    monkeypatch.setattr(text, "answered", canned)
    monkeypatch.setattr(blockwise, "fit", begin)
    network = blockwise.network_of(settings(), target())
    heads = shaken(stored.Weights(network.init(jax.random.key(5))), seed=2)
    stored.save(tmp_path / "heads", "blockwise", network.config, heads, num_tokens=K - 1)
    config = settings(init=str(tmp_path / "heads"))
    with pytest.raises(Begun) as begun:
        blockwise.run(config, CORPUS, tmp_path / "run", target=target())
    (params,) = begun.value.args
    jax.tree.map(np.testing.assert_array_equal, params, {"base": target().params, "heads": heads.net})
    config = settings(init=str(tmp_path / "heads"), block_size=K + 1)
    with pytest.raises(ValueError, match=r"init: expected a drafter with HeadsConfig\(.*num_heads=3"):
        blockwise.run(config, CORPUS, tmp_path / "other", target=target())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size\n.*greater than or equal to 2"),
        ({"mlp_width": 0}, "mlp_width\n.*greater than or equal to 1"),
        ({"blocks": 3}, "blocks\n.*Extra inputs are not permitted"),
        (
            {"sources": [{"text": "drafter", "every": 2, "examples": 2}]},
            "sources: expected text of references or target, got drafter",
        ),
        (
            {"training": {"steps": 1, "accumulate": 2}},
            r"training\.accumulate: expected 1, for a step learns one head, got 2",
        ),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_a_run_without_a_base_is_refused(tmp_path):
    with pytest.raises(ValueError, match="target: expected a checkpoint or a run's folder, got none"):
        blockwise.run(settings(), CORPUS, tmp_path / "run")
