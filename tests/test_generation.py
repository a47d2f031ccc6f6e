"""Generated answers: each its own, the same after any interruption, never those of something else."""

from __future__ import annotations

import dataclasses
import errno
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

import jspec
from jspec import testing
from training import generation, recipe, text
from training.data import Example
from training.generation import generate_answers

ENDS = tuple(range(1, 9))  # of 64 tokens: answers of all lengths
SETTINGS = {"temperature": 1.0, "seed": 3, "max_new_tokens": 12, "batch_size": 3}


@pytest.fixture(scope="module")
def decoder():
    return jspec.Model(*testing.tiny_decoder(num_layers=1, width=16), eos=ENDS)


@pytest.fixture(scope="module")
def translator():
    lm, params = testing.tiny_seq2seq(num_layers=1, num_encoder_layers=1, width=16)
    return jspec.Model(lm, params, eos=ENDS, decoder_start=(0,))


@pytest.fixture(params=["decoder", "translator"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(generation, "SHARD", 4)
    monkeypatch.setattr(generation, "BATCHES_PER_SHARD", 1)


def sources(count=11):
    rng = np.random.default_rng(0)
    return [rng.integers(9, 64, rng.integers(1, 9)).tolist() for _ in range(count)]


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_answer_is_that_of_its_source_and_its_own_seed(model):
    texts = sources()
    found = generate_answers(model, texts, **SETTINGS)
    alone = [
        jspec.generate(model, [text], temperature=1.0, seed=3 + i, max_new_tokens=12, capacity=32).tokens[0]
        for i, text in enumerate(texts)
    ]
    assert found == alone
    assert len({len(answer) for answer in found}) > 2
    for answer in found:
        assert (answer[-1] in ENDS) or len(answer) == 12
        assert set(ENDS).isdisjoint(answer[:-1])


def test_the_batch_makes_no_difference(decoder):
    texts = sources()
    found = generate_answers(decoder, texts, **SETTINGS)
    assert generate_answers(decoder, texts, **(SETTINGS | {"batch_size": 5})) == found
    assert generate_answers(decoder, texts[:6], **SETTINGS) == found[:6]
    assert generate_answers(decoder, texts, **(SETTINGS | {"seed": 4})) != found


def test_the_seed_counts_up_from_any_number(decoder):
    texts = sources(4)
    most = 2**32 - 1
    found = generate_answers(decoder, texts, **(SETTINGS | {"seed": most}))
    again = generate_answers(decoder, texts[1:], **(SETTINGS | {"seed": 0}))
    assert found[1:] == again


# --- the cache --------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def interrupt_after(shards):
    def look(progress):
        nonlocal shards
        shards -= 1
        if shards == 0:
            raise Interrupted

    return look


def test_an_interrupted_run_goes_on_and_leaves_the_same_files(model, tmp_path):
    texts = sources()
    whole = generate_answers(model, texts, **SETTINGS, cache=tmp_path / "whole")
    for shards in (1, 1, 2):
        with pytest.raises(Interrupted):
            generate_answers(
                model, texts, **SETTINGS, cache=tmp_path / "parts", progress=interrupt_after(shards)
            )
    seen = []
    found = generate_answers(model, texts, **SETTINGS, cache=tmp_path / "parts", progress=seen.append)
    assert found == whole == generate_answers(model, texts, **SETTINGS)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert len(contents(tmp_path / "whole")) == 1 + 3  # settings and shards of 4, 4 and 3


def test_what_is_on_disk_is_not_generated_again(decoder, tmp_path, monkeypatch):
    texts = sources()
    found = generate_answers(decoder, texts, **SETTINGS, cache=tmp_path)
    monkeypatch.setattr(jspec, "generate", None)
    seen = []
    assert generate_answers(decoder, texts, **SETTINGS, cache=tmp_path, progress=seen.append) == found
    assert seen[-1] == (11, 11, 0, None)


def test_answers_of_something_else_are_never_taken(decoder, tmp_path):
    texts = sources(5)
    generate_answers(decoder, texts, **SETTINGS, cache=tmp_path)
    folders = {path.name for path in tmp_path.iterdir()}
    other = jax.tree.map(lambda x: x, decoder.params)
    other["embedding"] = other["embedding"].at[3, 2].add(1e-3)
    swapped = jax.tree.map(lambda x: x, decoder.params)
    swapped["embedding"] = swapped["embedding"][::-1]  # the same numbers elsewhere
    changes = [
        (dataclasses.replace(decoder, params=other), texts, {}),
        (dataclasses.replace(decoder, params=swapped), texts, {}),
        (dataclasses.replace(decoder, eos=(*ENDS[1:], 9)), texts, {}),
        (decoder, [*texts[:4], [9, 9]], {}),
        (decoder, texts, {"temperature": 0.5}),
        (decoder, texts, {"seed": 4}),
        (decoder, texts, {"max_new_tokens": 11}),
    ]
    for number, (model, given, options) in enumerate(changes, 2):
        found = generate_answers(model, given, **(SETTINGS | options), cache=tmp_path)
        assert len(list(tmp_path.iterdir())) == number
        assert found == generate_answers(model, given, **(SETTINGS | options))
    again = dataclasses.replace(decoder, params=jax.tree.map(lambda x: x + 0, decoder.params), name="other")
    generate_answers(again, texts, **SETTINGS, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == len(changes) + 1
    (first,) = folders
    assert json.loads((tmp_path / first / "settings.json").read_text())["temperature"] == 1.0


def damage_half(path):
    path.write_bytes(path.read_bytes()[:-40])


def damage_byte(path):
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"\x93NUMPY") + 140] ^= 1
    path.write_bytes(whole)


def damage_nothing_left(path):
    path.write_bytes(b"")


def damage_other_shard(path):
    path.write_bytes(path.with_name("00000.npz").read_bytes())


@pytest.mark.parametrize(
    "damage", [damage_half, damage_byte, damage_nothing_left, damage_other_shard, lambda path: path.unlink()]
)
def test_a_shard_that_is_not_whole_is_made_again(decoder, damage, tmp_path):
    texts = sources()
    found = generate_answers(decoder, texts, **SETTINGS, cache=tmp_path)
    before = contents(tmp_path)
    (last,) = tmp_path.rglob("00002.npz")
    damage(last)
    assert contents(tmp_path) != before
    assert generate_answers(decoder, texts, **SETTINGS, cache=tmp_path) == found
    assert contents(tmp_path) == before


def test_a_full_disk_is_one_error_and_loses_nothing(decoder, tmp_path, monkeypatch):
    texts, save, calls = sources(), np.savez, []

    def full(file, **arrays):
        calls.append(file)
        if len(calls) == 2:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(file, **arrays)

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match=r"cache: cannot write .*00001.npz: No space left on device"):
        generate_answers(decoder, texts, **SETTINGS, cache=tmp_path)
    assert sorted(path.name for path in contents(tmp_path)) == ["00000.npz", "settings.json"]
    generate_answers(decoder, texts, **SETTINGS, cache=tmp_path)
    assert len(calls) == 4  # 0, the failed 1, then 1 and 2


def test_a_cache_that_cannot_be_made_is_one_error(decoder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cache: cannot write to .*file"):
        generate_answers(decoder, sources(), **SETTINGS, cache=tmp_path / "file")


# --- what is reported and refused -------------------------------------------------------------------


def test_utilisation_is_the_share_of_slots_that_emit():
    # From 2, 3, ... the chain counts up to the end token 9: answers of known lengths.
    law = np.roll(np.eye(10), 1, axis=1)
    chain = jspec.Model(*testing.table_lm(law), eos=(9,))
    seen = []
    found = generate_answers(chain, [[2], [5], [7]], max_new_tokens=20, batch_size=2, progress=seen.append)
    assert found == [[3, 4, 5, 6, 7, 8, 9], [6, 7, 8, 9], [8, 9]]
    # Two rows: 7 rounds of the first; 4 and then 2 of the other two.
    assert seen == [(3, 3, 13, 13 / 14)]


def test_progress_counts_to_the_end(decoder):
    seen = []
    found = generate_answers(decoder, sources(), **SETTINGS, progress=seen.append)
    assert [progress.done for progress in seen] == [4, 8, 11]
    assert {progress.total for progress in seen} == {11}
    assert seen[-1].tokens == sum(map(len, found))
    assert 0.4 < seen[-1].utilisation <= 1


def test_a_console_hears_of_every_shard_but_the_last(decoder, tmp_path):
    examples = [Example(source, [1]) for source in sources()]
    for heard in (["4 of 11", "8 of 11"], []):  # the second time everything is on the disk
        console = rich.console.Console(file=io.StringIO(), width=200)
        writing = text.Writing(12, 3, tmp_path)
        found = text.answered(decoder, examples, writing, 1.0, 3, console=console)
        assert [example.target for example in found] == generate_answers(decoder, sources(), **SETTINGS)
        lines = console.file.getvalue().splitlines()
        assert [line[len("answers, T=1: ") :].partition(",")[0] for line in lines] == heard


def test_bad_input_is_refused(decoder):
    with pytest.raises(ValueError, match="sources: expected at least one"):
        generate_answers(decoder, [])
    with pytest.raises(ValueError, match="temperature: expected"):
        generate_answers(decoder, [[9]], temperature=-1.0)
    broken = jax.tree.map(lambda x: x * np.nan, decoder.params)
    with pytest.raises(ValueError, match="model: expected finite logits, got others in the answer to source"):
        generate_answers(dataclasses.replace(decoder, params=broken), sources(2), **SETTINGS)


def test_models_of_another_dtype_are_other_models():
    """Weights that bfloat16 holds exactly give other logits there; runs in float32 keep the name they had."""
    params = {"a": jnp.arange(4.0), "b": jnp.ones((2, 3)) / 3}
    assert recipe.model_fingerprint("config", params) == "165a5cf0fb18a3c8"
    exact = {"a": jnp.arange(4.0)}
    coarse = jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact)
    assert recipe.model_fingerprint("config", exact) != recipe.model_fingerprint("config", coarse)
