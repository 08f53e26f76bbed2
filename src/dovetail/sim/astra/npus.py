"""Plays every NPU of the network, event by event, in the order in which ASTRA-sim works events off within a tick.

Owns the whole truth, at the price of one event per message and NPU. `dovetail.sim.astra.timing` and `queues` say the
same for one NPU and are used wherever NPUs are alike; this is for where they are not: trees, ranks that compute for
different times, and ticks in which the order of events differs from NPU to NPU.

Order within a tick: the world has one list of events per tick, worked off from the front while it grows. An NPU keeps a
list of its own per tick, which stands in the world's list where its first entry was made; messages stand there singly.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from dovetail.sim.astra.courses import Course, Packets, Ring, Tree
from dovetail.sim.astra.exchange import Rule, message_ns, rule
from dovetail.sim.astra.network import AstraNetwork
from dovetail.sim.astra.phases import Phase, Plan
from dovetail.sim.astra.system import Algorithm, AstraSystem

Event = Callable[[], None]


class World:
    """The clock, the list of events of each tick, and the messages on their way."""

    def __init__(self, network: AstraNetwork, system: AstraSystem) -> None:
        self.network = network
        self.system = system
        self.now = 0
        self.npus = [Npu(self, number) for number in range(network.num_npus)]
        self._ticks: list[int] = []
        self._events: dict[int, list[Event]] = {}
        self._messages: dict[tuple[int, ...], _Message] = {}
        self._posted: dict[tuple[int, ...], int] = {}
        self._travel: dict[tuple[Phase, int, int], int] = {}
        self._rules: dict[Phase, Rule] = {}

    def run(self) -> None:
        """Works off all events."""
        while self._ticks:
            self.now = self._ticks[0]
            events = self._events[self.now]
            for event in events:  # grows while it is worked off
                event()
            del self._events[self.now]
            heapq.heappop(self._ticks)

    def put(self, after: int, event: Event) -> None:
        """Appends an event to the list of a tick."""
        tick = self.now + after
        if tick not in self._events:
            self._events[tick] = []
            heapq.heappush(self._ticks, tick)
        self._events[tick].append(event)

    def rule(self, phase: Phase) -> Rule:
        """The rule of a phase, made once."""
        if phase not in self._rules:
            self._rules[phase] = rule(phase)
        return self._rules[phase]

    def num_messages(self, phase: Phase) -> int:
        """Messages of all NPUs for one chunk."""
        if phase.implementation.algorithm == Algorithm.DOUBLE_BINARY_TREE:
            return 2 * self.network.num_npus
        return self.rule(phase).steps * self.network.num_npus

    def send(self, phase: Phase, tag: int, source: int, target: int, size_bytes: int) -> None:
        """A message leaves; it meets its receive by order among those with equal tag, ends and size."""
        key, message = self._message(0, tag, source, target, size_bytes)
        distance = Ring(phase, self.network, source).distance(target)
        travel = self._travel.get((phase, distance, size_bytes))
        if travel is None:
            travel = message_ns(self.network, phase, distance, size_bytes)
            self._travel[phase, distance, size_bytes] = travel
        self.put(travel, lambda: self._arrive(key, message))

    def receive(self, tag: int, source: int, target: int, size_bytes: int, handler: Event) -> None:
        """An NPU is ready for a message that may be here already."""
        key, message = self._message(1, tag, source, target, size_bytes)
        message.handler = handler
        if message.arrived:
            del self._messages[key]
            self.put(0, handler)

    def _arrive(self, key: tuple[int, ...], message: _Message) -> None:
        message.arrived = True
        if message.handler is not None:
            del self._messages[key]
            message.handler()

    def _message(self, end: int, tag: int, source: int, target: int, size: int) -> tuple[tuple[int, ...], _Message]:
        counter = (end, tag, source, target, size)
        number = self._posted.get(counter, 0)
        self._posted[counter] = number + 1
        key = (tag, source, target, size, number)
        return key, self._messages.setdefault(key, _Message())


class _Message:
    __slots__ = ("arrived", "handler")

    def __init__(self) -> None:
        self.arrived = False
        self.handler: Event | None = None


class Npu:
    """One NPU: its lists of events, and the queue of chunks of each dimension."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.trees: dict[int, int] = {}  # per dimension, how many chunks took a tree
        self._lists: dict[int, list[Event]] = {}
        self._queues: list[list[Chunk]] = [[] for _ in world.network.npus]
        self._running = [0] * world.network.num_dimensions
        self._num_chunks = 0

    def put(self, after: int, event: Event) -> None:
        """Appends an event to this NPU's list of a tick."""
        tick = self.world.now + after
        if tick not in self._lists:
            self._lists[tick] = []
            self.world.put(after, self._work_off)
        self._lists[tick].append(event)

    def _work_off(self) -> None:
        for event in self._lists[self.world.now]:  # grows while it is worked off
            event()
        del self._lists[self.world.now]

    def start(self, plan: Plan, on_end: Event) -> None:
        """Queues the chunks of a collective; `on_end` runs when the last of them is through."""
        left = plan.num_chunks

        def one_through() -> None:
            nonlocal left
            left -= 1
            if not left:
                on_end()

        for _ in range(plan.num_chunks):
            chunk = Chunk(self, self._num_chunks, plan.phases, one_through)
            self._num_chunks += 1
            self._queues[chunk.phase.queue].append(chunk)
            self._serve(chunk.phase.queue)

    def leave(self, chunk: Chunk) -> None:
        """A chunk has ended its phase: it goes on to the next queue, and both queues start who waits there."""
        queue = chunk.phase.queue
        last = chunk.at + 1 == len(chunk.phases)
        if last:
            chunk.on_end()
        self._queues[queue].remove(chunk)
        if not last:
            chunk.at += 1
            self._queues[chunk.phase.queue].append(chunk)
        self._running[queue] -= 1
        self._serve(queue)
        if not last:
            self._serve(chunk.phase.queue)

    def _serve(self, queue: int) -> None:
        while self._running[queue] < min(self.world.system.active_chunks, len(self._queues[queue])):
            chunk = self._queues[queue][self._running[queue]]
            chunk.course.start()
            self._running[queue] += 1


class Chunk:
    """A chunk of a collective on one NPU: the courses it runs in turn, and what they may do."""

    __slots__ = ("_courses", "at", "npu", "number", "on_end", "phases")

    def __init__(self, npu: Npu, number: int, phases: tuple[Phase, ...], on_end: Event) -> None:
        self.npu = npu
        self.number = number
        self.phases = phases
        self.on_end = on_end
        self.at = 0
        self._courses = [self._course(phase) for phase in phases]

    @property
    def phase(self) -> Phase:
        """Where it is."""
        return self.phases[self.at]

    @property
    def course(self) -> Course:
        """What it runs there."""
        return self._courses[self.at]

    def _course(self, phase: Phase) -> Course:
        world, npu = self.npu.world, self.npu.number
        if phase.implementation.algorithm != Algorithm.DOUBLE_BINARY_TREE:
            return Packets(self, world.rule(phase), Ring(phase, world.network, npu))
        turn = self.npu.trees.get(phase.queue, 0)
        self.npu.trees[phase.queue] = turn + 1
        return Tree(self, Ring(phase, world.network, npu), phase.size_bytes, root_last=turn % 2 == 0)

    def cross(self, size_bytes: int, reduced: bool) -> None:
        """Takes a packet through the endpoint, then tells the course."""
        npu, course = self.npu, self.course
        if not reduced:
            npu.put(npu.world.system.endpoint_delay_ns, course.crossed)
            return
        reduce_ns = npu.world.system.reduce_ns(size_bytes)
        npu.put(npu.world.system.endpoint_delay_ns, lambda: npu.put(reduce_ns, course.crossed))

    def send(self, target: int, size_bytes: int) -> None:
        """Sends to another NPU."""
        self.npu.world.send(self.phase, self.number, self.npu.number, target, size_bytes)

    def receive(self, source: int, size_bytes: int) -> None:
        """Takes a message from another NPU, then tells the course."""
        self.npu.world.receive(self.number, source, self.npu.number, size_bytes, self.course.arrived)

    def end(self) -> None:
        """The phase is over."""
        self.npu.leave(self)
