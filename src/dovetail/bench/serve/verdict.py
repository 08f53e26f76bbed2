"""What a bench of serving found, in lines: ratios to ours, where the aims are met, and where ours does not win."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.bench.serve import first_token, offload, throughput
from dovetail.bench.serve.contender import LOOP, RECOMPUTE, VLLM, ours
from dovetail.measure.sizes import format_bytes
from dovetail.measure.stats import geometric_mean

Row = dict[str, Any]
#: Over the copy loop.
_AIMS = {first_token.SECTION: 1.5, throughput.SECTION: 1.9}
_RIVALS = (RECOMPUTE, LOOP, VLLM, offload.STOCK)
_SMALL_PAGES_BYTES = 64 << 10


def lines(rows: Sequence[Row]) -> list[str]:
    """A line for each case, then the aims, then where ours is behind."""
    best = ours([row["contender"] for row in rows])
    found: list[str] = []
    behind: list[str] = []
    better: list[str] = []
    for where, here in _cells(rows).items():
        mine = offload.OURS if offload.OURS in here else best or ""
        if mine not in here:
            continue
        others = {name: time / here[mine] for name, time in here.items() if name != mine}
        shown = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in others.items())
        found.append(f"{where}: {mine} {here[mine] / 1e3:.2f} ms; time of others / {mine}: {shown}")
        for name in (name for name, ratio in others.items() if ratio < 1 and name != offload.DEVICE):
            line = f"{where}: {name} takes {1 - others[name]:.1%} less time than {mine}"
            (behind if name in _RIVALS else better).append(line)
    found += _aims(rows, best)
    everywhere = [f"{best} beats the baselines everywhere"] if found and best else []
    found += [f"does not win: {line}" for line in behind] or everywhere
    found += [f"another of our forms is better: {line}" for line in better]
    return [*found, *_doubts(rows)]


def _doubts(rows: Sequence[Row]) -> list[str]:
    found = []
    for field, what in (
        ("same_bits", "logits not of the same bits as the same steps without a fetch"),
        ("same_token", "a first token other than that of a whole computation (rounding)"),
    ):
        count = sum(not row[field] for row in rows)
        if count:
            found.append(f"{count} of {len(rows)} rows: {what}")
    wrong = sum(not row["correct"] for row in rows)
    return [*found, f"{wrong} of {len(rows)} results WRONG" if wrong else "all correct"]


def where(row: Row) -> str:
    """The case of a row."""
    case = f"{row['model']}, pages of {format_bytes(row['row_bytes'])}"
    if row["section"] == offload.SECTION:
        return f"{offload.SECTION}, {case}, context of {format_bytes(row['tokens'])} tokens, one more token"
    if row["section"] == first_token.SECTION:
        return f"{first_token.SECTION}, {case}, prefix of {format_bytes(row['tokens'])} tokens"
    return f"{throughput.SECTION}, {case}, prefix of {format_bytes(row['tokens'])} tokens, {row['hit_rate']:.0%} kept"


def _cells(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    cells: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["time_us"]:
            cells.setdefault(where(row), {})[row["contender"]] = row["time_us"]
    return cells


def _aims(rows: Sequence[Row], mine: str | None) -> list[str]:
    found = []
    for section, aim in _AIMS.items():
        ratios = _ratios([row for row in rows if row["section"] == section], mine, LOOP)
        if ratios:
            mean, met = geometric_mean(ratios), sum(ratio >= aim for ratio in ratios)
            span = f"{min(ratios):.2f}x to {max(ratios):.2f}x, mean {mean:.2f}x"
            found.append(f"{section}: over the loop {span}; the aim of {aim}x is met in {met} of {len(ratios)} cases")
    small = [row for row in rows if row["row_bytes"] < _SMALL_PAGES_BYTES]
    ratios = _ratios(small, mine, VLLM)
    if ratios:
        ahead = sum(ratio > 1 for ratio in ratios)
        found.append(
            f"pages under 64 KB: ahead of vLLM's policy in {ahead} of {len(ratios)} cases, "
            f"{min(ratios):.2f}x to {max(ratios):.2f}x"
        )
    return found


def _ratios(rows: Sequence[Row], mine: str | None, other: str) -> list[float]:
    cells = _cells(rows).values()
    return [here[other] / here[mine] for here in cells if mine in here and other in here]
