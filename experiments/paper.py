"""The published figures of Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative
Decoding" (arXiv 2211.17192, version 2), as data, to stand beside what is measured here.

Target: T5 1.1 XXL (11B parameters), fine-tuned on WMT English-German ("ende") or CNN/DailyMail ("cnndm").
Drafters: T5 1.1 small (77M), base (250M) and large (800M), fine-tuned alike. One sequence at a time on one
TPU v4, whole inference, against T5X; c from profiler traces.

Errata, and what does not add up:

* Appendix A.5 prints the lenient rule for argmax decoding as "accept if p(x) <= l max p". It must be ">=":
  as printed, l = 1 accepts every token, while its alpha is given as 0.75, that of the exact rule.
* By Theorem 3.8, two expectations of Table 4 for the large drafter come out lower than printed: 1.93 (2.0)
  for "ende" and 1.54 (1.6) for "cnndm", at temperature 1.
* In Table 4 the measured speed-ups are 32 % below to 29 % above the expected ones.
* The factors that A.5 states for c = 0.015 lie above Theorem 3.8 at the best gamma for the alphas of Table 5.
"""

from __future__ import annotations

from typing import NamedTuple

SOURCE = "Leviathan et al. 2023, arXiv 2211.17192"
TASKS = {"ende": "WMT En-De", "cnndm": "CNN/DM"}  # as tables call them, since other data may stand beside


class Row(NamedTuple):
    """A row of Tables 2 and 4, joined: Table 2 has gamma, alpha and the speed-up, Table 4 c and what
    Theorem 3.8 expects."""

    task: str
    drafter: str
    temperature: float
    gamma: int
    alpha: float
    c: float
    expected: float
    measured: float


ROWS = (
    Row("ende", "small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    Row("ende", "base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    Row("ende", "large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    Row("ende", "small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    Row("ende", "base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    Row("ende", "large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    Row("cnndm", "small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    Row("cnndm", "base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    Row("cnndm", "large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    Row("cnndm", "small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    Row("cnndm", "base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    Row("cnndm", "large", 1, 3, 0.56, 0.11, 1.6, 1.7),
)

#: Table 3: alpha, the mean of sum min(p, q) over 10,000 tokens that the target generated, by task,
#: temperature and drafter. (The rows of other models, GPT-like and LaMDA, are left out.)
ALPHA: dict[tuple[str, float], dict[str, float]] = {
    ("ende", 0): {"unigram": 0.08, "bigram": 0.20, "small": 0.75, "base": 0.80, "large": 0.82},
    ("ende", 1): {"unigram": 0.07, "bigram": 0.19, "small": 0.62, "base": 0.68, "large": 0.71},
    ("cnndm", 0): {"unigram": 0.13, "bigram": 0.23, "small": 0.65, "base": 0.73, "large": 0.74},
    ("cnndm", 1): {"unigram": 0.08, "bigram": 0.16, "small": 0.53, "base": 0.55, "large": 0.56},
}

#: Section 4.2 and Table 5 are about this task alone.
ONLY = "ende"

#: Section 4.2: the bigram model drafting 3 tokens, with c taken as 0.
BIGRAM_SPEEDUP = 1.25

#: Table 5: alpha = sum min(p / l, q) by lenience l, at temperature 1.
LENIENCE = (1.0, 0.5, 0.3, 0.1)
LENIENT_ALPHA: dict[str, tuple[float, ...]] = {
    "unigram": (0.07, 0.10, 0.11, 0.16),
    "bigram": (0.19, 0.23, 0.25, 0.32),
    "small": (0.62, 0.71, 0.76, 0.84),
    "base": (0.68, 0.80, 0.83, 0.90),
}

#: Appendix A.5, text: the speed-ups that Table 5's alphas of the small drafter stand for, with c = 0.015.
LENIENT_SPEEDUP = (2.5, 3.1, 3.6, 5.0)


def find(task: str | None, drafter: str | None, temperature: float) -> Row | None:
    """The paper's row for a setting of this kind; None where there is none.

    >>> find("ende", "small", 0.0).measured
    3.4
    """
    wanted = (task, drafter, temperature)
    return next((row for row in ROWS if row[:3] == wanted), None)


def alpha(task: str | None, drafter: str | None, temperature: float) -> float | None:
    """The paper's alpha (Table 3) for a setting of this kind; None where there is none.

    >>> alpha("cnndm", "bigram", 0.0), alpha("ende", None, 1.0)
    (0.23, None)
    """
    return ALPHA.get((task or "", temperature), {}).get(drafter or "")


def lenient_alpha(task: str | None, drafter: str | None, factor: float) -> float | None:
    """The paper's alpha (Table 5) under lenience ``factor``; None where there is none.

    >>> lenient_alpha("ende", "base", 0.3), lenient_alpha("ende", "base", 0.2)
    (0.83, None)
    """
    alphas = LENIENT_ALPHA.get(drafter or "")
    if task != ONLY or alphas is None or factor not in LENIENCE:
        return None
    return alphas[LENIENCE.index(factor)]


def lenient_speedup(task: str | None, drafter: str | None, factor: float) -> float | None:
    """The speed-up that appendix A.5 states under lenience ``factor``; None where it states none.

    >>> lenient_speedup("ende", "small", 0.3), lenient_speedup("ende", "base", 0.3)
    (3.6, None)
    """
    if (task, drafter) != (ONLY, "small") or factor not in LENIENCE:
        return None
    return LENIENT_SPEEDUP[LENIENCE.index(factor)]


def bigram_speedup(task: str | None, drafter: str | None) -> float | None:
    """What section 4.2 says of a bigram model; None where this is about another drafter or task.

    >>> bigram_speedup("ende", "bigram"), bigram_speedup("cnndm", "bigram")
    (1.25, None)
    """
    return BIGRAM_SPEEDUP if (task, drafter) == (ONLY, "bigram") else None
