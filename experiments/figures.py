"""What trials of a bench show: rates, speed-ups, acceptance, and what the measured costs let one expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import cost, report
from experiments.bench import Bench, Setting, Trials
from jspec.measure import CostCurve, Rounds, Trial


def whole_rounds(bench: Bench, setting: Setting, trials: Sequence[Trial]) -> report.Rounds:
    """The rounds of whole batches: how many, the width of each, and all new tokens."""
    widths = []
    for group in bench.groups:
        columns = [setting.executed(trials[i].rounds.nodes) for i in group]
        count = max(len(column) for column in columns)
        padded = [np.pad(column, (0, count - len(column))) for column in columns]
        widths.append(np.max(padded, axis=0))
    return report.Rounds(sum(len(trial.tokens) for trial in trials), np.concatenate(widths))


def lines(
    bench: Bench,
    settings: Sequence[Setting],
    trials: Trials,
    drafting: Sequence[float | None],
    curve: CostCurve,
    temperature: float,
) -> list[report.Line]:
    """What the trials show, and what the costs let one expect.

    Args:
      settings: one of them plain decoding.
      drafting: seconds of each setting's drafting a round; None where nothing is drafted.
    """
    baseline = next(i for i, setting in enumerate(settings) if not setting.drafts and not setting.note)
    tokens = [[trial.tokens for trial in mine] for mine in trials[-1]]
    flips = [bench.flips(mine, tokens[baseline]) if temperature == 0 else None for mine in tokens]
    decode = bench.rates(trials, lambda trial: trial.decode_seconds)
    overall = bench.rates(trials, lambda trial: trial.prompt_seconds + trial.decode_seconds)
    plain = whole_rounds(bench, settings[baseline], trials[-1][baseline])
    found = []
    for i, setting in enumerate(settings):
        own, whole = trials[-1][i], whole_rounds(bench, setting, trials[-1][i])
        rounds = Rounds.join([trial.rounds for trial in own])
        alpha, depth = cost.estimate_alpha(rounds.accepted, rounds.judged), setting.drafter.method.depth
        seconds = drafting[i]
        c = theory = predicted = predicted_overall = best = None
        if seconds is not None:
            draft_cost = seconds / curve.seconds[0]
            c = draft_cost / depth
            theory = cost.predict_from_theory(alpha, rounds.proposed.tolist(), c)
            predicted = cost.predict_from_curve(
                whole.tokens_a_round / plain.tokens_a_round, whole.widths.tolist(), draft_cost, curve
            )
            predicted_overall = _with_prompts(bench, predicted, trials, i, baseline)
            if setting.is_chain:
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
                    drafting=seconds or 0.0,
                ),
                flips=flips[i],
                lossless=setting.verify.lossless,
                num_prompts=len(bench.cases),
            )
        )
    return found


def _with_prompts(bench: Bench, predicted: float, trials: Trials, setting: int, baseline: int) -> float:
    """The expected speed-up of whole inference, from that of decoding and the measured time that reading
    the prompts takes, here and in plain decoding: (1 + e) / (1 / predicted + e')."""
    firsts = [group[0] for group in bench.groups]

    def total(index: int, field: str) -> float:
        return float(np.median([sum(getattr(repeat[index][i], field) for i in firsts) for repeat in trials]))

    plain = total(baseline, "decode_seconds")
    share, own = (total(i, "prompt_seconds") / plain for i in (baseline, setting))
    return (1 + share) / (1 / predicted + own)


def content(bench: Bench, settings: Sequence[Setting], trials: Trials) -> dict[str, Any]:
    """Every round and every timing of every prompt, for JSON."""
    found: dict[str, Any] = {}
    for i, setting in enumerate(settings):
        found[setting.name] = {}
        for j, case in enumerate(bench.cases):
            last = trials[-1][i][j]
            found[setting.name][case.name] = {
                "category": case.category,
                "prompt_tokens": len(case.request.source or case.request.tokens),
                "tokens": last.tokens.tolist(),
                "emitted": last.rounds.emitted.tolist(),
                "accepted": last.rounds.accepted.tolist(),
                "proposed": last.rounds.proposed.tolist(),
                "width": setting.executed(last.rounds.nodes).tolist(),
                "prompt_seconds": [repeat[i][j].prompt_seconds for repeat in trials],
                "decode_seconds": [repeat[i][j].decode_seconds for repeat in trials],
            }
    return found
