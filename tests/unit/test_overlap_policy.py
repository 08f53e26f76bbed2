"""The choice of a strategy: estimates of measured slowdowns that explain themselves, and C's heuristics."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dovetail.overlap import ideal, policy
from dovetail.overlap.policy import Ranking, candidates, choose, conccl
from dovetail.overlap.strategy import Setting, Strategy
from dovetail.overlap.tables import LOCAL, Beside, ByCores, BySize, Tables
from dovetail.overlap.tasks import Bound, Load, Mover, Traffic

MB = 1 << 20
GATHER = Traffic(kind="all_gather", size_bytes=64 * MB)
SERIAL_ENGINES, SERIAL_CORES = (Setting(Strategy.SERIAL, mover=mover) for mover in Mover)
STREAMS, PRIORITY, DMA = Setting(Strategy.STREAMS), Setting(Strategy.PRIORITY), Setting(Strategy.DMA)
DMA_PARTITION, PARTITION = Setting(Strategy.DMA_PARTITION, 8), Setting(Strategy.PARTITION, 8)


def beside(setting: Setting, compute: float, comm: float, **changed: Any) -> Beside:
    row = Beside(setting.strategy, setting.cores, Bound.COMPUTE, "all_gather", 64 * MB, compute, comm)
    return dataclasses.replace(row, **changed)


def tables(*rows: Beside, **changed: Any) -> Tables:
    """An H200 of round figures: 64 MB take 1000 us by engines and 1100 by cores."""
    known = {
        "num_cores": 132,
        "core_step": 8,
        "flops": 8e14,
        "memory_bytes_per_s": 4e12,
        "link_bytes_per_s": 5.5e10,
        "alone": {
            ("all_gather", Mover.ENGINES): BySize(((64 * MB, 1000.0, 0),)),
            ("all_gather", Mover.CORES): BySize(((64 * MB, 1100.0, 16),)),
        },
        "beside": rows,
        "source": "profile of today",
    }
    return Tables(**{**known, **changed})


def chosen(known: Tables | None, *available: Setting, traffic: Traffic = GATHER, **what: Any) -> Ranking:
    return choose(traffic, known, available, **{"compute_us": 1000.0, "bound": Bound.COMPUTE, **what})


def times(ranking: Ranking) -> dict[str, float]:
    return {str(p.setting): pytest.approx(p.time_us) for p in ranking.predictions}


# --- what is known of a computation ----------------------------------------------------------------------------------


def test_the_balance_of_the_machine_tells_what_bounds() -> None:
    known = tables()  # 200 FLOPs for each byte
    assert policy.bound_of(Load(flops=2e9, size_bytes=1e7), known) is Bound.COMPUTE
    assert policy.bound_of(Load(flops=1.99e9, size_bytes=1e7), known) is Bound.MEMORY
    for item in (2, 4):  # bytes of an element
        row = Load(flops=2 * 8192 * 28672, size_bytes=item * (8192 + 8192 * 28672 + 28672))
        assert policy.bound_of(row, known) is Bound.MEMORY  # a product of one row
        assert policy.bound_of(Load(flops=1e6, size_bytes=3 * item * 1e6), known) is Bound.STREAM  # a sum of vectors
    for load in (Load(), Load(flops=1e9), Load(size_bytes=1e9)):
        assert policy.bound_of(load, known) is None
    assert policy.bound_of(Load(flops=2e9, size_bytes=1e7), None) is None


def test_the_roofline_in_microseconds() -> None:
    known = tables()
    assert policy.alone_us(Load(flops=2 * 8192**3), known) == pytest.approx(1374.4, rel=1e-3)
    assert policy.alone_us(Load(size_bytes=4e9), known) == pytest.approx(1000.0)
    assert policy.alone_us(Load(flops=8e11, size_bytes=4e9), known) == pytest.approx(1000.0)
    assert policy.alone_us(Load(flops=8e11, size_bytes=8e9), known) == pytest.approx(2000.0)
    assert policy.alone_us(Load(name="x"), known) is None
    assert policy.alone_us(Load(flops=1.0), None) is None


def test_short_kernels_take_what_they_were_measured_to_take() -> None:
    curve = BySize(((50_000_000, 25.0, 132), (400_000_000, 100.0, 132)))
    known = tables(compute_alone={Bound.MEMORY: curve, Bound.COMPUTE: BySize(((8_000_000_000, 16.0, 132),))})
    product = Load(flops=8e8, size_bytes=5e7)
    assert policy.alone_us(product, known) == pytest.approx(25.0)  # the roofline says 12.5
    ten = product._replace(flops=8e9, size_bytes=5e8)
    assert policy.alone_us(ten._replace(launches=10), known) == pytest.approx(250.0)
    assert policy.alone_us(ten, known) == pytest.approx(125.0)  # one long one
    assert policy.alone_us(Load(flops=1.6e10, size_bytes=1e6), known) == pytest.approx(32.0)  # by FLOPs
    assert policy.alone_us(Load(flops=1e6, size_bytes=5e7), known) == pytest.approx(12.5)  # a stream: none was measured


def test_regret_is_a_share_of_the_best() -> None:
    assert policy.regret(120.0, 100.0) == pytest.approx(0.2)
    assert policy.regret(100.0, 100.0) == 0


# --- C ---------------------------------------------------------------------------------------------------------------

#: What C reports of a MI300X: a GEMM without 32 and 64 of 304 cores, and where collectives are at their best.
MI300X = tables(
    num_cores=304,
    compute_by_cores={
        Bound.COMPUTE: ByCores(((240, 1.27), (272, 1.17), (304, 1.0))),
        Bound.MEMORY: ByCores(((240, 1.05), (296, 0.9), (304, 1.0))),
    },
    comm_by_cores={
        "all_gather": ByCores(((8, 4.0), (16, 2.0), (32, 1.0), (304, 1.0))),
        "all_to_all": ByCores(((16, 4.0), (32, 2.0), (64, 1.0), (304, 1.0))),
    },
)
EXCHANGE = Traffic(kind="all_to_all", size_bytes=64 * MB)


def test_what_launches_first_has_fewer_groups() -> None:
    assert policy.communication_first(Load(groups=100), 99)
    assert not policy.communication_first(Load(groups=100), 100)
    assert not policy.communication_first(Load(groups=100), 101)
    assert policy.communication_first(Load(), 1000)


@pytest.mark.parametrize(
    ("compute_us", "comm_us", "traffic", "cores", "time_us"),
    [
        (1000.0, 3000.0, GATHER, 32, 3000.0),  # the communication is longer: as many as it can use
        (1000.0, 3000.0, EXCHANGE, 64, 3000.0),
        (1000.0, 1000.0, GATHER, 32, 1170.0),
        (1000.0, 1000.0, EXCHANGE, 56, 1250.0),
        (10000.0, 1000.0, GATHER, 8, 10425.0),  # the computation is longer: as few as can be split off
    ],
)
def test_the_partition_of_c_on_its_machine(
    compute_us: float, comm_us: float, traffic: Traffic, cores: int, time_us: float
) -> None:
    found = conccl(compute_us, comm_us, Bound.COMPUTE, traffic, MI300X)
    assert found is not None
    assert found.setting == Setting(Strategy.PRIORITY_PARTITION, cores)
    assert found.time_us == pytest.approx(time_us)


def test_the_partition_of_c_says_why() -> None:
    found = conccl(1000.0, 1000.0, Bound.COMPUTE, GATHER, MI300X, first=False)
    assert found is not None
    assert found.setting == Setting(Strategy.PARTITION, 32)
    assert found.notes == ("32 of 304 cores: computation x1.17, communication x1.00",)
    other = conccl(1000.0, 1000.0, Bound.COMPUTE, Traffic(kind="broadcast", size_bytes=1), MI300X)
    assert other is not None
    assert other.notes[1:] == ("broadcast was not measured: figures of all_gather",)


def test_the_partition_of_c_needs_tables_and_cores() -> None:
    for missing in ({"compute_by_cores": {}}, {"comm_by_cores": {}}, {"core_step": 200}):
        assert conccl(1.0, 1.0, Bound.COMPUTE, GATHER, dataclasses.replace(MI300X, **missing)) is None
    gain = conccl(1000.0, 10.0, Bound.MEMORY, GATHER, MI300X)
    assert gain is not None
    assert (gain.setting.cores, gain.time_us) == (8, pytest.approx(900.0))  # a gain, as C found
    worse = conccl(1000.0, 10.0, None, GATHER, MI300X)
    assert worse is not None
    assert worse.time_us == pytest.approx(1042.5)


@given(data=some.data(), num_cores=some.integers(2, 40), step=some.integers(1, 4))
def test_the_partition_of_c_is_the_best_of_all(data: some.DataObject, num_cores: int, step: int) -> None:
    slower = some.floats(1.0, 8.0)
    compute = [(cores, data.draw(slower)) for cores in range(1, num_cores)] + [(num_cores, 1.0)]
    comm = [(cores, data.draw(slower)) for cores in range(1, num_cores)] + [(num_cores, 1.0)]
    known = tables(
        num_cores=num_cores,
        core_step=min(step, num_cores),
        compute_by_cores={Bound.COMPUTE: ByCores(tuple(compute))},
        comm_by_cores={"all_gather": ByCores(tuple(comm))},
    )
    compute_us, comm_us = data.draw(some.floats(1, 1e4)), data.draw(some.floats(1, 1e4))
    every = {
        k: max(compute_us * dict(compute)[num_cores - k], comm_us * dict(comm)[k])
        for k in range(1, num_cores)
        if k % known.core_step == 0 and num_cores - k >= known.core_step
    }
    found = conccl(compute_us, comm_us, Bound.COMPUTE, GATHER, known)
    if not every:
        assert found is None
        return
    assert found is not None
    assert found.time_us == pytest.approx(min(every.values()))
    assert every[found.setting.cores] == pytest.approx(found.time_us)


# --- candidates ------------------------------------------------------------------------------------------------------


def names(
    *, traffic: Traffic = GATHER, movers: Any = Mover, cores: int = 132, step: int = 8, idle: int = 0,
    partition: bool = True,
) -> str:  # fmt: skip
    found = candidates(
        traffic, frozenset(movers), num_cores=cores, core_step=step, idle_step=idle or step, has_partition=partition
    )
    return ", ".join(map(str, found))


def test_the_settings_of_a_pair() -> None:
    cores = "streams, priority, streams 32, priority 32, partition 8, partition 16, partition 32, partition 64, "
    cores += "priority+partition 8, priority+partition 16, priority+partition 32, priority+partition 64"
    assert names() == f"serial by engines, serial by cores, {cores}, dma, dma+partition 8"
    assert names(movers=[Mover.CORES]) == f"serial by cores, {cores}"
    assert names(movers=[Mover.ENGINES]) == "serial by engines, dma, dma+partition 8"
    few = "serial by engines, dma, dma+partition 2, dma+partition 4, dma+partition 8"
    assert names(movers=[Mover.ENGINES], idle=2) == few
    assert names(movers=[Mover.ENGINES], idle=4) == few.replace("dma+partition 2, ", "")
    plain = "streams, priority, streams 32, priority 32"
    assert names(movers=[Mover.ENGINES], idle=2, partition=False) == "serial by engines, dma"
    assert names(partition=False) == f"serial by engines, serial by cores, {plain}, dma"
    assert names(traffic=GATHER._replace(local=True)) == f"serial by engines, serial by cores, {cores}"


def test_few_settings_to_choose_among() -> None:
    """One number of cores of a strategy; of idle ones the fewest."""
    every = candidates(GATHER, frozenset(Mover), num_cores=132, core_step=8, idle_step=2, has_partition=True)
    assert ", ".join(map(str, policy.few(every, 8))) == (
        "serial by engines, serial by cores, streams, priority, partition 16, dma, dma+partition 2"
    )
    without = [s for s in every if s.strategy is not Strategy.DMA_PARTITION]
    assert policy.few(without, 8) == policy.few(every, 8)[:-1]


def test_the_settings_of_a_cpu() -> None:
    two = (
        "serial by engines, serial by cores, streams, priority, partition 1, priority+partition 1, dma, dma+partition 1"
    )
    assert names(cores=2, step=1) == two
    assert names(cores=1, step=1) == "serial by engines, serial by cores, streams, priority, dma"
    assert "partition 4" in names(cores=8, step=1)
    assert "partition 8" not in names(cores=15, step=1)


# --- the choice ------------------------------------------------------------------------------------------------------


def test_the_least_time_wins_and_says_why() -> None:
    known = tables(beside(DMA, 1.01, 1.0), beside(STREAMS, 1.25, 1.5))
    found = chosen(known, SERIAL_ENGINES, SERIAL_CORES, STREAMS, DMA, PRIORITY)
    assert found.choice == DMA
    words = "dma 1010 us, streams 1517 us, serial by engines 2000 us, serial by cores 2100 us (profile of today)"
    assert found.reason == f"{words}; without figures: priority"
    assert found.order == (DMA, STREAMS, SERIAL_ENGINES, SERIAL_CORES, PRIORITY)


def test_a_reason_has_the_fastest_few_and_serial() -> None:
    splits = [Setting(Strategy.PARTITION, cores) for cores in (8, 16, 24, 32, 40)]
    known = tables(*(beside(setting, 1.0 + setting.cores / 100, 1.2) for setting in splits))
    found = chosen(known, SERIAL_ENGINES, SERIAL_CORES, *splits)
    assert found.reason.count(" us") == 5
    assert "serial by engines 2000 us (profile" in found.reason
    assert "partition 40" not in found.reason
    near = dataclasses.replace(known, beside=(*(beside(s, 1.0, 1.0) for s in splits), beside(DMA, 1.01, 1.0)))
    tied = chosen(near, *splits, DMA, comm_us=dict.fromkeys(Mover, 1000.0))
    assert tied.predictions[-1].setting == tied.choice == DMA
    assert "dma 1010 us" in tied.reason  # the chosen one is always there


def test_an_h200_as_it_was_measured() -> None:
    """A GEMM of 5.5 ms beside 256 MB: engines had 99 % of the ideal, a kernel 51 to 67 %."""
    traffic = Traffic(kind="all_gather", size_bytes=256 * MB)
    known = tables(beside(DMA, 1.002, 1.01), beside(STREAMS, 1.4, 1.3), beside(PARTITION, 1.3, 1.4))
    alone = {Mover.ENGINES: 4850.0, Mover.CORES: 5300.0}
    available = (SERIAL_ENGINES, STREAMS, DMA, PARTITION)
    found = chosen(known, *available, traffic=traffic, compute_us=5500.0, comm_us=alone)
    pair = ideal.Pair(compute_us=5500.0, comm_us=4850.0, serial_us=10350.0)
    shares = {p.setting: pair.share(p.time_us) for p in found.predictions}
    assert found.choice == DMA
    assert shares[DMA] > 0.97
    assert 0.3 < shares[STREAMS] < 0.67


FIGURE = some.floats(1.0, 6.0)
SETTINGS = candidates(GATHER, frozenset(Mover), num_cores=132, core_step=8, idle_step=2, has_partition=True)


@some.composite
def measured(draw: Any) -> Tables:
    """Tables of anything, with no figure below 1."""
    rows = [
        beside(setting, draw(FIGURE), draw(FIGURE), bound=draw(some.sampled_from(Bound)))
        for setting in draw(some.sets(some.sampled_from(SETTINGS[2:])))
    ]
    by_cores = some.builds(lambda y, z: ByCores(((68, max(y, z)), (124, min(y, z)), (132, 1.0))), FIGURE, FIGURE)
    return tables(
        *rows,
        compute_by_cores=draw(some.dictionaries(some.sampled_from(Bound), by_cores)),
        comm_by_cores=draw(some.dictionaries(some.just("all_gather"), by_cores)),
        joules_per_gb=draw(some.dictionaries(some.sampled_from(Mover), some.floats(0.1, 10))),
    )


@given(
    known=measured(),
    available=some.lists(some.sampled_from(SETTINGS), min_size=1, unique=True),
    compute_us=some.floats(0, 1e5),
    comm_us=some.floats(0, 1e5),
    bound=some.sampled_from([None, *Bound]),
)
def test_rankings(
    known: Tables, available: list[Setting], compute_us: float, comm_us: float, bound: Bound | None
) -> None:
    alone = {Mover.ENGINES: comm_us, Mover.CORES: 1.1 * comm_us}
    found = choose(GATHER, known, available, compute_us=compute_us, comm_us=alone, bound=bound)
    assert sorted(map(str, found.order)) == sorted(map(str, available))
    predicted = [p.time_us for p in found.predictions]
    assert predicted == sorted(predicted)
    for p in found.predictions:
        assert p.time_us >= max(compute_us, alone[p.setting.moved_by]) * (1 - 1e-9)
        if p.setting.strategy is Strategy.SERIAL:
            assert p.time_us == pytest.approx(compute_us + alone[p.setting.moved_by])
    if found.predictions:
        best = next(p for p in found.predictions if p.setting == found.choice)
        assert best.time_us <= predicted[0] * (1 + policy.NEAR)
        assert found.choice.strategy in found.reason


@given(compute_us=some.floats(0, 1e5), comm_us=some.floats(0, 1e5))
def test_without_slowdowns_dma_is_ideal(compute_us: float, comm_us: float) -> None:
    known = tables(beside(DMA, 1.0, 1.0))
    found = chosen(known, DMA, SERIAL_ENGINES, compute_us=compute_us, comm_us={Mover.ENGINES: comm_us})
    (dma,) = [p for p in found.predictions if p.setting == DMA]
    assert dma.time_us == pytest.approx(max(compute_us, comm_us))


@given(compute=FIGURE, comm=FIGURE)
def test_two_that_end_together_take_what_was_measured(compute: float, comm: float) -> None:
    """Whatever part of the slowdowns would outlast the other."""
    known = tables(
        beside(PARTITION, compute, comm),
        beside(STREAMS, compute, comm),
        compute_by_cores={Bound.COMPUTE: ByCores(((124, 1.5), (132, 1.0)))},
        comm_by_cores={"all_gather": ByCores(((8, 2.0), (132, 1.0)))},
    )
    alone = {Mover.CORES: 900.0 / comm}
    found = chosen(known, PARTITION, STREAMS, compute_us=900.0 / compute, comm_us=alone)
    assert times(found) == {"partition 8": 900.0, "streams": 900.0}


def test_what_the_own_cores_cost_lasts_and_the_rest_does_not() -> None:
    """1000 us beside 100: the partition's 10 % last, another 10 % end after 200 us; of streams all 20 % end."""
    known = tables(
        beside(PARTITION, 1.21, 2.0),
        beside(STREAMS, 1.21, 2.0),
        compute_by_cores={Bound.COMPUTE: ByCores(((124, 1.1), (132, 1.0)))},
    )
    found = chosen(known, PARTITION, STREAMS, comm_us={Mover.CORES: 100.0})
    assert times(found) == {"streams": 200 + 1000 - 200 / 1.21, "partition 8": 200 + 1100 - 200 / 1.1}


def test_a_kernel_of_few_programs_stays_slow_when_the_computation_is_over() -> None:
    streams, full = Setting(Strategy.STREAMS, 8), STREAMS
    known = tables(
        beside(streams, 1.0, 3.0),
        beside(full, 1.0, 3.0),
        comm_by_cores={"all_gather": ByCores(((8, 2.0), (16, 1.0)))},
    )
    found = chosen(known, streams, full, compute_us=300.0, comm_us={Mover.CORES: 1000.0})
    assert times(found) == {"streams": 300 + 1000 - 100, "streams 8": 300 + 2000 - 200}
    unknown = dataclasses.replace(known, comm_by_cores={})  # then all of it is taken to stay
    assert times(chosen(unknown, streams, compute_us=300.0, comm_us={Mover.CORES: 1000.0})) == {"streams 8": 3000.0}


def test_a_computation_that_waits_for_memory_may_gain_by_fewer_cores() -> None:
    memory = {"bound": Bound.MEMORY}
    known = tables(
        beside(DMA, 0.9, 0.9, **memory),
        beside(DMA_PARTITION, 0.9, 0.9, **memory),
        compute_by_cores={Bound.MEMORY: ByCores(((124, 0.92), (132, 1.0)))},
    )
    found = chosen(known, DMA, DMA_PARTITION, comm_us={Mover.ENGINES: 500.0}, **memory)
    assert times(found) == {"dma": 1000.0, "dma+partition 8": 900.0}
    assert found.choice == DMA_PARTITION
    long = chosen(known, DMA, DMA_PARTITION, comm_us={Mover.ENGINES: 2000.0}, **memory)
    assert times(long) == {"dma": 2000.0, "dma+partition 8": 2000.0}  # the communication gains nothing


def test_a_partition_that_was_not_measured_is_estimated_as_c_does() -> None:
    setting = Setting(Strategy.PARTITION, 32)
    found = chosen(MI300X, setting, SERIAL_CORES, comm_us={Mover.CORES: 1000.0})
    assert times(found) == {"partition 32": 1170.0, "serial by cores": 2000.0}
    assert "partition 32: from slowdowns by cores" in found.reason
    for missing in ("compute_by_cores", "comm_by_cores"):
        partly = dataclasses.replace(MI300X, **{missing: {}})
        assert chosen(partly, setting, SERIAL_CORES, comm_us={Mover.CORES: 1000.0}).choice == SERIAL_CORES
    engines = chosen(MI300X, DMA_PARTITION, SERIAL_ENGINES)
    assert engines.order == (SERIAL_ENGINES, DMA_PARTITION)


def test_tiny_messages_that_engines_are_slow_for_are_moved_by_cores() -> None:
    times = {Mover.ENGINES: 40.0, Mover.CORES: 5.0}
    known = tables(
        beside(DMA, 1.0, 1.0),
        beside(STREAMS, 1.6, 1.0),
        alone={("all_gather", mover): BySize(((1024, times[mover], 0), (64 * MB, 1000.0, 0))) for mover in Mover},
    )
    available = (SERIAL_ENGINES, SERIAL_CORES, STREAMS, DMA)
    tiny = chosen(known, *available, traffic=Traffic(kind="all_gather", size_bytes=1024), compute_us=1.0)
    assert tiny.order[:2] == (STREAMS, SERIAL_CORES)
    assert chosen(known, *available).choice == DMA


# --- ties ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("joules", "dma_slowdown", "expected"),
    [
        ({}, 1.019, DMA),  # by engines it takes less
        ({}, 1.021, STREAMS),  # no tie
        ({Mover.ENGINES: 3.0, Mover.CORES: 1.0}, 1.019, STREAMS),
        ({Mover.ENGINES: 1.0, Mover.CORES: 3.0}, 1.019, DMA),
        ({Mover.CORES: 1.0}, 1.019, DMA),  # of engines nothing is known
    ],
)
def test_energy_breaks_ties(joules: dict[Mover, float], dma_slowdown: float, expected: Setting) -> None:
    known = tables(beside(DMA, dma_slowdown, 1.0), beside(STREAMS, 1.0, 1.0), joules_per_gb=joules)
    found = chosen(known, DMA, STREAMS, comm_us=dict.fromkeys(Mover, 1000.0))
    assert [p.setting for p in found.predictions] == [STREAMS, DMA]  # by time, whoever is chosen
    assert found.choice == expected
    assert ("dma is within 2% of the fastest and takes less energy" in found.reason) == (expected == DMA)


def test_joules_are_of_the_bytes() -> None:
    known = tables(beside(DMA, 1.0, 1.0), joules_per_gb={Mover.ENGINES: 2.0})
    found = chosen(known, DMA, SERIAL_CORES, traffic=GATHER._replace(size_bytes=3_000_000_000))
    assert [p.joules for p in found.predictions] == [pytest.approx(6.0), None]


@pytest.mark.parametrize("joules", [{}, {Mover.ENGINES: 1.0, Mover.CORES: 3.0}])
def test_of_equal_energy_a_partition_must_be_clearly_faster(joules: dict[Mover, float]) -> None:
    def choice(slower: float) -> Setting:
        known = tables(beside(DMA, slower, 1.0), beside(DMA_PARTITION, 1.0, 1.0), joules_per_gb=joules)
        return chosen(known, DMA, DMA_PARTITION).choice

    assert (choice(1 + policy.NEAR / 2), choice(1 + 2 * policy.NEAR)) == (DMA, DMA_PARTITION)
    near = tables(beside(DMA, 1.01, 1.0), beside(DMA_PARTITION, 1.0, 1.0), joules_per_gb=joules)
    assert "dma is within 2% of the fastest and takes fewer cores" in chosen(near, DMA, DMA_PARTITION).reason
    equal = tables(beside(STREAMS, 1.0, 1.01), beside(PARTITION, 1.0, 1.0), joules_per_gb=joules)
    assert chosen(equal, STREAMS, PARTITION).choice == PARTITION  # where cores move it, the faster


# --- what is not known -----------------------------------------------------------------------------------------------


def test_an_unknown_computation_takes_as_long_as_the_communication() -> None:
    known = tables(beside(DMA, 1.1, 1.0), beside(STREAMS, 1.1, 1.0))
    found = chosen(known, DMA, STREAMS, SERIAL_CORES, SERIAL_ENGINES, compute_us=None)
    assert times(found)["serial by engines"] == 2000.0
    assert times(found)["serial by cores"] == 2100.0
    assert "; the computation's time is not known: taken to be the communication's" in found.reason
    given_us = chosen(known, SERIAL_CORES, SERIAL_ENGINES, compute_us=None, comm_us={Mover.CORES: 300.0})
    assert times(given_us)["serial by cores"] == 600.0  # what is given goes before the tables
    assert "not known" not in chosen(known, DMA).reason


def test_an_unknown_bound_is_the_worse() -> None:
    rows = (beside(DMA, 1.1, 1.0), beside(DMA, 1.3, 1.0, bound=Bound.MEMORY))
    alone = {"comm_us": {Mover.ENGINES: 2000.0}, "compute_us": 2000.0}
    each = [chosen(tables(*rows), DMA, bound=bound, **alone).predictions[0].time_us for bound in (*Bound, None)]
    assert each[0] < each[1] == each[2]
    found = chosen(tables(*rows), DMA, bound=None, **alone)
    assert found.reason.endswith("; what bounds the computation is not known: the worse case")


def test_figures_of_something_else_say_so() -> None:
    known = tables(beside(Setting(Strategy.STREAMS, 16), 1.1, 1.0))
    other = Traffic(kind="all_to_all", size_bytes=64 * MB)
    reason = chosen(known, Setting(Strategy.STREAMS, 24), traffic=other, bound=Bound.MEMORY).reason
    assert reason.count("all_to_all was not measured: figures of all_gather") == 1
    assert "streams 24 was not measured: figures of 16 cores" in reason
    assert "streams 24 was not measured beside a computation of the sort memory: figures of compute" in reason
    serial = chosen(known, SERIAL_CORES, traffic=other)
    assert serial.reason.endswith("(profile of today); all_to_all was not measured: figures of all_gather")
    assert "figures of" not in chosen(known, Setting(Strategy.STREAMS, 16)).reason


EVERYTHING = (DMA_PARTITION, PRIORITY, DMA, STREAMS, SERIAL_ENGINES, SERIAL_CORES)


@pytest.mark.parametrize(
    ("changed", "expected", "words"),
    [
        ({}, DMA, "engines can move it beside a computation, and it has 1M or more"),
        ({"size_bytes": MB}, DMA, "engines can move it beside a computation, and it has 1M or more"),
        ({"size_bytes": MB - 1}, SERIAL_CORES, "it has less than 1M"),
        ({"reduces": True}, SERIAL_CORES, "its sums take cores"),
        ({"local": True}, SERIAL_CORES, "inside one GPU engines do nothing"),
    ],
)
def test_where_nothing_was_measured_the_default_is_safe(changed: Any, expected: Setting, words: str) -> None:
    found = chosen(None, *EVERYTHING, traffic=GATHER._replace(**changed))
    why = "nothing was measured here (`dovetail tune --only overlap` does)"
    assert found.reason == f"{expected}: {why}; {words}"
    assert found.predictions == ()
    rest = (SERIAL_CORES, SERIAL_ENGINES, STREAMS, PRIORITY, DMA, DMA_PARTITION)
    assert found.order == (expected, *(setting for setting in rest if setting != expected))


def test_without_engines_the_default_is_serial() -> None:
    found = chosen(None, STREAMS, SERIAL_CORES)
    assert found.choice == SERIAL_CORES
    assert found.reason.endswith("; engines cannot move it")


def test_figures_that_do_not_serve_leave_the_default() -> None:
    known = tables(beside(DMA, 1.0, 1.0), beside(STREAMS, 1.0, 1.0))
    local = GATHER._replace(local=True)
    found = chosen(known, *EVERYTHING, traffic=local)
    assert found.choice == SERIAL_CORES
    assert "nothing like it is in the profile of today (`dovetail tune --only overlap` measures)" in found.reason
    only = chosen(known, PRIORITY)
    assert (only.choice, only.predictions) == (PRIORITY, ())


def test_inside_one_gpu_engines_are_never_chosen() -> None:
    rows = [beside(setting, 1.0, 1.0, kind=LOCAL) for setting in (DMA, DMA_PARTITION, STREAMS)]
    alone = {(LOCAL, mover): BySize(((64 * MB, 100.0, 0),)) for mover in Mover}
    local = GATHER._replace(local=True)
    known = tables(*rows, alone=alone, joules_per_gb={Mover.ENGINES: 1.0, Mover.CORES: 2.0})
    found = chosen(known, *EVERYTHING, traffic=local)
    assert found.choice == STREAMS
    assert found.order[-2:] == (DMA, DMA_PARTITION)
    assert "without figures: priority, dma, dma+partition 8" in found.reason
    assert len({p.joules for p in found.predictions}) == 1  # there is nobody but cores to move it
    unknown = dataclasses.replace(known, joules_per_gb={})
    even = dataclasses.replace(unknown, alone={**alone, (LOCAL, Mover.ENGINES): BySize(((64 * MB, 100.5, 0),))})
    assert chosen(even, SERIAL_ENGINES, SERIAL_CORES, traffic=local).choice == SERIAL_CORES


def test_reductions_by_engines_need_figures_of_their_own() -> None:
    reduction = Traffic(kind="all_reduce", size_bytes=64 * MB, reduces=True)
    known = tables(beside(DMA, 1.0, 1.0), beside(STREAMS, 1.2, 1.2))
    found = chosen(known, *EVERYTHING, traffic=reduction)
    assert found.choice == STREAMS
    assert {DMA, SERIAL_ENGINES}.isdisjoint(p.setting for p in found.predictions)
    alone = {**known.alone, ("all_reduce", Mover.ENGINES): BySize(((64 * MB, 1000.0, 0),))}
    own = dataclasses.replace(known, alone=alone, beside=(*known.beside, beside(DMA, 1.05, 1.1, kind="all_reduce")))
    assert chosen(own, *EVERYTHING, traffic=reduction).choice == DMA


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="there must be a setting to choose from"):
        choose(GATHER, None, ())
    for wrong in ({"compute_us": -1.0}, {"comm_us": {Mover.CORES: -1.0}}, {"compute_us": math.nan}):
        with pytest.raises(ValueError, match="times cannot be negative: compute_us="):
            chosen(tables(), DMA, **wrong)
    with pytest.raises(ValueError, match="partition 132 leaves none of 132 cores to the computation"):
        chosen(tables(), Setting(Strategy.PARTITION, 132))


def test_nothing_to_move_takes_no_time() -> None:
    known = tables(beside(DMA, 1.1, 1.0))
    found = chosen(known, DMA, SERIAL_ENGINES, traffic=Traffic(kind="all_gather", size_bytes=0))
    assert times(found) == {"serial by engines": 1000.0, "dma": 1000.0}
    assert found.choice == SERIAL_ENGINES
