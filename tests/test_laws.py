"""The target's laws on disk: what they were made of, and what a batch has of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Model
from jspec.testing import tiny_decoder, tiny_seq2seq
from training import features, forward, laws
from training.data import Batches, Example
from training.features import Features, Shown
from training.laws import StoredLaws

EXAMPLES = [Example([3, 4, 1], [5, 6, 1]), Example([7, 1], [8, 1]), Example([2, 9, 4, 1], [3, 1])] * 3


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_they_are_those_of_the_forward(kind, tmp_path, monkeypatch):
    """At every place of an answer, without what cannot come out; in files that stay."""
    monkeypatch.setattr(features, "SHARD", 4)
    monkeypatch.setattr(laws, "PLACES", 5)
    lm, params = (tiny_seq2seq if kind == "encoder-decoder" else tiny_decoder)(vocab_size=13)
    start = (0,) if kind == "encoder-decoder" else ()
    model = Model(lm, params, eos=(1,), decoder_start=start, vocab_size=11, banned=(4, 7))
    shown = Features(model, EXAMPLES, tmp_path)
    told = []
    stored = StoredLaws(model, shown, EXAMPLES, tmp_path, progress=lambda *done: told.append(done))
    assert told == [(4, 9), (8, 9), (9, 9)]
    batches = Batches(EXAMPLES, decoder_start=start, batch_size=4, buckets=2, seed=1)
    for step in range(3):
        batch = Shown(batches, shown, None, stored)[step]
        logits = np.array(forward.logits(model.lm, model.params, batch)[..., :11], np.float64)
        logits[..., [4, 7]] = -np.inf
        inside = batch.weights > 0
        expected = np.log(np.exp(logits).sum(-1))
        np.testing.assert_allclose(batch.laws.normalizer[inside], expected[inside], atol=2e-2)
        np.testing.assert_array_equal(batch.laws.best[inside], logits.argmax(-1)[inside])
        assert not batch.laws.normalizer[~inside].any()
    again = StoredLaws(model, shown, EXAMPLES, tmp_path, progress=lambda *done: told.append(done))
    assert len(told) == 3
    jax.tree.map(np.testing.assert_array_equal, again.batch([8, -1], 9), stored.batch([8, -1], 9))
    other = dataclasses.replace(model, banned=())
    StoredLaws(other, shown, EXAMPLES, tmp_path, progress=lambda *done: told.append(done))
    assert len(told) == 6


def test_laws_of_a_batch_are_made_block_by_block(monkeypatch):
    monkeypatch.setattr(laws, "ROWS", 4)
    lm, params = tiny_decoder(vocab_size=13)
    hidden = jax.random.normal(jax.random.key(0), (2, 3, lm.config.width))
    found = laws.laws_of(params, hidden, lm=lm, vocab_size=11)
    logits = lm.head(params, hidden)[..., :11]
    np.testing.assert_allclose(found.normalizer, jax.nn.logsumexp(logits, axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(found.best, jnp.argmax(logits, axis=-1))
