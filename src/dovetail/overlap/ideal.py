"""How far two that run together are from ideal: pure functions of times, in the words of C (ConCCL).

With Tg the computation's time alone and Tc the communication's, the ideal speedup over one after the other is
(Tg + Tc) / max(Tg, Tc); the share of ideal is the part of it that was had: (S - 1) / (S_ideal - 1).
"""

from __future__ import annotations

from dataclasses import dataclass

_NEAR = 1.15
G_LONG, C_LONG, EQUAL = "G-long", "C-long", "GC-equal"


def speedup(compute_us: float, comm_us: float) -> float:
    """The ideal one."""
    return (compute_us + comm_us) / max(compute_us, comm_us)


def class_of(compute_us: float, comm_us: float) -> str:
    """Which of the two is longer."""
    if compute_us > _NEAR * comm_us:
        return G_LONG
    return C_LONG if comm_us > _NEAR * compute_us else EQUAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The two alone: what everything else is compared with."""

    compute_us: float
    comm_us: float  #: by the faster mover
    serial_us: float  #: one after the other, as measured

    @property
    def ideal_us(self) -> float:
        """The longer of the two."""
        return max(self.compute_us, self.comm_us)

    @property
    def ideal_speedup(self) -> float:
        """Over one after the other."""
        return speedup(self.compute_us, self.comm_us)

    @property
    def kind(self) -> str:
        """G-long, C-long or GC-equal."""
        return class_of(self.compute_us, self.comm_us)

    def share(self, total_us: float) -> float:
        """Of the ideal speedup, that a run of `total_us` had; negative if it was slower than one after the other."""
        return (self.serial_us / total_us - 1) / (self.ideal_speedup - 1)


def together_us(compute_us: float, comm_us: float, compute_slowdown: float, comm_slowdown: float) -> float:
    """The time of both if each is slowed down by so much while the other runs, and not at all afterwards."""
    compute_end, comm_end = compute_us * compute_slowdown, comm_us * comm_slowdown
    if compute_end <= comm_end:
        return compute_end + comm_us - compute_end / comm_slowdown
    return comm_end + compute_us - comm_end / compute_slowdown
