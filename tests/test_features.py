"""Features on disk: those of the target's forward, whatever was interrupted, and a distillation with them."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Model
from jspec.testing import tiny_decoder, tiny_seq2seq
from training import distill, features, forward, recipe
from training.data import Batches, Example
from training.features import Features, Shown

EXAMPLES = [Example([3, 4, 1], [5, 6, 1]), Example([7, 1], [8, 1]), Example([2, 9, 4, 1], [3, 1])] * 3


@functools.cache
def target(kind="decoder") -> Model:
    start = (0,) if kind == "encoder-decoder" else ()
    make = tiny_seq2seq if kind == "encoder-decoder" else tiny_decoder
    lm, params = make(vocab_size=11)
    return Model(lm, params, eos=(1,), decoder_start=start)


def batches(model: Model) -> Batches:
    return Batches(EXAMPLES, decoder_start=model.decoder_start, batch_size=4, buckets=2, seed=1)


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_features_are_those_of_the_forward(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "SHARD", 4)
    model = target(kind)
    shown = Shown(batches(model), Features(model, EXAMPLES, tmp_path))
    for step in range(3):
        batch = shown[step]
        expected = np.asarray(forward.hidden(model.lm, model.params, batch).hidden)
        assert batch.features.dtype == np.float16
        inside = np.arange(batch.tokens.shape[1])[None] < batch.lengths[:, None]
        inside &= batch.weights.sum(1, keepdims=True) > 0  # rows that only fill the batch
        np.testing.assert_allclose(batch.features[inside], expected[inside], rtol=1e-3, atol=1e-3)
        assert not batch.features[~inside].any()


def test_taps_stand_side_by_side(tmp_path):
    model = target()
    found = Features(model, EXAMPLES, tmp_path, taps=(0, 2), precision="bfloat16")
    batch = Batches(EXAMPLES[:1], batch_size=1, buckets=1, shuffle=False)[0]
    taps = forward.hidden(model.lm, model.params, batch, taps=(0, 2)).taps
    expected = np.concatenate([taps[0], taps[2]], axis=-1)[0, : len(found[0])]
    np.testing.assert_allclose(found[0].astype(np.float32), expected, rtol=1e-2, atol=1e-2)
    assert found.nbytes == sum(len(found[i]) for i in range(len(EXAMPLES))) * expected.shape[1] * 2


def test_hidden_states_and_taps_come_from_one_pass(tmp_path):
    model = target()
    both = Features(model, EXAMPLES[:1], tmp_path, taps=(0, 2), hidden=True)
    apart = [Features(model, EXAMPLES[:1], tmp_path, taps=taps) for taps in ((), (0, 2))]
    np.testing.assert_array_equal(both[0], np.concatenate([part[0] for part in apart], axis=-1))
    assert both.nbytes == sum(part.nbytes for part in apart)
    assert len({*tmp_path.iterdir()}) == 3
    Features(model, EXAMPLES[:1], tmp_path, hidden=True)  # all there is without taps: the same folder
    assert len({*tmp_path.iterdir()}) == 3


def test_of_all_layers_that_are_kept_each_run_reads_its_own(tmp_path):
    model = target()
    kept = Features(model, EXAMPLES, tmp_path, taps=(0, 1, 2), hidden=True)
    for taps in ((), (2, 0), (0, 1, 2)):
        own = Features(model, EXAMPLES, tmp_path, taps=taps, hidden=True)
        for step in range(3):
            few, all_ = (Shown(batches(model), found, taps)[step].features for found in (own, kept))
            np.testing.assert_array_equal(few, all_)


def test_an_interrupted_computation_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "SHARD", 4)
    told = []
    whole = Features(target(), EXAMPLES, tmp_path, progress=lambda *done: told.append(done))
    first = [whole[i].copy() for i in range(len(EXAMPLES))]
    (tmp_path / next(iter(tmp_path.iterdir())) / "00001.npy").unlink()
    again = Features(target(), EXAMPLES, tmp_path, progress=lambda *done: told.append(done))
    assert told == [(4, 9), (8, 9), (9, 9), (8, 9)]
    for i, expected in enumerate(first):
        np.testing.assert_array_equal(again[i], expected)


def test_what_float16_cannot_hold_is_refused(tmp_path):
    model = target()
    large = Model(
        model.lm, model.params | {"norm": {"scale": jnp.full(model.lm.config.width, 1e6)}}, eos=(1,)
    )
    with pytest.raises(ValueError, match="expected finite numbers in float16, got others; bfloat16"):
        Features(large, EXAMPLES, tmp_path)
    assert Features(large, EXAMPLES, tmp_path, precision="bfloat16").nbytes > 0


def test_a_distillation_with_features_learns_what_it_learns_without(tmp_path):
    settings = {
        "drafter": {"layers": [0]},
        "loss": "forward_kl",
        "sources": [{"text": "target", "temperature": 1, "weight": 2}, {"text": "references"}],
        "batching": {"batch_size": 4, "buckets": 1},
        "max_new_tokens": 6,
        "training": {"steps": 4, "optimizer": {"learning_rate": 1e-2}},
    }
    corpus, losses = recipe.Corpus(EXAMPLES, EXAMPLES), {}
    for precision in (None, "float16"):
        folder = tmp_path / str(precision)
        config = distill.Distill.model_validate(settings | {"features": precision})
        distill.run(config, corpus, folder, target=target("encoder-decoder"))
        lines = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
        losses[precision] = [float(line.split('"loss": ')[1].split(",")[0]) for line in lines]
    assert len(losses[None]) == 4
    np.testing.assert_allclose(losses["float16"], losses[None], rtol=2e-3)


def test_features_of_the_drafters_own_text_are_refused():
    own = {"text": "drafter", "every": 2, "examples": 2}
    with pytest.raises(ValueError, match="features: expected none with text of the drafter"):
        distill.Distill.model_validate(
            {"drafter": {"layers": [0]}, "sources": [own], "features": "float16", "training": {"steps": 1}}
        )
