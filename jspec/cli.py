"""The command line: ``jspec generate`` writes as it decodes, ``jspec info`` says what is here.

An error is one line on stderr and exit code 2.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import platform
import re
import sys
import time
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import huggingface_hub
import huggingface_hub.errors
import jax
import typer
import typer.core
import yaml
from rich.console import Console
from rich.table import Table

from jspec import auto, drafters, engine, text, verify
from jspec.io import gguf
from jspec.models import ENDLESS, Seq2SeqConfig
from jspec.output import Output
from jspec.types import Drafter

LIBRARIES = ("jspec", "jax", "jaxlib", "flax", "transformers", "tokenizers", "gguf")


class _OneLine(typer.core.TyperGroup):
    """A command group whose errors, wrong options as well as bad input, are one line."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        result = None
        try:
            result = super().main(*args, standalone_mode=False, **extra)
        except (ValueError, FileNotFoundError) as error:
            _fail(str(error))
        except KeyboardInterrupt:
            sys.exit(130)
        except Exception as error:
            # A wrong option or command. The class differs: typer carries its own copy of click, or not.
            describe = getattr(error, "format_message", None)
            if describe is None:
                raise
            _fail(describe())
        if standalone_mode:
            sys.exit(result if isinstance(result, int) else 0)
        return result


def _fail(message: str) -> None:
    print(f"jspec: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


app = typer.Typer(
    cls=_OneLine,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Speculative decoding for JAX: many drafters, one exact engine.",
)


class DType(StrEnum):
    """Of weights, activations and cache."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Target = Annotated[str, typer.Option(help=f"{text.SMOLLM2}, a folder, a .gguf file or a Hub id.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    target: Target = text.SMOLLM2,
    drafter: Annotated[
        str, typer.Option(help=f"none, {', '.join(text.DRAFTERS)}, or a draft model (as --target).")
    ] = "none",
    drafter_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, an argument of the drafter's factory; repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1: off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0: off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1: off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answer.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    chat: Annotated[
        bool | None, typer.Option(help="Use the chat template. Default: where the model has one.")
    ] = None,
    dtype: Annotated[DType, typer.Option(help="Of weights, activations and cache.")] = DType.float32,
) -> None:
    """Continue a prompt: the text goes to stdout as it comes, a one-line summary to stderr."""
    _remember_compilations()
    model = text.load(target, dtype.value)
    if chat is None:
        chat = model.tokenizer is not None and model.tokenizer.has_chat_template
    stream = text.stream(
        model,
        sys.stdin.read() if prompt == "-" else prompt,
        drafter=_drafter(drafter, drafter_option or [], model, dtype),
        max_new_tokens=max_new_tokens,
        chat=chat,
        system=system,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or (),
    )
    first = 0.0
    for piece in stream:
        first = first or time.perf_counter()
        print(piece, end="", flush=True)
    end = time.perf_counter()
    print(flush=True)
    assert stream.output is not None
    print(_summary(stream.output, drafter, end - first), file=sys.stderr)


def _drafter(
    name: str, options: list[str], model: text.Model, dtype: DType
) -> Drafter | text.Model | str | None:
    arguments = {}
    for option in options:
        key, separator, value = option.partition("=")
        if not separator:
            raise ValueError(f"--drafter-option: expected NAME=VALUE, got {option!r}")
        arguments[key] = yaml.safe_load(value)
    if name == "none":
        if arguments:
            raise ValueError("--drafter-option: expected a --drafter to take it, got none")
        return None
    if name in text.DRAFTERS:
        return text.named_drafter(name, model, **arguments) if arguments else name
    if not (name.endswith(".gguf") or "/" in name or name == text.SMOLLM2 or Path(name).is_dir()):
        raise ValueError(text.unknown_drafter(name))
    if arguments:
        raise ValueError("--drafter-option: not taken by a draft model")
    return text.load(name, dtype.value)


def _summary(output: Output, drafter: str, seconds: float) -> str:
    """The first round holds the compilations, so the rate is that of the rounds after it."""
    stats = output.stats
    tau = stats.mean_accepted_length or 0.0
    rate = f"{tau * (stats.rounds - 1) / seconds:.1f} tokens/s" if stats.rounds > 1 else "tokens/s n/a"
    return (
        f"[{stats.tokens} tokens, {rate} after the first round, tau {tau:.2f}, drafter {drafter}, "
        f"finish {output.finish_reasons[0]}]"
    )


def _remember_compilations() -> None:
    """Keep compiled programs in the user's cache folder, unless JAX was told where to keep them."""
    if _config("jax_compilation_cache_dir") is None:
        jax.config.update("jax_compilation_cache_dir", str(auto.cache_folder() / "jax"))


def _config(name: str) -> Any:
    return getattr(jax.config, name)


# --- info -------------------------------------------------------------------------------------------


@app.command()
def info(
    target: Annotated[str | None, typer.Option(help="Also load this model and describe it.")] = None,
) -> None:
    """Versions, devices, models at hand, drafters and acceptance rules with their exactness, settings."""
    console = Console()
    described = None if target is None else _describe(text.load(target))
    _print(console, "versions", [("python", platform.python_version()), *map(_version, LIBRARIES)])
    _print(console, "devices", [(str(device), device.device_kind) for device in jax.devices()])
    _print(console, "models", _models())
    _print(console, "drafters", _methods(drafters))
    _print(console, "acceptance rules", _methods(verify))
    _print(console, "settings", _settings())
    if described is not None:
        _print(console, f"model {target}", described)


def _print(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()


def _version(library: str) -> tuple[str, str]:
    try:
        return library, importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return library, "not installed"


def _models() -> list[tuple[str, str]]:
    """The embedded model, and what the Hub's cache holds."""
    try:
        rows = [(text.SMOLLM2, str(gguf.find_smollm2()))]
    except FileNotFoundError as error:
        rows = [(text.SMOLLM2, str(error))]
    try:
        repositories = huggingface_hub.scan_cache_dir().repos
    except huggingface_hub.errors.CacheNotFound:
        return rows
    return rows + sorted(
        (repo.repo_id, str(repo.repo_path)) for repo in repositories if repo.repo_type == "model"
    )


#: To the end of the sentence, in which a bracket may hold more than one.
EXACTNESS = re.compile(r"\b(Lossless|Lossy|As exact|Keeps the exactness)\b(\([^)]*\)|[^.:;(])*")


def _methods(module: ModuleType) -> list[tuple[str, str]]:
    """Every factory of a package and the words of its docstring that say how exact it is."""
    rows = []
    for name in module.__all__:
        exactness = EXACTNESS.search(inspect.getdoc(getattr(module, name)) or "")
        if exactness:
            rows.append((name, " ".join(exactness.group().split())))
    return rows


def _settings() -> list[tuple[str, str]]:
    return [
        ("capacity", f"multiples of {engine.CAPACITY_STEP} slots a row"),
        ("prompt chunks", f"{' or '.join(map(str, engine.CHUNKS))} tokens"),
        ("looks for stop strings", f"every {text.SEGMENT} rounds, every round when streaming"),
        ("matmul precision", str(_config("jax_default_matmul_precision") or "default")),
        ("compilation cache", str(_config("jax_compilation_cache_dir") or auto.cache_folder() / "jax")),
        *(
            (name, os.environ[name])
            for name in ("JAX_PLATFORMS", "XLA_FLAGS", "HF_HOME")
            if name in os.environ
        ),
    ]


def _describe(model: text.Model) -> list[tuple[str, str]]:
    leaves = jax.tree.leaves(model.params)
    config, tokenizer = model.lm.config, model.tokenizer
    encoder = []
    if isinstance(config, Seq2SeqConfig):
        encoder = [
            ("encoder layers", str(config.num_encoder_layers)),
            ("source positions", _positions(config.source_length)),
        ]
    return [
        ("parameters", f"{sum(leaf.size for leaf in leaves):,}"),
        ("dtypes", ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))),
        *encoder,
        ("decoder layers" if encoder else "layers", str(config.num_layers)),
        ("positions", _positions(model.context_length)),
        ("vocabulary", f"{model.vocab_size:,} tokens, {config.vocab_size:,} logits"),
        ("end tokens", ", ".join(map(str, model.eos)) or "none"),
        ("tokenizer", "no" if tokenizer is None else "yes"),
        ("chat template", "yes" if tokenizer is not None and tokenizer.has_chat_template else "no"),
    ]


def _positions(length: int) -> str:
    return str(length) if length < ENDLESS else "no end"
