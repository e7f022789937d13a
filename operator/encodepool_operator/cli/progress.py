"""How a pool is shown: a table that redraws itself on a terminal, a line per change elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from encodepool_operator.local.report import GroupRow, Report, condition

PIPE_WIDTH = 1000
LEAST_WIDTH = 120
"""A narrow terminal breaks long lines by itself; cutting them would hide the ports."""

COLUMNS = ("GROUP", "PHASE", "REVISION", "INCARNATION", "URL", "BOOTSTRAP", "RESTARTS", "REASON")


def status_table(report: Report, *, running: bool) -> None:
    """The table of ``encodepool local status`` on standard output."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)  # for a program that reads, a line stays a line
    elif console.width < LEAST_WIDTH:
        console = Console(width=LEAST_WIDTH)
    if not running and not report.groups:
        console.print(f"pool {report.pool} is down")
        return
    console.print(_shown(report))
    if report.problem:
        console.print(Text(f"problem: {report.problem}"))
    if not running:
        console.print("the controller is not running: this is what it last saw")


class Screen:
    """Something shown again and again, on a terminal in one place. Use as a context; ``transient``: it goes
    away at the end."""

    def __init__(self, console: Console, *, transient: bool = False) -> None:
        self._console = console
        self._live = Live(console=console, transient=transient, auto_refresh=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()


class Progress(Screen):
    """Shows reports on standard error while a command waits."""

    def __init__(self) -> None:
        super().__init__(Console(stderr=True), transient=True)
        self._shown: dict[int, tuple[str, int]] = {}
        self._stalled = ""
        self._began_s = time.monotonic()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, report: Report) -> None:
        if self._console.is_terminal:
            self._live.update(_shown(report), refresh=True)
            return
        for row in report.groups:
            now = (row.phase, row.incarnation)
            if self._shown.get(row.group) != now:
                self._shown[row.group] = now
                because = f": {row.reason}" if row.reason else ""
                passed_s = time.monotonic() - self._began_s
                self.note(f"{passed_s:6.1f} s  group {row.group} {row.phase}{because}")
        for index in sorted(self._shown.keys() - {row.group for row in report.groups}):
            del self._shown[index]
            self.note(f"{time.monotonic() - self._began_s:6.1f} s  group {index} gone")
        stalled = _stalled(report)
        if stalled != self._stalled:
            self._stalled = stalled
            if stalled:
                self.note(f"{time.monotonic() - self._began_s:6.1f} s  {stalled}")


def _stalled(report: Report) -> str:
    """Why the pool does not get on, which no group's line may tell: one without ports has no line."""
    message = condition(report.status, "Stalled").get("message", "")
    return f"stalled: {message}" if message else ""


def _shown(report: Report) -> Group:
    stalled = _stalled(report)
    return Group(_table(report.groups), *([Text(stalled)] if stalled else []))


def _table(rows: list[GroupRow]) -> Table:
    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="")
    for row in rows:
        cells = (row.group, row.phase, row.revision, row.incarnation, row.url, row.bootstrap, row.restarts)
        table.add_row(*(Text(str(cell)) for cell in cells), Text(row.reason))
    return table
