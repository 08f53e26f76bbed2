"""What was found of fused operators: rows for a record, and what they say. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What a contender does."""

    COMPUTE = "compute"  #: the operator alone
    COMM = "comm"  #: the collective alone
    UNFUSED = "unfused"  #: the operator, then the collective
    DECOMPOSED = "decomposed"  #: both in chunks
    DMA = "dma"  #: slices behind flags


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One contender at one shape."""

    kind: Kind
    name: str
    """Who computes, how it is cut and where rows go: ``torch``, ``12 slices remote 4x4w4p6 strided``."""
    time_us: float
    """Median, from the common start until all of it was done, on the GPU's clock."""
    iterations: int
    setting: dict[str, Any]


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
    """Queues in each direction of the forms in slices or chunks."""
    words: str
    """Where their flags lie, unless a cell says otherwise: ``device`` or ``host``."""
    checks: int
    """Runs whose every byte was compared."""
    cells: list[Cell]

    def __post_init__(self) -> None:
        missing = [kind for kind in Kind if not any(cell.kind is kind for cell in self.cells)]
        if missing:
            raise ValueError(f"{self.shape}: no time of {', '.join(missing)}")

    def best(self, kind: Kind) -> Cell:
        """The fastest of a kind."""
        return min((cell for cell in self.cells if cell.kind is kind), key=lambda cell: cell.time_us)

    def us(self, kind: Kind) -> float:
        """Its time."""
        return self.best(kind).time_us

    @property
    def measured_ratio(self) -> float:
        """Computation over communication."""
        return self.us(Kind.COMPUTE) / self.us(Kind.COMM)

    @property
    def ideal_us(self) -> float:
        """The longer of the two alone."""
        return max(self.us(Kind.COMPUTE), self.us(Kind.COMM))

    @property
    def lower(self) -> float:
        """How much lower the fused time is than the unfused one, the fastest of each: 0.4 is 40 %."""
        return 1 - self.us(Kind.DMA) / self.us(Kind.UNFUSED)

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
        for name in ("measured_ratio", "ideal_us", "lower", "over_ideal", "against_decomposed"):
            found[name] = getattr(self, name)
        return found


@dataclass(frozen=True, kw_only=True)
class Product:
    """Our kernel against torch.mm, alone."""

    m: int
    n: int
    k: int
    dtype: str
    torch_us: float
    ours_us: float
    tile: str
    iterations: int

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


def mean_against_decomposed(rows: Sequence[Row]) -> float:
    """Of all shapes."""
    return sum(row.against_decomposed for row in rows) / len(rows)


def not_ahead(rows: Iterable[Row]) -> list[Row]:
    """Where the decomposed form is as fast or faster."""
    return [row for row in rows if row.against_decomposed <= 0]


def verdict(rows: Sequence[Row], products: Sequence[Product] = ()) -> list[tuple[bool, str]]:
    """(holds, sentence) for everything that must hold of what was measured."""
    found = []
    for op in dict.fromkeys(row.op for row in rows):
        mine = [row for row in rows if row.op == op]
        for row in balanced(mine):
            wanted = BALANCED[op]
            text = f"{row.shape}: {row.lower:.1%} lower than unfused, wanted {wanted:.0%}"
            found.append((row.lower >= wanted, text))
            text = f"{row.shape}: {row.over_ideal:.1%} above the ideal, at most {OVER_IDEAL:.0%}"
            found.append((row.over_ideal <= OVER_IDEAL, text))
        mean = mean_lower(mine)
        text = f"{op}: {mean:.1%} lower than unfused on the mean of {len(mine)} shapes, wanted {ON_THE_MEAN:.0%}"
        found.append((mean >= ON_THE_MEAN, text))
        ahead = mean_against_decomposed(mine)
        behind = not_ahead(mine)
        text = f"{op}: {ahead:.1%} lower than decomposed on the mean; not ahead at {len(behind)} of {len(mine)} shapes"
        found.append((ahead > 0, text))
    for product in products:
        text = f"{product.m}x{product.n}x{product.k}: {product.share:.1%} of torch.mm, wanted {OF_TORCH:.0%}"
        found.append((product.share >= OF_TORCH, text))
    return found


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for people: milliseconds of the fastest of each kind."""
    names = "".join(f"{kind:>11}" for kind in Kind)
    lines = [f"{'shape, ms':<42}{'ratio':>6}{names}{'ideal':>9}{'lower':>8}  best dma; best decomposed"]
    for row in rows:
        times = "".join(f"{row.us(kind) / 1e3:11.3f}" for kind in Kind)
        lines.append(
            f"{row.shape:<42}{row.measured_ratio:6.2f}{times}{row.ideal_us / 1e3:9.3f}{row.lower:8.1%}"
            f"  {row.best(Kind.DMA).name}; {row.best(Kind.DECOMPOSED).name}"
        )  # fmt: skip
    return lines
