"""Prints the plan: rich tables on a terminal, aligned columns elsewhere, or JSON. Called by `cli`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[int] = frozenset()
    """Rows that a terminal shows in bold."""


@dataclass
class Report:
    """Lines and tables in order; `data` is the same for programs."""

    data: dict[str, Any] = field(default_factory=dict)
    parts: list[str | Table] = field(default_factory=list)

    def line(self, text: str) -> None:
        self.parts.append(text)

    def table(self, table: Table) -> None:
        self.parts.append(table)

    def print(self, out: TextIO, *, as_json: bool) -> None:
        if as_json:
            print(json.dumps(self.data, indent=2), file=out)
        elif out.isatty() and _rich_available():
            self._print_rich(out)
        else:
            self._print_plain(out)

    def _print_plain(self, out: TextIO) -> None:
        for part in self.parts:
            if isinstance(part, str):
                print(part, file=out)
                continue
            cells = [list(part.columns), *(list(row) for row in part.rows)]
            widths = [max(len(row[column]) for row in cells) for column in range(len(part.columns))]
            print(f"\n{part.title}", file=out)
            for row in cells:
                first, *rest = (
                    cell.ljust(width) if not index else cell.rjust(width)
                    for index, (cell, width) in enumerate(zip(row, widths, strict=True))
                )
                print("  " + "  ".join([first, *rest]).rstrip(), file=out)

    def _print_rich(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        console = Console(file=out)
        for part in self.parts:
            if isinstance(part, str):
                console.print(Text(part))
                continue
            shown = RichTable(title=part.title, title_justify="left", title_style="bold")
            for index, column in enumerate(part.columns):
                shown.add_column(column, justify="right" if index else "left")
            for index, row in enumerate(part.rows):
                shown.add_row(*map(Text, row), style="bold green" if index in part.marked else None)
            console.print(shown)


def _rich_available() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True
