"""Ways to get the KV of a prefix: compute it again, or fetch it in one of several forms.

`vllm` is what vLLM 0.32 does with these pages: from host to device a kernel of 12 programs below 28 KiB a page, above
it, and always from device to host, one batch of plain copies. It runs on our kernel and our calls, not in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dovetail.kv.choose import Path
from dovetail.kv.mover import GpuTransfer
from dovetail.kv.planner import Direction, Table
from dovetail.kv.transformers import prefix
from dovetail.kv.transformers.serving import ServingMover

RECOMPUTE, LOOP, VLLM, LAYERS, RUNS = "recompute", "loop", "vllm", "layers", "runs"
_KERNEL_BELOW_BYTES = 28 << 10
_ONE_CALL = 1 << 30
#: A copy of a layer's step has at least so many bytes: shorter ones take longer to issue than to move.
_STEP_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the copies of one direction are made."""

    path: Path
    entries_per_call: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way, in both directions; without forms it fetches and keeps nothing."""

    name: str
    fetch: Form | None = None
    store: Form | None = None
    layers: int | Literal["auto"] | None = None  #: fetched at a time; None: all at once
    runs: bool = False  #: blocks of a request are in a row, as our allocator has them in a memory that is not crowded

    @property
    def path(self) -> str:
        """Of a fetch, for people."""
        if self.fetch is None:
            return ""
        one = " in one call" if self.fetch.entries_per_call == _ONE_CALL else ""
        by = f", {self.layers} layer{'s' * (self.layers > 1)} at a time" if isinstance(self.layers, int) else ""
        row = ", blocks in a row" if self.runs else ""
        return f"{self.fetch.path}{one}{by}{row}"


def known(backend: str) -> tuple[str, ...]:
    """Names of contenders; ours is the first of those that are paths."""
    paths = [str(path) for path in Path]
    if backend == "cpu":
        return RECOMPUTE, str(Path.CPU), LAYERS, RUNS
    return (RECOMPUTE, LOOP, VLLM, *(p for p in paths if p != Path.CPU), LAYERS, RUNS)


def usual(backend: str) -> tuple[str, ...]:
    """Those that are measured if none are named."""
    if backend == "cpu":
        return known(backend)
    return (RECOMPUTE, LOOP, VLLM, str(Path.DMA_2D), str(Path.STAGED), str(Path.AUTO), LAYERS, RUNS)


def ours(names: Sequence[str]) -> str | None:
    """The one that ratios are about."""
    return next((name for name in (Path.AUTO, Path.CPU) if name in names), None)


def keeper(contenders: Sequence[Contender]) -> Contender:
    """Who stores what all of them fetch: ours, otherwise the first that can."""
    able = [c for c in contenders if c.fetch is not None]
    return next((c for c in able if c.name == ours([one.name for one in able])), able[0])


def contender(name: str, backend: str, *, row_bytes: int, num_layers: int, graphs: bool = False) -> Contender:
    """A contender by name, for pages of `row_bytes`, and for steps that are `graphs`."""
    best = Form(path=Path.CPU if backend == "cpu" else Path.AUTO)
    match name:
        case "recompute":
            return Contender(name=name)
        case "loop":
            loop = Form(path=Path.DMA_LOOP)
            return Contender(name=name, fetch=loop, store=loop)
        case "vllm":
            batch = Form(path=Path.DMA_BATCH, entries_per_call=_ONE_CALL)
            fetch = Form(path=Path.KERNEL) if row_bytes < _KERNEL_BELOW_BYTES else batch
            return Contender(name=name, fetch=fetch, store=batch)
        case "layers":
            step = 1 if backend == "cpu" else min(num_layers, max(1, _STEP_BYTES // row_bytes))
            return Contender(name=name, fetch=best, store=best, layers=step)
        case "runs":
            return Contender(name=name, fetch=best, store=best, runs=True)
        case _:
            form = Form(path=Path(name))
            layers = prefix.AUTO if graphs and form.path is Path.AUTO else None
            # The kernel disturbs what computes beside it: nobody stores with it.
            store = best if form.path is Path.KERNEL else form
            return Contender(name=name, fetch=form, store=store, layers=layers)


class SwitchedMover(ServingMover):
    """Copies in the forms of whichever contender has its turn, whatever path it is asked for."""

    turn: Contender | None = None

    def submit(
        self,
        direction: Direction | str,
        table: Table,
        path: Path | str = Path.AUTO,
        *,
        after: Sequence[int] = (),
        beside: bool | None = None,
        entries_per_call: int | None = None,
    ) -> GpuTransfer:
        """As the contender does it."""
        assert self.turn is not None
        form = self.turn.fetch if Direction(direction) is Direction.FETCH else self.turn.store
        assert form is not None
        return super().submit(
            direction, table, form.path, after=after, beside=beside, entries_per_call=form.entries_per_call
        )
