"""The start line: nobody passes before all have come."""

import threading
import time
from pathlib import Path

import pytest

from dovetail.bench.start import StartLine, make
from dovetail.errors import Timeout


@pytest.mark.parametrize("share_cores", [False, True], ids=["own-cores", "shared-cores"])
def test_nobody_passes_before_the_last_has_come(tmp_path: Path, share_cores: bool) -> None:
    ranks, rounds = 3, 5
    make(tmp_path / "start", ranks)
    came: list[list[int]] = [[] for _ in range(ranks)]
    left: list[list[int]] = [[] for _ in range(ranks)]

    def be(rank: int) -> None:
        line = StartLine(tmp_path / "start", rank, ranks, share_cores=share_cores, timeout_s=30)
        for turn in range(rounds):
            if turn % ranks == rank:
                time.sleep(0.003)  # each is the late one in its turn
            came[rank].append(time.perf_counter_ns())
            line()
            left[rank].append(time.perf_counter_ns())
        line.close()

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for turn in range(rounds):
        assert min(times[turn] for times in left) >= max(times[turn] for times in came)


def test_late_rank_is_named(tmp_path: Path) -> None:
    make(tmp_path / "start", 2)
    line = StartLine(tmp_path / "start", 0, 2, share_cores=True, timeout_s=0.02)
    with pytest.raises(Timeout, match="rank 1 did not come to the start line"):
        line()
    line.close()
