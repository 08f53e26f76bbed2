"""vLLM on a CPU, with our worker: what was stored and loaded again gives the tokens of a run that kept everything."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.serve import BLOCK_BYTES, BLOCK_TOKENS, LENGTHS, MARK

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is missing: make test-vllm", allow_module_level=True)

ROOT = Path(__file__).parents[2]
CPU = "cpu,the cache is in host memory"
BLOCKS = sum(length // BLOCK_TOKENS for length in LENGTHS)
PAGE = ROOT / "docs/vllm.md"
#: What the documentation tells users to write, in this order: our spec, and our connector too.
LINES = re.findall(r"--kv-transfer-config '([^']+)'", PAGE.read_text())


def plain(line: str = LINES[0], **extra: Any) -> dict[str, Any]:
    """Our spec under vLLM's connector."""
    found: dict[str, Any] = json.loads(line)
    found["kv_connector_extra_config"] |= {"cpu_bytes_to_use": 300 * BLOCK_BYTES, **extra}
    return found


def with_connector(**extra: Any) -> dict[str, Any]:
    """And under ours."""
    return plain(LINES[1], **extra)


def test_the_readme_has_the_line_of_the_documentation() -> None:
    assert LINES[0] in (ROOT / "README.md").read_text()


@functools.cache
def model(sliding: bool) -> tempfile.TemporaryDirectory[str]:
    """A folder; the first engine fills it."""
    return tempfile.TemporaryDirectory()


def run(transfer: dict[str, Any] | None, between: str, *, sliding: bool = False) -> dict[str, Any]:
    scenario = {"transfer": transfer, "between": between, "model": model(sliding).name, "sliding": sliding}
    command = [sys.executable, "-m", "tests.vllm.serve", json.dumps(scenario)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert len(lines) == 1, (done.stdout + done.stderr)[-6000:]
    assert "were not closed" not in done.stderr
    found: dict[str, Any] = json.loads(lines[0].removeprefix(MARK))
    return found


@functools.cache
def reference() -> dict[str, Any]:
    """Without offloading: the second round finds its prefixes in the engine's own cache."""
    return run(None, "nothing")


def test_loaded_prefixes_give_equal_tokens_and_logprobs() -> None:
    found, wanted = run(plain(), "reset"), reference()
    assert (found["worker"], found["memory"]) == ("DovetailWorker", "HostMemory")
    assert found["first"] == wanted["first"]
    assert found["second"] == wanted["second"]  # to the last bit of every logprob
    assert [one["cached"] for one in found["second"]] == [n // BLOCK_TOKENS * BLOCK_TOKENS for n in LENGTHS]
    assert found["closed"]
    size, each = BLOCKS * BLOCK_BYTES, len(LENGTHS)
    assert found["transfers"] == {f"store,{CPU}": each, f"load,{CPU}": each}
    assert found["bytes"] == {f"store,{CPU}": size, f"load,{CPU}": size}
    for direction in ("load", "store"):
        name = f"vllm:kv_offload_{direction}_"
        assert found["metrics"][name + "bytes_total"] == size
        assert found["metrics"][name + "size_count"] == each
        assert found["metrics"][name + "size_sum"] == size
        assert 0 < found["metrics"][name + "time_total"] < 10
    assert not any(name.startswith("dovetail") and "{" in name for name in found["metrics"])


def test_a_corrupted_load_is_seen() -> None:
    """If this passes with equal results, the test above proves nothing."""
    found, wanted = run(plain(), "corrupt"), reference()
    assert found["first"] == wanted["first"]
    for one, other in zip(found["second"], wanted["second"], strict=True):
        assert one["cached"] == other["cached"]
        assert one["logprobs"] != other["logprobs"]
        (token, right), *_ = other["logprobs"][0].items()
        assert abs(one["logprobs"][0].get(token, -99.0) - right) > 1e-3


def test_our_connector_reports_paths_and_our_pool_hands_out_runs() -> None:
    """In chunks of two blocks."""
    found, wanted = run(with_connector(blocks_per_chunk=2, dovetail={"pool": "dovetail"}), "reset"), reference()
    assert found["first"] == wanted["first"]
    assert found["second"] == wanted["second"]
    assert found["slots"] == 300
    for direction in ("load", "store"):
        labels = "{" + f"{direction},{CPU}" + "}"
        assert found["metrics"]["dovetail:kv_transfers_total" + labels] == len(LENGTHS)
        assert found["metrics"]["dovetail:kv_bytes_total" + labels] == BLOCKS * BLOCK_BYTES
        assert found["metrics"][f"vllm:kv_offload_{direction}_bytes_total"] == BLOCKS * BLOCK_BYTES


@pytest.mark.parametrize("pool", ["vllm", "dovetail"])
def test_a_pool_that_is_too_small_evicts(pool: str) -> None:
    room = LENGTHS[-1] // BLOCK_TOKENS + 1
    transfer = with_connector(cpu_bytes_to_use=room * BLOCK_BYTES, dovetail={"pool": pool})
    found, wanted = run(transfer, "reset"), reference()
    assert found["slots"] == room
    assert found["first"] == wanted["first"]
    for one, other in zip(found["second"], wanted["second"], strict=True):
        assert one["tokens"] == other["tokens"]  # those that were computed again may differ in a last bit of a logprob
    assert found["bytes"][f"store,{CPU}"] > BLOCKS * BLOCK_BYTES  # some were stored twice


def test_a_model_with_two_groups_of_layers() -> None:
    """Full and sliding attention: groups have their own blocks in the same memory, and jobs a part of each."""
    found, wanted = run(plain(), "reset", sliding=True), run(None, "nothing", sliding=True)
    assert found["first"] == wanted["first"]
    assert found["second"] == wanted["second"]
    assert found["second"] != reference()["second"]  # the window is seen
    assert found["slots"] == 600  # a block has half of the layers
    full, window = BLOCKS, 2 * len(LENGTHS)
    assert found["bytes"][f"load,{CPU}"] == (full + window) * BLOCK_BYTES // 2


def test_tiers_behind_the_host_stay(tmp_path: Path) -> None:
    """vLLM's file tier reads and fills the memory that our worker moves from: a new engine finds the old files."""
    tier = {"type": "fs", "root_dir": str(tmp_path)}
    transfer = plain(spec_name="DovetailTieringSpec", blocks_per_chunk=2, secondary_tiers=[tier])
    found, wanted = run(transfer, "reset"), reference()
    assert (found["worker"], found["memory"]) == ("DovetailWorker", "Region")
    assert found["second"] == wanted["second"]
    assert found["closed"]
    files = list(tmp_path.rglob("*.bin"))
    assert len(files) == BLOCKS // 2
    assert {file.stat().st_size for file in files} == {2 * BLOCK_BYTES}
    again = run(transfer, "nothing")
    assert again["first"] == wanted["second"]
    assert again["bytes"] == {f"load,{CPU}": BLOCKS * BLOCK_BYTES}  # all came from the files


def test_the_format_of_shared_memory_is_the_one_of_vllms_worker() -> None:
    """Where its own worker would put each page of each block of a chunk."""
    import numpy as np
    import torch
    from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs

    from dovetail.kv.mover import linear
    from dovetail.kv.planner import Direction, Pieces
    from dovetail.kv.vllm.jobs import Caches, Job, Page

    per_chunk, sizes = 3, [64, 32, 64]
    offsets = np.cumsum([0, *sizes]).tolist()
    row = per_chunk * sum(sizes)
    host = torch.zeros(8 * row, dtype=torch.int8)
    tensors = [torch.zeros(40, size, dtype=torch.int8) for size in sizes]
    pages = [Page(tensor=t, padded_bytes=s, offset=o) for t, s, o in zip(tensors, sizes, offsets, strict=False)]
    chunks, blocks = np.array([5, 0, 2]), np.arange(7, 14)  # from the second block of the first chunk on
    job = Job(blocks=blocks, chunks=chunks, group_sizes=[7], block_indices=[4])
    caches = Caches([pages], blocks_per_chunk=per_chunk, shared=True)
    copies = caches.table(Direction.FETCH, job, Pieces(num_slots=8, slot_bytes=row, slots_per_piece=8))
    device, _, there, length = linear(copies)
    found = {d + caches.base: (h, n) for d, h, n in zip(device.tolist(), there.tolist(), length.tolist(), strict=True)}
    wanted = {}
    for t, size, offset in zip(tensors, sizes, offsets, strict=False):
        view = host.as_strided((8, per_chunk * size), (row, 1), per_chunk * offset)
        pointers = np.zeros(7, np.uint64)
        compute_sub_block_ptrs(chunks, per_chunk, pointers, view, skip_count=1)
        for block, pointer in zip(blocks.tolist(), pointers.tolist(), strict=True):
            wanted[t.data_ptr() + block * size] = (pointer - host.data_ptr(), size)
    assert found == wanted
