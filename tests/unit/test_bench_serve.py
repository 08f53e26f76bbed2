"""`dovetail bench kv --serve`: on host memory, with copies of a stand-in driver, and with bytes that get lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.standin import build

from dovetail import cli
from dovetail.bench.gpu.session import Session
from dovetail.bench.gpu.spec import Bounds
from dovetail.bench.serve import first_token, offload, run, throughput, verdict
from dovetail.bench.serve.contender import contender, keeper, known, usual
from dovetail.bench.serve.server import Scattered, Server
from dovetail.bench.serve.shapes import build as build_model
from dovetail.bench.serve.shapes import served_model
from dovetail.bench.serve.spec import Spec
from dovetail.errors import NotSupported
from dovetail.hw.gpu import driver
from dovetail.kv.choose import Path as Form
from dovetail.kv.mover import GpuMover
from dovetail.kv.plain import CpuMover
from dovetail.kv.planner import Table
from dovetail.kv.transformers import PagedMemory
from dovetail.measure import record

TINY = dataclasses.replace(served_model("tiny"), num_layers=3, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16)
SPEC = Spec(
    models=(TINY,), tokens=(64, 100), hit_rates=(0.5, 1.0), cache_bytes=8 << 20, contenders=known("cpu"),
    serve_tokens=48, num_requests=6, in_flight=3, new_tokens=2, suffix_tokens=20, rounds=2, num_prefixes=2,
)  # fmt: skip

COLUMNS = tuple(Table.__dataclass_fields__)


pytestmark = pytest.mark.usefixtures("one_thread")


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return int(ended.value.code or 0)


def test_on_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "serve.json"
    words = ("bench", "kv", "--serve", "--quick", "--tokens", "64", "--requests", "4", "--new", "2", "--iters", "1")
    assert command(*words, "--json", str(out)) == 0
    rows = record.read(out, kind="bench").rows
    assert [(row["section"], row["contender"]) for row in rows] == [
        (section, name) for section in ("first token", "requests") for name in ("recompute", "cpu", "layers", "runs")
    ]
    assert all(row["correct"] and row["same_bits"] and row["time_us"] > 0 for row in rows)
    assert [row["fetched_tokens"] for row in rows] == [0, *[64] * 3, 0, *[4 * 512] * 3]
    assert "all correct" in capsys.readouterr().out


def test_rows_of_a_small_run() -> None:
    rows, _ = run.measure(SPEC, None)
    assert len(rows) == 4 * 4
    assert all(row["correct"] for row in rows)
    half = [row for row in rows if row.get("hit_rate") == 0.5]
    assert {(row["num_hits"], row["num_requests"]) for row in half} == {(3, 6)}
    assert [row["fetched_tokens"] for row in half] == [0, *[3 * 48] * 3]
    assert [row["iterations"] for row in half] == [1, 2, 2, 2]  # a pass of recomputation is enough


def test_bytes_that_get_lost_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = CpuMover.submit

    def lossy(self: CpuMover, direction: str, table: Table, path: str = "cpu", **_: Any) -> object:
        kept = len(table) - (direction == "fetch")
        return submit(self, direction, Table(*(getattr(table, name)[:kept] for name in COLUMNS)), path)

    monkeypatch.setattr(CpuMover, "submit", lossy)
    rows, _ = run.measure(dataclasses.replace(SPEC, hit_rates=(1.0,)), None)
    for row in rows:
        assert row["correct"] == (row["contender"] == "recompute")
        assert (row["time_us"] is None) == (row["contender"] != "recompute")
    assert verdict.lines(rows)[-1] == "9 of 12 results WRONG"


def test_a_prefix_of_another_request_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks hold numbers, but of somebody else: nothing was fetched."""
    submit = CpuMover.submit
    monkeypatch.setattr(Server, "poison", lambda self: self.memory.tokens.normal_())

    def nothing(self: CpuMover, direction: str, table: Table, path: str = "cpu", **_: Any) -> object:
        kept = 0 if direction == "fetch" else len(table)
        return submit(self, direction, Table(*(getattr(table, name)[:kept] for name in COLUMNS)), path)

    monkeypatch.setattr(CpuMover, "submit", nothing)
    rows, _ = run.measure(dataclasses.replace(SPEC, hit_rates=(), tokens=(64,)), None)
    assert [row["correct"] for row in rows] == [True, False, False, False]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setenv("DOVETAIL_CUDA_LIBRARY", str(build("cuda")))
    driver.load.cache_clear()
    with Session("cuda", Bounds(pin_bytes=64 << 20)) as made:
        yield made
    driver.load.cache_clear()


def test_contenders_on_a_stand_in_driver(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks in the stand-in's memory, which the CPU reaches: every contender copies in its own form."""
    for_model = PagedMemory.for_model

    def on_device(*arguments: Any, **options: Any) -> PagedMemory:
        made = for_model(*arguments, **options)
        raw = session.arena("device", made.tokens.nbytes).take(made.tokens.nbytes)
        made.tokens = raw.view(made.tokens.dtype).view(made.tokens.shape)
        made.words = made.tokens.flatten(2).view(torch.int64)
        return made

    monkeypatch.setattr(PagedMemory, "for_model", on_device)
    forms: list[tuple[str, str, int | None]] = []
    submit = GpuMover.submit

    def noted(self: GpuMover, direction: str, table: Table, path: str = "", **options: Any) -> Any:
        forms.append((str(direction), str(path), options["entries_per_call"]))
        return submit(self, direction, table, path, **options)

    monkeypatch.setattr(GpuMover, "submit", noted)
    names = [name for name in usual("cuda") if name not in ("vllm", "staged")]  # these have kernels
    entries = [contender(name, "cuda", row_bytes=4096, num_layers=3) for name in names]
    vllm = contender("vllm", "cuda", row_bytes=64 << 10, num_layers=3)  # without Triton there is no kernel to run
    model = build_model(TINY, "cpu", 1)
    with Server(TINY, model, num_blocks=128, pool_blocks=64, session=session, seed=1) as server:
        rows = first_token.measure(SPEC, server, [*entries, vllm], 64)
        rows += throughput.measure(SPEC, server, [*entries, vllm], 0.5)
    assert all(row["correct"] and row["same_bits"] for row in rows)
    one_call = vllm.store.entries_per_call if vllm.store else None
    for direction in ("fetch", "store"):
        assert (direction, "dma-loop", None) in forms
        assert (direction, "auto", None) in forms
        assert (direction, "dma-batch", one_call) in forms


def test_a_context_in_host_memory() -> None:
    model = build_model(TINY, "cpu", 1)
    rows = offload.measure(SPEC, TINY, model, 100)
    assert [row["contender"] for row in rows] == ["device", "offloaded"]
    assert all(row["correct"] and row["same_bits"] and row["time_us"] > 0 for row in rows)
    whole, ours = (row["device_bytes"] for row in rows)
    assert ours == 2 * 7 * TINY.row_bytes
    assert whole == 106 * TINY.block_bytes // 16
    same = {"model": "m", "row_bytes": TINY.row_bytes}
    assert "time of others / offloaded: device" in verdict.lines([same | row for row in rows])[0]


def test_a_part_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(throughput, "measure", fails)
    rows, notes = run.measure(dataclasses.replace(SPEC, tokens=(64,), hit_rates=(1.0,)), None)
    assert notes == ["tiny, requests, 100% kept failed: RuntimeError: out of memory"]
    assert {row["section"] for row in rows} == {"first token"}


def test_blocks_are_scattered_or_in_a_row() -> None:
    blocks = Scattered(20, 1)
    first = blocks.alloc(8)
    assert len(set(first.tolist())) == 8
    assert first.tolist() != sorted(first.tolist())
    blocks.free(first)
    blocks.together = True
    assert blocks.alloc(12).tolist() == list(range(12))
    assert blocks.num_free == 8
    blocks.free([1, 5])
    assert blocks.alloc(8).tolist() == list(range(12, 20))
    assert sorted(blocks.alloc(2).tolist()) == [1, 5]  # no row is left


def test_what_is_too_large_is_refused_before_anything_is_measured(session: Session) -> None:
    with pytest.raises(ValueError, match=r"--cache: 100000 bytes are too few for tiny: \d+ are needed"):
        run.measure(dataclasses.replace(SPEC, cache_bytes=100_000), None)
    model = build_model(TINY, "cpu", 1)
    with pytest.raises(NotSupported, match="bytes of pinned memory are over the limit; .* --pin allows more"):
        Server(TINY, model, num_blocks=64, pool_blocks=1 << 20, session=session, seed=1)
    with pytest.raises(NotSupported, match=r"\d+ bytes of pinned memory are needed; .* --pin allows more"):
        run.measure(dataclasses.replace(SPEC, offload_tokens=(1 << 30,)), session)
    with pytest.raises(ValueError, match="name at least one that fetches"):
        run.measure(dataclasses.replace(SPEC, contenders=("recompute",)), None)


def test_the_policy_of_vllm_is_by_the_size_of_a_page() -> None:
    small = contender("vllm", "cuda", row_bytes=16 << 10, num_layers=32)
    large = contender("vllm", "cuda", row_bytes=64 << 10, num_layers=32)
    assert small.fetch is not None
    assert large.fetch is not None
    assert (small.fetch.path, large.fetch.path) == (Form.KERNEL, Form.DMA_BATCH)
    assert small.store == large.store == large.fetch
    assert large.path == "dma-batch in one call"
    steps = [contender("layers", "cuda", row_bytes=size << 10, num_layers=32).layers for size in (1, 16, 64, 1024)]
    assert steps == [32, 16, 4, 1]
    entries = [contender(name, "cuda", row_bytes=4096, num_layers=3) for name in usual("cuda")]
    assert keeper(entries).name == "auto"
    assert keeper(entries[:3]).name == "loop"


def row(contender_name: str, time_us: float | None, section: str = "first token", row_bytes: int = 16384) -> Any:
    return {
        "section": section, "model": "m", "row_bytes": row_bytes, "tokens": 1024, "hit_rate": 0.5, "time_us": time_us,
        "contender": contender_name, "same_bits": True, "same_token": True, "correct": time_us is not None,
    }  # fmt: skip


def test_verdicts_say_where_ours_does_not_win() -> None:
    rows = [row("auto", 100.0), row("vllm", 90.0), row("loop", 160.0), row("layers", 80.0)]
    rows += [row("auto", 100.0, "requests"), row("loop", 180.0, "requests"), row("vllm", None, "requests")]
    case = "pages of 16K, prefix of 1K tokens"
    assert verdict.lines(rows) == [
        f"first token, m, {case}: auto 0.10 ms; time of others / auto: vllm 0.90x, loop 1.60x, layers 0.80x",
        f"requests, m, {case}, 50% kept: auto 0.10 ms; time of others / auto: loop 1.80x",
        "first token: over the loop 1.60x to 1.60x, mean 1.60x; the aim of 1.5x is met in 1 of 1 cases",
        "requests: over the loop 1.80x to 1.80x, mean 1.80x; the aim of 1.9x is met in 0 of 1 cases",
        "pages under 64 KB: ahead of vLLM's policy in 0 of 1 cases, 0.90x to 0.90x",
        f"does not win: first token, m, {case}: vllm takes 10.0% less time than auto",
        f"another of our forms is better: first token, m, {case}: layers takes 20.0% less time than auto",
        "1 of 7 results WRONG",
    ]
    rows = [row("auto", 100.0), row("loop", 160.0), row("layers", 80.0)]
    assert verdict.lines(rows)[-3:] == [
        "auto beats the baselines everywhere",
        f"another of our forms is better: first token, m, {case}: layers takes 20.0% less time than auto",
        "all correct",
    ]
    rows = [row("auto", 1.0) | {"same_bits": False, "same_token": False}, row("vllm", 2.0)]
    assert [line.split(":")[0] for line in verdict.lines(rows)[-3:-1]] == ["1 of 2 rows"] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench kv --serve --model llama", "--model: 'llama' is not one of llama-8b, llama-8b-tp4, tiny"),
        ("bench kv --serve --path dma-2d", "'dma-2d' is not one of recompute, cpu, layers, runs, which cpu has"),
        ("bench kv --serve --hit 2", "--hit: 2 is no share of requests"),
        ("bench kv --serve --hit often", "--hit: 'often' is no number between 0 and 1"),
        ("bench kv --serve --requests 0", "--requests: 0 must be at least 1"),
        ("bench kv --serve --in-flight 0", "--in-flight: 0 must be at least 1"),
        ("bench kv --serve --layout mla", "--layout is for kv without --serve"),
        ("bench kv --hit 0.5", "--hit is for --serve"),
        ("bench all_gather --serve", "--serve is for kv"),
        ("bench kv --serve --pin 1G", "--force and --pin are for --backend cuda"),
    ],
)
def test_errors_of_usage(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*words.split()) == 2
    assert message in capsys.readouterr().err


def test_requests_decoded_together_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By steps of fixed form, which are graphs on a GPU; then with tokens that went to somebody else."""
    spec = dataclasses.replace(SPEC, graphs=True, tokens=(64,), hit_rates=(0.5,), num_requests=4, new_tokens=4)
    rows, _ = run.measure(spec, None)
    rows = [row for row in rows if row["section"] == "requests"]
    assert [row["correct"] for row in rows] == [True] * 4
    assert {(row["decoded"], row["decoded_at_once"]) for row in rows} == {("together", 3)}
    decode, passes = Server.decode, []

    def swapped(self: Server, tokens: torch.Tensor, caches: Any) -> torch.Tensor:
        passes.append(len(caches))
        return decode(self, tokens, caches[::-1] if len(passes) > 6 else caches)  # the reference is right

    monkeypatch.setattr(Server, "decode", swapped)
    assert [row["correct"] for row in run.measure(spec, None)[0]][4:] == [False] * 4
    monkeypatch.setattr(Server, "decode", lambda self, tokens, caches: torch.full((len(caches), 99), float("nan")))
    assert [row["correct"] for row in run.measure(spec, None)[0]][4:] == [False] * 4


def test_a_prompt_whose_prefix_is_there_is_computed_first() -> None:
    class Cache:
        def __init__(self, has_arrived: bool) -> None:
            self.has_arrived = has_arrived

    late, here = (throughput._Flight(None, Cache(arrived), 1) for arrived in (False, True))  # type: ignore[arg-type]
    assert throughput._next([late, here], is_urgent=False) is here
    assert throughput._next([late], is_urgent=False) is None
    assert throughput._next([late], is_urgent=True) is late
    assert throughput._next([], is_urgent=True) is None
