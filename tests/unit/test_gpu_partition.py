"""Shares of the multiprocessors, against stand-in drivers: who gets which, what is refused, and that nothing leaks."""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import standin

from dovetail.errors import NotSupported
from dovetail.hw.gpu import green, hip
from dovetail.hw.gpu.cuda import CudaDriver
from dovetail.hw.gpu.driver import WAIT, WORD, Driver, DriverError, Share, SourceOrder
from dovetail.hw.gpu.hip import HipDriver
from dovetail.hw.gpu.library import Library
from dovetail.hw.gpu.partition import StreamShare, mask_words, rounded

SETTINGS = ("VERSION", "FAIL", "DEVICES", "CORES", "CAPABILITY", "STEP", "XCDS", "DELAY_US")
MADE = {"cuda": "cuGreenCtxStreamCreate", "hip": "hipExtStreamCreateWithCUMask"}


class Gpu:
    """A driver over its stand-in, and the back door of that."""

    def __init__(self, name: str) -> None:
        self.name, self.path = name, str(standin.build(name))
        self._library = ctypes.CDLL(self.path)
        self._library.standin_calls.restype = ctypes.c_size_t
        self._library.standin_calls.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.set(**dict.fromkeys(SETTINGS, ""))
        self.set(CORES=132 if name == "cuda" else 304)
        self.driver = self.fresh()

    def fresh(self) -> Driver:
        driver: Driver = CudaDriver(self.path) if self.name == "cuda" else HipDriver(self.path)
        driver.use(0)
        self.calls()
        return driver

    def set(self, **settings: object) -> None:
        for name, value in settings.items():
            self._library.standin_set(name.encode(), str(value).encode())

    def calls(self, name: str = "") -> list[str]:
        """The calls since the last time, as lines; those of one name."""
        buffer, found = ctypes.create_string_buffer(1 << 16), ""
        while self._library.standin_calls(buffer, len(buffer)):
            found += buffer.value.decode()
        return [line for line in found.splitlines() if line.startswith(name)]

    def alive(self) -> int:
        """Contexts and streams of shares that live."""
        if self.name == "hip":
            return int(self._library.standin_masked_streams())
        return int(self._library.standin_green_contexts() + self._library.standin_green_streams())


@pytest.fixture(params=["cuda", "hip"])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    made = Gpu(request.param)
    before = made.alive()
    yield made
    made.set(**dict.fromkeys(SETTINGS, ""))
    assert made.alive() == before


@pytest.fixture
def cuda() -> Iterator[Gpu]:
    made = Gpu("cuda")
    yield made
    made.set(**dict.fromkeys(SETTINGS, ""))


@pytest.fixture
def amd() -> Iterator[Gpu]:
    made = Gpu("hip")
    yield made
    made.set(**dict.fromkeys(SETTINGS, ""))


def fields(line: str) -> dict[str, str]:
    return dict(part.split("=") for part in line.split()[1:])


def cores_of(gpu: Gpu, share: Share) -> set[int]:
    """The multiprocessors that a stream of the share may use, as the driver was told."""
    gpu.calls()
    share.stream()
    (line,) = gpu.calls(MADE[gpu.name])
    told = fields(line)
    if gpu.name == "cuda":
        return set(range(int(told["first"]), int(told["first"]) + share.num_cores))
    words = [int(word, 0) for word in told["mask"].split(",")]
    return {32 * at + bit for at, word in enumerate(words) for bit in range(32) if word >> bit & 1}


def close(*shares: Share) -> None:
    for share in shares:
        share.close()


class TestNumbers:
    @given(
        st.integers(1, 400), st.integers(1, 400), st.sampled_from([(2, 2), (4, 2), (8, 8), (1, 1)]), st.integers(1, 9)
    )
    def test_a_share_is_the_smallest_that_can_be_cut(
        self, number: int, total: int, cut: tuple[int, int], least_rest: int
    ) -> None:
        least, step = cut
        possible = [n for n in range(least, total - least_rest + 1) if n % step == 0]
        enough = [n for n in possible if n >= number]
        try:
            got = rounded(number, total, least=least, step=step, least_rest=least_rest)
        except (ValueError, NotSupported):
            assert not enough
        else:
            assert got == enough[0]

    @pytest.mark.parametrize("number", [-8, 0, 129, 131, 132, 1000])
    def test_what_cannot_be_split_off(self, number: int) -> None:
        with pytest.raises(ValueError, match=f"{number} of 132 multiprocessors can't be split off; 1 to 128 can, in s"):
            rounded(number, 132, least=8, step=8)

    def test_too_few_to_split(self) -> None:
        with pytest.raises(NotSupported, match="8 multiprocessors are too few to split: a share has 8 or more"):
            rounded(1, 8, least=8, step=8)

    @given(st.integers(1, 320).flatmap(lambda n: st.tuples(st.integers(0, n), st.integers(0, n), st.just(n))))
    def test_the_bits_of_a_mask(self, cut: tuple[int, int, int]) -> None:
        first, end = sorted(cut[:2])
        words = mask_words(first, end, cut[2])
        assert len(words) == -(-cut[2] // 32)
        assert all(0 <= word < 2**32 for word in words)
        assert [i for i in range(32 * len(words)) if words[i // 32] >> i % 32 & 1] == list(range(first, end))


class TestShares:
    @pytest.mark.parametrize("number", [1, 8, 9, 30, 64])
    def test_they_have_nothing_in_common_and_leave_nothing_out(self, gpu: Gpu, number: int) -> None:
        total = gpu.driver.num_multiprocessors(0)
        first, second = gpu.driver.split_cores(0, number)
        one, other = cores_of(gpu, first), cores_of(gpu, second)
        assert not one & other
        assert one | other == set(range(total))
        assert (first.num_cores, second.num_cores) == (len(one), len(other))
        close(first, second)

    @pytest.mark.parametrize(("number", "has"), [(1, 8), (8, 8), (9, 16), (16, 16), (121, 128), (128, 128)])
    def test_numbers_are_rounded_up(self, gpu: Gpu, number: int, has: int) -> None:
        first, second = gpu.driver.split_cores(0, number)
        assert first.num_cores == has
        assert second.num_cores == gpu.driver.num_multiprocessors(0) - has
        assert has % gpu.driver.core_step(0) == 0
        close(first, second)

    @pytest.mark.parametrize("number", [-1, 0, 132, 133])
    def test_what_cannot_be_asked_for_makes_nothing(self, gpu: Gpu, number: int) -> None:
        gpu.set(CORES=132)
        with pytest.raises(ValueError, match=f"{number} of 132 multiprocessors can't be split off"):
            gpu.driver.split_cores(0, number)
        assert gpu.calls("cuDevSm") == gpu.calls("cuGreen") == gpu.calls("hipExtStream") == []

    def test_a_gpu_that_is_too_small(self, gpu: Gpu) -> None:
        gpu.set(CORES=8)
        with pytest.raises(NotSupported, match="8 multiprocessors are too few to split"):
            gpu.driver.split_cores(0, 1)

    def test_its_streams_take_work_and_events_order_them(self, gpu: Gpu) -> None:
        driver = gpu.driver
        first, second = driver.split_cores(0, 8)
        one, other, own = first.stream(), second.stream(), driver.stream_create()
        assert len({one, other, own}) == 3
        a, word = driver.device_alloc(3 * 4096), driver.host_alloc(8)
        ctypes.c_uint64.from_address(word).value = 0
        gate = np.zeros(1, WORD)
        gate["kind"], gate["address"], gate["value"] = WAIT, word, 1
        driver.stream_words(gate, own)  # nothing may start yet
        driver.fill(a, 7, 4096, own)
        driver_order(driver, own, one)
        entry = [np.array([value], np.uint64) for value in (a + 4096, a, 4096)]
        driver.copy_batch(*entry, SourceOrder.STREAM, one)
        driver_order(driver, one, other)
        driver.copy(a + 8192, a + 4096, 4096, other)
        assert not driver.stream_done(one)
        assert not driver.stream_done(other)
        ctypes.c_uint64.from_address(word).value = 1
        driver.stream_synchronize(other)
        assert set(ctypes.string_at(a + 4096, 8192)) == {7}
        close(first, second)
        driver.stream_destroy(own)
        driver.device_free(a)
        driver.host_free(word)

    def test_closing(self, gpu: Gpu) -> None:
        before = gpu.alive()
        first, second = gpu.driver.split_cores(0, 8)
        streams = [first.stream(), first.stream(), second.stream()]
        close(first, first)
        with pytest.raises(ValueError, match="this share of the multiprocessors is closed; split them again"):
            first.stream()
        gpu.driver.stream_synchronize(streams[2])  # the other one goes on
        with pytest.raises(DriverError, match=r"InvalidHandle|INVALID_HANDLE"):
            gpu.driver.stream_synchronize(streams[0])
        close(second, second)
        assert gpu.alive() == before

    def test_closing_goes_on_after_a_failure(self, gpu: Gpu) -> None:
        before = gpu.alive()
        call = "cuStreamDestroy" if gpu.name == "cuda" else "hipStreamDestroy"
        first, second = gpu.driver.split_cores(0, 8)
        streams = [first.stream(), first.stream()]
        gpu.set(FAIL=f"{call}:700:1")
        with pytest.raises(DriverError, match=f"{call} failed"):
            first.close()
        gpu.set(FAIL="")
        assert gpu.alive() - before == (2 if gpu.name == "cuda" else 1)  # the stream, and the second share's context
        close(first, second)
        if gpu.name == "hip":
            gpu.driver.stream_destroy(streams[0])
        else:
            assert gpu.alive() - before == 1  # lost with its context, as the driver has it
            gpu._library.standin_forget()

    def test_a_stream_that_the_driver_refuses_leaves_the_share_as_it_was(self, gpu: Gpu) -> None:
        first, second = gpu.driver.split_cores(0, 8)
        gpu.set(FAIL=f"{MADE[gpu.name]}:2:1")
        with pytest.raises(DriverError, match=f"{MADE[gpu.name]} failed: .*OutOfMemory|OUT_OF_MEMORY"):
            first.stream()
        first.stream()
        close(first, second)

    def test_several_threads_make_streams(self, gpu: Gpu) -> None:
        first, second = gpu.driver.split_cores(0, 8)

        def make(share: Share) -> int:
            gpu.driver.use(0)
            return share.stream()

        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(make, [first, second] * 16))
        assert len(set(made)) == 32
        close(first, second)

    def test_a_device_that_is_not_current(self, gpu: Gpu) -> None:
        gpu.set(DEVICES=2)
        driver = gpu.driver
        driver.use(0)
        first, second = driver.split_cores(1, 8)
        gpu.calls()
        stream = first.stream()
        (line,) = gpu.calls(MADE[gpu.name])
        assert gpu.name == "cuda" or fields(line)["device"] == "1"
        a = driver.device_alloc(64)
        assert driver.memory_at(a).device == 0  # what was current still is
        driver.stream_synchronize(stream)
        driver.device_free(a)
        close(first, second)


def driver_order(driver: Driver, first: int, then: int) -> None:
    event = driver.event_create()
    driver.event_record(event, first)
    driver.stream_wait_event(then, event)
    driver.event_destroy(event)


class TestCuda:
    @pytest.mark.parametrize("version", [12050, 12080, 13000])
    @pytest.mark.parametrize(("capability", "step", "fewest"), [(7, 2, 2), (8, 2, 4), (9, 8, 8), (12, 8, 8)])
    def test_steps_by_version_and_capability(
        self, cuda: Gpu, version: int, capability: int, step: int, fewest: int
    ) -> None:
        cuda.set(VERSION=version, CAPABILITY=capability)
        driver = cuda.fresh()
        assert driver.core_step(0) == step
        first, second = driver.split_cores(0, 1)
        assert fields(cuda.calls("cuDevSmResourceSplitByCount")[0])["least"] == str(fewest)
        assert (first.num_cores, second.num_cores) == (fewest, 132 - fewest)
        close(first, second)

    @pytest.mark.parametrize(("version", "step"), [(12080, 8), (13000, 16)])
    def test_a_driver_that_tells_the_step_is_believed(self, cuda: Gpu, version: int, step: int) -> None:
        cuda.set(VERSION=version, STEP=16)
        assert cuda.fresh().core_step(0) == step

    @pytest.mark.parametrize(("number", "has", "flags"), [(1, 2, 1), (2, 2, 1), (3, 4, 1), (8, 8, 0), (9, 10, 1)])
    def test_few_that_stay_idle(self, cuda: Gpu, number: int, has: int, flags: int) -> None:
        """Pairs, wherever they are; what can be cut off as usual is."""
        assert (cuda.driver.core_step(0), cuda.driver.idle_step(0)) == (8, 2)
        cuda.calls()
        first, second = cuda.driver.split_cores(0, number, idle=True)
        call = fields(cuda.calls("cuDevSmResourceSplitByCount")[-1])
        assert (call["least"], call["flags"]) == (str(has), str(flags))
        assert (first.num_cores, second.num_cores) == (has, 132 - has)
        close(first, second)

    @pytest.mark.parametrize("refuses", [True, False], ids=["refuses", "cuts more"])
    def test_a_driver_that_cuts_no_few_off(self, cuda: Gpu, monkeypatch: pytest.MonkeyPatch, refuses: bool) -> None:
        """Then idle ones come in the steps of all others."""
        driver, before = cuda.fresh(), cuda.alive()
        monkeypatch.setattr(green, "_ANY_PLACE", 2 if refuses else 4)  # the stand-in knows neither, and ignores 4
        assert driver.idle_step(0) == 8
        first, second = driver.split_cores(0, 2, idle=True)
        assert (first.num_cores, second.num_cores) == (8, 124)
        close(first, second)
        assert cuda.alive() == before

    def test_few_that_stay_idle_where_few_can_work(self, cuda: Gpu) -> None:
        """Ampere: two are a step, four the fewest, idle or not."""
        cuda.set(CAPABILITY=8, CORES=108)
        driver = cuda.fresh()
        assert (driver.core_step(0), driver.idle_step(0)) == (2, 2)
        for idle in (False, True):
            first, second = driver.split_cores(0, 2, idle=idle)
            assert (first.num_cores, second.num_cores) == (4, 104)
            close(first, second)

    @pytest.mark.parametrize(
        ("version", "lacks"), [(12030, "cuDeviceGetDevResource"), (12040, "cuGreenCtxStreamCreate")]
    )
    def test_a_driver_without(self, cuda: Gpu, version: int, lacks: str) -> None:
        cuda.set(VERSION=version)
        driver = cuda.fresh()
        assert not driver.capabilities(0).partition
        for ask in (lambda: driver.core_step(0), lambda: driver.split_cores(0, 8)):
            with pytest.raises(NotSupported, match=f"CUDA {version} has no {lacks}; 12050 and later can split"):
                ask()

    @pytest.mark.parametrize(
        ("call", "nth"),
        [
            ("cuDeviceGetDevResource", 1),
            ("cuDevSmResourceSplitByCount", 1),
            ("cuDevResourceGenerateDesc", 1),
            ("cuGreenCtxCreate", 1),
            ("cuDevResourceGenerateDesc", 2),
            ("cuGreenCtxCreate", 2),
        ],
    )
    def test_what_fails_on_the_way_leaves_nothing(self, cuda: Gpu, call: str, nth: int) -> None:
        before = cuda.alive()
        cuda.set(FAIL=f"{call}:915:{nth}")
        with pytest.raises(DriverError, match=rf"{call} failed: CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION \(915\)"):
            cuda.driver.split_cores(0, 8)
        assert cuda.alive() == before
        close(*cuda.driver.split_cores(0, 8))
        assert cuda.alive() == before

    def test_a_split_that_takes_everything_is_refused(self, cuda: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(green, "rounded", lambda *_a, **_k: 128)
        cuda.set(CORES=128)
        with pytest.raises(DriverError, match="cuDevSmResourceSplitByCount did not cut 128 of 128 multiprocessors off"):
            cuda.driver.split_cores(0, 8)
        assert cuda.calls("cuGreenCtxCreate") == []

    def test_streams_do_not_block_and_have_their_priority(self, cuda: Gpu) -> None:
        first, second = cuda.driver.split_cores(0, 8)
        first.stream(priority=-2)
        second.stream()
        assert cuda.calls("cuGreenCtx") == [
            "cuGreenCtxCreate device=0 first=0 count=8 flags=1",
            "cuGreenCtxCreate device=0 first=8 count=124 flags=1",
            "cuGreenCtxStreamCreate first=0 flags=1 priority=-2",
            "cuGreenCtxStreamCreate first=8 flags=1 priority=0",
        ]
        close(first, second)

    def test_batches_know_them_as_ours(self, cuda: Gpu) -> None:
        first, second = cuda.driver.split_cores(0, 8)
        stream, a = first.stream(), cuda.driver.device_alloc(128)
        cuda.calls()
        cuda.driver.copy_batch(*(np.array([n], np.uint64) for n in (a + 64, a, 64)), SourceOrder.STREAM, stream)
        assert cuda.calls("cuStreamIsCapturing") == []
        cuda.driver.stream_synchronize(stream)
        close(first, second)
        cuda.driver.device_free(a)

    def test_the_primary_context_stays_current(self, cuda: Gpu) -> None:
        cuda.calls()
        shares = cuda.driver.split_cores(0, 8)
        streams = [share.stream() for share in shares]
        close(*shares)
        assert len(streams) == 2
        assert cuda.calls("cuCtx") == []

    def test_the_primary_context_is_there_first(self, cuda: Gpu) -> None:
        cuda.set(DEVICES=2)
        close(*cuda.driver.split_cores(1, 8))
        names = [line.split()[0] for line in cuda.calls()]
        assert names.index("cuDevicePrimaryCtxRetain") < names.index("cuGreenCtxCreate")

    def test_there_is_room_for_a_longer_resource(self) -> None:
        assert green.RESOURCE_BYTES >= 2 * 144
        assert ctypes.sizeof(green._resource()) == green.RESOURCE_BYTES


class TestHip:
    @pytest.mark.parametrize("number", [8, 16, 32, 64, 72, 296])
    def test_masks_are_even_over_dies_and_engines(self, amd: Gpu, number: int) -> None:
        """An MI300X: bit i is on XCD i % 8, there on shader engine i // 8 % 4."""
        for share in amd.driver.split_cores(0, number):
            bits = cores_of(amd, share)
            dies = Counter(bit % 8 for bit in bits)
            assert set(dies.values()) == {len(bits) // 8}
            engines = Counter((bit % 8, bit // 8 % 4) for bit in bits)
            loads = [engines[place] for place in itertools.product(range(8), range(4))]
            assert max(loads) - min(loads) <= 1
            share.close()

    def test_no_die_is_left_without_a_unit(self, amd: Gpu) -> None:
        """Six dies of 38 units, an MI300A: 224 of 228 would leave two of them none, and a queue that hangs."""
        amd.set(CORES=228, XCDS=6)
        with pytest.raises(ValueError, match="224 of 228 multiprocessors can't be split off; 1 to 216 can, in"):
            amd.driver.split_cores(0, 224)
        for number in (1, 216):
            for share in amd.driver.split_cores(0, number):
                share.stream()
                share.close()

    def test_a_runtime_without(self, amd: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
        has = Library.has
        monkeypatch.setattr(Library, "has", lambda self, symbol: "CUMask" not in symbol and has(self, symbol))
        for ask in (lambda: amd.driver.core_step(0), lambda: amd.driver.split_cores(0, 8)):
            with pytest.raises(NotSupported, match="HIP 71400000 has no hipExtStreamCreateWithCUMask to reserve"):
                ask()

    def test_a_priority_is_refused_and_not_forgotten(self, amd: Gpu) -> None:
        first, second = amd.driver.split_cores(0, 8)
        with pytest.raises(NotSupported, match="streams with a mask of compute units no priority; 0, not -1"):
            first.stream(priority=-1)
        assert amd.calls("hipExt") == []
        close(first, second)

    def test_the_step_is_that_of_the_dies(self, amd: Gpu) -> None:
        assert amd.driver.core_step(0) == amd.driver.idle_step(0) == hip.CORE_STEP == 8


def test_all_streams_go_before_the_context_does() -> None:
    seen: list[str] = []
    numbers = itertools.count(1)

    def note(text: str) -> Callable[[int], None]:
        return lambda stream: seen.append(f"{text} {stream}")

    share = StreamShare(8, lambda _priority: next(numbers), note("destroy"), lambda: seen.append("release"))
    assert [share.stream(), share.stream()] == [1, 2]
    share.close()
    share.close()
    assert seen == ["destroy 1", "destroy 2", "release"]
