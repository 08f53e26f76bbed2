"""One cell on one rank: what is checked, what is timed, and the rows that come of it."""

import time
from functools import partial
from typing import Any

import pytest
import torch

from dovetail.bench.cases import Case
from dovetail.bench.cell import Cell
from dovetail.bench.contender import Contender
from dovetail.bench.spec import Spec
from dovetail.errors import NotSupported

FIELDS = ["collective", "backend", "variant", "requested", "ranks", "size_bytes", "tensors", "time_us", "algbw_gbps",
          "busbw_gbps", "correct"]  # fmt: skip


class Copying:
    """An all-gather of one rank is a copy. `spoil` is done to the result of call number `at`."""

    name = "cpu"

    def __init__(self, spoil: str = "", at: int = 0) -> None:
        self.spoil, self.at, self.num_calls = spoil, at, 0

    def bind(self, case: Case, requested: str) -> Contender:
        inp, out = (torch.empty(case.num_elements, dtype=case.torch_dtype) for _ in range(2))
        return Contender(
            backend=self.name, requested=requested, variant="pcpy", inp=inp, out=out, call=partial(self.call, inp, out)
        )

    def call(self, inp: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(inp)
        self.num_calls += 1
        if self.spoil and self.num_calls >= self.at:
            spoilt = inp if self.spoil == "input" else out
            spoilt.view(torch.uint8)[-1] ^= 1


class Unable:
    name = "openmpi"

    def bind(self, case: Case, requested: str) -> Contender:
        raise NotSupported("it has no such type")


def measure(*wanted: Any, collective: str = "all_gather", **more: Any) -> tuple[list[dict[str, Any]], list[str]]:
    spec = Spec(collectives=(collective,), ranks=1, sizes=(64,), seconds=1e-4, **more)
    case = Case.of(collective, 1, 64)
    return Cell(case=case, spec=spec, rank=0, start=lambda: None, agree=lambda value: [value]).measure(list(wanted))


def test_row_has_the_fields_of_the_contract_in_their_order() -> None:
    rows, notes = measure((Copying(), "auto"))
    assert notes == []
    assert list(rows[0])[: len(FIELDS)] == FIELDS
    measured = ("time_us", "algbw_gbps", "busbw_gbps", "iterations", "limit_us", "limit_share")
    assert all(rows[0].pop(name) > 0 for name in measured if name != "busbw_gbps")
    assert rows[0].pop("busbw_gbps") == 0  # one rank has no peer to send to
    assert rows[0] == {
        "collective": "all_gather",
        "backend": "cpu",
        "variant": "pcpy",
        "requested": "auto",
        "ranks": 1,
        "size_bytes": 64,
        "tensors": "symmetric",
        "correct": True,
        "dtype": "float32",
        "in_place": False,
    }


def test_bandwidth_is_that_of_the_time() -> None:
    rows, _ = measure((Copying(), "auto"))
    assert rows[0]["algbw_gbps"] == pytest.approx(64 / rows[0]["time_us"] / 1e3, rel=1e-2)


@pytest.mark.parametrize("spoil", ["output", "input"])
@pytest.mark.parametrize("at", [1, 2, 4], ids=["first-check", "second-check", "while-timed"])
def test_wrong_result_is_no_time(spoil: str, at: int) -> None:
    rows, _ = measure((Copying(), "good"), (Copying(spoil, at), "bad"))
    assert [row["correct"] for row in rows] == [True, False]
    assert rows[0]["time_us"] > 0
    assert [rows[1][name] for name in ("time_us", "algbw_gbps", "busbw_gbps", "iterations")] == [None, None, None, 0]


def test_wrong_contender_is_not_timed() -> None:
    wrong = Copying("output", 1)
    measure((wrong, "bad"))
    assert wrong.num_calls == 2  # its two checks


def test_contender_that_cannot_is_left_out_with_a_line() -> None:
    rows, notes = measure((Copying(), "auto"), (Unable(), "openmpi"))
    assert [row["requested"] for row in rows] == ["auto"]
    assert notes == ["all_gather: openmpi left out: it has no such type"]


def test_fixed_iterations_are_kept() -> None:
    rows, _ = measure((Copying(), "a"), (Copying(), "b"), iterations=17)
    assert [row["iterations"] for row in rows] == [17, 17]


def test_one_far_slower_is_given_up_after_a_few_calls() -> None:
    class Slow(Copying):
        def call(self, inp: torch.Tensor, out: torch.Tensor) -> None:
            super().call(inp, out)
            time.sleep(0.001)

    slow = Slow()
    rows, _ = measure((Copying(), "fast"), (slow, "slow"), collective="broadcast", iterations=50, give_up=4.0)
    assert [row["iterations"] for row in rows] == [50, 3]
    assert slow.num_calls == 2 + 3 + 1  # checks, first calls, last check
    assert rows[1]["time_us"] > 0


def test_iterations_follow_time_within_bounds() -> None:
    spec = Spec(collectives=("all_gather",), ranks=1, sizes=(64,), seconds=0.25)
    cell = Cell(case=Case.of("all_gather", 1, 64), spec=spec, rank=0, start=lambda: None, agree=lambda value: [value])
    assert cell._iterations([2.0, 1000.0, 5e6]) == [2000, 250, 5]


def test_fixed_iterations_of_one_far_slower_are_bounded_by_time() -> None:
    spec = Spec(collectives=("all_gather",), ranks=1, sizes=(64,), seconds=0.25, iterations=1000)
    cell = Cell(case=Case.of("all_gather", 1, 64), spec=spec, rank=0, start=lambda: None, agree=lambda value: [value])
    assert cell._iterations([2.0, 19.0, 50_000.0]) == [1000, 1000, 5]
