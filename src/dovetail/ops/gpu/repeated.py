"""Products by `store` whose like was run before: one meeting and one launch, with as little Python as that takes.

What was found out then about tiles, and about words and memory that the ranks share, still holds. Owns which products
can be repeated like that, and when no longer; the counterpart of `ops.cpu.repeated`.

Legend: x [rows, k], w [n, k], all of one rank; a kernel's arguments begin with the tensors of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dovetail.ops import calls
from dovetail.ops.group import NUM_WORDS, OpsGroup
from dovetail.ops.repeat import Same

if TYPE_CHECKING:
    from dovetail.ops.gpu.launcher import Launch
    from dovetail.ops.gpu.store import Store

#: Makes, of x and w, the tensors that a kernel's arguments begin with; and the result, if that is one of them.
_Begin = Callable[[torch.Tensor, torch.Tensor], tuple[tuple[torch.Tensor, ...], torch.Tensor | None]]
_UNALIGNED = 15


class Repeated:
    """Products of one shape. `of` makes one, or None if there is none."""

    def __init__(
        self, store: Store, op: str, splits: tuple[int, ...], same: Same, launch: Launch, begin: _Begin, number: int
    ) -> None:  # fmt: skip
        """`splits`: rows that are sent, then received, where an operator has them; `number`: how many arguments `begin`
        makes."""
        self._store, self._op, self._splits, self._same = store, op, splits, same
        self._begin: _Begin | None = begin
        self._rest = tuple(launch.args[number:])
        self._launch: Launch | None = launch._replace(held=_kept(launch, number), args=())
        store.repeats.add(self)

    @staticmethod
    def of(g: OpsGroup, c: calls.Product) -> Repeated | None:
        """For a call that was just made by this transport."""
        store: Store | None = g.known.get(("store", c.device))
        if store is None or not (c.rows and c.n):
            return None
        launch, name = store.launcher.latest, 0
        if launch is None or not launch.is_direct:
            return None
        begin: _Begin
        splits: tuple[int, ...] = ()
        if isinstance(c, calls.GemvAllReduce):
            begin, number = _pair, 2
        elif isinstance(c, calls.GemmAllToAll) and c.even and launch.then is not None:
            begin, number, name, splits = _pair, 2, store.SMALL, (*c.send, *c.receive)
        elif isinstance(c, calls.MatmulReduceScatter):
            begin, number = _scattered(c), 3
        elif isinstance(c, calls.AllGatherMatmul):
            found = store.place_of(c.x, c.n)
            if found is None:
                return None  # peers read x where it lies
            place, name, copies = found
            begin, number = _gathered(c, place, copies), 3
        else:
            return None  # peers write to new memory in each call
        same = g.same(c.text, (name, 0), splits)
        if isinstance(c, calls.AllGatherMatmul) and same is not None and not all(row[0] for row in same.told):
            return None  # some rank's memory was new to the others, and may be other memory next time
        return None if same is None else Repeated(store, c.op, splits, same, launch, begin, number)

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor | None:
        """None, and nothing was done, if it can't be done like that any more."""
        store, launch, begin = self._store, self._launch, self._begin
        if (
            launch is None
            or begin is None
            or self._same.is_over
            or (x.data_ptr() | w.data_ptr()) & _UNALIGNED
            or (self._op == calls.AllGatherMatmul.op and store.is_placed(x))
        ):
            return None
        launcher = store.launcher
        launcher.begin()
        first, out = begin(x, w)
        rows = self._same.meet()
        if rows is not None:
            return self._at_length(rows, x, w)
        args = first if launcher.interpreted else tuple([t.data_ptr() for t in first])
        made = launcher.launch(launch._replace(args=args + self._rest, held=(launch.held, out)))
        if launcher.interpreted:
            store.check_late()
        return made if out is None else out

    def forget(self) -> None:
        """Lets shared memory go: it is not that of calls any more."""
        self._launch = self._begin = None
        self._rest = ()

    def _at_length(self, rows: list[tuple[int, ...]], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Somebody has something else to say than in earlier calls: what, all ranks know by now."""
        store, splits = self._store, self._splits
        store.meet = lambda _: [(*row[:2], *row[NUM_WORDS:]) if splits else row[:2] for row in rows]
        try:
            if splits:
                many = len(splits) // 2
                return store.gemm_all_to_all(x, w, splits[:many], splits[many:])
            found: torch.Tensor = getattr(store, self._op)(x, w)
            return found
        finally:
            store.meet = None


def _kept(launch: Launch, number: int) -> tuple[Any, ...]:
    """What a launch held, without the tensors of its call."""
    own = {a.data_ptr() if isinstance(a, torch.Tensor) else a for a in launch.args[:number]}
    return tuple(h for h in launch.held if not (isinstance(h, torch.Tensor) and h.data_ptr() in own))


def _pair(x: torch.Tensor, w: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], None]:
    return (x, w), None


def _scattered(c: calls.Product) -> _Begin:
    shape = (c.rows // c.world, c.n)

    def begin(x: torch.Tensor, w: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        out = x.new_empty(shape)
        return (x, w, out), out

    return begin


def _gathered(c: calls.Product, place: torch.Tensor, copies: bool) -> _Begin:
    """`place`: where peers read x; `copies`: the kernel gathers everybody's rows first."""
    shape, gathered = (c.world * c.rows, c.n), (c.world * c.rows if copies else 0, c.k)

    def begin(x: torch.Tensor, w: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        place.copy_(x)
        y = x.new_empty(shape)
        return (w, y, x.new_empty(gathered)), y

    return begin
