"""A call that can be made again and again on the GPUs of a group: its plans, compiled when they are first needed.

The counterpart of the native caller. `direct` plans are for tensors that are all on the heap, `staged` ones take any
mixture; which of them runs is decided by the slots, the same on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import DovetailError, HardwareError, MismatchError, NotSupported
from dovetail.hw.gpu.bind import Place
from dovetail.hw.gpu.execution import Execution, Launch, Where
from dovetail.hw.gpu.group import NUM_WORDS, GpuGroup, Post
from dovetail.hw.gpu.program import compile_plan
from dovetail.hw.gpu.ticket import GpuTicket
from dovetail.hw.gpu.words import WordTable
from dovetail.hw.gpu.world import ADOPTED, NOWHERE
from dovetail.hw.layout import Layout, layout_of, numbered
from dovetail.hw.proved import prove_first
from dovetail.hw.slots import PLAN_CALL
from dovetail.plan import passes
from dovetail.plan.plan import ABSENT, AT_RUN, Plan, Role
from dovetail.plan.step import NONE

#: What a caller gives: buffers and parameters; and where torch has mapped those that it maps itself.
_Made = tuple[tuple[tuple[int, int], ...], tuple[int, ...], tuple[Any, ...]]
#: What comes of it: the kind of plan, who runs it, and where its buffers are.
_Known = tuple[int, Execution, Callable[[], Where]]
_MOST_KNOWN = 256

DIRECT, STAGED_HEAP, STAGED_ORDINARY = range(3)
#: Scratch as large as the input.
AS_INPUT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a call is."""

    call: int  #: what ranks compare: collective, dtype, reduction, variant, root; or a plan's fingerprint
    size_bytes: int
    plan_of: Callable[[int], Plan]  #: the plan of a choice, with its entry handshake
    has_direct: bool
    scratch_heap: int = 0  #: bytes that a rank with heap tensors gives to a staged plan
    scratch_ordinary: int = 0
    most_streams: int = 2
    check: bool = False  #: prove its plans first


@dataclass(frozen=True, slots=True)
class _Ready:
    plan: Plan
    layout: Layout
    execution: Execution


@dataclass(slots=True, eq=False)
class Counter:
    """How often a call ran; statistics keep it when the call is gone."""

    runs: int = 0
    direct: int = 0
    paths: dict[str, int] = field(default_factory=dict)  #: bytes of the last run, by path


class GpuCall:
    """Every member of the group makes the same one and starts it in the same order."""

    def __init__(self, group: GpuGroup, spec: Spec) -> None:
        self.group, self.spec = group, spec
        self._ready: dict[tuple[int, bool], _Ready] = {}
        self._plans: dict[int, tuple[Plan, Layout]] = {}
        self._posted: dict[_Made, tuple[bytes, bool]] = {}
        self._agreed: dict[tuple[_Made, bytes], _Known] = {}
        first = DIRECT if spec.has_direct else STAGED_HEAP
        self._layout = self._plan(first)[1]  # its errors are raised before anything is posted
        self._direct_scratch = max(0, self._layout.scratch_bytes) if spec.has_direct else 0
        self.counter = Counter()
        group.calls.add(self)

    def _plan(self, choice: int) -> tuple[Plan, Layout]:
        if choice not in self._plans:
            plan = passes.lower(self.spec.plan_of(choice), self.group.world.device.caps.native_ops)
            most = max((i + 1 for _, i in numbered([s.rank for s in plan.signals])), default=0)
            if most > NUM_WORDS - 1:
                raise NotSupported(
                    f"plan {plan.name} has {most} signals on one rank; at most {NUM_WORDS - 1} fit, and a gate"
                )
            prove_first(plan, wanted=self.spec.check)
            self._plans[choice] = (plan, layout_of(plan))
        return self._plans[choice]

    def _prepared(self, choice: int, gated: bool) -> _Ready:
        if (choice, gated) not in self._ready:
            plan, layout = self._plan(choice)
            if gated and "prelaunch" not in plan.passes:
                plan = passes.prelaunch(plan)  # its gate comes last among the signals: the others keep their words
            group = self.group
            most = 1 if gated else self.spec.most_streams  # so that several calls can be armed at a time
            program = compile_plan(plan, {group.group.rank}, group.world.device.caps, most_streams=most)
            words = WordTable.of_ranks(program.plan, group.blocks, NUM_WORDS)
            execution = Execution(group.world.device, program, words, timeout_s=group.group.timeout_s)
            self._ready[choice, gated] = _Ready(program.plan, layout, execution)
        return self._ready[choice, gated]

    def words(self, names: Sequence[str]) -> list[int]:
        """Where the GPU finds the words of signals of a plan that has but one form."""
        ready = self._prepared(DIRECT, gated=False)
        numbers = {s.name: n for n, s in enumerate(ready.plan.signals)}
        return [ready.execution.words.address(numbers[name]) for name in names]

    def close(self) -> None:
        """Waits for its last run, bounded by that one's deadline, and gives events back."""
        with self.group.lock:
            for ready in self._ready.values():
                ready.execution.close()
            self._ready.clear()
            self._agreed.clear()

    def start(
        self,
        buffers: Sequence[tuple[int, int]],
        params: Sequence[int] = (),
        *,
        after: int | None = None,
        after_event: int | None = None,
        gated: bool = False,
        hold: tuple[Any, ...] = (),
        launch: Launch | None = None,
    ) -> tuple[GpuTicket, int]:
        """Agrees with the others and issues this rank's part. Blocks the host until all ranks have called.

        Args:
            buffers: (address, bytes) of the caller's buffers, in the plan's order.
            after, after_event, gated, launch: see `Execution.start`.

        Returns:
            the ticket, and which kind of plan runs (DIRECT, STAGED_HEAP, STAGED_ORDINARY).
        """
        group = self.group
        adopted = group.world.adopted
        made = (tuple(buffers), tuple(params), tuple(adopted.get(a) for a, _ in buffers) if adopted else ())
        with group.lock:
            posted = self._posted.get(made)
            if posted is None:
                posted = _bounded(self._posted)[made] = self._post(buffers, params)
            slot, staged = posted
            device, timeout_s = group.world.device, group.group.timeout_s
            if after is not None and device.driver.stream_capturing(after):
                raise NotSupported("the stream is capturing a graph, in which these copies would be lost")
            armed = device.arm(1, timeout_s) if gated else None  # one too many is refused before anything is posted
            try:
                gathered = group.exchange(slot)
            except BaseException:
                device.disarm(armed or ())
                raise
            known = self._agreed.get((made, gathered)) if not gated else None
            prepared = None
            try:
                if known is None:
                    known = self._agree(made, gathered, staged, gated)
                choice, execution, prepare = known
                execution.timeout_s = timeout_s
                prepared = execution.prepare((made, gathered), prepare, gated=gated, armed=armed)
                ticket = execution.start(
                    prepared, run=group.runs, after=after, after_event=after_event, previous=group.last, gated=gated,
                    hold=hold, peers=group, launch=launch,
                )  # fmt: skip
            except MismatchError:
                device.disarm(armed or ())
                raise  # every rank sees it; nothing was moved
            except BaseException as error:  # the others have agreed and wait
                if prepared is None:
                    device.disarm(armed or ())
                group.fail(error if isinstance(error, DovetailError) else HardwareError(f"a call failed: {error!r}"))
                raise
            group.last = ticket
            self.counter.runs += 1
            self.counter.direct += choice == DIRECT
            self.counter.paths = ticket.bytes_by_path
            return ticket, choice

    def _agree(self, made: _Made, gathered: bytes, staged: bool, gated: bool) -> _Known:
        """From everybody's slots to what runs: the same verdict on every rank. Remembered for the next such call."""
        slots = self.group.agreed(gathered)
        self._torchs_own(slots)
        direct = self.spec.has_direct and bool(slots["on_heap"].all())
        choice = DIRECT if direct else STAGED_ORDINARY if staged else STAGED_HEAP
        ready = self._prepared(choice, gated)
        values = self._params(ready.plan, slots)
        known = (choice, ready.execution, lambda: (self._places(ready, slots, made[0]), values, ()))
        if not gated:
            _bounded(self._agreed)[made, gathered] = known
        return known

    def _torchs_own(self, slots: NDArray[np.void]) -> None:
        """Tensors that torch has mapped can be reached from ranks that pass such a tensor too, and from no others."""
        for k in range(2):
            given = slots["bytes"][:, k] > 0
            adopted = slots["how"][:, k] == ADOPTED
            if adopted.any() and not adopted[given].all():
                ranks = np.flatnonzero(adopted).tolist()
                raise MismatchError(
                    f"ranks {ranks} pass tensors of torch's symmetric memory, the others do not: all must, or none",
                    calls=self.group.calls_of(slots, range(len(slots))),
                )

    def _post(self, buffers: Sequence[tuple[int, int]], params: Sequence[int]) -> tuple[bytes, bool]:
        """This rank's slot, and whether its input is staged."""
        world, layout = self.group.world, self._layout
        named = [not size or world.name_of(address, size)[0] != NOWHERE for address, size in buffers]
        on_heap = all(named)
        staged = bool(buffers) and not named[layout.input]
        scratch = self.spec.scratch_heap if on_heap else self.spec.scratch_ordinary
        if scratch == AS_INPUT:
            scratch = buffers[layout.input][1] if staged else 0
        scratch = max(scratch, self._direct_scratch)
        posted = [
            buffers[layout.input] if buffers else (0, 0),
            buffers[layout.output] if layout.output != NONE else (0, 0),
            (self.group.scratch(scratch), scratch),
        ]
        post = Post(
            call=self.spec.call, size_bytes=self.spec.size_bytes, on_heap=on_heap, staged=staged, buffers=posted,
            params=params,
        )  # fmt: skip
        return self.group.slot(post), staged

    def _params(self, plan: Plan, slots: NDArray[np.void]) -> list[int]:
        values = [int(slots["params"][r, i]) for r, i in numbered([p.rank for p in plan.params])]
        for a, b in plan.equal:
            if values[a] != values[b]:
                sender, receiver = plan.params[a].rank, plan.params[b].rank
                raise MismatchError(
                    f"{plan.params[a].name} of rank {sender} is {values[a]} bytes, but {plan.params[b].name} of rank "
                    f"{receiver} is {values[b]}; nothing was moved",
                    calls=self.group.calls_of(slots, {sender, receiver}),
                )
        return values

    def _places(
        self, ready: _Ready, slots: NDArray[np.void], buffers: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], Place]:
        plan = ready.plan
        places = {}
        for r, n in itertools.product(range(plan.world), range(len(plan.buffers))):
            if plan.buffers[n].sizes[r] != ABSENT:
                place = self._place(ready, slots, buffers, r, n)
                if place is not None:
                    places[r, n] = place
        return places

    def _place(
        self, ready: _Ready, slots: NDArray[np.void], buffers: Sequence[tuple[int, int]], r: int, n: int
    ) -> Place | None:
        """Where buffer n of rank r is: by the caller's pointers if it is this rank's own, otherwise by the slot."""
        plan, layout = ready.plan, ready.layout
        b = plan.buffers[n]
        view = b.role is Role.VIEW
        if b.role is Role.SCRATCH or (view and slots["staged"][r]):
            size = int(slots["bytes"][r, 2]) if b.sizes[r] == AT_RUN else b.sizes[r]
            if not size:
                return None
            whole = self._opened(slots, r, 2)
            if whole is None or layout.scratch[n] + size > whole.size_bytes:
                raise HardwareError(f"plan {plan.name}: rank {r} posted too little scratch memory for {b.name}")
            return replace(whole, base=whole.base + layout.scratch[n], size_bytes=size, staged=view)
        shown = b.of if view else n
        user = layout.user.index(shown)
        least = plan.buffers[shown].sizes[r]
        found: Place | None
        if r == self.group.group.rank:
            address, size = buffers[user]
            found = self._at(address, size) if size else None
        elif user in (layout.input, layout.output):
            found = self._opened(slots, r, 0 if user == layout.input else 1, buffers[user][0])
        else:
            return None
        if found is None:
            return None
        if least >= 0 and found.size_bytes < least:
            raise HardwareError(f"plan {plan.name}: {b.name} of rank {r} has {found.size_bytes} bytes, not {least}")
        return replace(found, size_bytes=found.size_bytes if least == AT_RUN else least)

    def _at(self, address: int, size_bytes: int) -> Place:
        """Memory, with what the driver knows of it."""
        memory = self.group.world.device.driver.memory_at(address)
        return Place(address, size_bytes, memory.kind, memory.device)

    def _opened(self, slots: NDArray[np.void], r: int, k: int, own: int = 0) -> Place | None:
        """Memory that rank r posted, as this process sees it; `own`: this rank's counterpart."""
        how, size = int(slots["how"][r, k]), int(slots["bytes"][r, k])
        if how == NOWHERE or not size:
            return None
        handle, offset = bytes(slots["handle"][r, k]), int(slots["offset"][r, k])
        world = self.group.world
        if how == ADOPTED:
            return self._at(world.adopted[own][1][r], size) if own in world.adopted else None
        if r == self.group.group.rank:
            heap = world.heap if how == 1 else world.host_heap
            segment = next(s for s in heap.segments if s.handle.ljust(64, b"\0") == handle)
            return self._at(segment.base + offset, size)
        base, _ = world.open(self.group.group.ranks[r], how, handle)
        return self._at(base + offset, size)


def _bounded(known: dict[Any, Any]) -> dict[Any, Any]:
    """The dictionary, with room for one more."""
    while len(known) >= _MOST_KNOWN:
        known.pop(next(iter(known)))
    return known


class GpuRunner:
    """Any plan on the GPUs of a group: the counterpart of `hw.cpu.executor.PlanRunner`, with the same arguments."""

    def __init__(self, group: GpuGroup, plan: Plan, *, most_streams: int = 2, check: bool = True) -> None:
        """`check`: as of `PlanRunner`; what is proved is the plan as the device takes it."""
        if plan.world != group.group.size:
            raise NotSupported(f"plan {plan.name} is for {plan.world} ranks, {group.group} has {group.group.size}")
        self.plan = plan
        self._names = [plan.buffers[n].name for n in layout_of(plan).user]
        self._sizes = {b.name: b.sizes[group.group.rank] for b in plan.buffers}
        spec = Spec(
            call=PLAN_CALL | plan.fingerprint() << 8, size_bytes=0, plan_of=lambda _: plan, has_direct=True,
            scratch_ordinary=0, most_streams=most_streams, check=check,
        )  # fmt: skip
        self._call = GpuCall(group, spec)

    def submit(
        self, tensors: Mapping[str, Any], params: Sequence[int] = (), *, after: int | None = None, gated: bool = False,
        launch: Launch | None = None, hold: tuple[Any, ...] = (),
    ) -> GpuTicket:  # fmt: skip
        """Starts a run. `tensors`: this rank's buffers by name, all on the heap; `params`: what it posts.

        `hold`: what else must live until the run is over.
        """
        wanted = {n for n in self._names if self._sizes[n] != ABSENT}
        if wrong := set(tensors) ^ wanted:
            raise ValueError(f"plan {self.plan.name} takes {sorted(wanted)}; wrong or missing: {sorted(wrong)}")
        buffers = [(t.data_ptr(), t.nbytes) if (t := tensors.get(n)) is not None else (0, 0) for n in self._names]
        held = (*tensors.values(), *hold)
        return self._call.start(buffers, params, after=after, gated=gated, hold=held, launch=launch)[0]

    def words(self, names: Sequence[str]) -> list[int]:
        """Addresses of imported signals of this rank, for whoever raises them. They stay as long as the group."""
        return self._call.words(names)

    def close(self) -> None:
        """Waits for the last run, bounded by its deadline."""
        self._call.close()
