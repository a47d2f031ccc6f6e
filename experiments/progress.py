"""Progress bars, one below the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import rich.console
import rich.progress


@contextlib.contextmanager
def bars(console: rich.console.Console) -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """``bar(name, total)`` adds a bar and returns the function that moves it on by one."""
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as progress:

        def bar(name: str, total: int) -> Callable[[], None]:
            task = progress.add_task(name, total=total)
            return lambda: progress.advance(task)

        yield bar
