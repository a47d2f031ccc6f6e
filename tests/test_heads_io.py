"""Public checkpoints of draft heads: read, written, held against what their own programs compute, refused."""

import json

import heads as public
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from heads import CHECKPOINTS, FILES, LOGITS, Random, Shown, put
from safetensors.numpy import load_file

from jspec.drafters.nets import Text
from jspec.io import heads

MAKERS = list(CHECKPOINTS)


@pytest.fixture(scope="module")
def target():
    return public.target()


def made(folder, maker, target, dtype=np.float16):
    raw, tensors = maker(Random(dtype), target)
    return put(folder, raw, tensors, FILES.get(CHECKPOINTS[maker], "model.safetensors")), raw, tensors


def same_bits(ours, theirs):
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(np.asarray(ours).view(np.uint8), np.asarray(theirs).view(np.uint8))


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
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
    written = load_file(again / first.layout.file)
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        same_bits(written[name], tensor)
    said = json.loads((again / "config.json").read_text())
    assert {key: said[key] for key in raw} == raw
    second = heads.read(again, target)
    assert second.network is first.network
    jax.tree.map(same_bits, second.weights, first.weights)


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_a_network_says_what_the_original_says(maker, target, tmp_path):
    folder, raw, tensors = made(tmp_path, maker, target, np.float32)
    checkpoint = heads.read(folder, target)
    rng, layout = np.random.default_rng(1), CHECKPOINTS[maker]
    length, a, num_tokens = 9, 5, 1 if "eagle" in layout else 3
    params = target.params
    shown = Shown(
        rng.integers(0, public.V, length),
        rng.standard_normal((length, public.E)),
        {tap: rng.standard_normal((length, public.E)) for tap in range(public.L + 1)},
        np.asarray(params["embedding"]),
        np.asarray(params["unembedding"]["kernel"]).T,
    )
    expected = LOGITS[layout](raw, tensors, shown, a, num_tokens)
    text = Text(
        jnp.asarray(shown.tokens[None], jnp.int32),
        jnp.array([length]),
        jnp.array([[a]]),
        jnp.asarray(shown.hidden[None], jnp.float32),
        {tap: jnp.asarray(x[None], jnp.float32) for tap, x in shown.taps.items()},
    )
    found = checkpoint.network.teach(checkpoint.weights, target.lm, params, text, num_tokens)
    np.testing.assert_allclose(found[0, 0], expected, rtol=2e-4, atol=2e-4)
    if checkpoint.weights.ids is not None:
        np.testing.assert_array_equal(checkpoint.weights.ids, tensors["d2t"] + np.arange(public.COLUMNS))
