"""What trials of a bench show: rates, speed-ups, acceptance, and what the measured costs let one expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import cost, report
from experiments.bench import Bench, Setting, Trials
from jspec.measure import CostCurve, Rounds, Trial


def whole_rounds(bench: Bench, setting: Setting, repeats: Sequence[Sequence[Trial]]) -> report.Rounds:
    """The rounds of whole batches in all repeats: how many, the width of each, and all new tokens."""
    widths = []
    for trials in repeats:
        for group in bench.groups:
            columns = [setting.executed(trials[i].rounds.nodes) for i in group]
            count = max(len(column) for column in columns)
            padded = [np.pad(column, (0, count - len(column))) for column in columns]
            widths.append(np.max(padded, axis=0))
    tokens = sum(len(trial.tokens) for trials in repeats for trial in trials)
    return report.Rounds(tokens, np.concatenate(widths))


def caught_up(bench: Bench, depth: int, repeats: Sequence[Sequence[Trial]]) -> float:
    """The share of whole rounds before which a row, not finished yet, had its whole draft accepted."""
    behind = rounds = 0
    for trials in repeats:
        for group in bench.groups:
            rows = [trials[i].rounds.accepted for i in group]
            after = np.zeros((len(rows), max(len(row) for row in rows)), bool)
            for flags, row in zip(after, rows, strict=True):
                flags[1 : len(row)] = row[:-1] == depth
            behind, rounds = behind + after.any(0).sum(), rounds + after.shape[1]
    return float(behind / rounds)


def lines(
    bench: Bench,
    settings: Sequence[Setting],
    trials: Trials,
    drafting: Sequence[cost.Drafting | None],
    curve: CostCurve,
    temperature: float,
) -> list[report.Line]:
    """What the trials show, all repeats together, and what the costs let one expect.

    Args:
      settings: one of them plain decoding.
      drafting: of each setting; None where nothing is drafted.
    """
    baseline = next(i for i, setting in enumerate(settings) if not setting.drafts and not setting.note)
    tokens = [[trial.tokens for trial in mine] for mine in trials[-1]]  # at temperature 0 those of any repeat
    flips = [bench.flips(mine, tokens[baseline]) if temperature == 0 else None for mine in tokens]
    decode = bench.rates(trials, lambda trial: trial.decode_seconds)
    overall = bench.rates(trials, lambda trial: trial.prompt_seconds + trial.decode_seconds)
    plain = whole_rounds(bench, settings[baseline], [repeat[baseline] for repeat in trials])
    found = []
    for i, setting in enumerate(settings):
        method, own = setting.drafter.method, [repeat[i] for repeat in trials]
        whole, depth = whole_rounds(bench, setting, own), method.depth
        rounds = Rounds.join([trial.rounds for repeat in own for trial in repeat])
        alpha, costs, seconds = cost.estimate_alpha(rounds.accepted, rounds.judged), drafting[i], 0.0
        c = theory = predicted = predicted_overall = best = None
        if costs is not None:
            seconds = costs.mean(caught_up(bench, depth, own))
            c = costs.after_nothing / curve.seconds[0] / depth
            theory = cost.predict_from_theory(alpha, rounds.proposed.tolist(), c)
            predicted = cost.predict_from_curve(
                whole.tokens_a_round / plain.tokens_a_round,
                whole.widths.tolist(),
                seconds / curve.seconds[0],
                curve,
            )
            predicted_overall = _with_prompts(bench, predicted, trials, i, baseline)
            if rounds.are_chains and not method.side:
                best = cost.best_length(
                    rounds.survival(depth).tolist(),
                    curve,
                    draft_cost=c,
                    drafting=float((rounds.proposed > 0).mean()),
                )
        found.append(
            report.Line(
                name=setting.name,
                note=setting.note,
                baseline=i == baseline,
                tau=float(rounds.emitted.sum() / len(rounds.emitted)),
                accepted_by_position=tuple(float(share) for share in rounds.survival(depth)),
                alpha=alpha if setting.drafts else None,
                c=c,
                theory=theory,
                predicted=predicted,
                predicted_overall=predicted_overall,
                best_length=best,
                decode=report.Speed.of(decode[:, i]),
                overall=report.Speed.of(overall[:, i]),
                speedup=report.Speed.of(decode[:, i] / decode[:, baseline]),
                overall_speedup=report.Speed.of(overall[:, i] / overall[:, baseline]),
                round=report.Round(
                    seconds=whole.tokens_a_round / float(np.median(decode[:, i])),
                    forward=float(np.mean([curve.relative(n) for n in whole.widths])) * curve.seconds[0],
                    drafting=seconds,
                ),
                flips=flips[i],
                lossless=setting.verify.lossless,
                num_prompts=len(bench.cases),
            )
        )
    return found


def _with_prompts(bench: Bench, predicted: float, trials: Trials, setting: int, baseline: int) -> float:
    """The expected speed-up of whole inference, from that of decoding, the measured time that reading the
    prompts takes, here and in plain decoding, and the numbers N of tokens that both wrote:
    (1 + e) / (1 / predicted + e' N_plain / N_setting), of which the median over the repeats."""
    firsts = [group[0] for group in bench.groups]

    def total(trials: Sequence[Trial], field: str) -> float:
        return sum(getattr(trials[i], field) for i in firsts)

    found = []
    for repeat in trials:
        plain, own = repeat[baseline], repeat[setting]
        decoding = total(plain, "decode_seconds")
        share, mine = (total(part, "prompt_seconds") / decoding for part in (plain, own))
        tokens = [sum(len(trial.tokens) for trial in part) for part in (plain, own)]
        found.append((1 + share) / (1 / predicted + mine * tokens[0] / tokens[1]))
    return float(np.median(found))


def content(bench: Bench, settings: Sequence[Setting], trials: Trials) -> dict[str, Any]:
    """Every round and every timing of every prompt, for JSON; each is a list with an entry a repeat."""
    found: dict[str, Any] = {}
    for i, setting in enumerate(settings):
        found[setting.name] = {}
        for j, case in enumerate(bench.cases):
            mine = [repeat[i][j] for repeat in trials]
            found[setting.name][case.name] = {
                "category": case.category,
                "prompt_tokens": len(case.request.source or case.request.tokens),
                "tokens": [trial.tokens.tolist() for trial in mine],
                "emitted": [trial.rounds.emitted.tolist() for trial in mine],
                "accepted": [trial.rounds.accepted.tolist() for trial in mine],
                "proposed": [trial.rounds.proposed.tolist() for trial in mine],
                "width": [setting.executed(trial.rounds.nodes).tolist() for trial in mine],
                "prompt_seconds": [trial.prompt_seconds for trial in mine],
                "decode_seconds": [trial.decode_seconds for trial in mine],
            }
    return found
