"""The race of contenders: `auto` has tried its paths before the rounds, in the state that is measured."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.bench.kv import race as racing
from dovetail.bench.kv.race import Contender, race
from dovetail.errors import HardwareError
from dovetail.kv.learn import SETTLED


class Runner(Contender):
    """Takes as long as it says; notes whether computation ran beside."""

    def __init__(self, name: str, time_us: float, load: FakeLoad | None = None) -> None:
        super().__init__(name=name, entries=None, size_bytes=1, copies=1, plan_us=0.0, parts=[])
        self.time_us, self.load, self.runs = time_us, load, [0, 0]

    def once(self) -> tuple[float, float]:
        self.runs[bool(self.load and self.load.is_on)] += 1
        return 1.0, self.time_us

    def arrives(self) -> bool:
        return True


class FakeLoad:
    """Two transfers to a window."""

    def __init__(self, fails: int = 0) -> None:
        self.is_on, self.windows, self._fails = False, 0, fails

    def beside(self, once: Any, about_us: float) -> tuple[list[tuple[float, float]], float]:
        self.windows += 1
        if self.windows <= self._fails:
            raise HardwareError("no transfer ended in time")
        self.is_on = True
        found = [once(), once()]
        self.is_on = False
        return found, 1.0


def test_auto_runs_until_it_has_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "_MOST_ROUNDS", 1)
    made = [Runner("dma-2d", 90.0), Runner("auto", 100.0), Runner("dma-loop", 200_000.0)]
    race(made, 2, None)
    assert [sum(one.runs) for one in made] == [1 + 2, SETTLED + 2, 1 + 2]
    slow = Runner("auto", 200_000.0)
    race([slow], 2, None)
    assert sum(slow.runs) == 2 + 2  # less often
    made = [Runner("dma-2d", 90.0), Runner("auto", 100.0), Runner("dma-loop", 200_000.0)]
    race(made, 2, None)
    assert [one.times_us for one in made] == [[90.0] * 2, [100.0] * 2, [200_000.0] * 2]
    made = [Runner("dma-2d", 90.0)]
    race(made, 2, None)
    assert sum(made[0].runs) == 3  # there is nothing to settle


@pytest.mark.parametrize("fails", [0, 1])
def test_beside_a_load_some_windows_are_thrown_away(fails: int) -> None:
    """As many as `auto` needs to have tried its paths; none behind one that failed."""
    load: Any = FakeLoad(fails)
    made = [Runner("auto", 100.0, load), Runner("staged", 90.0, load)]
    race(made, 3, load)
    needed = -(-SETTLED // 2)
    assert load.windows == (1 if fails else needed) + 2 * 3
    assert [one.runs for one in made] == [[1, 6 if fails else 6 + 2 * needed], [1, 6]]
    assert all(len(one.times_us) == 6 and len(one.kept) == 3 for one in made)
