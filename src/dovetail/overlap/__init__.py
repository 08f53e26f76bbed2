"""Communication beside computation (C3): measure how far it is from ideal here, offer every strategy, choose by itself.

    from dovetail import overlap

    done = overlap.run(lambda: x @ w, overlap.Collective(dovetail.all_gather_into_tensor, out, part))
    print(done.strategy, done.reason)

Owns the strategies and the choice among them, over two protocols (`tasks`): whoever computes and whoever communicates
hands in objects. Nothing is loaded or started by importing this.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.overlap.calls import beside as beside
    from dovetail.overlap.calls import close as close
    from dovetail.overlap.calls import explain as explain
    from dovetail.overlap.calls import run as run
    from dovetail.overlap.collective import Collective as Collective
    from dovetail.overlap.local import LocalCommunication as LocalCommunication
    from dovetail.overlap.runtime import Outcome as Outcome
    from dovetail.overlap.runtime import Runtime as Runtime
    from dovetail.overlap.strategy import Setting as Setting
    from dovetail.overlap.strategy import Strategy as Strategy
    from dovetail.overlap.tasks import Call as Call
    from dovetail.overlap.tasks import Communication as Communication
    from dovetail.overlap.tasks import Computation as Computation
    from dovetail.overlap.tasks import Load as Load
    from dovetail.overlap.tasks import Mover as Mover
    from dovetail.overlap.tasks import Traffic as Traffic

# Public name -> the module that defines it. Every name here also stands in the TYPE_CHECKING block above.
_HOME = {
    "Call": "tasks",
    "Collective": "collective",
    "Communication": "tasks",
    "Computation": "tasks",
    "Load": "tasks",
    "LocalCommunication": "local",
    "Mover": "tasks",
    "Outcome": "runtime",
    "Runtime": "runtime",
    "Setting": "strategy",
    "Strategy": "strategy",
    "Traffic": "tasks",
    "beside": "calls",
    "close": "calls",
    "explain": "calls",
    "run": "calls",
}

__all__ = [  # noqa: RUF022 - in the order a reader meets them
    "run", "beside", "explain", "Outcome", "Strategy", "Setting", "Collective", "LocalCommunication", "Call", "Load",
    "Traffic", "Mover", "Computation", "Communication", "Runtime", "close",
]  # fmt: skip


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'dovetail.overlap' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"dovetail.overlap.{home}"), name)
    globals()[name] = value
    return value
