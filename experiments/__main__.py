"""`python -m experiments table --config FILE`: measure, print, and write the report's files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import jax
import rich.console
import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Experiments of jspec."""


@app.command()
def table(
    config: Annotated[Path, typer.Option(help="A YAML file as in configs/.")],
    output: Annotated[Path | None, typer.Option(help="Folder of table.md, rounds.json, speedup.png.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets; default: $JSPEC_DATA.")] = None,
) -> None:
    """Speed of every drafter of a configuration, next to plain decoding, in one run."""
    from experiments import config as configs
    from experiments import prompts, report
    from experiments import table as tables
    from jspec import auto, load

    jax.config.update("jax_compilation_cache_dir", str(auto.cache_folder() / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    console = rich.console.Console() if sys.stdout.isatty() else rich.console.Console(width=200)
    try:
        settings = configs.load(config)
        questions = prompts.read(prompts.find(settings.prompts.file, data), settings.prompts.ids)
        model = load(settings.target, dtype=settings.dtype)
        cases = tables.tokenize(model, questions, settings.prompts.chat, settings.max_new_tokens)
        rows = [tables.build(row, model, settings.dtype) for row in settings.drafters]
    except (ValueError, OSError) as error:
        rich.console.Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None

    folder = output or Path(settings.output or Path("runs") / config.stem)
    folder.mkdir(parents=True, exist_ok=True)
    measured = tables.run(settings, model, cases, rows, console)
    report.write(folder, console, measured, settings.model_dump(mode="json"))


if __name__ == "__main__":
    app(prog_name="python -m experiments")
