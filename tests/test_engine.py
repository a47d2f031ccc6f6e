"""The engine on tiny random models: greedy equality, row independence, stops, turns, refills, compilation."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import CASES, Tiny, encoder_decoder, first_layer, reference, target

from jspec import drafters, engine, sampling, testing, verify
from jspec.types import Drafter, Prompt, PyTree, Verifier

V = 11
PROMPTS = [[3], [1, 4, 1, 5], [2, 6, 5, 3, 5, 2, 6]]
NEW = [17, 9, 20]
#: One case of every kind of drafter state.
STATEFUL = (
    "model/block",
    "heuristic(model)",
    "early_exit",
    "suffix",
    "token_recycling",
    "lookahead",
    "jacobi",
    "dflash",
    "masked",
    "medusa",
    "hydra tree",
    "eagle/block",
    "eagle3 own tree",
    "mtp/block",
    "mtp heads/block",
    "glide cape",
    "assistant/token",
    "bita/token",
)
QUICK_STATEFUL = ("model/block", "token_recycling")


def build(name: str, model: Tiny | None = None) -> tuple[Drafter, Verifier]:
    case, model = CASES[name], model or target(V)
    return case.drafter(model, first_layer(model)), case.verify()


def generate(
    name: str, prompt: Prompt, new: list[int], seeds: list[int], *, model: Tiny | None = None, **options
) -> engine.State:
    model = model or target(V)
    drafter, rule = build(name, model)
    return engine.generate(
        model.params,
        prompt,
        sampling.row_keys(jnp.array(seeds)),
        target=model.lm,
        drafter=drafter,
        verify=rule,
        max_new_tokens=jnp.array(new),
        **options,
    )


def text(state: engine.State, row: int) -> list[int]:
    return np.asarray(state.tokens)[row, : int(state.lengths[row])].tolist()


def eos_of(ids: list[int]) -> engine.Stops:
    return engine.Stops(jnp.array(ids, jnp.int32), jnp.zeros((0, 1), jnp.int32))


#: Cases of the quick suite: every part of the contract. The rest runs under `slow`.
QUICK = ("model/block", "suffix tree", "token_recycling", "lookahead")
QUICK_ENCODER_DECODER = ("model/block",)


def quick(names: Iterable[str], chosen: tuple[str, ...], *more: Any) -> list[Any]:
    """Parameters of a test, the names that were not chosen under `slow`."""
    return [pytest.param(name, *more, marks=() if name in chosen else pytest.mark.slow) for name in names]


@pytest.mark.parametrize(
    ("name", "family"),
    [*quick(CASES, QUICK, target), *quick(CASES, QUICK_ENCODER_DECODER, encoder_decoder)],
)
def test_greedy_equals_plain_decoding_and_rows_equal_rows_alone(name, family):
    """Ragged prompts (and sources), another limit a row, no spare slot in the cache, end tokens inside
    accepted blocks."""
    model = family(V)
    capacity = max(len(p) + n for p, n in zip(PROMPTS, NEW, strict=True))
    free = [reference(model, p, n, row=i) for i, (p, n) in enumerate(zip(PROMPTS, NEW, strict=True))]
    prompt = model.prompt(PROMPTS)
    for eos in ([V + 1, V + 2], [free[0][9], free[2][15]]):
        expected = [until(text, len(p), eos) for text, p in zip(free, PROMPTS, strict=True)]
        options = dict(stops=eos_of(eos), capacity=capacity, model=model)
        together = generate(name, prompt, NEW, [0, 1, 2], **options)
        for row in range(3):
            assert text(together, row) == expected[row]
            ended = expected[row][-1] in eos
            assert engine.FINISH_REASONS[int(together.finish[row])] == ("eos" if ended else "length")
        row = 1
        one = jax.tree.map(operator.itemgetter(slice(row, row + 1)), prompt)
        one = one._replace(tokens=one.tokens[:, : len(PROMPTS[row])])
        alone = generate(name, one, [NEW[row]], [row], **options)
        assert text(alone, 0) == expected[row]
        assert int(alone.rounds[0]) == int(together.rounds[row])
        same_rows(alone, 0, together, row)


def until(tokens: list[int], start: int, eos: list[int]) -> list[int]:
    """``tokens`` up to the first end token from ``start`` on."""
    ends = [i + 1 for i in range(start, len(tokens)) if tokens[i] in eos]
    return tokens[: ends[0]] if ends else tokens


def same_rows(a: engine.State, i: int, b: engine.State, j: int) -> None:
    """Row i of a is row j of b: counters, text, history, and cache and drafter state where they are live."""
    for field in ("lengths", "limits", "starts", "finish", "rounds"):
        assert int(getattr(a, field)[i]) == int(getattr(b, field)[j])
    assert text(a, i) == text(b, j)
    same_tree(a.history, i, b.history, j)
    same_tree(a.cache, i, b.cache, j)
    same_tree(a.drafter_state, i, b.drafter_state, j)


def same_tree(a: PyTree, i: int, b: PyTree, j: int) -> None:
    """Row i of a is row j of b; of keys and values [B, K, S, h], the slots that hold something."""

    def compare(path: tuple, x: jax.Array, y: jax.Array) -> None:
        x, y = np.asarray(x[i]), np.asarray(y[j])
        if np.issubdtype(x.dtype, np.integer):
            np.testing.assert_array_equal(x, y, err_msg=str(path))
        elif x.ndim == 3:
            live = int(lengths_beside(a, path)[i])
            np.testing.assert_allclose(x[:, :live], y[:, :live], atol=1e-4, err_msg=str(path))
        else:
            np.testing.assert_allclose(x, y, atol=1e-4, err_msg=str(path))

    jax.tree_util.tree_map_with_path(compare, a, b)


def lengths_beside(tree: object, path: tuple) -> jax.Array:
    """The field `lengths` of the innermost cache on the way to a leaf."""
    found = None
    for key in path:
        found = getattr(tree, "lengths", found)
        tree = tree[key.idx] if hasattr(key, "idx") else getattr(tree, getattr(key, "name", ""))
    assert found is not None, path
    return found


@pytest.mark.parametrize(
    "name", quick(["model/block", "suffix", "token_recycling"], ("model/block", "suffix"))
)
def test_stops_at_every_position_of_the_block(name):
    model = target(V)
    whole = reference(model, PROMPTS[1], 12)
    new = whole[4:]
    for position in range(12):
        first = new.index(new[position])
        state = generate(name, model.prompt([PROMPTS[1]]), [12], [0], stops=eos_of([new[position], V + 5]))
        assert text(state, 0) == whole[: 4 + first + 1]
        assert int(state.finish[0]) == engine.FINISH_REASONS.index("eos")
    for end in range(1, 12):
        sequence = new[max(0, end - 2) : end + 1]
        stops = engine.Stops(jnp.zeros(0, jnp.int32), jnp.array([[-1] * (4 - len(sequence)) + sequence]))
        state = generate(name, model.prompt([PROMPTS[1]]), [12], [0], stops=stops)
        ends = [
            i
            for i in range(len(new))
            if i + 1 >= len(sequence) and new[i + 1 - len(sequence) : i + 1] == sequence
        ]
        assert text(state, 0) == whole[: 4 + ends[0] + 1]
        assert int(state.finish[0]) == engine.FINISH_REASONS.index("stop")


def test_a_stop_sequence_does_not_reach_into_the_prompt():
    model = target(V)
    whole = reference(model, PROMPTS[1], 6)
    stops = engine.Stops(jnp.zeros(0, jnp.int32), jnp.array([[PROMPTS[1][-1], whole[4]]]))
    state = generate("plain", model.prompt([PROMPTS[1]]), [6], [0], stops=stops)
    again = [i for i in range(5, 10) if whole[i - 1 : i + 1] == [PROMPTS[1][-1], whole[4]]]
    assert text(state, 0) == whole[: again[0] + 1 if again else 10]


@pytest.mark.parametrize("new", range(7))
def test_exactly_the_asked_number_of_tokens(new):
    """A drafter that is always right offers more than the budget."""
    whole = reference(target(V), PROMPTS[2], 12)
    model = target(V)
    state = engine.generate(
        model.params,
        model.prompt([PROMPTS[2]]),
        sampling.row_keys(jnp.array([0])),
        target=model.lm,
        drafter=testing.scripted(whole, 4),
        verify=verify.target_only(),
        max_new_tokens=new,
        record=engine.records(stats=engine.statistics),
    )
    assert text(state, 0) == whole[: 7 + new]
    assert int(state.rounds[0]) == -(-new // 5)
    assert int(state.finish[0]) == engine.FINISH_REASONS.index("length")


def test_statistics_count_drafts_and_not_the_bonus():
    """A script that is right for 0, 1, 2 and 4 tokens of 4, with the last round cut by the budget."""
    model = target(V)
    whole = reference(model, PROMPTS[1], 11)
    script = np.array(whole)
    wrong = [4, 6, 9]  # first draft of round 0, second of round 1, third of round 2
    script[wrong] = (script[wrong] + 1) % V
    state = engine.generate(
        model.params,
        model.prompt([PROMPTS[1]]),
        sampling.row_keys(jnp.array([0])),
        target=model.lm,
        drafter=testing.scripted(script, 4),
        verify=verify.target_only(),
        max_new_tokens=11,
        record=engine.statistics,
    )
    stats = jax.tree.map(lambda x: np.asarray(x)[0, 4:15], state.record)
    assert text(state, 0) == whole
    assert stats.offset.tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3, 4]
    assert stats.accepted.tolist() == [False, True, False, True, True, False, True, True, True, True, False]
    assert stats.proposed.tolist() == [4] * 11
    assert int(state.rounds[0]) == 4


def test_log_probabilities_equal_teacher_forced_scores():
    model = target(V)
    drafter, rule = build("model/block")
    settings = sampling.Settings(jnp.array([1.0, 0.0]), top_k=jnp.array([2, 0]))
    state = engine.generate(
        model.params,
        model.prompt(PROMPTS[1:]),
        sampling.row_keys(jnp.array([5, 6])),
        target=model.lm,
        drafter=drafter,
        verify=rule,
        sampler=sampling.sampler(settings),
        max_new_tokens=12,
        record=engine.logprobs,
    )
    from zoo import full_logits

    for row in range(2):
        tokens = np.array([text(state, row)])
        logits = full_logits(model, tokens)[0]
        scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        first, last = int(state.starts[row]), int(state.lengths[row])
        expected = [scores[i - 1, tokens[0, i]] for i in range(first, last)]
        np.testing.assert_allclose(np.asarray(state.record)[row, first:last], expected, atol=1e-4)


@pytest.mark.parametrize("name", quick(STATEFUL, QUICK_STATEFUL))
def test_a_second_turn_equals_decoding_the_whole_conversation(name):
    model = target(V)
    drafter, rule = build(name)
    options = dict(target=model.lm, drafter=drafter, sampler=sampling.greedy(1))
    run = dict(**options, verify=rule, stops=engine.no_stops())
    keys = sampling.row_keys(jnp.array([3]))
    state = engine.start(
        model.params, model.prompt([PROMPTS[1]]), keys, max_new_tokens=6, capacity=40, **options
    )
    state = engine.run(model.params, state, **run)
    first = text(state, 0)
    more = [7, 8, 9]
    state = engine.append(
        model.params, state, np.array([more]), np.array([3]), keys, max_new_tokens=8, **options
    )
    assert int(state.cache.lengths[0]) == len(first) + 2
    state = engine.run(model.params, state, **run)
    assert text(state, 0) == reference(model, first + more, 8)


@pytest.mark.parametrize("new", range(1, 8))
def test_a_draft_model_reads_a_second_turn_from_where_it_stands(new):
    """Its cache lags behind the target's after a whole acceptance and after a round without a draft."""
    model = target(V)
    drafter = drafters.model(model, 3)  # always right
    options = dict(target=model.lm, drafter=drafter, sampler=sampling.greedy(1))
    keys, more = sampling.row_keys(jnp.array([3])), [7, 8, 9]
    turn = dict(max_new_tokens=8, **options)
    state = engine.start(
        model.params, model.prompt([PROMPTS[1]]), keys, max_new_tokens=new, capacity=40, **options
    )
    state = engine.run(model.params, state, verify=verify.block(), stops=engine.no_stops(), **options)
    first = text(state, 0)
    state = engine.append(model.params, state, np.array([more]), np.array([3]), keys, **turn)
    fresh = engine.start(model.params, model.prompt([first + more]), keys, capacity=40, **turn)
    same_tree(state.cache, 0, fresh.cache, 0)
    same_tree(state.drafter_state.cache, 0, fresh.drafter_state.cache, 0)


@pytest.mark.slow
def test_a_draft_model_with_fewer_positions_than_the_target():
    """It drafts as far as it can, and the row goes on plainly; a shorter row beside it drafts on."""
    model = target(V)
    settings = dict(seed=1, vocab_size=V, rotary=None, bounded=True)
    small = Tiny(*testing.tiny_decoder(**settings, context_length=12))
    prompt = model.prompt(PROMPTS[:1] + PROMPTS[2:])
    state = engine.generate(
        model.params,
        prompt,
        sampling.row_keys(jnp.arange(2)),
        target=model.lm,
        drafter=drafters.model(small, 3),
        verify=verify.block(),
        max_new_tokens=20,
        record=engine.statistics,
    )
    for row, tokens in enumerate((PROMPTS[0], PROMPTS[2])):
        assert text(state, row) == reference(model, tokens, 20)
        proposed = np.asarray(state.record.proposed)[row]
        assert proposed[: int(state.lengths[row])].max() == 3
        assert proposed[16:].max() == 0  # the last root it can read is at place 11, its last draft at 14


@pytest.mark.parametrize("draft_width", [V - 3, pytest.param(V + 5, marks=pytest.mark.slow)])
def test_a_draft_model_with_another_padding_of_the_vocabulary(draft_width):
    model = target(V)
    other = Tiny(*testing.tiny_decoder(seed=2, vocab_size=draft_width))
    state = engine.generate(
        model.params,
        model.prompt(PROMPTS),
        sampling.row_keys(jnp.arange(3)),
        target=model.lm,
        drafter=drafters.model(other, 3),
        verify=verify.block(),
        max_new_tokens=9,
    )
    for row, tokens in enumerate(PROMPTS):
        assert text(state, row) == reference(model, tokens, 9)


@pytest.mark.parametrize("name", quick(STATEFUL, QUICK_STATEFUL))
def test_a_refilled_row_equals_a_fresh_one(name):
    model = target(V)
    drafter, rule = build(name)
    shared = dict(target=model.lm, drafter=drafter)
    run = dict(**shared, verify=rule, stops=engine.no_stops(), sampler=sampling.greedy(2))
    keys = sampling.row_keys(jnp.array([0, 1]))
    state = engine.start(
        model.params,
        model.prompt(PROMPTS[:2]),
        keys,
        max_new_tokens=jnp.array([14, 3]),
        capacity=32,
        sampler=sampling.greedy(2),
        **shared,
    )
    state = engine.run(model.params, state, max_finished=1, **run)
    assert np.asarray(state.finish).tolist() == [0, engine.FINISH_REASONS.index("length")]
    second = dict(max_new_tokens=10, sampler=sampling.greedy(1), **shared)
    key = sampling.row_keys(jnp.array([9]))
    state = engine.insert(model.params, state, [1], model.prompt([PROMPTS[2]]), key, **second)
    state = engine.run(model.params, state, **run)
    assert text(state, 0) == reference(model, PROMPTS[0], 14)
    assert text(state, 1) == reference(model, PROMPTS[2], 10)
    fresh = engine.start(model.params, model.prompt([PROMPTS[2]]), key, capacity=32, **second)
    fresh = engine.run(model.params, fresh, **{**run, "sampler": sampling.greedy(1)})
    same_rows(fresh, 0, state, 1)


@pytest.mark.parametrize("name", quick(STATEFUL, QUICK_STATEFUL))
def test_chunks_of_the_prompt_do_not_matter(name, monkeypatch):
    """The state before the first round is the same for every way of cutting the prompt."""
    model = target(V)
    drafter, _ = build(name)
    prompt = np.random.default_rng(0).integers(0, V, (2, 23))
    lengths = np.array([23, 14])
    states = []
    for chunk in (23, 16, 5, 1):
        monkeypatch.setattr(engine, "CHUNKS", (chunk,))
        states.append(
            engine.start(
                model.params,
                Prompt(prompt, lengths),
                sampling.row_keys(jnp.array([0, 1])),
                target=model.lm,
                drafter=drafter,
                sampler=sampling.greedy(2),
                max_new_tokens=4,
                capacity=32,
            )
        )
    for other in states[1:]:
        same_rows(states[0], 0, other, 0)
        same_rows(states[0], 1, other, 1)


def test_values_do_not_compile_again():
    model = target(V)
    drafter, rule = build("model/block")

    def once(prompts: list[list[int]], seeds: list[int], temperature: float, new: int) -> None:
        state = engine.generate(
            model.params,
            model.prompt(prompts),
            sampling.row_keys(jnp.array(seeds)),
            target=model.lm,
            drafter=drafter,
            verify=rule,
            sampler=sampling.sampler(
                sampling.Settings(jnp.full(2, temperature), top_p=jnp.full(2, 0.5 + temperature / 4))
            ),
            stops=eos_of([V - 1]),
            max_new_tokens=new,
        )
        jax.block_until_ready(state)

    once(PROMPTS[:2], [0, 1], 0.0, 5)
    before = engine._run._cache_size(), engine._absorb._cache_size(), engine._empty._cache_size()
    once(PROMPTS[1:], [5, 6], 0.7, 9)
    once([[1], [2, 3]], [7, 8], 1.0, 1)
    # The drafter made anew is the same program, too.
    drafter, rule = build("model/block")
    once([[1] * 10, [2, 3]], [7, 8], 1.0, 30)
    assert (engine._run._cache_size(), engine._absorb._cache_size(), engine._empty._cache_size()) == before


@pytest.mark.parametrize("name", quick(["plain", "token_recycling", "model/block"], ("plain",)))
def test_the_cache_is_written_in_place(name):
    """Temporaries of the whole loop grow with S by less than a tenth of what the cache grows by."""
    model = Tiny(*testing.tiny_decoder(vocab_size=V, num_layers=8, width=64, num_heads=2))
    drafter, rule = CASES[name].drafter(model, model), CASES[name].verify()

    def sizes(capacity: int) -> tuple[int, int]:
        state = engine.start(
            model.params,
            model.prompt(PROMPTS),
            sampling.row_keys(jnp.arange(3)),
            target=model.lm,
            drafter=drafter,
            sampler=sampling.greedy(3),
            max_new_tokens=4,
            capacity=capacity,
        )
        lowered = engine._run.lower(
            model.params,
            state,
            drafter,
            rule,
            sampling.greedy(3),
            engine.no_stops(),
            jnp.int32(9),
            jnp.int32(9),
            target=model.lm,
            widths=engine.block_widths(drafter),
            record=None,
        )
        memory = lowered.compile().memory_analysis()
        return memory.temp_size_in_bytes, sum(x.nbytes for x in jax.tree.leaves(state.cache))

    (small, small_cache), (large, large_cache) = sizes(1024), sizes(4096)
    print(name, small, large, small_cache, large_cache)
    assert large - small < 0.1 * (large_cache - small_cache)


def test_stream_yields_the_rounds_of_generate():
    model = target(V)
    drafter, rule = build("suffix")
    shared = dict(target=model.lm, drafter=drafter, sampler=sampling.greedy(1))
    keys = sampling.row_keys(jnp.array([0]))
    state = engine.start(model.params, model.prompt([PROMPTS[2]]), keys, max_new_tokens=15, **shared)
    seen = [
        text(s, 0) for s in engine.stream(model.params, state, verify=rule, stops=engine.no_stops(), **shared)
    ]
    assert all(a == b[: len(a)] and len(a) < len(b) for a, b in zip(seen, seen[1:], strict=False))
    assert seen[-1] == reference(model, PROMPTS[2], 15)


@pytest.mark.slow
def test_nan_weights_end_a_row_without_a_token():
    model = target(V)
    broken = jax.tree.map(lambda x: x * jnp.nan, model.params)
    for name in ("plain", "suffix", "model/block"):
        drafter, rule = build(name)
        state = engine.generate(
            broken,
            model.prompt(PROMPTS),
            sampling.row_keys(jnp.arange(3)),
            target=model.lm,
            drafter=drafter,
            verify=rule,
            max_new_tokens=5,
        )
        assert np.asarray(state.finish).tolist() == [engine.FINISH_REASONS.index("nan")] * 3
        assert np.asarray(state.lengths).tolist() == [1, 4, 7]


def test_a_broken_token_that_is_not_emitted_breaks_nothing():
    """Weights that are NaN for one token: neither a rejected draft of it nor padding with it may be felt."""
    model = target(V)
    whole = reference(model, PROMPTS[1], 12)
    absent = sorted(set(range(V)) - set(whole))
    script = np.array(whole)
    script[7] = absent[0]
    for token in (absent[0], 0) if 0 in absent else (absent[0],):
        embedding = model.params["embedding"].at[token].set(jnp.nan)
        head = model.params["unembedding"]  # not tied: only reading the token breaks
        state = engine.generate(
            {**model.params, "embedding": embedding, "unembedding": head},
            model.prompt([PROMPTS[1]]),
            sampling.row_keys(jnp.array([0])),
            target=model.lm,
            drafter=testing.scripted(script, 4),
            verify=verify.target_only(),
            max_new_tokens=12,
        )
        assert text(state, 0) == whole
        assert int(state.finish[0]) == engine.FINISH_REASONS.index("length")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "name",
    quick(
        ["plain", "model/block", "model/token", "suffix tree/tree", "iid tree/kseq"],
        ("plain", "suffix tree/tree"),
    ),
)
def test_a_row_without_a_possible_token_ends_as_nan(name, temperature):
    model = target(V)
    drafter, rule = build(name)
    settings = sampling.Settings(jnp.full(1, temperature))
    for processor, reason in (
        (sampling.allow(jnp.zeros((1, V), bool)), "nan"),
        (sampling.stateless(lambda logits: logits.at[:, 3].set(jnp.inf)), "length"),
    ):
        state = engine.generate(
            model.params,
            model.prompt([PROMPTS[1]]),
            sampling.row_keys(jnp.array([0])),
            target=model.lm,
            drafter=drafter,
            verify=rule,
            sampler=sampling.sampler(settings, [processor]),
            max_new_tokens=5,
        )
        assert engine.FINISH_REASONS[int(state.finish[0])] == reason
        assert text(state, 0) == PROMPTS[1] + ([3] * 5 if reason == "length" else [])


def test_refusals():
    with pytest.raises(ValueError, match="capacity: expected at least 24 slots"):
        generate("plain", target(V).prompt([PROMPTS[1]]), [20], [0], capacity=23)
    with pytest.raises(ValueError, match="prompt: expected lengths in 1"):
        model = target(V)
        engine.start(
            model.params,
            Prompt(jnp.zeros((1, 3), jnp.int32), jnp.array([0])),
            sampling.row_keys(jnp.array([0])),
            target=model.lm,
            drafter=drafters.plain(),
            sampler=sampling.greedy(1),
            max_new_tokens=1,
        )
    with pytest.raises(
        ValueError, match=r"verify: kseq is right for \['iid'\] drafts, but the drafter's are chosen"
    ):
        model = target(V)
        engine.generate(
            model.params,
            model.prompt([PROMPTS[0]]),
            sampling.row_keys(jnp.array([0])),
            target=model.lm,
            drafter=drafters.suffix(2),
            verify=verify.kseq(),
            max_new_tokens=1,
        )
    with pytest.raises(ValueError, match=r"widths: expected numbers in 1 \.\. 5"):
        generate("suffix", target(V).prompt([PROMPTS[0]]), [2], [0], widths=(1, 9))
    with pytest.raises(ValueError, match="widths: a drafter with side rows always runs all its 5 nodes"):
        generate("lookahead", target(V).prompt([PROMPTS[0]]), [2], [0], widths=(1,))
