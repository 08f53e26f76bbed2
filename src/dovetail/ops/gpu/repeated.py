"""Products by `store` whose like was run before: one meeting and one launch, with as little Python as that takes.

What was found out then about tiles, and about words and memory that the ranks share, still holds; how an operator's
launch is made again, the operator has said (`launcher.Again`). Owns when a product can be repeated like that, and when
no longer; the counterpart of `ops.cpu.repeated`.

Legend: x [rows, k], w [n, k], all of one rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.ops import calls
from dovetail.ops.gpu.launcher import Launch, is_aligned
from dovetail.ops.group import NUM_WORDS, OpsGroup
from dovetail.ops.repeat import Same

if TYPE_CHECKING:
    from dovetail.ops.gpu.store import Store


class Repeated:
    """Products of one shape. `of` makes one, or None if there is none."""

    def __init__(self, store: Store, c: calls.Product, splits: tuple[int, ...], same: Same, launch: Launch) -> None:
        """`splits`: rows that are sent, then received, where an operator has them."""
        self._store, self._op, self._splits, self._same = store, c.op, splits, same
        self._launch: Launch | None = launch
        self._reads_there = c.op == calls.AllGatherMatmul.op
        self._limit_s = store.group.timeout_s  # a kernel's waits are bounded by an argument
        store.repeats.add(self)

    @staticmethod
    def of(g: OpsGroup, c: calls.Product) -> Repeated | None:
        """For a call that was just made by this transport."""
        store: Store | None = g.known.get(("store", c.device))
        launch = None if store is None else store.launcher.latest
        if store is None or launch is None or launch.again is None or store.named is None:
            return None
        if not is_aligned(c.x, c.w):
            return None  # its kernel takes any address, and is slower
        if (splits := c.fixed_splits) is None:
            return None
        same = g.same(c.text, (store.named, 0), splits)
        return None if same is None else Repeated(store, c, splits, same, launch)

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor | None:
        """None, and nothing was done, if it can't be done like that any more."""
        store, launch = self._store, self._launch
        if (
            launch is None
            or launch.again is None
            or self._same.is_over
            or store.group.timeout_s != self._limit_s
            or not is_aligned(x, w)
            or (self._reads_there and store.is_placed(x))
        ):
            return None
        launcher, again = store.launcher, launch.again
        launcher.begin()
        first = again.first(x, w)
        rows = self._same.meet()
        if rows is not None:
            return self._at_length(rows, x, w)
        made = launcher.launch(launch, first)
        if launcher.interpreted:
            store.check_late()
        return made if again.result is None else first[again.result]

    def forget(self) -> None:
        """Lets shared memory go: it is not that of calls any more."""
        self._launch = None

    def _at_length(self, rows: list[tuple[int, ...]], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Somebody has something else to say than in earlier calls: what, all ranks know by now."""
        store, splits = self._store, self._splits
        many = len(splits) // 2
        store.meet = lambda _: [(*row[:2], *row[NUM_WORDS:]) if splits else row[:2] for row in rows]
        try:
            found: torch.Tensor = getattr(store, self._op)(x, w, *((splits[:many], splits[many:]) if splits else ()))
            return found
        finally:
            store.meet = None
