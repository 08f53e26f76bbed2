"""Tables on terminals of any width: figures stay whole, and every row says what it is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from dovetail.cli import _table

FIGURES = [[f"{row}.{column}e+0{row}" for column in range(9)] for row in range(3)]
NAMES = ["70b-decode+all_gather@1", "405b-decode+weights@2", "mi300x"]
PROSE = "eight of them, fully connected, as published"


def made() -> Table:
    table = Table(title="a title", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("\nscenario", no_wrap=True)
    table.add_column("what it is")
    for n in range(9):
        table.add_column(f"all together {n}" if n % 2 else f"\n{n}", justify="right")
    for name, figures in zip(NAMES, FIGURES, strict=True):
        table.add_row(name, PROSE, *figures)
    return table


def shown(table: Table, width: int, keys: int) -> list[str]:
    out = Console(width=width, file=io.StringIO())
    for part in _table.parts(table, width, keys):
        out.print(part)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("width", [70, 80, 100, 120, 160, 250])
@pytest.mark.parametrize("keys", [1, 2])
def test_no_figure_is_lost(width: int, keys: int) -> None:
    lines = shown(made(), width, keys)
    assert max(map(len, lines)) <= width
    assert lines[0] == "a title"
    for name, figures in zip(NAMES, FIGURES, strict=True):
        mine = [line for line in lines if line.startswith(name)]
        assert [word for line in mine for word in line.split() if word in figures] == figures
        assert len(mine) == sum("scenario" in line for line in lines)  # each part says which row is which


def test_a_table_that_fits_is_left_as_it_is() -> None:
    """Nothing is broken or folded where there is room."""
    lines = shown(made(), 250, 1)
    assert sum(line.startswith("mi300x") for line in lines) == 1
    assert any("all together 7" in line for line in lines)
    assert all(PROSE in line for line in lines if line.startswith("mi300x"))


def test_prose_is_folded_before_a_table_is_cut() -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("name")
    table.add_column("title")
    table.add_column("ranks", justify="right")
    table.add_row("mi300x", PROSE, "8")
    lines = shown(table, 50, 1)
    assert next(line.split() for line in lines if "mi300x" in line)[-1] == "8"
    assert " ".join(word for line in lines[1:] for word in line.split() if word in PROSE.split()) == PROSE


def test_a_word_that_is_longer_than_its_column_is_folded() -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("state")
    table.add_column("value")
    path = "/a/" + "long/" * 20
    table.add_row("ok", path)
    assert "".join(line.removeprefix("ok").strip() for line in shown(table, 40, 1)) == path
