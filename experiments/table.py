"""The speed table: every drafter on every prompt, in turn with plain decoding, in one run."""

from __future__ import annotations

from collections.abc import Sequence

import rich.console

import jspec
from experiments import cost, figures, progress, report
from experiments.bench import PLAIN, Bench, Case, Setting
from experiments.config import Row, Table
from experiments.prompts import Question
from jspec import auto, drafters, engine, measure, verify
from jspec.io.tokenizer import check_vocabularies
from jspec.prompts import as_requests
from jspec.text import named_drafter
from training import recipe


def build(row: Row, model: jspec.Model, dtype: str = "float32") -> Setting:
    """The drafter, verifier and widths that a row names.

    Raises:
        ValueError: an argument, rule or width that does not exist or does not fit; it names the row.
    """
    note = ""
    try:
        if row.drafter == "none":
            drafter = drafters.plain()
        elif row.drafter == "auto":
            choice = auto.choice(model)
            drafter, note = choice.build(model) or drafters.plain(), choice.title
        elif row.drafter == "model":
            arguments = dict(row.arguments)
            draft_model = jspec.load(str(arguments.pop("draft_model")), dtype=dtype)
            recipe.check_kind("draft_model", model, draft_model)
            drafter = drafters.model(draft_model, **arguments)
            if model.vocabulary is not None:
                check_vocabularies(model.vocabulary, drafter.params)
        else:
            drafter = named_drafter(row.drafter, model, **row.arguments)
        rule = verify.resolve(drafter.method, None if row.verify is None else verify.named(row.verify))
        return Setting(row.name, drafter, rule, engine.block_widths(drafter, row.widths), note)
    except (TypeError, ValueError) as error:
        raise ValueError(f"drafters: {row.name!r}: {error}") from None
    except KeyError as error:
        raise ValueError(f"drafters: {row.name!r}: the argument {error} is missing") from None


def tokenize(
    model: jspec.Model, questions: Sequence[Question], chat: bool, max_new_tokens: int
) -> list[Case]:
    """Every question as tokens; refused where it and its answer do not fit into the model's positions."""
    if model.tokenizer is None:
        raise ValueError(f"target: {model.name} has no tokenizer, which the prompts need")
    cases = []
    requests = as_requests(model, [question.text for question in questions], chat, None)
    for question, request in zip(questions, requests, strict=True):
        if len(request.tokens) + max_new_tokens > model.context_length:
            raise ValueError(
                f"prompts: {question.id} has {len(request.tokens)} tokens, with "
                f"max_new_tokens={max_new_tokens} it needs more than the "
                f"{model.context_length} positions of {model.name}"
            )
        cases.append(Case(str(question.id), question.category, request))
    return cases


def run(
    config: Table,
    model: jspec.Model,
    cases: Sequence[Case],
    settings: Sequence[Setting],
    console: rich.console.Console,
) -> report.Report:
    """Measure. ``settings`` are the rows in order; plain decoding is put first where it is missing.

    Compilation is done before anything is timed.
    """
    if all(setting.drafts or setting.note for setting in settings):
        settings = [PLAIN, *settings]
    benches = [
        Bench(
            model,
            cases,
            max_new_tokens=config.max_new_tokens,
            seed=config.seed,
            repeats=config.repeats,
            batch_size=size,
        )
        for size in config.batch_sizes
    ]
    groups, kinds = sum(len(bench.groups) for bench in benches), len(config.temperatures)
    forwards = len(benches) * len({1, *config.curve}) * (measure.REPEATS + 1)
    sections = []
    with progress.bars(console) as bar:
        compiled = bar("compiling", len(benches) * len(settings))
        curve_done = bar("cost curve", forwards)
        drafted = bar("drafting", len(benches) * len(settings) * kinds)
        advance = bar("decoding", kinds * config.repeats * groups * len(settings))
        for bench in benches:
            bench.compile(settings, compiled)
            curve, fill = bench.curve(config.curve, curve_done)
            for temperature in config.temperatures:
                drafting: list[cost.Drafting | None] = []
                for setting in settings:
                    drafting.append(bench.draft_seconds(setting, temperature) if setting.drafts else None)
                    drafted()
                trials = bench.trials(settings, temperature, advance)
                sections.append(
                    report.Section(
                        _title(config, model, len(cases), temperature, bench.batch_size),
                        figures.lines(bench, settings, trials, drafting, curve, temperature),
                        curve,
                        fill,
                        figures.content(bench, settings, trials),
                    )
                )
    return report.Report(sections, report.NEAR_TIE[config.dtype])


def _title(config: Table, model: jspec.Model, num_prompts: int, temperature: float, batch_size: int) -> str:
    law = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    together = "one row at a time" if batch_size == 1 else f"{batch_size} rows at a time"
    return (
        f"{model.name}, {config.dtype}, {law}, {num_prompts} prompts, {config.max_new_tokens} new tokens, "
        f"{together}, {config.repeats} repeats"
    )
