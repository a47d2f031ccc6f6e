"""How good answers are: BLEU of translations, ROUGE-2 of summaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Score(NamedTuple):
    """A score in 0 .. 100, and what it was computed with."""

    value: float
    name: str  # for headings
    signature: str


def score(metric: str, answers: Sequence[str], references: Sequence[str]) -> Score:
    """Score a test set.

    Args:
      metric: "bleu": corpus BLEU by sacrebleu with its defaults (Post 2018, arXiv 1804.08771); "rouge2":
        mean F1 of ROUGE-2 by rouge-score, with stemming, in percent (Lin 2004).

    Raises:
      ValueError: an unknown metric, or not as many answers as references.
      ImportError: the extra ``experiments`` is not installed.

    >>> score("bleu", ["a b c d e"], ["a b c d e"]).value
    100.0
    """
    if len(answers) != len(references) or not references:
        raise ValueError(f"answers: expected {len(references)}, one a reference, got {len(answers)}")
    if metric == "bleu":
        from sacrebleu.metrics.bleu import BLEU

        bleu = BLEU()
        value = bleu.corpus_score(list(answers), [list(references)]).score
        return Score(round(float(value), 4), "BLEU", str(bleu.get_signature()))
    if metric == "rouge2":
        from importlib import metadata

        from rouge_score import rouge_scorer

        scorer = rouge_scorer.RougeScorer(["rouge2"], use_stemmer=True)
        pairs = zip(references, answers, strict=True)
        values = [scorer.score(reference, answer)["rouge2"].fmeasure for reference, answer in pairs]
        version = metadata.version("rouge-score")
        return Score(
            round(100 * sum(values) / len(values), 4), "ROUGE-2", f"rouge-score {version}, F1, stemmed"
        )
    raise ValueError(f"metric: expected bleu or rouge2, got {metric!r}")
