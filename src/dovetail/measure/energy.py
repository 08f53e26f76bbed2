"""How many joules a piece of work takes on a GPU: a meter, and a window whose edges lie on the meter's ticks.

Owns reading energy and the window. A meter's counter stands still between its ticks (some 10 to 100 ms), so a window
that begins anywhere is off by a tick at either end. This one repeats the work until the counter has just changed,
begins there, and ends the same way while the work still runs: what is left is the time between two looks at the
counter, and `Energy.resolution_j` is that bound. It says nothing of the sensor's own error, which is some per cent.

Nothing here sets anything on a GPU. The only thread (of a meter that has to sample power) ends with its `close()`.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol, Self

from dovetail.errors import HardwareError, NotSupported
from dovetail.measure.gpu import Amd, Device, Nvml, card

_log = logging.getLogger(__name__)

_FIRST_LOOK_S = 0.0005  #: between looks at a counter whose period is not known yet
_LOOKS_PER_TICK = 10
_INTERVALS = 8
_STALL_S = 3.0
_SAMPLE_S = 0.01
_SETTLE_TICKS = 2


class Meter(Protocol):
    """Energy of one GPU. An owner: `close()` it, or use `with`."""

    name: str
    settle_s: float  #: until a reading follows a change of load

    def joules(self) -> float:
        """A counter that only grows, in steps; where it begins means nothing. Raises `HardwareError`."""

    def watts(self) -> float:
        """Power as the driver tells it, often a mean over a second. Raises `HardwareError`."""

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


def meter(device: Device) -> Meter | None:
    """The best meter of the device (`dovetail.measure.gpu` says what names one), or None; the reason is logged."""
    try:
        return require(device)
    except NotSupported as error:
        _log.info("no energy is measured: %s", error)
        return None


def require(device: Device) -> Meter:
    """As `meter`, but raises `NotSupported` that says what is missing."""
    found = card(device)
    try:
        counter: Meter = NvmlMeter(found) if isinstance(found, Nvml) else AmdMeter(found)
        if _read(counter.joules) is not None:
            return counter
        if _read(counter.watts) is not None:
            return PowerMeter(counter)
    except BaseException:
        found.close()
        raise
    found.close()
    raise NotSupported("this GPU's driver tells neither joules nor watts (a MIG slice or a virtual GPU has none)")


def _read(reading: Callable[[], float]) -> float | None:
    try:
        return reading()
    except HardwareError:
        return None


class _Owner(ABC):
    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NvmlMeter(_Owner):
    """NVML's counter of millijoules; it is there from Volta on."""

    name, settle_s = "NVML energy counter", 0.2

    def __init__(self, device: Nvml) -> None:
        self._device = device

    def joules(self) -> float:
        return _told(self._device.ask("GetTotalEnergyConsumption"), "energy") / 1000

    def watts(self) -> float:
        return _told(self._device.ask("GetPowerUsage"), "power") / 1000

    def close(self) -> None:
        self._device.close()


class AmdMeter(_Owner):
    """AMD SMI's energy accumulator, counted in steps of some 15 microjoules."""

    name, settle_s = "AMD SMI energy counter", 0.2

    def __init__(self, device: Amd) -> None:
        self._device = device

    def joules(self) -> float:
        told = self._device.ask("get_energy_count") or {}
        steps = _number(told, "energy_accumulator", "power")  # the second is its name in older packages
        return _told(steps, "energy") * _told(_number(told, "counter_resolution"), "energy") / 1e6

    def watts(self) -> float:
        told = self._device.ask("get_power_info") or {}
        return _told(_number(told, "socket_power", "current_socket_power", "average_socket_power"), "power")

    def close(self) -> None:
        self._device.close()


def _told(answer: float | None, what: str) -> float:
    if answer is None:
        raise HardwareError(f"the driver does not tell this GPU's {what}")
    return answer


def _number(told: Mapping[str, Any], *names: str) -> float | None:
    """The first of these that is a number; AMD SMI writes "N/A" for what it has not."""
    return next((float(told[name]) for name in names if isinstance(told.get(name), int | float)), None)


class Integral:
    """Joules from samples of power: the area under straight lines between them."""

    def __init__(self) -> None:
        self.joules = 0.0
        self.error: Exception | None = None
        self._last: tuple[float, float] | None = None

    def add(self, time_s: float, watts: float) -> None:
        """A sample; times ascend."""
        if self._last is not None:
            before_s, before_w = self._last
            self.joules += (time_s - before_s) * (before_w + watts) / 2
        self._last = (time_s, watts)


class PowerMeter(_Owner):
    """Sums up power that a thread samples, where there is no counter. The thread ends with `close()` or this object."""

    # The driver's power is a mean over up to a second.
    settle_s = 1.0

    def __init__(self, source: Meter, *, sample_s: float = _SAMPLE_S) -> None:
        self.name = source.name.replace("energy counter", "power, summed up")
        self._source, self._integral, stop = source, Integral(), threading.Event()
        self._stop = stop
        # The thread knows nothing of this object, so that one that was forgotten can be collected and ends it.
        work = (stop, self._integral, source.watts, sample_s)
        self._thread = threading.Thread(target=_sample, args=work, name="dovetail-power", daemon=True)
        weakref.finalize(self, stop.set)
        self._thread.start()

    def joules(self) -> float:
        if self._integral.error is not None:
            raise HardwareError(f"power can no longer be read: {self._integral.error}")
        return self._integral.joules

    def watts(self) -> float:
        return self._source.watts()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._source.close()


def _sample(stop: threading.Event, integral: Integral, watts: Callable[[], float], sample_s: float) -> None:
    try:
        while not stop.is_set():
            integral.add(time.perf_counter(), watts())
            stop.wait(sample_s)
    except Exception as error:
        integral.error = error  # told by the next joules()


@dataclass(frozen=True, kw_only=True)
class Power:
    """Watts, and how far off the window's edges can make them."""

    watts: float
    error_w: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Energy:
    """What a window found."""

    meter: str
    joules: float
    """All that the GPU took in the window."""
    seconds: float
    repetitions: int
    resolution_j: float
    """How far off the edges can make `joules`, at the window's mean power; the sensor's own error comes on top."""
    idle_w: float
    """Power with nothing running, taken off for the net figures."""
    idle_error_w: float
    period_s: float
    """Between two ticks of the counter."""

    @property
    def watts(self) -> float:
        """Mean power."""
        return self.joules / self.seconds

    @property
    def net_joules(self) -> float:
        """Joules above idle. Below zero within `net_error_j` is zero; further below stays, and `note` says it."""
        net = self.joules - self.idle_w * self.seconds
        return net if abs(net) > self.net_error_j else max(0.0, net)

    @property
    def net_error_j(self) -> float:
        """The bound of `net_joules`: that of the window and that of the idle power."""
        return self.resolution_j + self.idle_error_w * self.seconds

    @property
    def note(self) -> str:
        """What has to be said beside the net figures; empty when they speak for themselves."""
        if self.net_joules < 0:
            return f"negative: less than the idle power of {self.idle_w:.1f} W, which was not idle; measure it again"
        if self.net_joules <= self.net_error_j:
            return f"not told apart from idle: at most {self.net_joules + self.net_error_j:.3g} J"
        return ""

    def joules_per_gb(self, bytes_per_repetition: float) -> float:
        """Net joules for 10^9 bytes, where each repetition moves `bytes_per_repetition`."""
        return self.net_joules / self._gigabytes(bytes_per_repetition)

    def error_per_gb(self, bytes_per_repetition: float) -> float:
        """The bound of `joules_per_gb`."""
        return self.net_error_j / self._gigabytes(bytes_per_repetition)

    def _gigabytes(self, bytes_per_repetition: float) -> float:
        if not bytes_per_repetition > 0:
            raise ValueError(f"a repetition must move some bytes, got {bytes_per_repetition}")
        return bytes_per_repetition * self.repetitions / 1e9

    def row(self) -> dict[str, Any]:
        """All of it as plain JSON, for a row of a record."""
        names = ("watts", "net_joules", "net_error_j", "note")
        return asdict(self) | {name: getattr(self, name) for name in names}


def measure(
    work: Callable[[], object],
    *,
    meter: Meter,
    seconds: float = 2.0,
    idle_w: Power | float | None = None,
    ticks: int = 20,
    limit_s: float = 60.0,
    period_s: float | None = None,
) -> Energy:
    """Repeat `work` for a window of at least `seconds` and `ticks` ticks of the counter, and take its energy.

    The work runs before the window too, until power and reading are steady, and is never cut short: the call ends one
    repetition after its time at most. Ranks that have to repeat as often as this one are told by `work` itself.

    Args:
        work: one repetition; returns when the GPU is done with it.
        idle_w: what `idle` found; measured first if not given; 0 to take nothing off.
        limit_s: the window ends at the first tick after this, whatever `ticks` asks for.
        period_s: what `period` found; found first if not given.

    Raises:
        HardwareError: the counter stands still, runs backwards or can no longer be read.
    """
    if not (seconds > 0 and ticks >= 1 and limit_s > 0):
        raise ValueError(f"seconds, ticks and limit_s must be above zero, got {seconds}, {ticks} and {limit_s}")
    if period_s is None:
        period_s = period(meter)
    if idle_w is None:
        idle_w = idle(meter, period_s=period_s)
    below = idle_w if isinstance(idle_w, Power) else Power(watts=idle_w)
    found = _window(work, meter, min(max(seconds, ticks * period_s), limit_s), period_s)
    return Energy(
        meter=meter.name,
        joules=found.joules,
        seconds=found.seconds,
        repetitions=found.repetitions,
        resolution_j=found.resolution_j,
        idle_w=below.watts,
        idle_error_w=below.error_w,
        period_s=period_s,
    )


def idle(meter: Meter, seconds: float = 1.0, *, ticks: int = 20, period_s: float | None = None) -> Power:
    """Power while this process leaves the GPU alone.

    Measure it as the work will find the GPU: with the context already made, which alone takes power, and some seconds
    after other work, since clocks fall slowly.
    """
    if period_s is None:
        period_s = period(meter)
    nap_s = period_s / _LOOKS_PER_TICK
    found = _window(lambda: time.sleep(nap_s), meter, max(seconds, ticks * period_s), period_s)
    return Power(watts=found.joules / found.seconds, error_w=found.resolution_j / found.seconds)


def period(meter: Meter) -> float:
    """Seconds between two ticks of the counter: the median of a few. Raises `HardwareError` if it stands still."""
    changes: list[float] = []
    last, deadline = meter.joules(), time.perf_counter() + _STALL_S
    while len(changes) <= _INTERVALS and time.perf_counter() < deadline:
        time.sleep(_FIRST_LOOK_S)
        now = meter.joules()
        if now != last:
            changes.append(time.perf_counter())
            last = now
    if len(changes) < 2:
        raise _stands_still(meter)
    return statistics.median(after - before for before, after in itertools.pairwise(changes))


class _Found(NamedTuple):
    joules: float
    seconds: float
    repetitions: int
    resolution_j: float


class _Edge(NamedTuple):
    time_s: float
    joules: float
    repetitions: int
    gap_s: float  #: the tick lies within this before `time_s`


def _window(work: Callable[[], object], meter: Meter, wanted_s: float, period_s: float) -> _Found:
    """The work's energy between two ticks, at least `wanted_s` apart."""
    repetitions = 0

    def repeat(until_s: float) -> None:
        nonlocal repetitions
        while True:
            work()
            repetitions += 1
            if time.perf_counter() >= until_s:
                return

    def edge() -> _Edge:
        look_s, joules = time.perf_counter(), meter.joules()
        deadline = look_s + _STALL_S
        while True:
            # Not after every repetition: a look may take longer than short work.
            repeat(look_s + period_s / _LOOKS_PER_TICK)
            now_s, now = time.perf_counter(), meter.joules()
            if now != joules:
                return _Edge(now_s, now, repetitions, min(now_s - look_s, period_s))
            if now_s > deadline:
                raise _stands_still(meter)
            look_s = now_s

    repeat(time.perf_counter() + max(meter.settle_s, _SETTLE_TICKS * period_s))
    first = edge()
    repeat(first.time_s + wanted_s)
    last = edge()
    joules, seconds = last.joules - first.joules, last.time_s - first.time_s
    if joules < 0:
        raise HardwareError(f"the {meter.name} ran backwards by {-joules:.3g} J; was the driver reloaded?")
    resolution_j = joules / seconds * (first.gap_s + last.gap_s)
    return _Found(joules, seconds, last.repetitions - first.repetitions, resolution_j)


def _stands_still(meter: Meter) -> HardwareError:
    return HardwareError(f"the {meter.name} stood still for {_STALL_S:g} s; energy cannot be measured with it")
