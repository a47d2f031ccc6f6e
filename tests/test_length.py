"""Stopping rules: how many tokens a chain drafts is read off the drafter's own law, at any temperature."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from zoo import full_logits, reference, target

from jspec import drafters, engine, sampling, verify

V, PROMPT, NEW, DEPTH = 11, [1, 4, 1, 5], 16, 4


def _entropy(law: np.ndarray) -> np.ndarray:
    return -(law * np.log(law)).sum(-1)


@pytest.mark.parametrize(
    ("rule", "sure"),
    [
        (drafters.confidence, lambda law: law.max(-1)),
        (drafters.entropy_bound, lambda law: 1 - np.sqrt(0.2 * _entropy(law))),
    ],
)
def test_a_greedy_chain_stops_where_its_drafter_is_unsure(rule, sure):
    """The target drafts for itself, so that every draft is right and a round's length is the rule's alone."""
    model = target(V)
    text = reference(model, PROMPT, NEW)
    logits = full_logits(model, np.array([text], np.int32))[0].astype(np.float64)
    law = np.exp(logits - logits.max(-1, keepdims=True))
    scores = sure(law / law.sum(-1, keepdims=True))[len(PROMPT) - 1 : -1]  # of every new token's law
    threshold = float(np.sort(scores)[NEW // 2 - 1 : NEW // 2 + 1].mean())
    expected, start = [], 0
    while start < NEW:
        drafts = min(DEPTH, NEW - start - 1)
        unsure = np.flatnonzero(scores[start : start + drafts] < threshold)
        drafts = int(unsure[0]) if unsure.size else drafts
        expected += [drafts] * (drafts + 1)
        start += drafts + 1
    assert len(set(expected)) > 2
    state = engine.generate(
        model.params,
        model.prompt([PROMPT]),
        sampling.row_keys(jnp.array([0])),
        target=model.lm,
        drafter=drafters.model(model, DEPTH, sample=False, proceed=rule(threshold)),
        verify=verify.target_only(),
        max_new_tokens=NEW,
        record=engine.statistics,
    )
    assert np.asarray(state.tokens)[0, : len(text)].tolist() == text
    proposed = np.asarray(state.record.proposed)[0, len(PROMPT) : len(text)]
    assert proposed.tolist() == expected
