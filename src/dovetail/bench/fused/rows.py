"""What was found of fused operators: rows for a record, and what they say. Pure functions of numbers.

A row compares what was settled in a pilot, before it was timed: a few forms of every kind, of which the fastest counts:
three of `dma` by default, four that are decomposed, up to four that are unfused. Ablations and the default do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What a contender does."""

    COMPUTE = "compute"  #: the operator alone
    COMM = "comm"  #: the collective alone
    UNFUSED = "unfused"  #: the operator, then the collective
    DECOMPOSED = "decomposed"  #: both in chunks
    DMA = "dma"  #: slices behind flags


class Role(StrEnum):
    """What a cell stands for in its row."""

    COUNTS = "counts"  #: the fastest of these is the figure of its kind
    PICKED = "picked"  #: settled in a pilot and timed afresh: the fastest of these, whatever others took
    DEFAULT = "default"  #: what the library does if it is told nothing
    ABLATION = "ablation"  #: the fastest of the pilot but for one setting, and what can't be without it


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One contender at one shape."""

    kind: Kind
    name: str
    """Who computes, how it is cut and where rows go: ``torch, whole``, ``12 slices remote 4x4w4p6 strided``."""
    time_us: float
    """Median, from the common start until all of it was done, on the GPU's clock."""
    iterations: int
    setting: dict[str, Any]
    role: Role = Role.COUNTS
    quartiles_us: tuple[float, float] | None = None
    """The lower and the upper one."""
    host_us: float | None = None
    """Without a gate: median from the call on the host until the GPU was done, on the host's clock."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One shape."""

    op: str
    shape: str
    size_bytes: int
    """Over the link in each direction, about; exactly `out_bytes` and `in_bytes`."""
    out_bytes: int
    in_bytes: int
    split: str
    ratio: float
    """That was asked for; `measured_ratio` is what it became."""
    sizes: dict[str, int]
    """M, N, K of a product; tables, dim, batch and bag length of an embedding."""
    dtype: str
    ranks: int
    link: str
    pace: str
    lanes: int
    """Queues in each direction of the forms in slices or chunks, unless a cell says otherwise."""
    words: str
    """Where their flags lie, unless a cell says otherwise: ``device`` or ``host``."""
    checks: int
    """Runs whose every byte was compared."""
    cells: list[Cell]
    gated_checks: int = 0
    """Those of them behind the gate, as forms are timed."""
    pilot: dict[str, dict[str, float]] = field(default_factory=dict)
    """What was settled beforehand: by question, microseconds of each that was tried. No figure comes from here."""

    def __post_init__(self) -> None:
        missing = [kind for kind in Kind if not self._counted(kind)]
        if missing:
            raise ValueError(f"{self.shape}: no time of {', '.join(missing)}")

    def _counted(self, kind: Kind) -> list[Cell]:
        mine = [cell for cell in self.cells if cell.kind is kind]
        return [c for c in mine if c.role is Role.PICKED] or [c for c in mine if c.role is Role.COUNTS]

    def taken(self, kind: Kind) -> Cell:
        """The one whose time is that of its kind: the fastest that was picked, otherwise the fastest that counts."""
        return min(self._counted(kind), key=lambda cell: cell.time_us)

    def us(self, kind: Kind) -> float:
        """Its time."""
        return self.taken(kind).time_us

    def _seen_us(self, kind: Kind) -> float:
        """The shortest time in which all of a side was seen done: alone, or inside of a form that does both."""
        both = (Kind.UNFUSED, Kind.DECOMPOSED, Kind.DMA)
        return min(cell.time_us for cell in self.cells if cell.kind is kind or cell.kind in both)

    @property
    def measured_ratio(self) -> float:
        """Computation over communication, each alone."""
        return self.us(Kind.COMPUTE) / self.us(Kind.COMM)

    @property
    def ideal_us(self) -> float:
        """The longer of the two, each at the best that was seen of it: no form of this row is below."""
        return max(self._seen_us(Kind.COMPUTE), self._seen_us(Kind.COMM))

    @property
    def lower(self) -> float:
        """How much lower the fused time is than the unfused one: 0.4 is 40 %."""
        return 1 - self.us(Kind.DMA) / self.us(Kind.UNFUSED)

    @property
    def default_lower(self) -> float | None:
        """The same of the library's default, which no pilot chose; None if it was not timed."""
        found = [cell.time_us for cell in self.cells if cell.role is Role.DEFAULT]
        return 1 - found[0] / self.us(Kind.UNFUSED) if found else None

    @property
    def over_ideal(self) -> float:
        """How far above the ideal: 0.07 is 7 %."""
        return self.us(Kind.DMA) / self.ideal_us - 1

    @property
    def against_decomposed(self) -> float:
        """How much lower than the decomposed form."""
        return 1 - self.us(Kind.DMA) / self.us(Kind.DECOMPOSED)

    def as_dict(self) -> dict[str, Any]:
        """For a record, with what follows from the times."""
        found = asdict(self) | {"kind": "operator"}
        for name in ("measured_ratio", "ideal_us", "lower", "default_lower", "over_ideal", "against_decomposed"):
            found[name] = getattr(self, name)
        return found | {"taken": {str(kind): self.taken(kind).name for kind in Kind}}


@dataclass(frozen=True, kw_only=True)
class Product:
    """Our kernel against torch.mm, alone."""

    m: int
    n: int
    k: int
    dtype: str
    torch_us: float
    ours_us: float
    """With the tile that a pilot picked, timed afresh."""
    tile: str
    iterations: int
    default_us: float | None = None
    """With the library's default tile."""
    quartiles_us: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of ``torch``, ``ours`` and ``default``."""

    @property
    def share(self) -> float:
        """Of torch.mm's speed."""
        return self.torch_us / self.ours_us

    def as_dict(self) -> dict[str, Any]:
        """For a record."""
        tflops = 2 * self.m * self.n * self.k / self.ours_us / 1e6
        return asdict(self) | {"kind": "product", "share": self.share, "tflops": tflops}


#: What must hold.
BALANCED = {"gemm_all_to_all": 0.40, "embedding_all_to_all": 0.35}
ON_THE_MEAN, OVER_IDEAL, OF_TORCH = 0.25, 0.07, 0.95


def balanced(rows: Iterable[Row]) -> list[Row]:
    """Those whose two sides were to take equally long."""
    return [row for row in rows if row.ratio == 1]


def mean_lower(rows: Sequence[Row]) -> float:
    """Of all shapes."""
    return sum(row.lower for row in rows) / len(rows)


def mean_default_lower(rows: Sequence[Row]) -> float | None:
    """Of all shapes; None if one has no time of the default."""
    found = [lower for row in rows if (lower := row.default_lower) is not None]
    return sum(found) / len(found) if len(found) == len(rows) else None


def mean_against_decomposed(rows: Sequence[Row]) -> float:
    """Of all shapes."""
    return sum(row.against_decomposed for row in rows) / len(rows)


def not_ahead(rows: Iterable[Row]) -> list[Row]:
    """Where the decomposed form is as fast or faster."""
    return [row for row in rows if row.against_decomposed <= 0]


def than(share: float, other: str) -> str:
    """A share of time that is saved, in words; what is lost is called so.

    >>> than(0.25, "unfused"), than(-0.052, "decomposed")
    ('25.0% lower than unfused', '5.2% HIGHER than decomposed')
    """
    return f"{share:.1%} lower than {other}" if share >= 0 else f"{-share:.1%} HIGHER than {other}"


def _means(name: str, rows: Sequence[Row]) -> list[tuple[bool, str]]:
    mean, default = mean_lower(rows), mean_default_lower(rows)
    text = f"{name}: {than(mean, 'unfused')} on the mean of {len(rows)} shapes, wanted {ON_THE_MEAN:.0%}"
    if default is not None:
        text += f" (picked in a pilot; the default is {than(default, 'unfused')})"
    ahead, behind = mean_against_decomposed(rows), not_ahead(rows)
    against = f"{name}: {than(ahead, 'decomposed')} on the mean; not ahead at {len(behind)} of {len(rows)} shapes"
    return [(mean >= ON_THE_MEAN, text), (ahead > 0, against)]


def verdict(rows: Sequence[Row], products: Sequence[Product] = ()) -> list[tuple[bool, str]]:
    """(holds, sentence) for everything that must hold of what was measured."""
    found = []
    for op in dict.fromkeys(row.op for row in rows):
        mine = [row for row in rows if row.op == op]
        for row in balanced(mine):
            wanted, at = BALANCED[op], f"{row.shape}, ratio {row.measured_ratio:.2f}"
            forms = f"dma {row.taken(Kind.DMA).name}; unfused {row.taken(Kind.UNFUSED).name}"
            found.append((row.lower >= wanted, f"{at}: {than(row.lower, 'unfused')}, wanted {wanted:.0%} ({forms})"))
            text = f"{at}: {row.over_ideal:.1%} above the ideal, at most {OVER_IDEAL:.0%}"
            found.append((row.over_ideal <= OVER_IDEAL, text))
        found += _means(op, mine)
    if len({row.op for row in rows}) > 1:
        found += _means("all of it", rows)
    for product in products:
        text = f"{product.m}x{product.n}x{product.k}: {product.share:.1%} of torch.mm, wanted {OF_TORCH:.0%}"
        text += f" (tile {product.tile}"
        if product.default_us:
            text += f"; the default tile {product.torch_us / product.default_us:.1%}"
        found.append((product.share >= OF_TORCH, text + ")"))
    return found


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for people: milliseconds of each kind, the ratio that was measured, and which setting was taken."""
    names = "".join(f"{kind:>11}" for kind in Kind)
    head = f"{'shape, ms':<42}{'ratio':>6}{names}{'ideal':>9}{'lower':>8}{'default':>9}"
    lines = [f"{head}  dma as picked; fastest unfused; fastest decomposed"]
    for row in rows:
        times = "".join(f"{row.us(kind) / 1e3:11.3f}" for kind in Kind)
        default = "" if row.default_lower is None else f"{row.default_lower:.1%}"
        taken = "; ".join(row.taken(kind).name for kind in (Kind.DMA, Kind.UNFUSED, Kind.DECOMPOSED))
        lines.append(
            f"{row.shape:<42}{row.measured_ratio:6.2f}{times}{row.ideal_us / 1e3:9.3f}{row.lower:8.1%}{default:>9}"
            f"  {taken}"
        )  # fmt: skip
    return lines
