"""A page with one plot of lines over sizes, both axes logarithmic; whole in one file, so it opens without a network."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.errors import NotSupported

#: name of a line -> its points (x, y)
Lines = Mapping[str, Sequence[tuple[float, float]]]
#: Apart also for people who can't tell red from green (Okabe and Ito).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("solid", "dash", "dot")


def write(
    path: str | os.PathLike[str],
    lines: Lines,
    *,
    title: str,
    note: str,
    x: str,
    y: str,
    limits: Lines | None = None,
    like: Mapping[str, str] | None = None,
) -> Path:
    """Writes the page.

    Args:
        note: stands under the title; "simulated" for instance.
        limits: lines that are only there to compare with: grey, and the axis does not stretch for them.
        like: name of a line -> name of another one that it belongs to: the same colour, dashed.

    Raises:
        ValueError: `path` does not end in .html, or there is nothing to show.
        NotSupported: plotly is not installed.
    """
    target = Path(path)
    if target.suffix != ".html":
        raise ValueError(f"a plot is written as .html, not as {target.name!r}")
    if not any(lines.values()):
        raise ValueError("there is nothing to plot")
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise NotSupported("plots need plotly: pip install 'dovetail-ml[report]'") from None
    figure = go.Figure()
    styles = _styles(list(lines), like or {})
    for name, points in lines.items():
        figure.add_scatter(**_points(points), name=name, mode="lines+markers", line=styles[name])
    for name, points in (limits or {}).items():
        figure.add_scatter(**_points(points), name=name, mode="lines", line={"color": "#888888", "dash": "dot"})
    figure.update_layout(title={"text": title, "subtitle": {"text": note}}, template="plotly_white", hovermode="x")
    sizes = sorted({p[0] for points in lines.values() for p in points})
    marks = sizes[:: max(1, len(sizes) // 12)]
    figure.update_xaxes(title=x, type="log", tickvals=marks, ticktext=[_size(s) for s in marks])
    heights = [math.log10(p[1]) for points in lines.values() for p in points if p[1] > 0]
    figure.update_yaxes(title=y, type="log", dtick=1, range=[min(heights) - 0.3, max(heights) + 0.3])
    text = figure.to_html(include_plotlyjs=True, full_html=True, div_id="plot")
    target.write_text(text.replace("<head>", f"<head><title>{html.escape(title)}</title>", 1), encoding="utf-8")
    return target


def _points(points: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
    return {"x": [p[0] for p in points], "y": [p[1] for p in points]}


def _styles(names: list[str], like: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """A colour for each family of lines; when they run out, the next dash."""
    families = list(dict.fromkeys(like.get(name, name) for name in names))
    styles = {}
    for name in names:
        number = families.index(like.get(name, name))
        dash = number // len(COLORS) + (name in like)
        styles[name] = {"color": COLORS[number % len(COLORS)], "dash": _DASHES[dash % len(_DASHES)]}
    return styles


def _size(size_bytes: float) -> str:
    for shift, unit in ((30, "G"), (20, "M"), (10, "K")):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.4g}{unit}"
    return f"{size_bytes:.0f}"
