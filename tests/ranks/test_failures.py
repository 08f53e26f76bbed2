"""Ranks that die, stop, disagree or pass nonsense: a typed error on every other rank, soon, and nothing left behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import DovetailError, MismatchError, NotSupported, PeerError, Timeout
from tests.ranks import workers

ROOT = Path(__file__).parents[2]


def _trials(count: int, how: str, timeout_s: float) -> list[dict[str, Any]]:
    script = [sys.executable, "-m", "tests.ranks.trials", str(count), how, str(timeout_s)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("DOVETAIL_")}
    done = subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _in_shared_memory() -> set[str]:
    """Names, but for Open MPI's: another test may run beside this one."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sm_segment", "vader_segment"))}


def test_killed_at_100_random_moments() -> None:
    before = _in_shared_memory()
    found = _trials(100, "SIGKILL", 30.0)
    assert len(found) == 100
    took = sorted(said["at"] - t["hit_at"] for t in found for said in t["said"])
    assert took[len(took) * 95 // 100] < 2.0
    assert took[-1] < 10.0  # on a machine that is busy with other things, and far from the time limit
    for t in found:
        for said in t["said"]:
            assert said["error"] == "PeerError", said
            assert said["about"] == t["victim"], said
            assert said["again"] == "PeerError"
            assert said["fds"] <= 0, "file descriptors left open"
    assert _in_shared_memory() <= before


def test_stopped_rank_is_a_timeout() -> None:
    for t in _trials(5, "SIGSTOP", 0.4):
        for said in t["said"]:
            assert said["error"] == "Timeout", said
            assert "rank" in said["text"]
            assert said["again"] == "Timeout"


def _await(*files: Path) -> None:
    """Until other ranks have made these files: the order of a test, by no means of what it tests."""
    deadline = time.monotonic() + 30
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, files
        time.sleep(0.01)


def test_timeout_says_where_everybody_is(spare_pool: Callable[..., Any], tmp_path: Path) -> None:
    pool = spare_pool(3)

    def job() -> str:
        g = workers.world()
        g.set_timeout(0.5)
        if g.rank == 2:
            _await(tmp_path / "0", tmp_path / "1")  # late on purpose: the others are seen to wait
        t = dovetail.zeros(1000)
        with pytest.raises(Timeout) as caught:
            dovetail.all_reduce(t, variant="twoshot")
        (tmp_path / str(g.rank)).touch()
        return str(caught.value)

    texts = pool.run(job)
    assert "rank 2 has not entered it" in texts[0]
    assert "rank 2 has not entered it" in texts[1]
    assert "all_reduce (twoshot, 4000 bytes)" in texts[0]


def test_a_second_init_sets_the_time_limit(spare_pool: Callable[..., Any], tmp_path: Path) -> None:
    """That of the world's group and of groups made later: inside of `launch` there is no other `init` to give it to."""

    def job() -> tuple[float, ...]:
        g = dovetail.init()
        limits = [g.timeout_s]
        with pytest.raises(ValueError, match="timeout must be seconds above 0, not -1"):
            dovetail.init(timeout=-1)
        with pytest.raises(TypeError, match="timeout must be seconds or a timedelta, not 'soon'"):
            dovetail.init(timeout="soon")
        limits.append(g.timeout_s)
        assert dovetail.init(timeout=timedelta(seconds=0.25)) is g
        limits += [g.timeout_s, dovetail.new_group([g.rank]).timeout_s, dovetail.init().timeout_s]
        if g.rank == 0:
            with pytest.raises(Timeout, match=r"made no progress for 0\.25 s: rank 1 has not entered it"):
                dovetail.barrier()
            (tmp_path / "over").touch()
        else:
            _await(tmp_path / "over")
        return tuple(limits)

    assert spare_pool(2).run(job) == [(60.0, 60.0, 0.25, 0.25, 0.25)] * 2


def test_survivors_make_a_new_group(spare_pool: Callable[..., Any]) -> None:
    pool = spare_pool(3)

    def job() -> Any:
        g = workers.world()
        others = g.world.new_group([0, 2]) if g.rank != 1 else None
        if g.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerError, match="rank 1 died"):
            dovetail.all_reduce(dovetail.zeros(10))
        with pytest.raises(PeerError, match="rank 1 died"):  # later calls raise it at once
            dovetail.barrier()
        workers.all_reduce("auto", "symmetric", 1000, torch.float32, "sum", 1, others)
        later = g.world.new_group([2, 0])
        workers.all_gather("auto", "mixed", 1000, torch.float32, 2, later)
        g.close()
        return True

    pool.start(job)
    assert pool.finish([0, 2]) == {0: True, 2: True}


CALLS: dict[str, Callable[[Any], Any]] = {
    "another collective": lambda g: (
        dovetail.all_reduce(torch.zeros(8))
        if g.rank == 0
        else dovetail.all_gather_into_tensor(torch.zeros(8 * g.size), torch.zeros(8))
    ),
    "another size": lambda g: dovetail.all_reduce(dovetail.zeros(8 + g.rank)),
    "another dtype": lambda g: dovetail.all_reduce(torch.zeros(8, dtype=(torch.float32, torch.int32)[g.rank > 0])),
    "another op": lambda g: dovetail.all_reduce(torch.zeros(8), "sum" if g.rank else "max"),
    "another root": lambda g: dovetail.broadcast(torch.zeros(8), int(g.rank > 0)),
    "another variant": lambda g: dovetail.all_reduce(dovetail.zeros(8), variant="oneshot" if g.rank else "twoshot"),
    "barrier against reduce": lambda g: dovetail.barrier() if g.rank else dovetail.all_reduce(torch.zeros(3)),
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_disagree(pools: Any, world: int, what: str) -> None:
    """Every rank gets an error that shows both calls; nothing moved, so the group goes on."""
    call = CALLS[what]

    def job() -> dict[int, str]:
        g = workers.world()
        with pytest.raises(MismatchError) as caught:
            call(g)
        workers.all_reduce("auto", "mixed", 100, torch.float32, "sum", 3)
        return caught.value.calls

    for rank, calls in enumerate(pools.get(world).run(job)):
        assert rank in calls
        assert len(calls) == 2
        assert len(set(calls.values())) == 2, calls


@pytest.mark.parametrize("world", [2, 3])
def test_splits_disagree(pools: Any, world: int) -> None:
    def job() -> str:
        g = workers.world()
        send = [2] * g.size
        receive = [2] * g.size
        if g.rank == 1:
            receive[0] = 3  # rank 0 sends 2 rows
        inp, out = torch.zeros(sum(send), 4), torch.zeros(sum(receive), 4)
        with pytest.raises(MismatchError) as caught:
            dovetail.all_to_all_single(out, inp, receive, send)
        dovetail.barrier()
        return str(caught.value)

    for text in pools.get(world).run(job):
        assert "rank 0 sends 32 bytes to rank 1, which expects 48" in text


@pytest.mark.parametrize("world", [2])
def test_bad_arguments(pools: Any, world: int) -> None:
    """Clear errors before anything moves; the ranks can go on."""

    def job() -> None:
        g = workers.world()
        t = torch.zeros(8)
        bad: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (ValueError, "needs output_tensor of 16", lambda: dovetail.all_gather_into_tensor(torch.zeros(15), t)),
            (TypeError, "must be of one dtype", lambda: dovetail.all_gather_into_tensor(torch.zeros(16).int(), t)),
            (TypeError, "must be a tensor", lambda: dovetail.all_gather_into_tensor([0.0] * 16, t)),
            (ValueError, "no variant 'fast'", lambda: dovetail.all_reduce(t, variant="fast")),
            (ValueError, "can't share equally", lambda: dovetail.all_to_all_single(torch.zeros(9), torch.zeros(9))),
            (ValueError, "sum to 3, it has 8 rows", lambda: dovetail.all_to_all_single(t, t + 1, [4, 4], [1, 2])),
            (TypeError, "output_split_sizes must be whole numbers", lambda: dovetail.all_to_all_single(t, t + 1, 4, 4)),
            (
                ValueError,
                r"input's split sizes must be 2 whole numbers, 0 or more, not \[4.0, 4.0\]",
                lambda: dovetail.all_to_all_single(t, t + 1, [4, 4], torch.full((2,), 4.0)),
            ),
            (
                ValueError,
                "overlap",
                lambda: dovetail.all_gather_into_tensor(torch.zeros(17)[:16], t.set_(torch.zeros(17))[3:11]),
            ),
            (TypeError, "combines bits", lambda: dovetail.all_reduce(torch.zeros(8), "band")),
            (NotSupported, "can't be reduced", lambda: dovetail.all_reduce(torch.zeros(8, dtype=torch.complex64))),
            (NotSupported, "no reduction", lambda: dovetail.all_reduce(torch.zeros(8), "median")),
            (NotSupported, "dense tensor", lambda: dovetail.all_reduce(torch.eye(3).to_sparse())),
            (NotSupported, "is on meta", lambda: dovetail.all_reduce(torch.zeros(8, device="meta"))),
            (ValueError, "one of \\[0, 1\\], not 5", lambda: dovetail.broadcast(t, 5)),
            (ValueError, "list of 2 tensors", lambda: dovetail.gather(torch.zeros(3), [torch.zeros(3)], g.rank)),
            (TypeError, "dovetail Group", lambda: dovetail.all_reduce(t, group="world")),
            (ValueError, "no negative sizes", lambda: dovetail.empty(-1)),
            (TypeError, "a shape is made of ints.*not '8'", lambda: dovetail.empty("8")),
            (TypeError, "a shape is made of ints.*not 8.5", lambda: dovetail.empty(8.5)),
            (TypeError, "such as torch.float32, not 'float32'", lambda: dovetail.empty(8, dtype="float32")),
            (ValueError, "no collective", lambda: dovetail.explain("reduce_all", 10)),
            (TypeError, "size_bytes must be an int.*not '1M'", lambda: dovetail.explain("all_gather", "1M")),
        ]
        for kind, text, call in bad:
            if "overlap" in text:
                whole = torch.zeros(20)
                with pytest.raises(kind, match=text):
                    dovetail.all_gather_into_tensor(whole[:16], whole[3:11])
                continue
            with pytest.raises(kind, match=text):
                call()
        workers.all_reduce("auto", "mixed", 50, torch.float32, "sum", 9)

    pools.get(world).run(job)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("world", [1])
def test_a_gpu_that_torch_does_not_find(pools: Any, world: int) -> None:
    def job() -> None:
        for call in (dovetail.empty, lambda n, device: dovetail.explain("all_gather", n, device=device)):
            with pytest.raises(NotSupported, match=r"device 'cuda' needs a GPU, and torch .* finds none: .*doctor"):
                call(8, device="cuda")

    pools.get(world).run(job)


def test_closed_group(spare_pool: Callable[..., Any]) -> None:
    pool = spare_pool(2)

    def job() -> str:
        g = workers.world()
        sub = g.world.new_group([0, 1])
        workers.all_reduce("auto", "symmetric", 10, torch.float32, "sum", 1, sub)
        if g.rank == 1:
            sub.close()
            with pytest.raises(DovetailError, match="is closed"):
                dovetail.all_reduce(torch.zeros(3), group=sub)
            dovetail.barrier()
            return ""
        with pytest.raises(PeerError) as caught:
            dovetail.all_reduce(torch.zeros(3), group=sub)
        dovetail.barrier()
        return str(caught.value)

    assert "rank 1 closed the group" in pool.run(job)[0]


def test_heap_is_full(spare_pool: Callable[..., Any]) -> None:
    """An error and not SIGBUS; what fits afterwards works."""
    pool = spare_pool(1, {"DOVETAIL_HEAP": "64M"})

    def job() -> int:
        held = [dovetail.empty(1 << 20) for _ in range(10)]
        with pytest.raises(dovetail.errors.HardwareError, match="no room"):
            dovetail.empty(15 << 20)
        before = workers.world().world.used_bytes
        held.clear()
        return before - workers.world().world.used_bytes

    assert pool.run(job)[0] == 10 * (4 << 20)


def test_the_machine_is_full(spare_pool: Callable[..., Any]) -> None:
    """More than there is memory is refused before the kernel has to end somebody."""
    pool = spare_pool(1, {"DOVETAIL_HEAP": "8T"})

    def job() -> None:
        with pytest.raises(dovetail.errors.HardwareError, match="are available on this machine"):
            dovetail.empty(1 << 40)
        dovetail.all_reduce(dovetail.zeros(10))

    pool.run(job)


def test_tensor_outlives_the_world(spare_pool: Callable[..., Any]) -> None:
    pool = spare_pool(2)

    def job() -> float:
        t = dovetail.zeros(1 << 18)
        dovetail.all_reduce(t.fill_(1.0))
        dovetail.finalize()
        t += 1  # still mapped
        return float(t.sum()) / t.numel()

    assert pool.run(job) == [3.0, 3.0]


def test_forked_child_is_no_rank(spare_pool: Callable[..., Any]) -> None:
    """The child's objects are dead, and its exit is not the rank's death."""
    pool = spare_pool(2)

    def job() -> bool:
        g = workers.world()
        workers.all_reduce("auto", "symmetric", 10, torch.float32, "sum", 1)
        pid = os.fork()
        if pid == 0:
            try:
                dovetail.all_reduce(torch.zeros(3), group=g)
            except DovetailError:
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(pid, 0)
        for seed in range(50):
            workers.all_reduce("auto", "symmetric", 100, torch.float32, "sum", seed)
        return os.waitstatus_to_exitcode(status) == 0

    assert pool.run(job) == [True, True]


def test_forked_child_leaves_the_heap_alone(spare_pool: Callable[..., Any]) -> None:
    """A child that drops the parent's tensors, groups and calls must not punch holes into memory that ranks share."""
    pool = spare_pool(2)

    def job() -> list[float]:
        g = workers.world()
        t = dovetail.zeros(1 << 16).fill_(7.0)
        work = dovetail.all_reduce(t, async_op=True)
        work.wait()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                work.wait()
                dovetail.all_reduce(t, group=g)
            except (DovetailError, RuntimeError):
                status = 0
            del t, g, work
            gc.collect()
            os._exit(status)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        dovetail.barrier()
        return [t.min().item(), t.max().item()]

    assert pool.run(job) == [[14.0, 14.0]] * 2


def test_a_group_that_was_not_joined(spare_pool: Callable[..., Any], tmp_path: Path) -> None:
    """Who gave up a join leaves nothing behind that a late peer could write to; both can try again."""
    pool = spare_pool(2, {"DOVETAIL_TIMEOUT": "0.4"})

    def job() -> bool:
        w = workers.world().world
        w.timeout_s = 0.4
        if w.rank == 1:
            _await(tmp_path / "0")  # late: rank 0 is seen to give up
        with pytest.raises(Timeout, match="did not join"):
            w.new_group([0, 1])
        t = dovetail.zeros(100_000)
        (tmp_path / str(w.rank)).touch()
        _await(tmp_path / "1")  # until rank 1 has given up too
        w.timeout_s = 20.0
        again = w.new_group([0, 1])
        again.set_timeout(20.0)
        workers.all_reduce("auto", "symmetric", 100, torch.float32, "sum", 1, again)
        return bool((t == 0).all())

    assert pool.run(job) == [True, True]


def test_groups_come_and_go(spare_pool: Callable[..., Any]) -> None:
    """Closed groups give their memory back; there can be more of them over time than at once."""
    pool = spare_pool(2)

    def job() -> int:
        w = workers.world().world
        for round_ in range(60):
            g = w.new_group([0, 1])
            workers.all_reduce("oneshot", "ordinary", 1000, torch.float32, "sum", round_, g)
            g.close()
            del g
            if round_ == 9:
                early = w.used_bytes
        dovetail.barrier()
        return w.used_bytes - early

    assert max(pool.run(job)) < 4 << 20


def test_interrupted_wait(spare_pool: Callable[..., Any], tmp_path: Path) -> None:
    """Ctrl-C reaches a rank that waits for a peer, and the peer is told."""
    pool = spare_pool(2)

    def job() -> str:
        g = workers.world()
        if g.rank == 1:
            _await(tmp_path / "interrupted")  # it comes while rank 0 waits
            with pytest.raises(PeerError) as caught:
                dovetail.all_reduce(dovetail.zeros(10))
            return str(caught.value)
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            dovetail.all_reduce(dovetail.zeros(10))
        (tmp_path / "interrupted").touch()
        return ""

    assert "failed on rank 0" in pool.run(job)[1]
