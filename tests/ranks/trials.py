"""Kills or stops a rank at a random moment of a random collective, many times; prints what the others saw, as JSON.

Run as a script: one process imports torch, then forks the ranks of each trial, so that a trial takes milliseconds.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
import traceback
import uuid
from typing import Any

import dovetail.hw.cpu._native
import torch

import dovetail
import dovetail.coll
from dovetail.errors import PeerError, Timeout

RANKS = 3


def _rank(rank: int, token: str, seed: int, timeout_s: float, report: int, ready: int) -> None:
    os.environ.update(
        DOVETAIL_RENDEZVOUS=token, DOVETAIL_RANK=str(rank), DOVETAIL_WORLD_SIZE=str(RANKS), DOVETAIL_HEAP="1G"
    )
    fds_before = len(os.listdir("/proc/self/fd"))
    g = dovetail.init(timeout=60)
    rng = random.Random(seed)
    said: dict[str, Any] = {"rank": rank}
    for _ in range(12):
        _call(rng)  # plans are made: from here on a moment is most likely one of a collective
    dovetail.barrier()
    g.set_timeout(timeout_s)
    os.write(ready, b"x")
    try:
        while True:
            _call(rng)
    except (PeerError, Timeout) as error:
        said.update(error=type(error).__name__, about=getattr(error, "rank", -1), text=str(error), at=time.monotonic())
    except BaseException:
        said["error"] = traceback.format_exc()
    try:
        dovetail.all_reduce(torch.zeros(4))
        said["again"] = "no error"
    except (PeerError, Timeout) as again:
        said["again"] = type(again).__name__
    dovetail.finalize()
    gc.collect()
    said["fds"] = len(os.listdir("/proc/self/fd")) - fds_before
    os.write(report, (json.dumps(said) + "\n").encode())
    os._exit(0)


def _call(rng: random.Random) -> None:
    items, kind = rng.choice((256, 16_384, 1 << 18)), rng.choice(("heap", "ordinary"))
    make = dovetail.empty if kind == "heap" else torch.empty
    t, whole = make(items), make(items * RANKS)
    match rng.choice(("ar", "ag", "aa", "async")):
        case "ar":
            dovetail.all_reduce(t)
        case "ag":
            dovetail.all_gather_into_tensor(whole, t)
        case "aa":
            dovetail.all_to_all_single(whole, make(items * RANKS))
        case _:
            works = [dovetail.all_reduce(make(items), async_op=True) for _ in range(3)]
            for w in works:
                w.wait()


def trial(seed: int, how: int, timeout_s: float) -> dict[str, Any]:
    """One trial: who was hit, when, and what the survivors said."""
    rng = random.Random(seed)
    token, victim = uuid.uuid4().hex, rng.randrange(RANKS)
    read_end, write_end = os.pipe()
    ready_read, ready_write = os.pipe()
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            try:
                _rank(rank, token, seed, timeout_s, write_end, ready_write)
            finally:
                os._exit(1)
        children.append(pid)
    os.close(write_end)
    os.read(ready_read, 1)
    time.sleep(rng.uniform(0, 0.05))  # the random moment
    hit_at = time.monotonic()
    os.kill(children[victim], how)
    said = []
    with os.fdopen(read_end) as lines:
        for _ in range(RANKS - 1):
            said.append(json.loads(lines.readline() or '{"error": "ended without a word"}'))
    for rank, pid in enumerate(children):
        if rank == victim:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(ready_read)
    os.close(ready_write)
    return {"victim": victim, "hit_at": hit_at, "said": said}


def main() -> None:
    count, how, timeout_s = int(sys.argv[1]), signal.Signals[sys.argv[2]], float(sys.argv[3])
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a rank's own collection, which takes as long as all of its calls, finds only what it made itself
    for seed in range(count):
        print(json.dumps(trial(seed, how, timeout_s)), flush=True)


if __name__ == "__main__":
    main()
