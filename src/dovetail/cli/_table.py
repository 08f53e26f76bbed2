"""Tables on a terminal of any width: no figure is ever shortened.

A table that is too wide has its headings broken and its prose folded. If that is not enough it comes in parts, one
below the other, each of which begins with the columns that say what a row is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table

_NARROWEST_PROSE = 28
"""Characters; a column that has no need of them has fewer."""


def console(wide: int) -> Console:
    """That of standard output: of a terminal's width, otherwise `wide`."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=wide)


def show(table: Table, *, wide: int, keys: int = 1) -> None:
    """Prints a table; `keys`: how many columns, from the left, say what a row is.

    Columns on the right and those marked `no_wrap` hold figures and names, which stay whole; others are prose.
    """
    there = console(wide)
    for n, part in enumerate(parts(table, there.width, keys)):
        there.print(*[""] * (n > 0), part, sep="\n")


def parts(table: Table, width: int, keys: int = 1) -> Iterator[Table]:
    """The table, in as many parts as it takes to fit; one column beside the keys is in a part at least."""
    between = table.padding[1] + table.padding[3]
    for column in table.columns:
        column.no_wrap = column.no_wrap or column.justify == "right"
        column.overflow = "fold"  # also a word that is longer than its column
    least = [_least(column) + between for column in table.columns]
    if sum(least) - between > width:
        _break_headings(table)
        least = [_least(column) + between for column in table.columns]
    if sum(least) - between <= width:
        yield table
        return
    room = width + between - sum(least[:keys])
    group: list[int] = []
    for n in range(keys, len(least)):
        if group and sum(least[k] for k in group) + least[n] > room:
            yield _part(table, [*range(keys), *group], first=group[0] == keys)
            group = []
        group.append(n)
    yield _part(table, [*range(keys), *group], first=group[0] == keys)


def _break_headings(table: Table) -> None:
    """A word on each line where that makes a column narrower; the last lines of all headings are level."""
    for column in table.columns:
        heading = str(column.header)
        if "\n" not in heading and len(heading) > max((len(str(cell)) for cell in column.cells), default=0):
            column.header = heading.replace(" ", "\n")
    most = max(str(column.header).count("\n") for column in table.columns)
    for column in table.columns:
        column.header = "\n" * (most - str(column.header).count("\n")) + str(column.header)


def _least(column: Column) -> int:
    """The width below which something would be lost, or prose be hard to read."""
    from rich.text import Text

    lines = [line for cell in (column.header, *column.cells) for line in Text.from_markup(str(cell)).plain.split("\n")]
    whole = max(map(len, lines))
    if column.no_wrap:
        return whole
    return max(min(whole, _NARROWEST_PROSE), *(len(word) for line in lines for word in ("", *line.split())))


def _part(table: Table, which: list[int], *, first: bool) -> Table:
    from rich.table import Table

    made = Table(
        title=table.title if first else None, title_justify=table.title_justify, box=table.box, padding=table.padding,
        pad_edge=table.pad_edge, show_header=table.show_header,
    )  # fmt: skip
    for n in which:
        column = table.columns[n]
        made.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap, overflow=column.overflow)
    for row in zip(*(table.columns[n].cells for n in which), strict=True):
        made.add_row(*row)
    return made
