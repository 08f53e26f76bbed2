"""What was measured of overlap: read between its points, kept in a profile, refused where it is broken."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dovetail import profile
from dovetail.measure import machine
from dovetail.overlap import section as stored
from dovetail.overlap import tables
from dovetail.overlap.strategy import Setting, Strategy
from dovetail.overlap.tables import LOCAL, Beside, ByCores, BySize, Known, Tables
from dovetail.overlap.tasks import Bound, Mover, Traffic

MB = 1 << 20

SECTION: dict[str, Any] = {
    "device": "NVIDIA H200",
    "num_cores": 132,
    "core_step": 8,
    "flops": 8e14,
    "memory_bytes_per_s": 4.1e12,
    "link_bytes_per_s": 5.5e10,
    "compute_alone": {"memory": [[10_000_000, 8.0, 132], [300_000_000, 78.0, 132]]},
    "compute_by_cores": {"compute": [[68, 1.9], [124, 1.06], [132, 1.0]], "memory": [[124, 0.95], [132, 1.0]]},
    "comm_by_cores": {"all_gather": [[8, 1.4], [16, 1.0]]},
    "alone": {
        "all_gather": {
            "engines": [[MB, 24.0, 0], [64 * MB, 1300.0, 0]],
            "cores": [[MB, 27.0, 16], [64 * MB, 1400.0, 32]],
        }
    },
    "beside": [
        ["dma", 0, "compute", "all_gather", MB, 1.01, 1.0],
        ["streams", 16, "compute", "all_gather", MB, 1.2, 2.0],
        ["streams", 16, "compute", "all_gather", 64 * MB, 1.4, 4.0],
    ],
    "joules_per_gb": {"engines": 1.1, "cores": 3.0},
}

GATHER = Traffic(kind="all_gather", size_bytes=MB)


def parsed(**changed: Any) -> Tables:
    return stored.parse({**SECTION, **changed}, "profile of today")


# --- between the points ----------------------------------------------------------------------------------------------

CURVES = some.lists(
    some.tuples(some.integers(1, 300), some.floats(0.5, 50.0)), min_size=1, max_size=8, unique_by=lambda point: point[0]
).map(lambda points: ByCores(tuple(sorted(points))))
TIMES = some.lists(
    some.tuples(some.integers(1, 1 << 34), some.floats(0.1, 1e7), some.integers(0, 132)),
    min_size=1, max_size=8, unique_by=lambda point: point[0],
).map(lambda points: BySize(tuple(sorted(points))))  # fmt: skip


@given(curve=CURVES, share=some.floats(0, 1))
def test_slowdowns_by_cores_pass_through_the_points_and_lie_between_them(curve: ByCores, share: float) -> None:
    for cores, slowdown in curve.points:
        assert curve.at(cores) == pytest.approx(slowdown)
    for (few, left), (many, right) in itertools.pairwise(curve.points):
        between = [curve.at(cores) for cores in (few, few + round(share * (many - few)), many)]
        ordered = sorted(between) if left <= right else sorted(between, reverse=True)
        assert between == pytest.approx(ordered)
    most = curve.points[-1]
    assert curve.at(most[0] + 100) == most[1]


def test_half_the_cores_of_the_fewest_take_twice_as_long() -> None:
    curve = ByCores(((16, 2.0), (32, 1.0)))
    assert [curve.at(cores) for cores in (4, 8, 16, 24, 32, 64)] == [8.0, 4.0, 2.0, 1.5, 1.0, 1.0]


@given(times=TIMES, share=some.floats(0, 1))
def test_times_by_size_pass_through_the_points_and_lie_between_them(times: BySize, share: float) -> None:
    for size_bytes, time_us, cores in times.points:
        assert times.time_us(size_bytes) == pytest.approx(time_us)
        assert times.cores(size_bytes) == cores
    for (small, left, _), (large, right, _) in itertools.pairwise(times.points):
        between = times.time_us(small * (large / small) ** share)
        assert min(left, right) * 0.999 <= between <= max(left, right) * 1.001
    smallest, largest = times.points[0], times.points[-1]
    assert times.time_us(smallest[0] / 2) <= smallest[1] * 1.001
    assert times.time_us(largest[0] * 2) >= largest[1] * 0.999
    assert times.time_us(0) == 0


def test_times_go_on_as_before_the_last_point() -> None:
    times = BySize(((MB, 10.0, 0), (4 * MB, 20.0, 4), (16 * MB, 80.0, 8)))
    assert times.time_us(2 * MB) == pytest.approx(10 * math.sqrt(2))  # straight on logarithmic axes
    assert times.time_us(32 * MB) == pytest.approx(160.0)
    assert times.time_us(MB / 4) == pytest.approx(5.0)
    assert [times.cores(size) for size in (0, MB, 2.1 * MB, 7 * MB, 9 * MB)] == [0, 0, 4, 4, 8]
    noise = BySize(((MB, 10.0, 0), (MB + 1, 1e6, 0)))
    assert noise.time_us(2 * MB) == pytest.approx(4e6, rel=1e-3)
    assert BySize(((1 << 60, 10.0, 0), ((1 << 60) + 1, 20.0, 0))).time_us(1 << 61) == pytest.approx(20.0)
    one = BySize(((MB, 10.0, 0),))
    assert (one.time_us(MB / 2), one.time_us(3 * MB)) == (pytest.approx(10.0), pytest.approx(30.0))


# --- which figures serve ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "measured", "mover", "serves"),
    [
        ("all_gather", ["all_gather", "broadcast"], "engines", "all_gather"),
        ("broadcast", ["all_gather", "all_to_all"], "engines", "all_gather"),
        ("scatter", ["all_gather", "all_to_all"], "engines", "all_to_all"),
        ("all_to_all", ["all_gather"], "engines", "all_gather"),
        ("something", ["all_to_all", "all_gather"], "cores", "all_gather"),
        ("all_gather", [], "engines", None),
        ("all_gather", [LOCAL], "cores", None),
        ("all_gather", ["reduce_scatter"], "engines", None),  # a reduction is more than copies
        ("all_gather", ["reduce_scatter"], "cores", "reduce_scatter"),
    ],
)
def test_the_nearest_kind_serves(kind: str, measured: list[str], mover: str, serves: str | None) -> None:
    assert tables.nearest(measured, Traffic(kind=kind, size_bytes=MB), Mover(mover)) == serves


def test_engines_have_figures_of_reductions_or_none() -> None:
    reduction = Traffic(kind="all_reduce", size_bytes=MB, reduces=True)
    assert tables.nearest(["all_gather"], reduction, Mover.ENGINES) is None
    assert tables.nearest(["all_gather"], reduction, Mover.CORES) == "all_gather"
    assert tables.nearest(["all_gather", "reduce_scatter"], reduction, Mover.ENGINES) == "reduce_scatter"
    own = Traffic(kind="combine", size_bytes=MB, reduces=True)
    assert tables.nearest(["all_gather", "combine"], own, Mover.ENGINES) == "combine"


def test_inside_one_gpu_only_its_own_figures_hold() -> None:
    local = GATHER._replace(local=True)
    assert tables.nearest(["all_gather"], local, Mover.CORES) is None
    assert tables.nearest(["all_gather", LOCAL], local, Mover.CORES) == LOCAL


def test_times_alone_say_what_they_were_measured_with() -> None:
    known = parsed()
    other = Traffic(kind="all_to_all", size_bytes=64 * MB)
    assert known.comm_us(GATHER, Mover.ENGINES) == Known(pytest.approx(24.0), "all_gather")
    assert known.comm_us(other, Mover.CORES) == Known(pytest.approx(1400.0), "all_gather")
    assert known.comm_us(GATHER._replace(local=True), Mover.CORES) is None
    assert (known.comm_cores(GATHER), known.comm_cores(other)) == (16, 32)
    assert parsed(alone={}).comm_cores(GATHER) == 0
    assert known.comm_slowdown(other, 12) == Known(pytest.approx(1.2), "all_gather")
    assert known.compute_slowdown(Bound.COMPUTE, 128) == pytest.approx(1.03)
    assert parsed(compute_by_cores={}).compute_slowdown(Bound.COMPUTE, 128) is None


def test_what_serves_for_a_sort_of_computation_that_was_not_measured() -> None:
    rows = [["dma", 0, bound, "all_gather", MB, slow, 1.0] for bound, slow in (("compute", 1.0), ("memory", 2.0))]
    known = parsed(beside=rows)
    dma = Setting(Strategy.DMA)
    assert both(known, dma, Bound.STREAM).bound is Bound.MEMORY
    assert known.compute_slowdown(Bound.STREAM, 124) == known.compute_slowdown(Bound.MEMORY, 124) == 0.95
    row = ["dma", 0, "stream", "all_gather", MB, 3.0, 1.0]
    streams = parsed(beside=[row], compute_by_cores={"stream": [[132, 1.0]]})
    assert both(streams, dma, Bound.COMPUTE).bound is both(streams, dma, Bound.MEMORY).bound is Bound.STREAM
    assert streams.compute_slowdown(Bound.COMPUTE, 124) is None  # waves of tiles are not like a stream
    assert streams.compute_slowdown(Bound.MEMORY, 132) == 1.0


def both(
    known: Tables, setting: Setting, bound: Bound = Bound.COMPUTE, size: int = MB, kind: str = "all_gather"
) -> Any:
    return known.both(setting, bound, Traffic(kind=kind, size_bytes=size))


def test_slowdowns_beside_lie_between_the_sizes_that_were_measured() -> None:
    streams = Setting(Strategy.STREAMS, 16)
    found = [both(parsed(), streams, size=size) for size in (1, MB, 8 * MB, 64 * MB, 1 << 40)]
    assert [row.compute_slowdown for row in found] == pytest.approx([1.2, 1.2, 1.3, 1.4, 1.4])
    assert [row.comm_slowdown for row in found] == pytest.approx([2.0, 2.0, 3.0, 4.0, 4.0])


def test_slowdowns_beside_say_what_they_were_measured_with() -> None:
    rows = [
        ["streams", 16, "compute", "all_gather", MB, 1.1, 1.0],
        ["streams", 16, "memory", "all_to_all", MB, 1.2, 1.0],
        ["streams", 0, "compute", "all_gather", MB, 1.3, 1.0],
        ["streams", 64, "compute", "all_gather", MB, 1.4, 1.0],
        ["dma", 0, "compute", "all_gather", MB, 1.5, 1.0],
        ["streams", 16, "compute", "all_to_all", 64 * MB, 9.0, 9.0],
    ]
    known = parsed(beside=rows)
    streams = Setting(Strategy.STREAMS, 16)
    assert both(known, streams) == Beside(Strategy.STREAMS, 16, Bound.COMPUTE, "all_gather", MB, 1.1, 1.0)
    assert both(known, streams, size=64 * MB).compute_slowdown == 1.1  # two kinds are not mixed
    assert both(known, streams, Bound.MEMORY).kind == "all_to_all"  # the bound goes before the kind
    assert both(known, streams, kind="broadcast").kind == "all_gather"
    assert both(known, Setting(Strategy.STREAMS)).compute_slowdown == 1.3  # as many as it thinks best, and no other
    assert [both(known, Setting(Strategy.STREAMS, cores)).cores for cores in (1, 24, 40, 41, 100)] == [
        16,
        16,
        16,
        64,
        64,
    ]
    assert both(known, Setting(Strategy.DMA, 3), Bound.MEMORY).bound is Bound.COMPUTE
    assert both(known, Setting(Strategy.PRIORITY)) is None
    local = GATHER._replace(local=True)
    assert known.both(streams, Bound.COMPUTE, local) is None
    reduction = Traffic(kind="all_reduce", size_bytes=MB, reduces=True)
    assert known.both(Setting(Strategy.DMA), Bound.COMPUTE, reduction) is None
    assert known.both(streams, Bound.COMPUTE, reduction) is not None
    without_0 = parsed(beside=rows[:1])
    assert both(without_0, Setting(Strategy.STREAMS)) is None


# --- the section of a profile ----------------------------------------------------------------------------------------


def test_a_section_comes_back_as_it_was() -> None:
    known = parsed()
    assert known.source == "profile of today"
    assert known.device == "NVIDIA H200"
    assert json.loads(json.dumps(stored.section(known))) == SECTION
    assert stored.parse(stored.section(known), known.source) == known
    least = {
        name: SECTION[name] for name in ("num_cores", "core_step", "flops", "memory_bytes_per_s", "link_bytes_per_s")
    }
    assert stored.section(stored.parse(least, "x")) == least
    assert known.joules_per_gb == {Mover.ENGINES: 1.1, Mover.CORES: 3.0}


BROKEN = [
    ("num_cores", 0, "num_cores: must be more than 0"),
    ("num_cores", 132.0, "num_cores: must be a count, not 132.0"),
    ("num_cores", True, "num_cores: must be a count, not True"),
    ("core_step", -8, "core_step: must be a count, not -8"),
    ("core_step", 133, "core_step: 133 of 132 cores"),
    ("flops", 0, "flops: must be more than 0"),
    ("flops", "much", "flops: must be a number that is not negative, not 'much'"),
    ("memory_bytes_per_s", math.inf, "memory_bytes_per_s: must be a number"),
    ("memory_bytes_per_s", 10**400, "memory_bytes_per_s: must be a number"),
    ("link_bytes_per_s", math.nan, "link_bytes_per_s: must be a number"),
    ("device", 7, "device: must be text, not 7"),
    ("compute_by_cores", [], r"compute_by_cores: must be an object, not \[\]"),
    (
        "compute_by_cores",
        {"heavy": [[132, 1.0]]},
        "compute_by_cores.heavy: must be one of compute, memory, stream, not 'heavy'",
    ),
    ("compute_by_cores", {"compute": [[124, 1.1]]}, r"compute_by_cores.compute: must end with \[132, 1.0\]"),
    ("compute_by_cores", {"compute": [[132, 1.1]]}, r"compute_by_cores.compute: must end with \[132, 1.0\]"),
    ("compute_by_cores", {"compute": []}, "compute_by_cores.compute: there are no points"),
    (
        "compute_by_cores",
        {"compute": [[132, 1.0], [8, 2.0]]},
        "compute_by_cores.compute: cores must ascend, not 132, 8",
    ),
    ("compute_by_cores", {"compute": [[8, 2.0], [8, 2.0]]}, "compute_by_cores.compute: cores must ascend, not 8, 8"),
    (
        "compute_by_cores",
        {"compute": [[0, 2.0], [132, 1.0]]},
        r"compute_by_cores.compute\[0\]\[0\]: must be more than 0",
    ),
    ("comm_by_cores", {"all_gather": [[8, 1.4]]}, "comm_by_cores.all_gather: the least slowdown must be 1.0"),
    ("comm_by_cores", {"all_gather": [[8]]}, r"comm_by_cores.all_gather\[0\]: must be a list of 2, not \[8\]"),
    ("comm_by_cores", {"all_gather": [[8, 0]]}, r"comm_by_cores.all_gather\[0\]\[1\]: must be more than 0"),
    ("alone", {"all_gather": []}, "alone.all_gather: must be an object"),
    ("alone", {"all_gather": {"magic": []}}, "alone.all_gather.magic: must be one of engines, cores"),
    ("alone", {"all_gather": {"cores": {}}}, "alone.all_gather.cores: must be a list"),
    ("alone", {"all_gather": {"cores": [[1, 1.0]]}}, r"alone.all_gather.cores\[0\]: must be a list of 3"),
    ("alone", {"all_gather": {"cores": [[1, 1.0, -1]]}}, r"alone.all_gather.cores\[0\]\[2\]: must be a count"),
    ("alone", {"all_gather": {"cores": [[2, 1.0, 1], [1, 1.0, 1]]}}, "alone.all_gather.cores: bytes must ascend"),
    ("beside", {}, "beside: must be a list"),
    ("beside", [["dma"]], r"beside\[0\]: must be a list of 7"),
    ("beside", [["magic", 0, "compute", "x", 1, 1.0, 1.0]], r"beside\[0\]\[0\]: must be one of serial, streams"),
    ("beside", [["dma", 0, "compute", "", 1, 1.0, 1.0]], r"beside\[0\]\[3\]: must be text, not ''"),
    ("beside", [["dma", 0, ["compute"], "x", 1, 1.0, 1.0]], r"beside\[0\]\[2\]: must be one of compute, memory"),
    ("beside", [["dma", 0, "compute", "x", 0, 1.0, 1.0]], r"beside\[0\]\[4\]: must be more than 0"),
    ("beside", [["dma", 0, "compute", "x", 1, 0.0, 1.0]], r"beside\[0\]\[5\]: must be more than 0"),
    ("beside", [["dma", 0, "compute", "x", 1, 1.0, None]], r"beside\[0\]\[6\]: must be a number"),
    ("beside", [["dma", 8, "compute", "x", 1, 1.0, 1.0]], r"beside\[0\]: dma takes 0 cores, not 8"),
    ("beside", [["serial", 0, "compute", "x", 1, 1.0, 1.0]], r"beside\[0\]: of two that run one after the other"),
    ("beside", [["partition", 132, "compute", "x", 1, 1.0, 1.0]], r"beside\[0\]: partition leaves none of 132 cores"),
    ("beside", 2 * [["dma", 0, "compute", "x", 1, 1.0, 1.0]], r"beside\[1\]: the same case as beside\[0\]"),
    ("joules_per_gb", {"engines": 0}, "joules_per_gb.engines: must be more than 0"),
    ("joules_per_gb", {"people": 1}, "joules_per_gb.people: must be one of engines, cores"),
    ("besides", [], "besides: there is no such field"),
]


@pytest.mark.parametrize(
    ("name", "value", "words"), BROKEN, ids=[f"{name}={value!r}"[:60] for name, value, _ in BROKEN]
)
def test_a_broken_section_names_the_place(name: str, value: Any, words: str) -> None:
    broken = (
        rf"section 'overlap' of the profile of today is not understood \({words}.*`dovetail tune --only overlap` makes"
    )
    with pytest.raises(ValueError, match=broken):
        parsed(**{name: value})


@pytest.mark.parametrize("name", ["num_cores", "core_step", "flops", "memory_bytes_per_s", "link_bytes_per_s"])
def test_what_must_be_there_is_missed(name: str) -> None:
    section = {key: value for key, value in SECTION.items() if key != name}
    with pytest.raises(ValueError, match=f"{name}: it is missing"):
        stored.parse(section, "x")


def test_a_section_is_an_object() -> None:
    with pytest.raises(ValueError, match=r"it must be an object, not \[1\]"):
        stored.parse([1], "x")


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Saves a section as the profile of this machine."""
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "profile.json"))
    return lambda section: profile.save(profile.Profile(key=machine.profile_key(), sections={"overlap": section}))


def test_the_profile_of_this_machine_and_device_is_in_force(keep: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert stored.current("cuda", "NVIDIA H200") is None  # nothing is shipped
    keep({"cuda": SECTION})
    found = stored.current("cuda", "NVIDIA H200")
    assert found is not None
    assert found.source.startswith("profile of 2")
    assert dataclasses.replace(found, source="profile of today") == parsed()
    assert stored.current("cuda", "NVIDIA A100") is None
    assert stored.current("hip", "NVIDIA H200") is None
    anywhere = copy.deepcopy(SECTION)
    del anywhere["device"]
    keep({"cuda": anywhere})
    assert stored.current("cuda", "NVIDIA A100") is not None
    assert not caplog.records


@pytest.mark.parametrize("section", [[1], {"cuda": [1]}, {"cuda": {**SECTION, "flops": -1}}])
def test_a_broken_section_is_ignored_with_a_warning(section: Any, keep: Any, caplog: pytest.LogCaptureFixture) -> None:
    keep(section)
    with caplog.at_level(logging.WARNING):
        assert stored.current("cuda", "NVIDIA H200") is None
    assert "section 'overlap' of the profile of" in caplog.text
    assert "until then it counts as not measured" in caplog.text
