"""What runs beside what: a computation and a communication, as two protocols, and what is known of each.

Owns the seam. Nothing here launches anything. `kv` and `ops` hand in objects of the same protocols; whoever runs them
(`gpu`, `cpu`) knows nothing of what they are for. On a GPU work is put into raw streams; on a CPU, where there are
none, the stream is 0 and a call runs on the calling thread.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol


class Name(StrEnum):
    """A word that is looked up often: hashed as the text that it is, which is faster than as a member of an enum."""

    __hash__ = str.__hash__


class Bound(Name):
    """What a computation waits for most."""

    COMPUTE = "compute"
    MEMORY = "memory"  #: the operands of its arithmetic, as a product of few rows
    STREAM = "stream"  #: memory too, with hardly any arithmetic: engines disturb it more, fewer cores disturb it less


class Mover(Name):
    """Who moves the bytes of a communication."""

    ENGINES = "engines"  #: DMA engines; on a CPU our software ones
    CORES = "cores"  #: a kernel on multiprocessors; on a CPU a thread


class Load(NamedTuple):
    """What is known of a computation before it has run. All of it may be left out: then it is learned.

    A tuple, as `Traffic` is: pairs are looked up by them at each run, and no Python runs to hash one.
    """

    name: str = ""  #: two computations of one name and one size are taken for the same
    flops: float = 0.0
    size_bytes: float = 0.0  #: read and written
    groups: int = 0  #: work-groups of its kernels, 0 if not known
    launches: int = 1  #: kernels one after the other that share the work: many short ones take longer than a long one


class Traffic(NamedTuple):
    """What a communication moves."""

    kind: str  #: "all_gather", "all_to_all", "reduce_scatter", "fetch", ...
    size_bytes: int  #: over the link, in the direction that has more
    num_pieces: int = 1  #: copies
    reduces: bool = False  #: some of it is arithmetic, which takes cores whoever moves
    local: bool = False  #: inside one GPU, where engines do nothing: the driver's copies are kernels


class Pending(Protocol):
    """A communication under way."""

    def wait(self) -> object:
        """Blocks the host until it is over; raises its error."""


class Computation(Protocol):
    """Launches work on torch's current stream, or does it; what it returns is the caller's."""

    @property
    def load(self) -> Load: ...
    def __call__(self) -> Any: ...


class Communication(Protocol):
    """Moves bytes between ranks, or between a GPU and host memory."""

    @property
    def traffic(self) -> Traffic: ...
    @property
    def movers(self) -> frozenset[Mover]:
        """Who can move it."""

    @property
    def group(self) -> Any:
        """The ranks that take part and must choose alike (`dovetail.Group`); None if this process is alone in it."""

    @property
    def device(self) -> Any:
        """The GPU (`dovetail.hw.gpu.device.Device`) on whose streams it runs; None on a CPU."""

    def start(self, mover: Mover, *, stream: int = 0, cores: int = 0) -> Pending | None:
        """Begins behind what is in the raw stream, and the stream goes on behind it.

        Args:
            mover: one of `movers`.
            cores: how many programs move it, if cores do; 0 for as many as the communication thinks best.

        Returns what the host can wait for; on a CPU, cores are done when this returns.

        A communication may also have `start_apart(stream) -> Run`: by engines, in streams of its own, behind what is
        in the raw stream, which does not wait for it. Then there are no hops over a stream that does nothing but wait,
        of which each costs an engine microseconds.
        """


class Run(Pending, Protocol):
    """A communication under way in streams of its own."""

    @property
    def event(self) -> int:
        """Recorded behind all of it."""

    @property
    def stream(self) -> int:
        """Where that is recorded."""


def apart_of(comm: Communication, mover: Mover) -> Callable[[int], Run] | None:
    """`start_apart` of a communication that has it, if engines are to move it."""
    return getattr(comm, "start_apart", None) if mover is Mover.ENGINES else None


class Side(Name):
    """Of two that run together."""

    COMPUTE = "compute"
    COMM = "comm"


#: Told of a side whose work was all launched, and of the raw stream that has it.
Mark = Callable[[Side, int], None]


#: Two under way, on a CPU both over: what the computation returned, and the communication for the host to wait for.
Launched = tuple[Any, Pending | None]


@dataclass(slots=True)
class Begun:
    """A communication beside what is launched next."""

    pending: Pending | None = None  #: for the host, as soon as there is one


@dataclass(frozen=True, slots=True)
class Call:
    """Any callable as a computation: `Call(lambda: model(x), Load(name="block 3", flops=2e12))`."""

    function: Callable[[], Any]
    load: Load = field(default_factory=Load)

    def __post_init__(self) -> None:
        if not isinstance(self.load, Load):
            raise TypeError(f"what is known of a computation is an overlap.Load, not {type(self.load).__name__}")

    def __call__(self) -> Any:
        """Calls it."""
        return self.function()


def several(group: Any) -> bool:
    """Are there others who must choose alike?"""
    return group is not None and group.size > 1


def computation(given: Computation | Callable[[], Any], *, alike: bool = False) -> tuple[Computation, Load]:
    """What was given and what is known of it, asked for once; of any other callable that is its name.

    `alike`: named by nothing that may differ between ranks.
    """
    load = getattr(given, "load", None)
    if isinstance(load, Load):
        return given, load  # type: ignore[return-value]
    if not callable(given):
        raise TypeError(f"a computation is something to be called without arguments, not {type(given).__name__}")
    load = Load(name=_name(given, alike))
    return Call(given, load), load


_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # of what takes long to describe


def _name(given: Any, alike: bool) -> str:
    """Of a callable: another one for what computes something else, as far as that shows.

    Of a function its place; of a `partial` also what its arguments are; of a module its class and how many parameters.
    If alike, no arguments and no parameters: ranks may have other tokens, and other shares of the weights.
    """
    if (code := getattr(given, "__code__", None)) is not None:  # of two lambdas, each has a line of its own
        return f"{code.co_filename}:{code.co_firstlineno} {getattr(given, '__qualname__', '')}"
    if isinstance(given, functools.partial):
        if alike:
            return _name(given.func, alike)
        every = [*map(_argument, given.args), *(f"{key}={_argument(of)}" for key, of in given.keywords.items())]
        return f"{_name(given.func, alike)}({', '.join(every)})"
    name = f"{getattr(given, '__module__', '')} {getattr(given, '__qualname__', type(given).__qualname__)}"
    parameters = getattr(given, "parameters", None)
    if alike or not callable(parameters):
        return name
    try:
        return _names[given]
    except (KeyError, TypeError):  # new, or nothing that a dict takes
        name = f"{name} of {sum(p.numel() for p in parameters())} parameters"
    with contextlib.suppress(TypeError):
        _names[given] = name
    return name


def _argument(of: Any) -> str:
    """Texts and switches as they are, tensors by their shape, all else by its type: numbers may count the steps."""
    if isinstance(of, (bool, str)):
        return repr(of)
    shape = getattr(of, "shape", None)
    return type(of).__qualname__ if shape is None else f"{getattr(of, 'dtype', '')}{list(shape)}"


def check_load(load: Load) -> None:
    """ValueError or TypeError for what can't be known of a computation: asked when a pair is new."""
    if not isinstance(load.name, str):
        raise TypeError(f"the name of a computation is text, not {load.name!r}; say which field: Load(flops=...)")
    for field_name in ("flops", "size_bytes", "groups", "launches"):
        value, least = getattr(load, field_name), int(field_name == "launches")
        try:
            right = least <= value < math.inf
        except TypeError:
            right = False
        if not right:
            raise ValueError(f"Load({field_name}={value!r}): it must be a number, {least} or more")


def check(comm: Any) -> None:
    """TypeError unless it looks like a communication."""
    try:  # at each run: asked for one by one, they take longer
        _ = comm.traffic, comm.movers, comm.group, comm.device, comm.start
        return
    except AttributeError:
        pass
    if missing := [name for name in ("traffic", "movers", "group", "device", "start") if not hasattr(comm, name)]:
        lacks = f"{type(comm).__name__} has no {', '.join(missing)}"
        raise TypeError(f"a communication is a Collective, a LocalCommunication, or of the same protocol: {lacks}")
