"""`python -m experiments table --config FILE`: train what is missing, measure, write the tables."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import jax
import rich.console
import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Config = Annotated[Path, typer.Option(help="A YAML file as in configs/.")]
Data = Annotated[
    Path | None, typer.Option(help="Folder of the data sets that the configuration names; see docs/data.md.")
]
Output = Annotated[Path | None, typer.Option(help="Folder of the results; default: runs/<config's name>.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="A run of minutes: the configuration's `smoke` values.")]

WRONG = (ValueError, OSError, FloatingPointError, ImportError)  # what a user can mend: one line


@app.callback()
def main() -> None:
    """Experiments of jspec."""


@app.command()
def table(config: Config, data: Data = None, output: Output = None, smoke: Smoke = False) -> None:
    """The table of a configuration: speeds of drafters, or a whole study with its training."""
    from experiments import study

    console = _prepare()
    try:
        settings = _read(config, smoke, "table")
        folder = _folder(config, output, smoke)
        if isinstance(settings, study.Study):
            measure = _trained(settings, data, folder, console)
        else:
            measure = _loaded(settings, data, output or Path(settings.output or folder), console)
    except WRONG as error:
        _fail(error)
    _run(measure)


@app.command()
def losses(config: Config, data: Data = None, output: Output = None, smoke: Smoke = False) -> None:
    """Losses compared on one drafter of a study, whose target and text it takes from --output."""
    from experiments import losses as comparison
    from experiments import pipeline, study
    from experiments.stages import Stages

    console = _prepare()
    try:
        import matplotlib  # noqa: F401  (as for a study: before the training)

        settings = _read(config, smoke, "losses")
        path = config.parent / settings.study
        base = study.load(path, smoke=smoke)
        if not isinstance(base, study.Study) or settings.drafter not in base.drafters:
            raise ValueError(f"{config}: expected a study with a drafter {settings.drafter!r}, got {path}")
        if base.drafters[settings.drafter].model is not None:
            raise ValueError(
                f"{config}: drafter: expected one that {path} trains, got {settings.drafter!r}, which it "
                "uses as it is (model)"
            )
        folder = _folder(path, output, smoke)
        texts = pipeline.read(base.data, data or Path("."), console)
        stages = Stages(folder, console)
        outcomes = comparison.compare(settings, base, texts, folder, stages, console)
        comparison.write(folder, settings, outcomes, stages, console)
    except WRONG as error:
        _fail(error)


@app.command()
def drafters(config: Config, data: Data = None, output: Output = None, smoke: Smoke = False) -> None:
    """Draft networks trained on the same text of a target, their learning curves and their speeds."""
    from experiments import drafters as comparison
    from experiments.stages import Stages

    console = _prepare()
    try:
        import matplotlib  # noqa: F401  (as for a study: before the training)

        settings = _read(config, smoke, "drafters")
        folder = _folder(config, output, smoke)
        # What does not wait for the training is looked at first.
        with tempfile.TemporaryDirectory() as random:
            _loaded(comparison.rehearsed(settings, Path(random)), data, folder, console)
        stages = Stages(folder, console)
        found = comparison.train(settings, data or Path("."), folder, stages, console)
        comparison.write(folder, settings, found, stages, console)
        measure = _loaded(comparison.rows(settings, folder), data, folder, console)
    except WRONG as error:
        _fail(error)
    _run(measure)


@app.command()
def blockwise(config: Config, data: Data = None, output: Output = None, smoke: Smoke = False) -> None:
    """Blockwise parallel decoding on a study's target: the paper's sweep, and other drafters beside it."""
    from experiments import blockwise as comparison
    from experiments import pipeline, quality, study
    from experiments.stages import Stages

    console = _prepare()
    try:
        import matplotlib  # noqa: F401  (as for a study: before the training)

        settings = _read(config, smoke, "blockwise")
        path = config.parent / settings.study
        base = study.load(path, smoke=smoke)
        if not isinstance(base, study.Study) or settings.drafter not in base.rows():
            raise ValueError(f"{config}: expected a study with a row {settings.drafter!r}, got {path}")
        quality.score(base.task.metric, ["a"], ["a"])
        folder = _folder(path, output, smoke)
        texts = pipeline.read(base.data, data or Path("."), console)
        stages = Stages(folder, console)
        if base.target.finetune is not None and not pipeline.finished(folder / pipeline.TARGET):
            pipeline.check_test(base.target.finetune, texts)
        workshop = pipeline.Workshop(base, texts, folder, stages, console)
        trained = comparison.train(settings, workshop)
    except WRONG as error:
        _fail(error)

    def measure() -> None:
        results = comparison.measure(settings, workshop, texts, trained)
        comparison.write(settings, base, results, stages)

    _run(measure)


#: The command for each kind of configuration.
COMMANDS = {
    "speed": "table",
    "study": "table",
    "losses": "losses",
    "drafters": "drafters",
    "blockwise": "blockwise",
}


def _read(config: Path, smoke: bool, command: str) -> Any:
    """The configuration, which must be one for this command."""
    from experiments import study

    settings = study.load(config, smoke=smoke)
    if COMMANDS[settings.kind] != command:
        kinds = " or ".join(kind for kind, its in COMMANDS.items() if its == command)
        raise ValueError(
            f"{config}: kind: expected {kinds}, got {settings.kind}: "
            f"python -m experiments {COMMANDS[settings.kind]}"
        )
    return settings


def _run(measure: Callable[[], None]) -> None:
    """Apart from what comes before: but for a disk that is full, what goes wrong here is no user's doing."""
    try:
        measure()
    except OSError as error:
        _fail(error)


def _trained(
    settings: Any, data: Path | None, folder: Path, console: rich.console.Console
) -> Callable[[], None]:
    """Train what a study names; the function that measures it."""
    import matplotlib  # noqa: F401  (missing packages are found out before the training, not after it)

    from experiments import measurements, pipeline, quality, study_report
    from experiments.stages import Stages

    quality.score(settings.task.metric, ["a"], ["a"])
    texts = pipeline.read(settings.data, data or Path("."), console)
    stages = Stages(folder, console)
    trained = pipeline.train(settings, texts, folder, stages, console)

    def measure() -> None:
        measured = measurements.measure(settings, trained, texts, folder, stages, console)
        beside = {name: subject.paper for name, subject in trained.subjects.items()}
        study_report.write(folder, settings, measured, beside, stages, console)

    return measure


def _loaded(
    settings: Any, data: Path | None, folder: Path, console: rich.console.Console
) -> Callable[[], None]:
    """Load what a speed table names; the function that measures it."""
    from experiments import prompts, report
    from experiments import table as tables
    from jspec import load

    questions = prompts.read(prompts.find(settings.prompts.file, data), settings.prompts.ids)
    model = load(settings.target, dtype=settings.dtype)
    cases = tables.tokenize(model, questions, settings.prompts.chat, settings.max_new_tokens)
    rows = [tables.build(row, model, settings.dtype) for row in settings.drafters]
    folder.mkdir(parents=True, exist_ok=True)

    def measure() -> None:
        measured = tables.run(settings, model, cases, rows, console)
        report.write(folder, console, measured, settings.model_dump(mode="json"))

    return measure


def _prepare() -> rich.console.Console:
    """The cache of compiled programs, the environment as it is now, and the console."""
    from experiments import environment
    from jspec import auto

    jax.config.update("jax_compilation_cache_dir", str(auto.cache_folder() / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    environment.current()
    return rich.console.Console() if sys.stdout.isatty() else rich.console.Console(width=200)


def _folder(config: Path, output: Path | None, smoke: bool) -> Path:
    return output or Path("runs") / (config.stem + ("-smoke" if smoke else ""))


def _fail(error: BaseException) -> NoReturn:
    rich.console.Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1) from None


@app.command("dry-run")
def dry_run(
    config: Config,
    layers: Annotated[int | None, typer.Option(help="Compile targets of so many layers instead.")] = None,
) -> None:
    """How models lie on devices that are not there: bytes, collectives, temporaries."""
    from experiments import dryrun
    from training import config as configs

    try:
        settings = configs.load(config, dryrun.DryRun)
        if layers is not None:
            settings = settings.model_copy(update={"layers": layers})
    except WRONG as error:
        _fail(error)
    dryrun.simulate(settings)
    print(dryrun.describe(settings))
    for layout in dryrun.run(settings):
        print(f"\n{dryrun.report(layout)}", flush=True)


if __name__ == "__main__":
    app(prog_name="python -m experiments")
