"""Tables as data, and how they are written: Markdown, LaTeX, the terminal."""

from __future__ import annotations

from typing import NamedTuple

import rich.box
import rich.console
import rich.table

_ESCAPED = {character: "\\" + character for character in "&%$#_{}"}
_ESCAPED |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_ESCAPED |= {"†": r"\textdagger{}"}
#: Words in headings that stand for a symbol, and the symbol in LaTeX.
SYMBOLS = {
    "alpha": r"$\alpha$",
    "gamma": r"$\gamma$",
    "tau": r"$\tau$",
    "c": "$c$",
    "T": "$T$",
    "l": "$l$",
    "Mq": "$M_q$",
    "B": "$B$",
}


class Sheet(NamedTuple):
    """A table: text in cells, and notes below it. ``left``: columns that hold words."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: tuple[str, ...] = ()
    left: tuple[int, ...] = (0,)


def markdown(sheet: Sheet) -> str:
    """A heading, the table, the notes as a list.

    >>> print(markdown(Sheet("t", ("a", "b"), [("x", "1")], ("so",))))
    ## t
    <BLANKLINE>
    | a | b |
    |---|---:|
    | x | 1 |
    <BLANKLINE>
    * so
    <BLANKLINE>
    """
    lines = [f"## {sheet.title}", "", _bar(sheet.headings)]
    lines.append(
        "|" + "|".join("---" if i in sheet.left else "---:" for i in range(len(sheet.headings))) + "|"
    )
    lines += [_bar(row) for row in sheet.rows]
    lines += ["", *(f"* {note}" for note in sheet.notes), ""] if sheet.notes else [""]
    return "\n".join(lines)


def _bar(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def escape(text: str) -> str:
    r"""Text for LaTeX.

    >>> print(escape("5 % of a_b"))
    5 \% of a\_b
    """
    return "".join(_ESCAPED.get(character, character) for character in text)


def _heading(text: str) -> str:
    """A heading with its symbols; a symbol is a whole word."""
    return " ".join(SYMBOLS.get(word, escape(word)) for word in text.split(" "))


def latex(sheet: Sheet) -> str:
    """A ``table`` with ``booktabs`` rules, no wider than the text; the notes go below it."""
    columns = "".join("l" if i in sheet.left else "r" for i in range(len(sheet.headings)))
    lines = [
        r"\begin{table}",
        r"\centering",
        r"\small",
        rf"\caption{{{escape(sheet.title)}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & ".join(map(_heading, sheet.headings)) + r" \\",
        r"\midrule",
        *(" & ".join(map(escape, row)) + r" \\" for row in sheet.rows),
        r"\bottomrule",
        r"\end{tabular}}",
    ]
    lines += [rf"\par\footnotesize {escape(note)}" for note in sheet.notes]
    return "\n".join([*lines, r"\end{table}", ""])


def document(parts: list[str]) -> str:
    """LaTeX tables as a file to ``\\input``, with what it needs said on top."""
    return "\n".join(["% needs \\usepackage{booktabs, graphicx}", "", *parts])


def show(console: rich.console.Console, sheet: Sheet) -> None:
    """On the terminal."""
    table = rich.table.Table(
        title=sheet.title,
        title_justify="left",
        box=rich.box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for i, heading in enumerate(sheet.headings):
        table.add_column(heading, justify="left" if i in sheet.left else "right", overflow="fold")
    for row in sheet.rows:
        table.add_row(*row)
    console.print(table)
    for note in sheet.notes:
        console.print(f"* {note}", markup=False, highlight=False, soft_wrap=True)
