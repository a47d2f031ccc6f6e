"""Public checkpoints of draft heads: read, written, held against what their own programs compute, refused."""

import json
import re

import heads as public
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from heads import CHECKPOINTS, LOGITS, Random, Shown, put
from safetensors.numpy import load_file
from zoo import Tiny, reference

from jspec import drafters, engine, sampling, verify
from jspec.drafters import kinds, nets
from jspec.drafters.block import block_network
from jspec.drafters.block_network import BlockConfig
from jspec.drafters.nets import Text, Weights
from jspec.io import heads
from jspec.io.torch_file import TorchTensors, save_torch
from jspec.models import language_model
from jspec.testing import tiny_checkpoint
from jspec.types import Block, Prompt

MAKERS = [pytest.param(maker, id=maker.__name__) for maker in CHECKPOINTS]


@pytest.fixture(scope="module")
def target():
    return public.target()


def made(folder, maker, target, dtype=np.float16):
    raw, tensors = maker(Random(dtype), target)
    put(folder, raw, {} if CHECKPOINTS[maker] == "hydra" else tensors)
    if CHECKPOINTS[maker] == "hydra":
        (folder / "model.safetensors").unlink()
        save_torch(folder / "hydra_lm_head.pt", tensors)
    return folder, raw, tensors


def stored(path):
    if path.suffix != ".pt":
        return load_file(path)
    file = TorchTensors(path)
    return {name: file.read(name) for name in file.shapes}


def text_of(target, length=9, a=5):
    """A random text and what the target shows of it, and the same for the original programs."""
    rng, params = np.random.default_rng(1), target.params
    taps = range(public.L + 1)
    shown = Shown(
        rng.integers(0, public.V, length),
        rng.standard_normal((length, public.E)),
        {tap: rng.standard_normal((length, public.E)) for tap in taps},
        np.asarray(params["embedding"]),
        np.asarray(params["unembedding"]["kernel"]).T,
    )
    text = Text(
        jnp.asarray(shown.tokens[None], jnp.int32),
        jnp.array([length]),
        jnp.array([[a]]),
        jnp.asarray(shown.hidden[None], jnp.float32),
        {tap: jnp.asarray(x[None], jnp.float32) for tap, x in shown.taps.items()},
    )
    return text, shown


def laws(network, weights, target, num_tokens):
    """Logits after one anchor, [K, Vd]."""
    text, _ = text_of(target)
    teach = jax.jit(lambda weights: network.teach(weights, target.lm, target.params, text, num_tokens))
    return np.asarray(teach(weights))[0, 0]


def same_bits(ours, theirs):
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(np.asarray(ours).view(np.uint8), np.asarray(theirs).view(np.uint8))


@pytest.mark.parametrize("maker", MAKERS)
def test_reading_and_writing_back_loses_nothing(maker, target, tmp_path):
    dtype = ml_dtypes.bfloat16 if maker in (public.eagle3, public.dspark) else np.float16
    folder, raw, tensors = made(tmp_path / "theirs", maker, target, dtype)
    first = heads.read(folder, target)
    assert first.layout.name == CHECKPOINTS[maker]
    again = heads.write(
        tmp_path / "ours",
        first.layout.name,
        first.network,
        first.weights,
        target,
        raw=first.raw,
        extras=first.extras,
    )
    written = stored(again / first.layout.file)
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        same_bits(written[name], tensor)
    said = json.loads((again / "config.json").read_text())
    assert {key: said[key] for key in raw} == raw
    second = heads.read(again, target)
    assert second.network is first.network
    jax.tree.map(same_bits, second.weights, first.weights)


@pytest.mark.slow
@pytest.mark.parametrize("maker", MAKERS)
def test_a_network_says_what_the_original_says(maker, target, tmp_path):
    folder, raw, tensors = made(tmp_path, maker, target, np.float32)
    checkpoint, layout = heads.read(folder, target), CHECKPOINTS[maker]
    num_tokens = 1 if "eagle" in layout else 3
    expected = LOGITS[layout](raw, tensors, text_of(target)[1], 5, num_tokens)
    found = laws(checkpoint.network, checkpoint.weights, target, num_tokens)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)
    if checkpoint.weights.ids is not None:
        np.testing.assert_array_equal(checkpoint.weights.ids, tensors["d2t"] + np.arange(public.COLUMNS))


# --- other spellings --------------------------------------------------------------------------------


def spelled(tensors, *pairs):
    for old, new in pairs:
        tensors = {re.sub(old, new, name): tensor for name, tensor in tensors.items()}
    return tensors


DROPOUT = (
    (r"^(hydra_mlp\.\d)\.1\.", r"\1.3."),
    (r"^(hydra_mlp\.\d)\.0\.", r"\1.1."),
    (r"^(hydra_lm_head\.\d)\.", r"\1.1."),
)


@pytest.mark.parametrize(
    ("maker", "pairs"),
    [
        (public.eagle, [("^", "model.")]),
        (public.eagle3, [("midlayer", "model.layers.0")]),
        (public.eagle3_speculators, [("layers.0", "midlayer")]),
        (public.medusa, [("^", "medusa_head.")]),
        (public.hydra, DROPOUT),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_spellings_of_names(maker, pairs, target, tmp_path):
    raw, tensors = maker(Random(), target)
    first = heads.read(made(tmp_path / "one", maker, target)[0], target)
    second = heads.read(put(tmp_path / "two", raw, spelled(tensors, *pairs)), target)
    assert second.network is first.network
    jax.tree.map(same_bits, second.weights, first.weights)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_files_of_torch(file, target, tmp_path):
    folder, _, tensors = made(tmp_path, public.eagle, target)
    (folder / "model.safetensors").rename(folder / "weights")
    save_torch(folder / file, tensors) if file.endswith(".bin") else (folder / "weights").rename(
        folder / file
    )
    kernel = heads.read(folder, target).weights.net["fc"]["kernel"]
    same_bits(np.asarray(kernel), np.ascontiguousarray(tensors["fc.weight"].T))


# --- refusals ---------------------------------------------------------------------------------------


def without(name):
    return lambda raw, tensors: tensors.pop(name)


def having(**entries):
    return lambda raw, tensors: raw.update(entries)


def tensor(name, value):
    return lambda raw, tensors: tensors.update({name.replace("__", "."): value(tensors)})


def inner(key, **entries):
    return lambda raw, tensors: raw[key].update(entries)


REFUSALS = [
    (
        public.eagle,
        without("layers.0.mlp.up_proj.weight"),
        r"missing tensors: layers\.0\.mlp\.up_proj\.weight",
    ),
    (public.eagle, tensor("more", lambda t: t["fc.bias"]), r"unknown tensors: more"),
    (
        public.eagle,
        tensor("fc__weight", lambda t: t["fc.weight"][:, :20]),
        r"fc\.weight of shape \(16, 20\) does not make a fc\.kernel of shape \(32, 16\)",
    ),
    (public.eagle, having(hidden_size=32), r"width: expected a target of width 32, .* got 16"),
    (public.eagle, having(vocab_size=24), r"vocab_size: expected a target of vocab_size 24, .* got 23"),
    (
        public.eagle,
        having(rope_theta=5e5),
        r"rope_theta: expected a target of rope_theta 500000, .* got 10000",
    ),
    (
        public.eagle,
        tensor("embed_tokens__weight", lambda t: t["embed_tokens.weight"][::-1].copy()),
        "embed_tokens",
    ),
    (
        public.eagle,
        tensor("embed_tokens__weight", lambda t: t["embed_tokens.weight"][:9]),
        r"\(23, 16\), got \(9, 16\)",
    ),
    (public.eagle, having(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling: expected none"),
    (public.eagle, having(hidden_act="gelu"), "hidden_act: expected silu, got 'gelu'"),
    (public.eagle_speculators, having(layernorms=True), "layernorms = True is not supported"),
    (public.eagle3, without("d2t"), r"d2t: expected the ids of 11 columns among 23 tokens"),
    (public.eagle3, tensor("d2t", lambda t: t["d2t"][::-1].copy()), r"d2t: expected increasing ids below 23"),
    (public.eagle3, tensor("d2t", lambda t: t["d2t"][:9]), r"d2t: expected 11 offsets, .* got shape \(9,\)"),
    (public.eagle3, tensor("t2d", lambda t: ~t["t2d"]), r"t2d: expected 23 marks, set for the 11 ids"),
    (public.eagle3, having(norm_before_fc=True), "norm_before_fc = True is not supported"),
    (
        public.eagle3_1,
        inner("eagle_config", eagle_aux_hidden_state_layer_ids=[0, 3, 9]),
        r"taps: .* 10 layers.* got 8",
    ),
    (
        public.eagle3_speculators,
        lambda raw, t: raw.pop("norm_before_residual"),
        "norm_before_residual is missing",
    ),
    (
        public.medusa,
        having(medusa_num_heads=5),
        r"medusa_num_heads: expected the tensors of 5 heads, got those of 3",
    ),
    (
        public.medusa,
        tensor("0__2__weight", lambda t: t["0.2.weight"][:, :8]),
        r"width: .* width 8, .* got 16",
    ),
    (public.hydra, having(hydra_head_arch="prefix-mlp"), "hydra_head_arch = 'prefix-mlp' is not supported"),
    (public.hydra, having(hydra_num_layers=3), "hydra_num_layers: expected the tensors of 3, got those of 2"),
    (
        public.dflash,
        having(num_target_layers=12),
        r"num_target_layers: expected a target of 12 layers, got 8",
    ),
    (
        public.dflash,
        inner("dflash_config", target_layer_ids=[1, 7]),
        r"target_layer_ids: .* of its 8, got \[1, 7\]",
    ),
    (
        public.dflash,
        inner("dflash_config", mask_token_id=23),
        r"mask_token_id: expected an id below 23, .* got 23",
    ),
    (public.dflash, inner("dflash_config", mask_token_id=None), "mask_token_id: .* missing"),
    (
        public.dflash,
        having(architectures=["DFlash2DraftModel"]),
        "architectures: .* DFlash2, which is not supported",
    ),
    (public.dspark, having(markov_head_type="gated"), "markov_head_type = 'gated' is not supported"),
    (
        public.dspark,
        tensor("lm_head__weight", lambda t: t["lm_head.weight"] + np.float16(1)),
        "lm_head.weight: expected",
    ),
]


@pytest.mark.parametrize(("maker", "change", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_a_wrong_checkpoint_or_target_is_refused(maker, change, message, target, tmp_path):
    raw, tensors = json.loads(json.dumps(maker(Random(), target)[0])), maker(Random(), target)[1]
    change(raw, tensors)
    folder = put(tmp_path, raw, tensors)
    with pytest.raises(ValueError, match=message) as caught:
        heads.read(folder, target)
    assert str(caught.value).startswith(str(folder))
    assert "\n" not in str(caught.value)


def test_a_rope_base_that_is_right_all_the_same(target, tmp_path):
    raw, tensors = public.eagle(Random(), target)
    folder = put(tmp_path, raw | {"rope_theta": 5e5}, tensors)
    assert heads.read(folder, target, rope_theta=5e5).network.config.rope_theta == 5e5


def test_a_target_that_scales_its_embedding_is_refused(target, tmp_path):
    folder, _, _ = made(tmp_path, public.eagle3, target)
    with pytest.raises(ValueError, match=r"embedding_scale: .* 4 times"):
        heads.read(folder, public.target(embedding_scale=4.0))


def test_what_is_no_head_is_refused(target, tmp_path):
    with pytest.raises(ValueError, match=r"expected a drafter in one of the layouts pard, eagle"):
        heads.read(put(tmp_path / "other", {"architectures": ["Llama"]}, {"x": np.zeros(2)}), target)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        heads.read(tmp_path / "empty", target)
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"medusa_lm_head\.safetensors"):
        heads.read(tmp_path / "empty", target)


# --- networks that were made here -------------------------------------------------------------------


def weights_of(network, seed=0):
    return Weights(network.init(jax.random.key(seed)))


def test_a_layout_refuses_a_network_it_has_no_words_for(target, tmp_path):
    config = drafters.EagleConfig(width=public.E, vocab_size=public.V, head_dim=4, qk_norm=True)
    network = drafters.eagle_network(config)
    with pytest.raises(ValueError, match="the layout eagle cannot say qk_norm = True"):
        heads.write(tmp_path / "a", "eagle", network, weights_of(network), target)
    with pytest.raises(ValueError, match=r"layout: expected one of pard, .* got 'egle'"):
        heads.write(tmp_path / "a", "egle", network, weights_of(network), target)
    config = drafters.HeadsConfig(kind="medusa", width=public.E, vocab_size=public.V, head="own")
    network = drafters.heads_network(config)
    with pytest.raises(ValueError, match="the layout hydra has no such parameters: heads"):
        heads.write(tmp_path / "a", "hydra", network, weights_of(network), target)
    assert not (tmp_path / "a").exists()
    heads.write(tmp_path / "a", "medusa", network, weights_of(network), target)
    with pytest.raises(ValueError, match="folder: expected a new or an empty one"):
        heads.write(tmp_path / "a", "medusa", network, weights_of(network), target)


def test_a_head_that_is_the_target_s_is_written_out_where_the_layout_wants_one(target, tmp_path):
    ids = jnp.array([0, 2, 3, 7, 9, 20], jnp.int32)
    head = nets.rows_of_head(target.lm, target.params, ids)
    config = drafters.Eagle3Config(
        width=public.E, vocab_size=public.V, head_dim=4, taps=(1, 2, 5), head="rows", draft_vocab=6
    )
    network = drafters.eagle_network(config)
    weights = weights_of(network)._replace(head=head, ids=ids)
    for name in ("eagle3", "eagle3/speculators"):
        folder = tmp_path / name.replace("/", " ")
        found = heads.read(heads.write(folder, name, network, weights, target), target)
        assert found.network.config.head == "own"
        np.testing.assert_array_equal(found.weights.ids, ids)
        np.testing.assert_array_equal(found.weights.net["head"], head)
        assert found.network.taps == (1, 2, 5)

    config = drafters.HeadsConfig(kind="medusa", width=public.E, vocab_size=public.V, num_heads=2)
    network = drafters.heads_network(config)
    folder = heads.write(tmp_path / "medusa", "medusa", network, weights_of(network), target)
    kernels = heads.read(folder, target).weights.net["head"]
    np.testing.assert_allclose(kernels, np.stack([target.params["unembedding"]["kernel"]] * 2), rtol=1e-6)


def test_a_mask_that_was_trained_is_written_beside_the_tensors(target, tmp_path):
    config = BlockConfig(
        width=public.E,
        vocab_size=public.V,
        taps=(2, 4),
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        mlp_width=8,
    )
    network = block_network(config)
    weights = weights_of(network)
    folder = heads.write(tmp_path / "one", "dflash", network, weights, target, num_tokens=4)
    assert TorchTensors(folder / "mask_embedding.pt").numbers == {"mask_token_id": public.V - 1}
    told = json.loads((folder / "config.json").read_text())["dflash_config"]
    assert told == {"target_layer_ids": [1, 3], "projector_type": "dflash", "mask_token_id": public.V - 1}
    found = heads.read(folder, target)
    assert found.network is network
    jax.tree.map(same_bits, found.weights, weights)
    assert found.layout.settings(found.raw) == {"num_tokens": 4}
    row = weights._replace(net=weights.net | {"mask": target.params["embedding"][7]})
    folder = heads.write(tmp_path / "two", "dflash", network, row, target)
    assert not (folder / "mask_embedding.pt").exists()
    assert json.loads((folder / "config.json").read_text())["mask_token_id"] == 7


# --- PARD -------------------------------------------------------------------------------------------


def pard(folder, **overrides):
    return tiny_checkpoint(
        folder, "qwen3", vocab_size=public.V + 2, pard_token=24, spd_type="pard", **overrides
    )


def test_pard_is_an_ordinary_model_with_a_mask(target, tmp_path):
    folder = pard(tmp_path / "theirs")
    first = heads.read(folder, target)
    np.testing.assert_array_equal(first.weights.net["masks"], first.weights.net["lm"]["embedding"][24:25])
    again = heads.write(tmp_path / "ours", "pard", first.network, first.weights, target, raw=first.raw)
    tensors = load_file(folder / "model.safetensors")
    written = load_file(again / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        same_bits(written[name], tensor)
    second = heads.read(again, target)
    assert second.network is first.network
    jax.tree.map(same_bits, second.weights, first.weights)

    trained = first.weights._replace(net=first.weights.net | {"masks": jnp.full((1, 32), 0.25)})
    heads.write(tmp_path / "trained", "pard", first.network, trained, target)
    found = heads.read(tmp_path / "trained", target)
    assert found.raw["pard_token"] == public.V  # the first id that is no token of the target's
    same_bits(found.weights.net["masks"], trained.net["masks"])


@pytest.mark.slow
def test_pard_says_what_the_model_says_behind_masks(target, tmp_path):
    checkpoint = heads.read(pard(tmp_path), target)
    lm, params = language_model(checkpoint.network.config.lm), checkpoint.weights.net["lm"]
    _, shown = text_of(target)
    tokens = jnp.asarray([[*shown.tokens[:6], 24, 24]], jnp.int32)
    cache = lm.start(params, Prompt(tokens, jnp.array([8])), 0)
    hidden = lm.extend(params, cache, Block(tokens, jnp.arange(8)[None])).hidden
    expected = lm.head(params, hidden)[0, 5:, : public.V]
    found = laws(checkpoint.network, checkpoint.weights, target, 3)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"vocab_size": 20, "pard_token": 3},
            "vocab_size: expected a target of at most 20 tokens, .* got 23",
        ),
        ({"pard_token": 25}, "pard_token: expected an id below 25, .* got 25"),
        ({"pard_token": -1}, "pard_token: expected an id below 25, .* got -1"),
    ],
)
def test_a_pard_checkpoint_for_another_vocabulary_is_refused(overrides, message, target, tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen3", **({"vocab_size": 25} | overrides))
    with pytest.raises(ValueError, match=message):
        heads.read(folder, target)


# --- drafting ---------------------------------------------------------------------------------------


PROMPTS, NEW = [[3, 1], [5, 2, 6]], [12, 9]


def drafts_as_plain(drafter, target):
    """Greedy text of two rows with an acceptance rule for drawn drafts."""
    model = Tiny(target.lm, target.params)
    state = engine.generate(
        target.params,
        model.prompt(PROMPTS),
        sampling.row_keys(jnp.array([0, 1])),
        target=target.lm,
        drafter=drafter,
        verify=verify.block(),
        max_new_tokens=jnp.array(NEW),
    )
    for row, (prompt, new) in enumerate(zip(PROMPTS, NEW, strict=True)):
        found = np.asarray(state.tokens)[row, : int(state.lengths[row])].tolist()
        assert found == reference(model, prompt, new)


def test_a_loaded_drafter_drafts(tmp_path):
    shallow = public.target(num_layers=1)
    drafter = drafters.load(made(tmp_path, public.medusa, shallow)[0], shallow)
    assert drafter.method.draws == "iid"
    drafts_as_plain(drafter, shallow)


@pytest.mark.slow
@pytest.mark.parametrize("maker", MAKERS)
def test_every_loaded_drafter_drafts(maker, target, tmp_path):
    drafts_as_plain(drafters.load(made(tmp_path, maker, target)[0], target), target)


@pytest.mark.slow
def test_a_loaded_pard_drafts(target, tmp_path):
    drafts_as_plain(drafters.load(pard(tmp_path), target, num_tokens=3), target)


def test_settings_say_more_than_the_checkpoint(target, tmp_path):
    folder, _, _ = made(tmp_path, public.dflash, target)
    assert drafters.load(folder, target).method.depth == 3
    assert drafters.load(folder, target, num_tokens=2).method.depth == 2
    folder, _, _ = made(tmp_path / "eagle", public.eagle3_speculators, target)
    assert drafters.load(folder, target).method.depth == 3
    tree = drafters.TreeSettings(top_k=2, depth=2, num_nodes=4)
    assert drafters.load(folder, target, tree=tree).method.width == 4


# --- our own ----------------------------------------------------------------------------------------


@pytest.fixture
def eagle3(monkeypatch, target):
    """A kind, and a network of it over rows of the target's head."""
    kind = kinds.Kind(drafters.Eagle3Config, drafters.eagle_network, drafters.eagle)
    monkeypatch.setitem(kinds.KINDS, "eagle3", kind)
    config = drafters.Eagle3Config(
        width=public.E, vocab_size=public.V, head_dim=4, taps=(1, 2, 5), head="rows", draft_vocab=3
    )
    network = drafters.eagle_network(config)
    ids = jnp.array([2, 7, 20], jnp.int32)
    head = nets.rows_of_head(target.lm, target.params, ids)
    return network, weights_of(network)._replace(head=head, ids=ids)


def test_our_own_folders(eagle3, target, tmp_path):
    network, weights = eagle3
    about = {"target": str(tmp_path / "target"), "data": "none"}
    drafters.save(tmp_path / "a", "eagle3", network, weights, num_tokens=4, dtype="bfloat16", about=about)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    assert tensors["ids"].tolist() == [2, 7, 20]
    assert not any(tensor.shape == (public.E, 3) for tensor in tensors.values())  # no rows of the head
    assert tensors["net.fc.kernel"].dtype == ml_dtypes.bfloat16
    assert tensors["net.stack.norm.scale"].dtype == np.float32
    drafter = drafters.load(tmp_path / "a", target)
    assert drafter.method.depth == 4
    found = drafter.params.weights
    expected = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), weights.net)
    np.testing.assert_array_equal(found.net["fc"]["kernel"], expected["fc"]["kernel"])
    np.testing.assert_array_equal(found.head, weights.head)
    assert drafters.load(tmp_path / "a", target, dtype="bfloat16", num_tokens=2).method.depth == 2
    with pytest.raises(ValueError, match=r"vocab_size 23, got one of 24"):
        drafters.load(tmp_path / "a", public.target(vocab_size=24))
    with pytest.raises(ValueError, match=r"taps: expected a target of at least 5 layers, .* got 3 layers"):
        drafters.load(tmp_path / "a", public.target(num_layers=3))
    with pytest.raises(ValueError, match=r"kind: expected that of a Eagle3Config, got 'other'"):
        kinds.KINDS["other"] = kinds.Kind(drafters.EagleConfig, drafters.eagle_network, drafters.eagle)
        try:
            drafters.save(tmp_path / "b", "other", network, weights)
        finally:
            del kinds.KINDS["other"]


def test_a_drafter_knows_its_target(eagle3, target, tmp_path, monkeypatch):
    tiny_checkpoint(tmp_path / "target", vocab_size=public.V, hidden_size=public.E, num_hidden_layers=5)
    network, weights = eagle3
    about = {"target": str(tmp_path / "target")}
    drafters.save(tmp_path / "trained" / "tiny", "eagle3", network, weights, about=about)
    monkeypatch.setattr(drafters.files, "SHIPPED", tmp_path / "trained")
    assert drafters.load("tiny").params.weights.head.shape == (public.E, 3)
    drafters.save(tmp_path / "nameless", "eagle3", network, weights)
    with pytest.raises(ValueError, match=r"model: expected the target of .*nameless"):
        drafters.load(tmp_path / "nameless")
