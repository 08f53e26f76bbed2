"""Replays a plan on a machine, step by step, in integer nanoseconds.

The model. A host thread submits ring after ring (control); an engine takes a ring up after its doorbell (schedule); its
moves begin one after the other, in the order in which the engine was asked, each as soon as the bytes of the one before
are through (they overlap in their latency: back to back); a signal is seen after all earlier steps of its ring have
landed (sync), and the host notices completions one by one. Moves that share a link or a memory share its bandwidth
fairly. A prelaunched plan was submitted beforehand: its time begins with the write that opens the gates.

Events at one time are taken in the order in which they were made, so a replay is deterministic.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum

from dovetail.errors import PlanError
from dovetail.plan import passes
from dovetail.plan.plan import Plan
from dovetail.plan.step import Op
from dovetail.sim.causes import START, Causes
from dovetail.sim.flows import Flows
from dovetail.sim.host import Host
from dovetail.sim.machine import Machine, MachineError, Steps, Wiring
from dovetail.sim.program import Kind, Move, Program
from dovetail.sim.resources import Resources
from dovetail.sim.result import Phase, Result, Span
from dovetail.sim.signals import Signals, Wait, Word


def price(
    plan: Plan | Program, machine: Machine, *, params: Mapping[str, int] | None = None, timeline: bool = False
) -> Result:
    """The time of one run of `plan` on `machine`; all ranks begin at once and imported signals are up.

    Args:
        plan: any plan that an executor runs, or a `Program` where one plan is priced often. Steps that the machine's
            engines lack are lowered first, as an executor does it; a `Program` must not have any.
        params: a value for each parameter of the plan, by name.
        timeline: also keep when every engine, link and host thread was busy.

    Raises:
        MachineError: the plan has more ranks than the machine, or the program has steps that it lacks.
        PlanError: a parameter has no value, or the plan deadlocks.
    """
    if isinstance(plan, Program) and params is not None:
        raise ValueError(f"plan {plan.plan.name}: a program has its parameters already")
    program = plan if isinstance(plan, Program) else Program(lowered(plan, machine), params)
    machine.require(program.plan.world, f"plan {program.plan.name}")
    if foreign := sorted(op.name.lower() for op in program.ops - native(machine)):
        raise MachineError(
            f"plan {program.plan.name} has {', '.join(foreign)} steps, which engines of {machine.name} lack: lower it"
        )
    return _Replay(program, machine, timeline).run()


def native(machine: Machine) -> frozenset[Op]:
    """The moves that run as they are; reductions run on compute cores everywhere."""
    return frozenset({Op[step.name] for step in machine.engine.steps} | {Op.REDUCE})


def lowered(plan: Plan, machine: Machine) -> Plan:
    """The plan in steps that the machine has; its list of passes says what was changed."""
    return passes.lower(plan, native(machine))


# Events. At one time, an engine picks a ring when all that ask are known, and flows are shared out anew last of all.
_GO, _PICK, _SHARE = range(3)
_LATE, _LAST = 1 << 61, 1 << 62
_ALWAYS = 1 << 62  # the value of a signal that is up for the whole run


def _tracks(wiring: Wiring, pairs: Sequence[tuple[int, int]]) -> list[str]:
    """The links that a move crosses, by name."""
    if wiring is Wiring.FULLY_CONNECTED:
        return [f"link {a} -> {b}" for a, b in pairs]
    if wiring is Wiring.SWITCH:
        return [track for a, b in pairs for track in (f"link out of {a}", f"link into {b}")]
    return []


class _Held(IntEnum):
    """What a ring waits for."""

    NOTHING = 0
    LANDING = 1  #: its own moves
    ENGINE = 2
    SIGNAL = 3
    TIME = 4


class _Replay:
    """One run. A moment is a number in `causes`."""

    def __init__(self, program: Program, machine: Machine, timeline: bool) -> None:
        self.program, self.machine, self.plan = program, machine, program.plan
        engine = machine.engine
        self.rings = program.widened(engine.broadcast_ways) if Steps.BROADCAST in engine.steps else program.rings
        self.poll_ns, self.signal_ns = round(engine.poll_ns), round(engine.signal_ns)
        self.command_ns = round(engine.command_ns)
        self.spans: list[Span] | None = [] if timeline else None
        self.causes = Causes()
        self.when_ns = self.causes.when_ns
        self.host = Host(machine, self.plan.world, self.causes, self._show if timeline else None)
        self.resources = Resources(machine, self.plan.world, self.rings, program.num_rows)
        self.flows = Flows(self.resources.capacity)
        self.flowing: list[tuple[int, Move, int]] = []  # by number of flow: ring, move, moment of its start
        self.version = 0  # of the set of flows
        count = len(self.rings)
        self.at = [0] * count  # the step that each ring is at
        self.held = [_Held.TIME] * count
        self.flying = [0] * count  # moves whose end is not known yet
        self.cause = [START] * count  # the moment that let the ring go on
        self.landed = [START] * count  # the moment at which its last move landed
        engines = [(r.rank, r.engine % engine.count) for r in self.rings]
        number = {found: n for n, found in enumerate(dict.fromkeys(engines))}
        self.engines = list(number)  # (rank, engine of the rank)
        self.engine_of = [number[found] for found in engines]
        self.alone = [num == 1 for num in Counter(engines).values()]  # has it one ring only?
        self.free = [START] * len(number)  # the moment from which on an engine may begin a move
        self.busy = [False] * len(number)  # with a move whose end is not known, or with picking
        self.asking: list[list[tuple[int, int]]] = [[] for _ in number]  # (since, ring)
        self.signals = Signals(self.plan, self.causes)
        self.waits: list[Wait | None] = [None] * len(program.waits)  # made when a ring first stands at them
        self.heap: list[tuple[int, int, int, int, int]] = []  # time, order, event, ring or engine, moment
        self.order = 0
        self.now = 0

    def run(self) -> Result:
        launched = self.host.launch(self.rings, self.plan.signals, self.program.prelaunched)
        for signal, moment in launched.gates:
            self._raise(signal, _ALWAYS, moment)
        for n, moment in launched.rings:
            self.cause[n] = moment
            self._post(self.when_ns[moment], _GO, n, moment)
        heap = self.heap
        while heap:
            self.now, _, event, what, moment = heapq.heappop(heap)
            if event == _GO:
                self._advance(what)
            elif event == _PICK:
                self._pick(what, moment)
            elif what == self.version:
                self._share()
        last = self.host.notice(launched.watching, self._arrivals())
        return Result(
            plan=self.plan.name,
            machine=self.machine.name,
            time_ns=self.when_ns[last],
            phases_ns=self.causes.phases_ns(last),
            limit_ns=self.resources.limit_ns(self.program.traffic()),
            spans=tuple(self.spans or ()),
        )

    def _post(self, when_ns: int, event: int, what: int, moment: int) -> None:
        self.order += 1
        heapq.heappush(self.heap, (when_ns, self.order, event, what, moment))

    def _arrivals(self) -> dict[int, list[int]]:
        """What each host thread has to notice.

        A ring is over when its last waits are, and its last move, if no signal follows it, is known to have landed; one
        without waits when its last signal is up. What several rings of a thread wait for is noticed once.
        """
        awaited: dict[int, dict[Word, int]] = {}
        for n, ring in enumerate(self.rings):
            self._require_end(n)
            mine = awaited.setdefault(self.host.thread_of(ring.rank), {})
            for word in ring.waits:
                mine[word] = self._reached(n, word)
            if not ring.actions:
                continue
            kind, word = ring.actions[-1]
            if kind is Kind.MOVE:  # an interrupt, or a fence that the executor adds
                done = self.landed[n]
                mine[-1, n] = self.causes.add(self.when_ns[done] + self.signal_ns, done, Phase.SYNC)
            elif kind is Kind.SIGNAL and not ring.waits:
                mine[word] = self._reached(n, word)
        return {thread: list(words.values()) for thread, words in awaited.items()}

    # --- rings and engines -------------------------------------------------------------------------------------------

    def _advance(self, n: int) -> None:
        """Takes steps of a ring until it has to wait."""
        actions = self.rings[n].actions
        while self.at[n] < len(actions):
            kind, what = actions[self.at[n]]
            if kind is Kind.MOVE:
                if what.drains and not self._landed(n):
                    return
                cause = self.cause[n]
                if what.op is not Op.REDUCE:
                    if not self._granted(n):
                        return
                    cause = self.causes.later(cause, self.free[self.engine_of[n]])
                self._begin(n, what, cause)
                continue
            if kind is Kind.SIGNAL:
                if not self._landed(n):
                    return
                up = self.causes.add(self.now + self.signal_ns, self.cause[n], Phase.SYNC)
                self._raise(what[0], what[1], up)
            elif not self._passes(n, what):
                return
            self.at[n] += 1
        self.held[n] = _Held.NOTHING

    def _passes(self, n: int, number: int) -> bool:
        """Is a wait over? If not, the ring goes on when its last word is up and the engine has polled it."""
        wait = self.waits[number]
        if wait is None:
            wait = self.waits[number] = self.signals.wait(self.program.waits[number])
        if wait.missing:
            self.held[n] = _Held.SIGNAL
            wait.rings.append(n)
            return False
        if self.when_ns[wait.moment] + self.poll_ns > self.now:
            self._go_behind(n, wait)
            return False
        if self.when_ns[wait.moment] > self.when_ns[self.cause[n]]:  # nothing to poll: the signal itself let it go on
            self.cause[n] = wait.moment
        return True

    def _go_behind(self, n: int, wait: Wait) -> None:
        ready_ns = self.when_ns[wait.moment] + self.poll_ns
        self.cause[n] = self.causes.add(ready_ns, wait.moment, Phase.SCHEDULE if wait.gate else Phase.SYNC)
        self.held[n] = _Held.TIME
        self._post(ready_ns, _GO, n, self.cause[n])

    def _landed(self, n: int) -> bool:
        """Have all moves of a ring landed? If not, it goes on when they have."""
        if self.flying[n]:
            self.held[n] = _Held.LANDING
            return False
        if self.when_ns[self.landed[n]] > self.now:
            self._go_at(n, self.landed[n])
            return False
        return True

    def _go_at(self, n: int, moment: int) -> None:
        """The ring goes on at a moment, and because of it."""
        self.cause[n], self.held[n] = moment, _Held.TIME
        self._post(self.when_ns[moment], _GO, n, moment)

    def _granted(self, n: int) -> bool:
        """Has the ring its engine for its next move? If not, it goes on when it is its turn."""
        engine = self.engine_of[n]
        if not self.alone[engine]:
            self._ask(n, engine)
            return False
        if self.busy[engine]:
            self.held[n] = _Held.ENGINE
            return False
        if (free_ns := self.when_ns[self.free[engine]]) > self.now:
            self.held[n] = _Held.TIME
            self._post(free_ns, _GO, n, self.free[engine])
            return False
        self.busy[engine] = True
        return True

    def _ask(self, n: int, engine: int) -> None:
        self.held[n] = _Held.ENGINE
        heapq.heappush(self.asking[engine], (self.now, n))
        if not self.busy[engine]:
            self.busy[engine] = True
            heapq.heappush(self.heap, (self.now, _LATE, _PICK, engine, self.free[engine]))

    def _pick(self, engine: int, free: int) -> None:
        """The engine begins a move: that of the ring that asked first, of several the first of the plan."""
        self.free[engine] = free
        self.busy[engine] = bool(self.asking[engine])
        if self.busy[engine]:
            _, n = heapq.heappop(self.asking[engine])
            self._begin(n, self.rings[n].actions[self.at[n]][1], self.causes.later(self.cause[n], free))
            self._advance(n)

    def _begin(self, n: int, move: Move, cause: int) -> None:
        start = self.causes.add(self.now, cause, Phase.COPY)
        self.at[n] += 1
        self.flying[n] += 1
        cap, uses = self.resources.of(move)
        if uses and move.size_bytes:
            self.flowing.append((n, move, start))
            self.flows.add(len(self.flowing) - 1, move.size_bytes, cap, uses)
            self._post_share(self.now)  # when all changes of this moment are known
        else:
            self._through(n, move, start, self.now + math.ceil(move.size_bytes / cap))

    def _post_share(self, when_ns: int) -> None:
        self.version += 1
        heapq.heappush(self.heap, (when_ns, _LAST, _SHARE, self.version, START))

    def _share(self) -> None:
        for flow in self.flows.advance(self.now):
            self._through(*self.flowing[flow], self.now)
        following = self.flows.share()
        if following is not None:
            self._post_share(max(following, self.now + 1))

    def _through(self, n: int, move: Move, start: int, end_ns: int) -> None:
        """The last byte of a move is through its engine at `end_ns`; it lands a little later."""
        begin_ns, latency_ns = self.when_ns[start], self.resources.latency_ns(move)
        landed = self.causes.add(end_ns + latency_ns, start, Phase.COPY)
        if self.when_ns[landed] >= self.when_ns[self.landed[n]]:
            self.landed[n] = landed
        self.flying[n] -= 1
        if not self.flying[n] and self.held[n] is _Held.LANDING:
            self._go_at(n, self.landed[n])
        if move.op is not Op.REDUCE:
            free = self.causes.add(max(end_ns, begin_ns + self.command_ns), start, Phase.COPY)
            self._leave(n, self.engine_of[n], free)
        if self.spans is not None:
            rank, engine = self.engines[self.engine_of[n]]
            track = f"rank {rank} cores" if move.op is Op.REDUCE else f"rank {rank} engine {engine}"
            what = f"{move.op.name.lower()} {move.size_bytes} B"
            self._show(track, what, begin_ns, end_ns, move.size_bytes)
            for track in _tracks(self.machine.link.wiring, move.pairs):
                self._show(track, what, begin_ns + latency_ns, end_ns + latency_ns, move.size_bytes)

    def _leave(self, n: int, engine: int, free: int) -> None:
        """The engine can begin another move at the moment `free`."""
        if not self.alone[engine]:
            self._post(self.when_ns[free], _PICK, engine, free)
            return
        self.free[engine], self.busy[engine] = free, False
        if self.held[n] is _Held.ENGINE:
            self.held[n] = _Held.TIME
            self._post(self.when_ns[free], _GO, n, free)

    def _show(self, track: str, name: str, begin_ns: int, end_ns: int, size_bytes: int = 0) -> None:
        assert self.spans is not None
        self.spans.append(Span(track=track, name=name, begin_ns=begin_ns, end_ns=end_ns, size_bytes=size_bytes))

    # --- signals -----------------------------------------------------------------------------------------------------

    def _raise(self, signal: int, value: int, moment: int) -> None:
        for wait in self.signals.reach(signal, value, moment):
            for n in wait.rings:
                self._go_behind(n, wait)

    def _reached(self, n: int, word: Word) -> int:
        moment = self.signals.moment(word)
        if moment is None:
            raise self._deadlock(n, word)
        return moment

    def _require_end(self, n: int) -> None:
        """Raises PlanError for a ring that never got to its end."""
        if self.at[n] < len(self.rings[n].actions):
            words = self.program.waits[self.rings[n].actions[self.at[n]][1]]
            raise self._deadlock(n, next(word for word in words if self.signals.moment(word) is None))

    def _deadlock(self, n: int, word: Word) -> PlanError:
        ring, signal = self.rings[n], self.plan.signals[word[0]].name
        text = f"rank {ring.rank} ({ring.name}) waits for {signal} >= {word[1]}, which nobody raises in time"
        return PlanError(f"plan {self.plan.name}: deadlock: {text}")
