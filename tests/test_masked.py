"""Masked drafters: a model that lags behind, and one whose positions end before the target's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import a_masked, shaken
from zoo import reference, target

from jspec import drafters, engine, sampling, testing, verify
from jspec.drafters import nets
from jspec.drafters.model import read
from jspec.drafters.nets import Weights
from jspec.models import language_model
from jspec.types import Context

V = 11


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_a_model_that_lags_behind_drafts_from_the_same_laws(causal):
    """Rows 9, 4 and 0 tokens behind; the block's forward reads 3 of them, the loop before it what is more."""
    model = target(V)
    network = a_masked(causal=causal)(model)
    weights = shaken(Weights(network.init(jax.random.key(0))))
    drafter = drafters.masked(network, weights, 2)
    tokens = jnp.array([[3, 1, 4, 1, 5, 2, 6, 5, 3, 5]] * 3)
    lengths, behind = jnp.array([10, 5, 7]), jnp.array([9, 4, 0])
    state = drafter.method.init(drafter.params, model.prompt([[1]] * 3), 16, model.lm)
    lm = language_model(network.config.lm)
    state = read(lm, weights.net["lm"], state, tokens, lengths - 1 - behind)
    assert state.lengths.tolist() == [0, 0, 6]
    sampler = sampling.sampler(sampling.Settings(jnp.ones(3)))
    context = Context(
        tokens, lengths, jnp.full(3, 9), sampler.init(tokens, lengths), sampler, model.lm, model.params, None
    )
    draft, after = jax.jit(lambda state, keys: drafter.method.propose(drafter.params, state, context, keys))(
        state, sampling.row_keys(jnp.arange(3))
    )
    assert after.lengths.tolist() == [9, 4, 6]
    text = nets.Text(tokens, lengths, lengths[:, None] - 1, jnp.zeros((3, 10, 32)), {})
    logits = network.teach(weights, model.lm, model.params, text, 2)[:, 0]
    np.testing.assert_allclose(draft.laws, jax.nn.softmax(logits), atol=2e-5)


@pytest.mark.slow
def test_a_model_with_fewer_positions_than_the_target():
    """It drafts as far as it can, and the row goes on plainly; a shorter row beside it drafts on."""
    model = target(V)
    small = testing.tiny_decoder(seed=1, vocab_size=V + 2, rotary=None, bounded=True, context_length=12)
    network = a_masked(lm=small[0].config)(model)
    weights = shaken(Weights(network.init(jax.random.key(0))))
    prompts = [[3], [2, 6, 5, 3, 5, 2, 6]]
    state = engine.generate(
        model.params,
        model.prompt(prompts),
        sampling.row_keys(jnp.arange(2)),
        target=model.lm,
        drafter=drafters.masked(network, weights, 3),
        verify=verify.block(),
        max_new_tokens=20,
        record=engine.statistics,
    )
    for row, tokens in enumerate(prompts):
        assert np.asarray(state.tokens)[row, : int(state.lengths[row])].tolist() == reference(
            model, tokens, 20
        )
        proposed = np.asarray(state.record.proposed)[row]
        assert proposed[: int(state.lengths[row])].max() == 3
        assert proposed[16:].max() == 0
