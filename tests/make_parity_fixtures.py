"""Logits of transformers (on torch) for the tiny checkpoints of `jspec.testing`: makes fixtures/parity.npz.

Run in an environment that has torch next to the project's own packages::

    python tests/make_parity_fixtures.py

The checkpoints come from numpy seeds, so only outputs are stored: half of the logits and the first entries of
the hidden states at three positions of two rows of tokens. Encoder-decoders read two sources of different
lengths besides.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jspec.io.gguf import find_smollm2
from jspec.testing import tiny_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"
LENGTH, AT, SHOWN = 24, (7, 15, 23), 8
SOURCE_LENGTHS = (13, 6)  # beyond the second stands anything

_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}

# name -> (family, entries of config.json)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied_biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    ),
    "llama_linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "llama_dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 3.0}}),
    "llama_llama3": ("llama", {"rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 32}}),
    "llama_yarn": ("llama", {"rope_scaling": _YARN}),
    "llama_v5": (
        "llama",
        {
            "rope_theta": None,
            "rope_parameters": {**_YARN, "rope_theta": 500.0, "mscale": 1.2, "mscale_all_dim": 0.8},
        },
    ),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3_longrope": ("phi3", {"rope_scaling": _LONG, "original_max_position_embeddings": 48}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": (
        "gemma3",
        {"rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {}),
    "opt_post_norm": ("opt", {"do_layer_norm_before": False, "tie_word_embeddings": False}),
    "t5": ("t5", {}),
    "t5_v1_1": ("t5_v1_1", {}),
    "t5_gated_silu": ("t5", {"feed_forward_proj": "gated-silu", "scale_decoder_outputs": False}),
    "mt5": ("mt5", {}),
    "mt5_tied": ("mt5", {"tie_word_embeddings": None}),
    "marian": ("marian", {}),
    "bart": ("bart", {}),
    "mbart": ("mbart", {}),
}
PROMPTS = ("The capital of France is", "def fibonacci(n):\n    ")  # of the SmolLM2 fixture


def tokens(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(1).integers(3, vocab_size, (2, LENGTH)).astype(np.int32)


def sources(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(2).integers(3, vocab_size, (2, max(SOURCE_LENGTHS))).astype(np.int32)


def reference(folder: Path) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [B, T, V], and hidden states [B, T, E]: the (decoder) layers' inputs, then the last norm's."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model, loading = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    ids = torch.tensor(tokens(config.vocab_size)).long()
    with torch.inference_mode():
        if not config.is_encoder_decoder:
            out = model.eval()(ids, output_hidden_states=True)
            return out.logits.numpy(), [hidden.numpy() for hidden in out.hidden_states]
        source = torch.tensor(sources(config.vocab_size)).long()
        mask = torch.arange(source.shape[1])[None] < torch.tensor(SOURCE_LENGTHS)[:, None]
        out = model.eval()(source, mask.long(), decoder_input_ids=ids, output_hidden_states=True)
    return out.logits.numpy(), [hidden.numpy() for hidden in out.decoder_hidden_states]


def smollm2() -> dict[str, np.ndarray]:
    """The 20 best logits after each prompt, by transformers' own reading of the GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    made = {}
    for i, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt)["input_ids"]
        with torch.inference_mode():
            top = model(torch.tensor([ids])).logits[0].topk(20)
        made |= {f"{i}.tokens": np.array(ids, np.int32), f"{i}.ids": top.indices.numpy().astype(np.int32)}
        made[f"{i}.logits"] = top.values.numpy()
    return made


def main() -> None:
    logging.disable(logging.WARNING)
    stored = {}
    for name, (family, overrides) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            logits, hidden = reference(tiny_checkpoint(folder, family, **overrides))
        stored[f"{name}.logits"] = logits[:, AT, : logits.shape[-1] // 2]
        stored[f"{name}.hidden"] = np.stack([h[:, AT, :SHOWN] for h in hidden[:-1]])
        print(f"{name}: logits of standard deviation {logits.std():.2f}")
    np.savez_compressed(FIXTURES / "parity.npz", **stored)
    np.savez_compressed(FIXTURES / "smollm2.npz", **smollm2())


if __name__ == "__main__":
    main()
