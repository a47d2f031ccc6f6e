"""Online distillation: what is recorded is what the target says, and drafters get better by it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_text

from jspec import engine, models, sampling, testing, verify
from jspec.checkpoint import Model
from jspec.types import Draft, Forward, Info, Prompt, Verdict
from training import forward, metrics, online, recipe
from training.config import Optimizer, Training
from training.data import Example, Record

V, EOS = 24, 1


def tables() -> tuple[Model, Model]:
    """Two Markov chains: decoder-only, and compiled in no time."""
    laws = np.random.default_rng(0).dirichlet(np.full(V, 0.5), (2, V))
    target, drafter = (testing.table_lm(0.98 * law + 0.02 / V) for law in laws)
    return Model(*target, eos=(EOS,)), Model(*drafter, eos=(EOS,))


def decoders() -> tuple[Model, Model]:
    """A target of some certainty, and a smaller drafter that knows nothing of it."""
    lm, params = testing.tiny_decoder(seed=1, vocab_size=V, num_layers=1)
    params["unembedding"]["kernel"] = 3 * params["unembedding"]["kernel"]
    small = testing.tiny_decoder(seed=7, vocab_size=V, num_layers=1, width=16)
    return Model(lm, params, eos=(EOS,)), Model(*small, eos=(EOS,))


def encoder_decoders() -> tuple[Model, Model]:
    lm, params = testing.tiny_seq2seq(seed=1, vocab_size=V, num_layers=1, num_encoder_layers=1)
    params["unembedding"]["kernel"] = 3 * params["unembedding"]["kernel"]
    small = testing.tiny_seq2seq(seed=7, vocab_size=V, num_layers=1, num_encoder_layers=1, width=16)
    return Model(lm, params, eos=(EOS,), decoder_start=(0,)), Model(*small, eos=(EOS,), decoder_start=(0,))


def corpus(count: int = 16) -> recipe.Corpus:
    rng = np.random.default_rng(0)
    texts = [Example(rng.integers(2, V, rng.integers(1, 6)).tolist(), [3, EOS]) for _ in range(count)]
    return recipe.Corpus(texts, texts[:4])


def config(steps: int, *, rate: float = 0.02, **settings) -> online.Online:
    settings = {"serving": online.Serving(max_new_tokens=24, num_tokens=3)} | settings
    training = Training(
        steps=steps, optimizer=Optimizer(learning_rate=rate, schedule="constant"), checkpoint_every=10
    )
    return online.Online(training=training, **settings)


def serve(target: Model, drafter: Model, settings: online.Online, step: int = 0) -> online.Served:
    stream = online.requests(target, [example.source for example in corpus().train])
    return online.Server(target, drafter, stream, settings)(step, drafter.params)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize(
    "pair", [tables, *(pytest.param(p, marks=pytest.mark.slow) for p in (encoder_decoders, decoders))]
)
def test_recorded_logits_are_those_of_a_separate_forward(pair, temperature):
    target, drafter = pair()
    serving = online.Serving(max_new_tokens=24, num_tokens=3, temperature=temperature)
    served = serve(target, drafter, config(1, serving=serving))
    expected = forward.logits(target.lm, target.params, served)
    emitted = np.asarray(served.weights) > 0
    assert emitted.sum() > 60
    recorded = np.asarray(served.feedback.logits)[:, 1:]
    np.testing.assert_allclose(recorded[emitted], np.asarray(expected)[emitted], atol=1e-5)
    # The weights are 1 from behind the prompt to the end token.
    stream = online.requests(target, [example.source for example in corpus().train])
    for row, request in enumerate(stream[:8]):
        first, last = np.flatnonzero(emitted[row])[[0, -1]]
        assert first == len(request.tokens) - 1
        assert served.tokens[row, : first + 1].tolist() == list(request.tokens)
        assert emitted[row, first : last + 1].all()
        labels = served.labels[row, first : last + 1].tolist()
        assert EOS not in labels[:-1]
        assert labels[-1] == EOS or len(labels) == 24
        assert served.lengths[row] == last + 1


def test_which_tokens_count_as_rejected():
    """A chain of 3 drafted tokens from a script, half of them wrong, and one that ends by the budget."""
    law = np.roll(np.eye(4), 1, axis=1)  # 0 1 2 3 0 1 2 3 ...
    lm, params = testing.table_lm(law)
    state = engine.generate(
        params,
        Prompt(jnp.array([[0]]), jnp.array([1])),
        sampling.row_keys(jnp.array([0])),
        target=lm,
        drafter=testing.scripted([0, 1, 0, 0, 0, 1, 2, 3, 0, 1, 3, -1, -1], 3),
        verify=verify.target_only(),
        max_new_tokens=12,
        record=online.feedback,
    )
    assert state.tokens[0, :13].tolist() == [0, 1, 2, 3] * 3 + [0]
    # Rounds: 1 | 2 (for 0), then 3 (for 0), then 0 1 2 | 3 (a bonus), then 0 1 | 2 (for 3), then nothing
    # drafted and 3, then nothing and 0.
    rejected = np.flatnonzero(np.asarray(state.record.rejected[0]))
    assert rejected.tolist() == [2, 3, 10]
    assert state.record.statistics.offset[0, 1:13].tolist() == [0, 1, 0, 0, 1, 2, 3, 0, 1, 2, 0, 0]
    np.testing.assert_array_equal(state.record.logits[0, 1:13], params[state.tokens[0, :12]])


def test_rejected_tokens_of_a_tree():
    """Rejected is a token after a node that has valid children, none of which was taken."""
    valid = jnp.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]], bool)
    draft = Draft(jnp.zeros((3, 4), jnp.int32), jnp.array([[-1, 0, 0, 1]] * 3), valid)
    path, zeros = jnp.array([[0, 1, 1], [0, 2, 2], [0, 0, 0]]), jnp.zeros((3, 3), jnp.int32)
    verdict = Verdict(path, jnp.array([1, 1, 0]), zeros, jnp.array([2, 2, 1]))
    forward = Forward(jnp.zeros((3, 4, 1)), {}, (), jnp.arange(12.0).reshape(3, 4, 1))
    record = online.feedback(Info(draft, verdict, forward))
    assert record.rejected[0, :2].tolist() == [False, True]
    assert record.rejected[1, :2].tolist() == [False, False]
    assert record.rejected[2, :1].tolist() == [False]
    assert record.logits[:, :, 0].tolist() == [[0, 1, 1], [4, 6, 6], [8, 8, 8]]


# --- learning -----------------------------------------------------------------------------------------


@pytest.fixture
def compilations(monkeypatch):
    """At each step, how many programs have been compiled (or read from the persistent cache) before it."""
    compiled, seen = [], []
    serve_step = online.Server.__call__

    def listen(event, duration, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    def watched(self, step, params):
        seen.append(len(compiled))
        return serve_step(self, step, params)

    monkeypatch.setattr(online.Server, "__call__", watched)
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "settings"),
    [(encoder_decoders, {"loss": "lk_hybrid"}), (decoders, {"only_rejected": True})],
)
def test_acceptance_rises_on_a_fixed_stream(pair, settings, tmp_path, compilations):
    """The share of drafted tokens that the target takes, sum of min(p, q) and tokens per forward; and after
    the first checkpoint not one program is compiled again."""
    target, drafter = pair()
    model = online.run(config(40, **settings), corpus(), tmp_path / "run", target=target, drafter=drafter)
    rows = [row for row in metrics.read(tmp_path / "run/metrics.jsonl") if "tau" in row]
    assert [row["step"] for row in rows] == list(range(1, 41))
    for name, gain in (("accepted", 0.06), ("alpha", 0.1), ("tau", 0.15)):
        first, last = (np.mean([row[name] for row in part]) for part in (rows[:5], rows[-5:]))
        print(f"{name}: {first:.3f} -> {last:.3f}")
        assert last > first + gain
    print("programs compiled before each step:", compilations)
    assert compilations[1] > compilations[0]
    assert compilations[11] == compilations[-1]
    assert model.lm is drafter.lm
    assert model.decoder_start == drafter.decoder_start
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), model.params, drafter.params)
    assert all(jax.tree.leaves(changed["layers"]))


def test_prompts_of_any_width_are_one_compilation(compilations):
    target, drafter = tables()
    stream = [online.Request([2 + i % 5] * width) for width in (2, 3, 5, 4) for i in range(8)]
    server = online.Server(target, drafter, stream, config(1))
    for step in range(4):
        served = server(step, drafter.params)
        assert served.lengths.min() >= (2, 3, 5, 4)[step]
    assert compilations[1] == compilations[-1]


def test_a_chat_is_served_as_one_and_masters_are_float32(tmp_path, monkeypatch):
    target = tiny_text.decoder()
    drafter = dataclasses.replace(target, params=models.cast(target.params, "bfloat16"))
    records = [Record("a", "b")]
    settings = online.Online(training=Training(steps=1), chat=True)
    seen = []
    monkeypatch.setattr(online, "fit", lambda *arguments, **options: seen.extend(arguments))
    with pytest.raises(FileNotFoundError):  # nothing was trained
        online.run(
            settings, recipe.Corpus(records, records), tmp_path / "run", target=target, drafter=drafter
        )
    params, _, server, *_ = seen
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    chat = target.tokenizer.chat([{"role": "user", "content": "a"}])
    assert [list(request.tokens) for request in server.stream] == [chat]


def test_a_step_learns_where_it_should():
    """The loss is the mean over requests of the mean over emitted, or rejected, positions."""
    target, drafter = tables()
    served = serve(target, drafter, config(1))
    q = np.asarray(forward.logits(drafter.lm, drafter.params, served), np.float64)
    p = np.asarray(served.feedback.logits, np.float64)[:, 1:]
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    emitted = np.asarray(served.weights) > 0
    rejected = np.asarray(served.feedback.rejected)[:, 1:] & emitted
    alpha = np.minimum(np.exp(log_p), np.exp(log_q)).sum(-1)
    offset, accepted, proposed = (np.asarray(x)[:, 1:] for x in served.feedback.statistics)
    opens = emitted & (offset == 0)
    for only_rejected, where in ((False, emitted), (True, rejected)):
        assert where.any(1).all()
        objective = online.Distillation(drafter.lm, online.losses.named("forward_kl"), only_rejected, V)
        loss, numbers = objective(drafter.params, (), served, jax.random.key(0))
        expected = np.mean([row[at].mean() for row, at in zip(kl, where, strict=True)])
        assert float(loss) == pytest.approx(expected, rel=1e-5)
        assert float(numbers["alpha"]) == pytest.approx(alpha[emitted].mean(), rel=1e-5)
        assert float(numbers["tau"]) == pytest.approx(emitted.sum() / opens.sum(), rel=1e-6)
        banned = online.Distillation(
            drafter.lm, online.losses.named("forward_kl"), only_rejected, V, banned=(V - 1,)
        )
        served_less = served._replace(
            feedback=served.feedback._replace(logits=served.feedback.logits.at[..., V - 1].set(-jnp.inf))
        )
        less = objective(drafter.params.at[:, V - 1].set(-jnp.inf), (), served_less, jax.random.key(0))
        for got, want in zip(
            *map(jax.tree.leaves, (banned(drafter.params, (), served, jax.random.key(0)), less)), strict=True
        ):
            assert float(got) == pytest.approx(float(want), rel=1e-5)
        taken = (accepted & emitted).sum() / proposed[opens].sum()
        assert float(numbers["accepted"]) == pytest.approx(taken, rel=1e-6)


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(tmp_path, monkeypatch):
    target, drafter = encoder_decoders()
    settings = config(40, loss="lk_hybrid")

    def run(folder):
        return online.run(settings, corpus(), tmp_path / folder, target=target, drafter=drafter)

    whole = run("whole")
    serve_step = online.Server.__call__

    def interrupted(self, step, params):
        if step == 25:
            raise KeyboardInterrupt
        return serve_step(self, step, params)

    with monkeypatch.context() as patch:
        patch.setattr(online.Server, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run("parts")
    parts = run("parts")
    jax.tree.map(np.testing.assert_array_equal, whole.params, parts.params)
    first, second = ((tmp_path / folder / "metrics.jsonl").read_text() for folder in ("whole", "parts"))
    assert first == second
    monkeypatch.setattr(online.Server, "__call__", None)
    run("parts")  # finished: nothing is served


def test_refusals(tmp_path):
    target, drafter = decoders()
    other = Model(*testing.tiny_decoder(vocab_size=V + 1))

    def run(target=target, drafter=drafter):
        online.run(config(1), corpus(), tmp_path / "run", target=target, drafter=drafter)

    with pytest.raises(ValueError, match="drafter: expected the target's 24 tokens, got 25"):
        run(drafter=other)
    with pytest.raises(ValueError, match="drafter: expected a model of the target's kind"):
        run(drafter=encoder_decoders()[1])
    with pytest.raises(ValueError, match="drafter: expected a checkpoint or a run's folder, got none"):
        run(drafter=None)
    assert not (tmp_path / "run").exists()
    serving = online.Serving(max_new_tokens=510)
    with pytest.raises(ValueError, match=r"max_new_tokens: .* need 515 positions, the models have 512"):
        settings = config(1, serving=serving)
        online.run(settings, corpus(), tmp_path / "run", target=target, drafter=drafter)
    with pytest.raises(ValueError, match="loss: expected one of"):
        config(1, loss="mse")
    with pytest.raises(ValueError, match=r"training.accumulate: expected 1, got 2"):
        online.Online(training=Training(steps=1, accumulate=2))
    with pytest.raises(ValueError, match=r"training.dropout: expected 0, got 0.1"):
        online.Online(training=Training(steps=1, dropout=0.1))
