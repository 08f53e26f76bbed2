"""The errors that Dovetail raises.

Owns the types and the facts they carry (which rank, which steps). A bad argument is a plain ``ValueError`` or
``TypeError``; everything else that goes wrong is a `DovetailError`. Every message says what was found, what is
allowed, and what to do next. All of them can be pickled, so an error travels from a rank to its launcher whole.
"""

from __future__ import annotations

from collections.abc import Iterable


class DovetailError(Exception):
    """The root of all errors of this library."""


class NotSupported(DovetailError):
    """This machine, build, dtype or variant cannot do what was asked; the message names what can."""


class HardwareError(DovetailError):
    """A driver, an engine or the operating system refused: out of memory, a failed mapping, a missing permission."""


class PeerError(DovetailError):
    """A rank of the group is gone. The group is broken: later calls on it raise this again, `close()` still works.

    Attributes:
        rank: the rank that died, in the numbering of the group.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), {"rank": self.rank})


class PlanError(DovetailError):
    """A plan is wrong: a race, a deadlock, an unwritten byte, a wrong result, or a step outside its buffer.

    Attributes:
        steps: the steps at fault, most often the two that conflict, as text a person can read.
    """

    def __init__(self, message: str, *, steps: Iterable[object] = ()) -> None:
        super().__init__(message)
        self.steps: tuple[object, ...] = tuple(steps)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), {"steps": self.steps})


class Timeout(DovetailError, TimeoutError):
    """A rank is alive but made no progress before the deadline; the message says where it stands."""


class MismatchError(DovetailError):
    """Ranks disagree on a call: another collective, size, dtype or split. Nothing was moved.

    Attributes:
        calls: rank -> the call that rank made, as text; both also stand in the message.
    """

    def __init__(self, message: str, *, calls: dict[int, str] | None = None) -> None:
        self.calls: dict[int, str] = dict(calls or {})
        lines = [message, *(f"  rank {rank} called {call}" for rank, call in sorted(self.calls.items()))]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self).split("\n  rank ", 1)[0], {"calls": self.calls})


def _rebuild(cls: type[DovetailError], message: str, facts: dict[str, object]) -> DovetailError:
    """Make the error again in another process (pickle calls constructors without keywords)."""
    return cls(message, **facts)
