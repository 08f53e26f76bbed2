"""What `auto` learns: paths near the best are tried and the fastest is found, those beyond reach are left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dovetail.kv.choose import CANDIDATES, Estimate, Path, Shape
from dovetail.kv.learn import AGAIN, FORGET, RARELY, REACH, SETTLED, TRIALS, Learner, Request
from dovetail.kv.planner import Direction

MB = 1 << 20
SHAPE = Shape(row_bytes=16384, size_bytes=64 * MB)
TWO = {Path.DMA_2D: 1930.0, Path.STAGED: 2100.0}


def known(tuned: Mapping[Path, float], size_bytes: int = SHAPE.size_bytes) -> Estimate:
    return Estimate(size_bytes=size_bytes, times_us=tuned, entries_per_call=7, why=lambda: "estimated: a test")


def request(tuned: Mapping[Path, float]) -> Request:
    return Learner().request(Direction.FETCH, False, SHAPE, tuned, known(tuned))


def run(one: Request, number: int, time_us: Callable[[Path], float]) -> Counter[Path]:
    """So many requests, each over before the next."""
    taken: Counter[Path] = Counter()
    for _ in range(number):
        is_due = one.is_due()
        path = one.choose(is_timed=is_due).path
        if is_due:
            one.note(path, time_us(path))
        taken[path] += 1
    return taken


def test_few_are_timed_where_nothing_is_tried() -> None:
    """All while there is something to find out, then one of `RARELY`; what becomes slow is noticed all the same."""
    one = request(TWO)
    due = []
    for _ in range(2 * TRIALS + 10 * RARELY):
        due.append(one.is_due())
        path = one.choose(is_timed=due[-1]).path
        if due[-1]:
            one.note(path, TWO[path])
    assert all(due[: 2 * TRIALS])
    assert 8 <= sum(due[2 * TRIALS :]) <= 14
    slow = TWO | {Path.DMA_2D: 4000.0}
    run(one, RARELY + TRIALS, slow.__getitem__)
    assert one.choose(is_timed=False).path is Path.STAGED


TIMES = some.fixed_dictionaries(dict.fromkeys(CANDIDATES, some.floats(100.0, 10_000.0)))


OFF = some.fixed_dictionaries(dict.fromkeys(CANDIDATES, some.floats(0.88, 1.13)))


@given(tuned=TIMES, off=OFF, scale=some.sampled_from([1.0, 0.3, 3.0]))
def test_the_fastest_of_those_near_is_found(tuned: dict[Path, float], off: dict[Path, float], scale: float) -> None:
    """Tuned times that are 12 % off either way, or of a slower GPU: what is really the fastest is within reach."""
    real = {path: scale * tuned[path] * off[path] for path in tuned}
    one = request(tuned)
    run(one, SETTLED, real.__getitem__)
    found = one.choose(is_timed=False)
    assert real[found.path] <= min(real.values()) * 1.03
    taken = run(one, 20 * AGAIN, real.__getitem__)
    slow = sum(number for path, number in taken.items() if real[path] > 1.03 * min(real.values()))
    assert slow <= 20 + 2 * TRIALS  # once in a while, and again what was forgotten


@given(tuned=TIMES, real=TIMES, dropped=some.lists(some.booleans(), min_size=1, max_size=7))
def test_nothing_beyond_reach_is_ever_tried(
    tuned: dict[Path, float], real: dict[Path, float], dropped: list[bool]
) -> None:
    one = request(tuned)
    for n in range(3 * AGAIN):
        believed = one.believed().times_us
        choice = one.choose(is_timed=True)
        is_unknown = believed[choice.path] == tuned[choice.path]
        assert believed[choice.path] <= REACH * min(believed.values()) or (
            is_unknown and tuned[choice.path] <= REACH * min(tuned.values())
        )
        assert choice.reason.startswith("tried: ") == (choice.path is not one.near()[0])
        if not dropped[n % len(dropped)]:
            one.note(choice.path, real[choice.path])


def test_trials_are_few() -> None:
    one = request(TWO)
    assert run(one, 2 * TRIALS, TWO.__getitem__) == dict.fromkeys(TWO, TRIALS)
    assert run(one, AGAIN - 2 * TRIALS - 1, TWO.__getitem__) == {Path.DMA_2D: AGAIN - 2 * TRIALS - 1}
    later = run(one, 4 * AGAIN, TWO.__getitem__)
    assert later[Path.STAGED] == 4


def test_the_reason_says_whose_figures_these_are() -> None:
    one = request(TWO | {Path.DMA_BATCH: 9000.0})
    assert one.choose(is_timed=False).reason == "estimated: a test"
    real = {Path.DMA_2D: 2425.0, Path.STAGED: 1813.0}
    for _ in range(2 * TRIALS):
        choice = one.choose(is_timed=True)
        one.note(choice.path, real[choice.path])
    choice = one.choose(is_timed=False)
    assert (choice.path, choice.entries_per_call) == (Path.STAGED, 7)
    assert choice.reason == (
        "measured here: dma-2d 2425 us, staged 1813 us (4 transfers); estimated: dma-batch 9000 us"
    )
    new = request(TWO)
    reasons = [new.choose(is_timed=True).reason for _ in range(2 * TRIALS)]
    assert reasons == ["estimated: a test"] * TRIALS + ["tried: estimated: a test"] * TRIALS


def test_a_reason_is_of_the_time_of_its_choice() -> None:
    """It is put into words when somebody asks: by the figures that decided, not by later ones."""
    one = request(TWO)
    first = one.choose(is_timed=False)
    run(one, 2 * TRIALS, {Path.DMA_2D: 2300.0, Path.STAGED: 1813.0}.__getitem__)
    settled = [one.choose(is_timed=True) for _ in range(2 * AGAIN)]
    run(one, 2 * AGAIN, {Path.DMA_2D: 900.0, Path.STAGED: 2900.0}.__getitem__)
    assert one.choose(is_timed=False).reason.startswith("measured here: dma-2d 900 us, staged 2900 us")
    assert first.reason == "estimated: a test"
    reason = "measured here: dma-2d 2300 us, staged 1813 us (4 transfers)"
    assert {(choice.path, choice.reason) for choice in settled} == {
        (Path.STAGED, reason),
        (Path.DMA_2D, f"tried: {reason}"),
    }


def test_the_first_time_of_a_path_counts_for_nothing() -> None:
    """A kernel is compiled: a second, then as fast as can be."""
    times = {Path.DMA_2D: [1e6, 2000, 2000], Path.STAGED: [1e6, 1500, 1500]}
    one = request(TWO)
    for _ in range(2 * TRIALS):
        path = one.choose(is_timed=True).path
        one.note(path, times[path].pop(0))
    assert one.believed().times_us == pytest.approx({Path.DMA_2D: 2000, Path.STAGED: 1500})


@pytest.mark.parametrize("phase", range(0, 1400, 100))
def test_a_path_is_tried_in_its_own_rhythm(phase: int) -> None:
    """One waits for the end of a kernel of 1400 us that computes beside: what it takes depends on when it begins."""
    one, now = request(TWO), float(phase)
    taken = []
    for _ in range(4 * AGAIN):
        path = one.choose(is_timed=True).path
        ready = now + 1100
        ends = {Path.DMA_2D: now + 1750, Path.STAGED: ready + -ready % 1400}[path]
        one.note(path, ends - now)
        now = ends + 20
        taken.append(path)
    assert taken[2 * TRIALS :].count(Path.STAGED) >= 4 * AGAIN - 2 * TRIALS - 4  # 1400 us each, if they follow


def test_a_time_that_somebody_disturbed_does_not_change_the_choice() -> None:
    one = request(TWO)
    run(one, 2 * TRIALS, TWO.__getitem__)
    for late in (True, False, False, True, False, False):
        one.note(Path.DMA_2D, 50_000.0 if late else 1930.0)
        assert one.choose(is_timed=False).path is Path.DMA_2D


@pytest.mark.parametrize("slower", [Path.DMA_2D, Path.STAGED])
def test_a_machine_that_changes_is_followed(slower: Path) -> None:
    """The best gets slower: seen when one is timed, and then at once. Another gets faster: seen at its next trial."""
    one = request(TWO)
    run(one, 2 * TRIALS, TWO.__getitem__)
    assert one.choose(is_timed=False).path is Path.DMA_2D
    if slower is Path.DMA_2D:
        run(one, RARELY + TRIALS, {Path.DMA_2D: 3000.0, Path.STAGED: 2100.0}.__getitem__)
    else:
        run(one, AGAIN + 2 * TRIALS, {Path.DMA_2D: 1930.0, Path.STAGED: 1500.0}.__getitem__)
    assert one.choose(is_timed=False).path is Path.STAGED


def test_what_was_seen_at_a_bad_time_is_forgotten() -> None:
    """All trials of the better path came at a bad time: it is beyond reach, but not for ever."""
    one = request(TWO)
    run(one, 2 * TRIALS, {Path.DMA_2D: 5000.0, Path.STAGED: 2100.0}.__getitem__)
    taken = run(one, FORGET // 2, TWO.__getitem__)
    assert taken[Path.DMA_2D] == 0
    run(one, FORGET, TWO.__getitem__)
    assert one.choose(is_timed=False).path is Path.DMA_2D


def test_nothing_is_tried_or_counted_where_nothing_is_timed() -> None:
    one = request(TWO)
    assert {one.choose(is_timed=False).path for _ in range(3 * AGAIN)} == {Path.DMA_2D}
    assert run(one, 2 * TRIALS, TWO.__getitem__) == dict.fromkeys(TWO, TRIALS)
    one.note(Path.STAGED, 0.0)  # a clock that did not go on
    assert one.believed().times_us == pytest.approx(TWO)


def test_requests_alike_share_what_was_seen() -> None:
    learner = Learner()

    def of(row_bytes: int, size_bytes: int, beside: bool = False, direction: Direction = Direction.FETCH) -> Request:
        shape = Shape(row_bytes=row_bytes, size_bytes=size_bytes)
        tuned = {path: time_us * size_bytes / SHAPE.size_bytes for path, time_us in TWO.items()}
        return learner.request(direction, beside, shape, TWO, known(tuned, size_bytes))

    real = {Path.DMA_2D: 2425.0, Path.STAGED: 1813.0}
    run(of(16384, 64 * MB), 2 * TRIALS, real.__getitem__)
    near = of(17000, 66 * MB)
    assert near.choose(is_timed=False).path is Path.STAGED
    assert near.believed().times_us[Path.STAGED] == pytest.approx(1813.0 * 66 / 64)
    others = (of(4096, 64 * MB), of(16384, 128 * MB), of(16384, 64 * MB, True))
    for other in (*others, of(16384, 64 * MB, direction=Direction.STORE)):
        assert other.choose(is_timed=False).path is Path.DMA_2D
    shape = Shape(row_bytes=0, size_bytes=0)
    nothing = learner.request(Direction.FETCH, False, shape, TWO, known(dict.fromkeys(TWO, 0.0), 0))
    assert nothing.choose(is_timed=False).path is Path.DMA_2D
