"""What is tried of a pair that comes again, and how ranks come to try and keep the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.overlap import policy
from dovetail.overlap.strategy import ALL, Setting, Strategy
from dovetail.overlap.tasks import Mover
from dovetail.overlap.trials import ROUNDS

_MOST = 5
ROUNDS_BEFORE_KEPT = ROUNDS * _MOST  #: runs of a pair after which it runs in the way that is kept
_PLAIN = (Strategy.SERIAL, Strategy.STREAMS)
_ALWAYS = (Strategy.DMA, *_PLAIN)


def contenders(ranking: policy.Ranking) -> list[Setting]:
    """What is tried of a pair that comes again, the chosen one first.

    It and the second; `dma`, which most often wins, in case it was estimated wrongly; one after the other, and plain
    streams: what the user would have without us.
    """
    order = ranking.order
    found = list(order[: _MOST - len(_ALWAYS)])
    first = {setting.strategy: setting for setting in reversed(order)}
    for strategy in _ALWAYS:
        setting = first.get(strategy)
        if setting is not None and setting not in found:
            found.append(setting)
    return found


def baseline(ranking: policy.Ranking) -> Setting:
    """The better of those two."""
    return next(s for s in ranking.order if s.strategy in _PLAIN)


def agreed(mine: list[Setting], group: Any, can: Callable[[Setting], bool]) -> list[Setting]:
    """Rank 0's settings, those that all ranks can run. At least one is left: `serial` is among them everywhere."""
    import torch

    from dovetail import coll

    told = torch.full((_MOST, 3), -1, dtype=torch.int64)
    for n, s in enumerate(mine):
        told[n] = torch.tensor([ALL.index(s.strategy), s.cores, list(Mover).index(s.mover)])
    coll.broadcast(told, group_src=0, group=group)
    settings = [Setting(ALL[a], cores, list(Mover)[b]) for a, cores, b in told.tolist() if a >= 0]
    able = torch.tensor([int(can(s)) for s in settings])
    coll.all_reduce(able, coll.ReduceOp.MIN, group=group)
    return [s for s, is_able in zip(settings, able.tolist(), strict=True) if is_able]


def slowest(figures: list[float], group: Any) -> list[float]:
    """Of all ranks, for each setting."""
    import torch

    from dovetail import coll

    tensor = torch.tensor(figures, dtype=torch.float64)
    coll.all_reduce(tensor, coll.ReduceOp.MAX, group=group)
    return [float(figure) for figure in tensor]
