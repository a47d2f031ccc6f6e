"""`python -m training RECIPE --config FILE`: train, and say where the model lies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import rich.console
import typer

from jspec import auto

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Config = Annotated[Path, typer.Option(help="A YAML file as in configs/.")]
DataFolder = Annotated[Path, typer.Option(help="What the configuration's data files are relative to.")]
Output = Annotated[Path | None, typer.Option(help="Folder of the run; default: runs/<config's name>.")]
Cache = Annotated[
    Path | None,
    typer.Option(help="Folder for what the target writes and shows, for several runs; default: the run's."),
]
MeshShape = Annotated[str | None, typer.Option(help="Devices, DATAxMODEL as in 4x2; default: one.")]


@app.callback()
def main() -> None:
    """Train models and drafters."""


def _console() -> rich.console.Console:
    return rich.console.Console() if sys.stdout.isatty() else rich.console.Console(width=200)


def _mesh(shape: str | None) -> Any:
    from jspec import parallel

    if shape is None:
        return None
    parallel.initialize_distributed()
    try:
        data, model = (int(size) for size in shape.split("x"))
    except ValueError:
        raise ValueError(f"mesh: expected DATAxMODEL, as in 4x2, got {shape!r}") from None
    return parallel.make_mesh(data, model)


def _train(
    recipes: Any, kind: type[Any], config: Path, data: Path, output: Path | None, **options: Any
) -> None:
    """Run a recipe on what its configuration names."""
    from training import config as configs
    from training import recipe

    settings = configs.load(config, kind)
    folder = output or Path("runs") / config.stem
    recipes.run(settings, recipe.read(settings.data, data), folder, **options)
    print(folder)


@app.command()
def finetune(
    config: Config, data: DataFolder = Path("."), output: Output = None, mesh: MeshShape = None
) -> None:
    """A model learns the answers of a corpus, from a checkpoint or from scratch."""
    from training import finetune as recipes

    placed = _mesh(mesh)  # before anything touches a device
    _train(recipes, recipes.Finetune, config, data, output, mesh=placed, console=_console())


@app.command()
def distill(
    config: Config, data: DataFolder = Path("."), output: Output = None, mesh: MeshShape = None
) -> None:
    """A smaller model learns a target's laws, on given text, the target's or its own."""
    from training import distill as recipes

    placed = _mesh(mesh)
    _train(recipes, recipes.Distill, config, data, output, mesh=placed, console=_console())


@app.command()
def drafter(config: Config, data: DataFolder = Path("."), output: Output = None, cache: Cache = None) -> None:
    """A network that reads the target's hidden states learns to draft for it."""
    from training import drafter as recipes

    _train(recipes, recipes.Drafter, config, data, output, cache=cache, console=_console())


@app.command()
def blockwise(
    config: Config, data: DataFolder = Path("."), output: Output = None, cache: Cache = None
) -> None:
    """A model and heads that draft for it learn together (blockwise parallel decoding)."""
    from training import blockwise as recipes

    _train(recipes, recipes.Blockwise, config, data, output, cache=cache, console=_console())


@app.command()
def plan(config: Config, data: DataFolder = Path(".")) -> None:
    """How long a drafter's text, features and training take on this device, by a short measured burst."""
    from training import config as configs
    from training import drafter as recipes
    from training import plan as plans
    from training import recipe

    settings = configs.load(config, recipes.Drafter)
    for line in plans.lines(plans.measure(settings, recipe.read(settings.data, data))):
        print(line)


@app.command()
def online(config: Config, data: DataFolder = Path("."), output: Output = None) -> None:
    """A drafter learns from the requests that it serves."""
    from training import online as recipes

    _train(recipes, recipes.Online, config, data, output, console=_console())


@app.command()
def ngram(config: Config, data: DataFolder = Path("."), output: Output = None) -> None:
    """A unigram or bigram drafter, by counting."""
    from training import ngram as recipes

    _train(recipes, recipes.Ngram, config, data, output)


@app.command()
def prompts(
    output: Annotated[Path, typer.Argument(help="A JSONL file; its key is `prompt`.")],
    target: Annotated[str, typer.Option(help="A chat model, as `jspec.load` takes it.")],
    count: Annotated[int, typer.Option(min=1, help="Turns to draw; what is cut off or double is left out.")],
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    dtype: Annotated[str, typer.Option(help="That of the model.")] = "float32",
) -> None:
    """Prompts that a chat model writes itself, to have it answer them."""
    from jspec import load
    from training import prompts as made

    if not output.parent.is_dir():  # before the turns are drawn, which takes a while
        raise FileNotFoundError(f"output: expected a file in a folder that exists, got {output}")
    model = load(target, dtype)
    options = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens, "batch_size": batch_size}
    found = made.write_prompts(model, count, **options)
    made.save_prompts(output, found)
    print(f"{output}: {len(found)} prompts of {count} turns")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    folder: Annotated[Path, typer.Argument(help="A new folder, in Hugging Face's format.")],
) -> None:
    """Write a trained model as a folder that transformers loads."""
    from training import export as exports

    print(exports.run(run, folder))


def run() -> None:
    """The command line, with one line for whatever a user can mend."""
    jax.config.update("jax_compilation_cache_dir", str(auto.cache_folder() / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    try:
        app(prog_name="python -m training")
    except (ValueError, OSError, FloatingPointError, ImportError) as error:
        rich.console.Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run()
