"""Which transport a fused operator takes: what is forced, what was measured, and what is said about it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail import env, profile
from dovetail.coll import choose as variants
from dovetail.errors import NotSupported
from dovetail.hw.gpu import driver
from dovetail.measure import machine
from dovetail.ops import calls, choose, library
from dovetail.ops.choose import Choice, from_table, transport_for
from dovetail.ops.cpu import decomposed, dma, store

CALL = calls.gemm_all_to_all(torch.zeros(64, 32), torch.zeros(16, 32), None, None, 2)
GEMV = calls.gemv_all_reduce(torch.zeros(4, 32), torch.zeros(16, 32), 2)
HAS = choose.TRANSPORTS["cpu"][CALL.op]


def _group(notice: dict[str, Any] | None = None, *, local: bool = True, size: int = 2) -> Any:
    """What is asked of a group: is it on one host, and what did rank 0 say."""
    told = json.dumps(notice).encode() if notice is not None else b""
    return SimpleNamespace(world=SimpleNamespace(local=local, notices=[told, b'{"disable": true}']), size=size)


def test_every_transport_is_there() -> None:
    """The table is what the transports have, for every operator."""
    made = {choose.STORE: store.FORWARD, choose.DMA: dma.FORWARD, choose.DECOMPOSED: decomposed.FORWARD}
    for kind in (
        calls.GemmAllToAll, calls.GemvAllReduce, calls.AllGatherMatmul, calls.MatmulReduceScatter,
        calls.EmbeddingAllToAll,
    ):  # fmt: skip
        found = {name for name, forward in made.items() if kind in forward} | {choose.UNFUSED}
        assert found == set(choose.TRANSPORTS["cpu"][kind.op]), kind.op


@pytest.mark.parametrize("name", HAS)
def test_asked_for(name: str) -> None:
    """An argument counts more than everything else."""
    assert transport_for(_group({"disable": True}), CALL, name, "cpu") == Choice(name, "asked for")


def test_asked_for_in_vain() -> None:
    with pytest.raises(ValueError, match="no transport 'quick'; there are auto, unfused, decomposed, store, dma"):
        transport_for(_group(), CALL, "quick", "cpu")
    with pytest.raises(NotSupported, match="gemv_all_reduce on cpu has the transports .*, not 'dma'"):
        transport_for(_group(), GEMV, "dma", "cpu")
    with pytest.raises(NotSupported, match="only transport 'unfused' can serve it"):
        transport_for(_group(local=False), CALL, "store", "cpu")
    assert transport_for(_group(local=False), CALL, "unfused", "cpu").transport == "unfused"


def test_told_by_rank_0() -> None:
    assert transport_for(_group({}), CALL, "auto", "cpu").transport == "store"
    assert transport_for(_group({"disable": True}), CALL, "auto", "cpu") == Choice("unfused", "DOVETAIL_DISABLE")
    forced = _group({"transport": "dma"})
    assert transport_for(forced, CALL, "auto", "cpu") == Choice("dma", "DOVETAIL_TRANSPORT")
    lacking = transport_for(forced, GEMV, "auto", "cpu")  # as without, and it says so
    assert lacking.transport == transport_for(_group({}), GEMV, "auto", "cpu").transport == "store"
    assert lacking.reason.startswith("DOVETAIL_TRANSPORT=dma: this operator has none; not measured here")
    assert transport_for(_group({"transport": "dma", "disable": True}), CALL, "auto", "cpu").transport == "unfused"


def test_the_variable_takes_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in choose.NAMES:
        monkeypatch.setenv("DOVETAIL_TRANSPORT", name)
        assert env.transport() == name
    monkeypatch.setenv("DOVETAIL_TRANSPORT", choose.AUTO)
    assert env.transport() is None


def test_several_hosts_and_other_backends() -> None:
    choice = transport_for(_group({"transport": "store"}, local=False), CALL, "auto", "cpu")
    assert choice.transport == "unfused"
    assert "spans hosts" in choice.reason
    assert transport_for(_group({}), CALL, "auto", "abacus").transport == "unfused"


def test_figures_of_another_gpu_do_not_count() -> None:
    rows = {"2": [[*CALL.load, {"unfused": 9.0, "store": 1.0, "dma": 5.0}, "float32"]]}
    for tuned, transport, reason in (
        ({CALL.op: rows, "device": "NVIDIA H200"}, "store", "9.00 times as fast as unfused"),
        ({CALL.op: rows, "device": "NVIDIA A100"}, "unfused", "nothing was measured on NVIDIA H200, only on NVIDIA A"),
        ({"device": "NVIDIA H200"}, "unfused", "nothing was measured on this GPU (`dovetail tune --only fused"),
        ({}, "unfused", "nothing was measured on this GPU"),
    ):
        told = {"fused": {"cuda": tuned}, "gpu": {"cuda": ("NVIDIA H200", 13)}}
        choice = transport_for(_group(told), CALL, "auto", "cuda")
        assert choice.transport == transport
        assert reason in choice.reason


def test_gains_over_collectives_of_torch_do_not_count_once_ours_are_in_force() -> None:
    rows = {"2": [[*CALL.load, {"unfused": 9.0, "store": 1.0, "dma": 5.0}, "float32"]]}
    for whose, passed, on, transport in (
        ("torch", False, "NVIDIA H200", "store"), ("torch", True, "NVIDIA H200", "unfused"),
        ("torch", True, "NVIDIA A100", "store"), ("ours", True, "NVIDIA H200", "store"),
        ("ours", False, "NVIDIA H200", "store"),
    ):  # fmt: skip
        tuned = {CALL.op: rows, "device": "NVIDIA H200", "collectives": whose}
        tested = {"passed": passed, "device": on, "driver": 13}
        told = {"fused": {"cuda": tuned}, "gpu": {"cuda": ("NVIDIA H200", 13)}, "selftest": {"cuda": tested}}
        choice = transport_for(_group(told), CALL, "auto", "cuda")
        assert choice.transport == transport
        if transport == "unfused":
            assert "the self-test of ours has passed since: measure again" in choice.reason


ROWS = [
    [1_000, 100, {"unfused": 5.0, "store": 9.0, "dma": 30.0}],
    [70_000, 4_000, {"unfused": 50.0, "store": 20.0, "dma": 30.0}],
    [70_000_000, 4_000_000, {"unfused": 900.0, "store": 800.0, "dma": 500.0, "novel": 1.0}],
]


def _with_rows(m: int) -> calls.Call:
    return calls.gemm_all_to_all(torch.zeros(m, 32), torch.zeros(16, 32), None, None, 2)


BEST = [(0, "unfused"), (2, "unfused"), (64, "store"), (100, "store"), (1 << 17, "dma")]


@pytest.mark.parametrize(("m", "best"), BEST)
def test_nearest_shape(m: int, best: str) -> None:
    """The fastest where calls of about as many operations and bytes were measured; unknown names don't count."""
    choice = from_table({"2": ROWS}, _with_rows(m), 2, HAS)
    assert choice.transport == best
    gain = {"unfused": "nothing else was clearly faster", "store": "times as fast", "dma": "times as fast"}[best]
    assert gain in choice.reason
    assert "2 ranks" in choice.reason


def test_a_small_gain_is_none() -> None:
    """Unfused is kept unless something else was faster by more than two runs differ."""
    rows = [[CALL.load[0], CALL.load[1], {"unfused": 100.0, "store": 100.0 / choose._LEAST_GAIN + 0.1, "dma": 200.0}]]
    assert from_table({"2": rows}, CALL, 2, HAS).transport == "unfused"
    rows = [[CALL.load[0], CALL.load[1], {"unfused": 100.0, "store": 100.0 / choose._LEAST_GAIN - 0.1, "dma": 200.0}]]
    assert from_table({"2": rows}, CALL, 2, HAS).transport == "store"


def test_rows_of_the_dtype() -> None:
    """Those of the call's dtype count, others if there are none."""
    rows = [
        [*CALL.load, {"unfused": 9.0, "store": 1.0, "dma": 5.0}, "bfloat16"],
        [CALL.load[0] * 4, CALL.load[1] * 4, {"unfused": 9.0, "store": 5.0, "dma": 1.0}, "float32"],
    ]
    assert from_table({"2": rows}, CALL, 2, HAS).transport == "dma"
    half = calls.gemm_all_to_all(CALL.x.half(), CALL.w.half(), None, None, 2)
    assert from_table({"2": rows[:1]}, half, 2, HAS).transport == "store"


def test_a_table_without_the_baseline() -> None:
    """Nothing to compare with: unfused."""
    assert from_table({"2": [[1, 1, {"store": 1.0}]]}, CALL, 2, HAS).transport == "unfused"


def test_nearest_number_of_ranks() -> None:
    table = {"2": [[1, 1, {"unfused": 1.0, "store": 2.0}]], "8": [[1, 1, {"unfused": 2.0, "store": 1.0}]]}
    assert [from_table(table, CALL, ranks, HAS).transport for ranks in (1, 3, 5, 6, 64)] == [
        "unfused", "unfused", "unfused", "store", "store",
    ]  # fmt: skip
    assert "8 ranks" in from_table(table, CALL, 64, HAS).reason


def test_only_what_the_operator_has() -> None:
    rows = [[1, 1, {"unfused": 3.0, "store": 2.0, "dma": 1.0}]]
    assert from_table({"2": rows}, GEMV, 2, choose.TRANSPORTS["cpu"][GEMV.op]).transport == "store"


def test_from_the_profile() -> None:
    told = {"fused": {"cpu": {CALL.op: {"2": ROWS}}}}
    assert transport_for(_group(told), _with_rows(2), "auto", "cpu").transport == "unfused"
    assert "not measured" in transport_for(_group(told), GEMV, "auto", "cpu").reason


def test_uneven_calls_choose_alike() -> None:
    """Ranks with other numbers of rows make the same choice."""
    rows = [calls.gemm_all_to_all(torch.zeros(n, 8), torch.zeros(4, 8), [1, 1], [n, 0], 2) for n in (0, 7, 5000)]
    assert len({from_table({"2": ROWS}, call, 2, HAS) for call in rows}) == 1


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_gradient_keeps_a_transport_that_its_operator_has(where: str) -> None:
    """On a device that is no CPU those of GPUs; `meta` stands for one."""
    grad = torch.empty(1, device=where)
    has = choose.TRANSPORTS["cpu" if where == "cpu" else "cuda"]
    for op, transport in itertools.product(("all_gather_matmul", "matmul_reduce_scatter"), choose.NAMES):
        wanted = transport if transport in has[op] else "auto"
        assert library._gradient_by(transport, op, grad) == wanted
    assert library._gradient_by("auto", "all_gather_matmul", grad) == "auto"
    assert library._gradient_by("decomposed", "all_gather_matmul", torch.empty(1, device="meta")) == "auto"


def test_rank_0_says_which_gpu_it_has_if_figures_of_one_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "profile.json"))
    here = SimpleNamespace(device_name=lambda number: "A100", version=13)
    monkeypatch.setattr(driver, "load", lambda name: here)
    of_gpu = {"cuda": {"device": "NVIDIA H200"}}
    for figures, wanted in (({"cpu": {CALL.op: {}}}, {}), (of_gpu, {"cuda": ["A100", 13]})):
        profile.save(profile.Profile(key=machine.profile_key(), sections={"fused": figures}))
        assert json.loads(variants.notice())["gpu"] == wanted
    monkeypatch.setattr(driver, "load", _missing)
    assert json.loads(variants.notice())["gpu"] == {"cuda": ["no GPU", 0]}


def _missing(name: str) -> Any:
    raise NotSupported(f"no {name} here")
