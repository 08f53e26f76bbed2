"""Setting and taking back the hooks of a model, and what can be said of them.

Owns the hooks while they are set. It reads FSDP's parameter groups, which torch keeps to itself, in `_targets` only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from dovetail.coll import api, choose, session
from dovetail.errors import NotSupported
from dovetail.hw.world import Group
from dovetail.overlap.fsdp.auto import Auto
from dovetail.overlap.fsdp.buffers import Buffers
from dovetail.overlap.fsdp.hooks import Gather, Scatter, Unit
from dovetail.overlap.strategy import AUTO, Strategy

#: Those that FSDP can have.
STRATEGIES = (Strategy.SERIAL, Strategy.STREAMS, Strategy.DMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one module runs."""

    module: str
    strategy: str
    reason: str
    measuring: bool  #: `auto` still tries strategies
    gathers: int  #: calls so far
    scatters: int
    gather_bytes: int  #: of an all-gather's result
    scatter_bytes: int  #: of a reduce-scatter's input
    fallbacks: dict[str, int]  #: reason -> calls

    def __str__(self) -> str:
        calls = f"{self.gathers} all-gathers of {self.gather_bytes} bytes"
        calls += f", {self.scatters} reduce-scatters of {self.scatter_bytes} bytes"
        fallen = "".join(f"; {n} times {reason}" for reason, n in self.fallbacks.items())
        return f"{self.module}: {self.strategy} ({self.reason}); {calls}{fallen}"


class Enabled:
    """A model whose FSDP hooks are ours. `close()`, or the end of `with`, puts back what stood there."""

    def __init__(self, model: Any, strategy: str = AUTO) -> None:
        wanted = _named(strategy)
        targets = _targets(model)
        if taken := next((t for t in targets if isinstance(t.gather, Gather)), None):
            raise ValueError(f"module {taken.name!r} is enabled already: call disable() on that model first")
        verdicts = [_verdict(t, wanted) for t in targets]  # raises before anything is set
        self.buffers = Buffers()
        self.units = [
            Unit(name=t.name, owner=self, buffers=self.buffers, fixed=v[0], reason=v[1]) if v is not None
            else Unit(name=t.name, owner=self, buffers=self.buffers)
            for t, v in zip(targets, verdicts, strict=True)
        ]  # fmt: skip
        undecided = [(t, u) for t, u, v in zip(targets, self.units, verdicts, strict=True) if v is None]
        self._autos = _automatic(undecided)
        self._set = [(t, u) for t, u in zip(targets, self.units, strict=True) if t.settable]
        for target, unit in self._set:
            target.set(Gather(unit, target.gather), Scatter(unit, target.scatter))
        self._counter: Any = None
        if self._autos:  # not traced if the model is compiled, as FSDP's own hooks are not
            untraced: Any = torch.compiler.disable(self._step)  # type: ignore[no-untyped-call]
            self._counter = model.register_forward_pre_hook(untraced, prepend=True)

    def _step(self, *_: Any) -> None:
        for auto in self._autos:
            auto.step(torch.is_grad_enabled())

    def explain(self) -> list[Row]:
        """What each module runs now, and why."""
        return [_row(unit) for unit in self.units]

    def close(self) -> None:
        """Puts the hooks back and gives the buffers to the heap. Safe to call twice; other ranks take no part.

        Gradients that lie in a buffer stay valid, and so does what is in flight.
        """
        for target, _ in self._set:
            target.set(target.gather, target.scatter)
        self._set = []
        if self._counter is not None:
            self._counter.remove()
        self._counter = None
        self.buffers.close()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        return "\n".join(str(row) for row in self.explain())


def enable(model: Any, strategy: str = AUTO) -> Enabled:
    """Lets FSDP2 move the parameters and gradients of `model` through Dovetail. All ranks call it.

    Args:
        model: what torch's `fully_shard` was called on, or a module that holds such modules.
        strategy: "serial" (blocking calls), "dma" (engines move the bytes beside the computation), "streams" (what
            FSDP does by itself) or "auto" (tries all of them in the first steps and keeps the fastest per module).

    Returns what `explain()`, `close()` and `with` work on.

    Raises:
        TypeError, ValueError: `model` is not sharded by FSDP2, or enabled already; no such strategy.
        NotSupported: a forced strategy where the ranks are on several hosts.
    """
    return Enabled(model, strategy)


def disable(model: Any) -> None:
    """Puts back what stood there before `enable`; ValueError if `model` is not enabled."""
    _enabled(model).close()


def explain(model: Any) -> list[Row]:
    """What each module of an enabled model runs, why, and how often it was called."""
    return _enabled(model).explain()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A module with the parameter group of FSDP that moves its parameters."""

    name: str
    module: Any
    group: Any
    gather: Any  #: what stood there
    scatter: Any
    settable: bool  #: torch sets no hooks on a module with several parameter groups

    def set(self, gather: Any, scatter: Any) -> None:
        self.module.set_custom_all_gather(gather)
        self.module.set_custom_reduce_scatter(scatter)

    @property
    def members(self) -> Any:
        """The process group that shares the parameters; None where each rank has all of them."""
        return getattr(self.group.mesh_info, "shard_process_group", None)


def _targets(model: Any) -> list[_Target]:
    """The modules of a model that FSDP2 shards. Reads what torch keeps to itself, here and in `_Target.members`."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    found: dict[int, _Target] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in groups:
            if group is not None and id(group) not in found:
                found[id(group)] = _Target(
                    name=name or "(root)", module=module, group=group, gather=group._all_gather_comm,
                    scatter=group._reduce_scatter_comm, settable=len(groups) == 1,
                )  # fmt: skip
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no module that FSDP2 shards: call torch.distributed.fsdp.fully_shard on it "
            "first (FullyShardedDataParallel and DDP have no such hooks)"
        )
    return list(found.values())


def _enabled(model: Any) -> Enabled:
    for target in _targets(model):
        if isinstance(target.gather, Gather):
            owner: Enabled = target.gather.unit.owner
            return owner
    raise ValueError(f"{type(model).__name__} is not enabled: call dovetail.overlap.fsdp.enable() on it first")


def _named(strategy: str) -> Strategy | None:
    """A strategy that FSDP can have; None for "auto"."""
    if strategy == AUTO:
        return None
    if strategy not in STRATEGIES:
        raise ValueError(f"for FSDP there are the strategies {', '.join(STRATEGIES)} and {AUTO}, not {strategy!r}")
    return Strategy(strategy)


def _verdict(target: _Target, wanted: Strategy | None) -> tuple[Strategy, str] | None:
    """What a module runs and why; None if `auto` has to find out."""
    if not target.settable:
        return Strategy.STREAMS, "it has several parameter groups, on which torch sets no hooks"
    if target.members is None:
        return Strategy.STREAMS, "its parameters are not sharded"
    group = session.group_of(target.members)
    if not group.world.local:
        if wanted not in (None, Strategy.STREAMS):
            raise NotSupported(f"{group} spans hosts: only the caller's process group reaches them, not {wanted!r}")
        return Strategy.STREAMS, "the group spans hosts"
    if wanted is not None:
        return wanted, "asked for"
    if choose.settings(group).get("disable"):
        return Strategy.STREAMS, "DOVETAIL_DISABLE"
    if group.size == 1:
        return Strategy.STREAMS, "a group of one rank moves nothing"
    if target.group.device.type == "cpu":
        return None
    picked = api.explain("all_gather", 1 << 20, group=group, device=target.group.device)
    if picked.variant == "torch":
        return Strategy.STREAMS, picked.reason
    return Strategy.DMA, "engines leave the GPU's cores to the computation; not measured: steps on GPUs are not timed"


def _automatic(undecided: list[tuple[_Target, Unit]]) -> list[Auto]:
    """An `Auto` per process group, known to its modules."""
    autos = []
    for name in dict.fromkeys(target.members.group_name for target, _ in undecided):
        mine = [(target, unit) for target, unit in undecided if target.members.group_name == name]
        auto = Auto(len(mine), functools.partial(_slowest, session.group_of(mine[0][0].members)))
        for number, (_, unit) in enumerate(mine):
            unit.auto, unit.number = auto, number
        autos.append(auto)
    return autos


def _slowest(group: Group, times: list[float]) -> list[float]:
    """The largest of each over the ranks."""
    t = torch.tensor(times, dtype=torch.float64)
    api.all_reduce(t, "max", group)
    found: list[float] = t.tolist()
    return found


def _row(unit: Unit) -> Row:
    auto = unit.auto
    return Row(
        module=unit.name,
        strategy=str(unit.strategy()),
        reason=unit.reason if auto is None else auto.reasons[unit.number],
        measuring=auto is not None and auto.measuring,
        gathers=unit.gathers,
        scatters=unit.scatters,
        gather_bytes=unit.gather_bytes,
        scatter_bytes=unit.scatter_bytes,
        fallbacks=dict(unit.fallbacks),
    )
