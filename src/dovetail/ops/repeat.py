"""Calls like one that was made before: what was found out about ranks, stages and words then still holds, so that most
of a call is one native call. `OpsGroup` makes these.

Each of them ends in the meeting that `OpsGroup.agree` would be. There it shows whether everybody said what they said
before; where they did not, a caller gets what `agree` returns, and raises as that does: MismatchError, PeerError,
Timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.hw.cpu import native
from dovetail.hw.cpu.executor import AS_SEEN

if TYPE_CHECKING:
    from dovetail.ops.group import OpsGroup

Rows = list[tuple[int, ...]]


class Said(NamedTuple):
    """What a rank says of a call, and what came of it."""

    mine: bytes  #: all of it
    text: str
    splits: Sequence[int]
    before: bytes  #: what everybody said the last time
    told: Rows  #: the same, in words


class Same:
    """A call that is said in the same words: `meet` is `OpsGroup.agree` for it, in few steps."""

    __slots__ = ("_fixed", "_group", "_meet", "_said", "_stage")

    def __init__(self, group: OpsGroup, said: Said) -> None:
        self._group, self._said = group, said
        self._meet, self._fixed = native.load().meet, group.fixed
        self._stage: tuple[int, int] | None = group.stage

    @property
    def is_over(self) -> bool:
        """This rank has something else to say, somebody had last time, or the time limit was changed."""
        return self._group.stage != self._stage or not self._group.is_limit_in_force

    def meet(self) -> Rows | None:
        """None if everybody has said what they said before; otherwise what `agree` returns."""
        said = self._said
        status = self._meet(*self._fixed, said.mine, said.before, ())
        self._group.meetings += 1
        if status == AS_SEEN:
            return None
        self._stage = None
        return self._group.judge(status, said)


class _ByStages:
    """A call whose parts go to everybody's stages before the ranks meet."""

    __slots__ = ("_group", "_said", "_stages")

    def __init__(self, group: OpsGroup, said: Said) -> None:
        self._group, self._said = group, said
        self._stages: tuple[bytes, int] | None = (group.plain, group.stage_epoch)

    @property
    def is_over(self) -> bool:
        """Somebody's stage is another now, somebody had something else to say, or the time limit was changed."""
        group = self._group
        return (group.plain, group.stage_epoch) != self._stages or not group.is_limit_in_force

    @property
    def half(self) -> int:
        """Which half of the stages the next call uses."""
        return self._group.meetings & 1

    def _met(self, status: int) -> Rows | None:
        """Behind every meeting that native code has made: as `Same.meet`."""
        self._group.meetings += 1
        if status == AS_SEEN:
            return None
        self._stages = None
        return self._group.judge(status, self._said)


class Repeat(_ByStages):
    """Parts of a result: `send`, then `finish(out, own, half)`, its native part; or both by `run`, or with the product
    itself by `multiply`.

    `finish` adds up everybody's parts at address `out`, this rank's being at `own`; or puts them there one after the
    other.
    """

    __slots__ = ("_multiply", "_run", "_send", "finish")

    def __init__(self, group: OpsGroup, made: Any, said: Said) -> None:
        super().__init__(group, said)
        self._send, self._run, self._multiply, self.finish = made.send, made.run, made.multiply, made.finish

    def send(self, source: int) -> int:
        """Sends, and meets the others; returns which half of the stage has what they sent. 0: it is there already."""
        half = self.half
        self._met(self._send(source, half))
        return half

    def run(self, source: int, out: int, own: int) -> None:
        """`send`, then `finish`."""
        half = self.half
        if self._met(self._run(source, out, own, half)) is not None:
            self.finish(out, own, half)

    def multiply(self, product: tuple[int, int, int], sizes: tuple[int, int, int], out: int, own: int) -> None:
        """`run`, whose source is made first: the product (x, w, where it goes), of sizes (rows of x, of w, k)."""
        half = self.half
        if self._met(self._multiply(*product, *sizes, out, own, half)) is not None:
            self.finish(out, own, half)


class Lookup(_ByStages):
    """Bags of a batch of the same size, pooled out of as many tables: `run`; and `finish(out, half)`, where what came
    still lies in the stage."""

    __slots__ = ("_run", "_unlike", "finish")

    def __init__(self, group: OpsGroup, made: Any, said: Said) -> None:
        super().__init__(group, said)
        self._run, self.finish, self._unlike = made.run, made.finish, made.UNLIKE

    def run(self, tables: list[Any], values: Any, offsets: Any, most: int, out: int) -> tuple[bool, Rows | None]:
        """Pools them into everybody's output, of which this rank's is at address `out`.

        Returns:
            (whether it was done: not if these are no such tensors, a row is out of range, or there are `most` values or
            more; None if the output is there, otherwise what `agree` returns: then nothing has been put beside this
            rank's own tables yet).
        """
        status = self._run(tables, values, offsets, most, out, self.half)
        return (False, None) if status == self._unlike else (True, self._met(status))
