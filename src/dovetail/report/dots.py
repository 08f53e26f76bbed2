"""Pages with one plot of dots, linear axes: names across, or two figures against each other; each page is one file."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.errors import NotSupported
from dovetail.report.lines import COLORS


class Dot(NamedTuple):
    """One of a series."""

    x: float | str
    y: float
    text: str  #: shown where the pointer is


def by_name(
    path: str | os.PathLike[str], series: Mapping[str, Sequence[Dot]], *, title: str, note: str, y: str
) -> Path:
    """A column for each series: all its dots, and a box around the middle half of them.

    Raises as `write`.
    """
    figure = _figure(path, series)
    for (name, dots), color in zip(series.items(), _colors(), strict=False):
        figure.add_box(
            y=[dot.y for dot in dots], text=[dot.text for dot in dots], name=name, boxpoints="all", jitter=0.4,
            pointpos=0, boxmean=True, marker={"color": color, "size": 5}, hovertemplate="%{text}: %{y:.3g}",
        )  # fmt: skip
    figure.update_layout(showlegend=False)
    return _write(path, figure, title, note, "", y)


def against(
    path: str | os.PathLike[str], series: Mapping[str, Sequence[Dot]], *, title: str, note: str, x: str, y: str
) -> Path:
    """One figure against another, a colour for each series; both axes logarithmic.

    Raises:
        ValueError: `path` does not end in .html, or there is nothing to show.
        NotSupported: plotly is not installed.
    """
    figure = _figure(path, series)
    for (name, dots), color in zip(series.items(), _colors(), strict=False):
        figure.add_scatter(
            x=[dot.x for dot in dots], y=[dot.y for dot in dots], text=[dot.text for dot in dots], name=name,
            mode="markers", marker={"color": color, "size": 7, "opacity": 0.7},
            hovertemplate="%{text}: %{x:.3g}, %{y:.3g}",
        )  # fmt: skip
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return _write(path, figure, title, note, x, y)


def _colors() -> list[str]:
    return list(COLORS) * 4


def _figure(path: str | os.PathLike[str], series: Mapping[str, Sequence[Dot]]) -> Any:
    if Path(path).suffix != ".html":
        raise ValueError(f"a plot is written as .html, not as {Path(path).name!r}")
    if not any(series.values()):
        raise ValueError("there is nothing to plot")
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise NotSupported("plots need plotly: pip install 'dovetail-ml[report]'") from None
    return go.Figure()


def _write(path: str | os.PathLike[str], figure: Any, title: str, note: str, x: str, y: str) -> Path:
    figure.update_layout(title={"text": title, "subtitle": {"text": note}}, template="plotly_white")
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y)
    text = figure.to_html(include_plotlyjs=True, full_html=True, div_id="plot")
    target = Path(path)
    target.write_text(text.replace("<head>", f"<head><title>{html.escape(title)}</title>", 1), encoding="utf-8")
    return target
