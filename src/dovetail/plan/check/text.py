"""How the checker's errors name steps, callers and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.errors import PlanError
from dovetail.plan.check.chains import Chains
from dovetail.plan.check.memory import Memories
from dovetail.plan.plan import Plan, Region
from dovetail.plan.step import Step


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Names of one plan's things."""

    plan: Plan
    chains: Chains
    memories: Memories

    def step(self, node: int) -> str:
        """`rank 0 queue 1 (send 2) step 3: copy ...`, or what an access from outside does."""
        chain, index = int(self.chains.chain[node]), int(self.chains.index[node])
        if chain < self.chains.num_queues:
            return self.plan.describe(chain, index)
        outside = self.chains.outside[chain - self.chains.num_queues]
        parts = [("reads", outside.read), ("writes", outside.write)]
        done = " and ".join(f"{verb} {self._region(r)}" for verb, r in parts if r)
        return f"external access that {done}"

    def goal(self, row: int) -> str:
        """A row of the goal."""
        rows = self.plan.goal[row]
        first = int(rows["first_source"])
        step = Step(rows, self.plan.sources[first : first + int(rows["num_sources"])])
        return f"goal {row}: {step.describe([b.name for b in self.plan.buffers], [s.name for s in self.plan.signals])}"

    def bytes(self, memory: int, low: int, high: int) -> str:
        """`rank 1 buffer output bytes [0, 64)`."""
        buffer = self.plan.buffers[int(self.memories.buffer[memory])].name
        return f"rank {int(self.memories.rank[memory])} buffer {buffer} bytes [{low}, {high})"

    def error(self, problem: str, steps: Sequence[str] = ()) -> PlanError:
        """The error that says `problem` of this plan."""
        return PlanError(f"plan {self.plan.name}: {problem}", steps=tuple(steps))

    def _region(self, region: Region) -> str:
        buffer = self.plan.buffers[region.buffer].name
        return f"rank {region.rank} buffer {buffer} bytes [{region.offset}, {region.offset + region.length})"
