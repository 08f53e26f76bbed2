"""Commands that are terminated or killed while their ranks work: no rank and no temporary folder stays."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dovetail import cli

LIMIT_S = 100.0
MAIN = (sys.executable, "-c", "from dovetail.cli import main; main()")
COMMANDS = {
    "bench-collective": "bench all_gather --ranks 2 --baseline gloo -b 1K -e 1K --iters 1000000",
    "bench-fused": "bench fused --op gemm_all_to_all --ranks 2 --iters 1000000",
    "bench-overlap": "bench overlap --ranks 2 --iters 1000000",
    "selftest": "doctor --selftest --backend cpu --ranks 2",
}
#: What a rank writes into a command's temporary folder when it is at work.
AT_WORK = ("dovetail-bench-*/progress", "dovetail-selftest-*/at")


def _until(met: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not met() and time.monotonic() < deadline:
        time.sleep(0.02)
    return met()


def _below(pid: int) -> list[int]:
    """The children of a process, multiprocessing's tracker among them."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@contextmanager
def _started(words: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("DOVETAIL_")}
    env |= {"TMPDIR": str(folder), "DOVETAIL_PROFILE": str(folder / "profile.json"), "OMP_NUM_THREADS": "1"}
    with (folder / "said").open("wb") as said:
        command = subprocess.Popen([*MAIN, *words.split()], stderr=said, stdout=subprocess.DEVNULL, env=env)
    try:
        yield command
    finally:
        _end(command)


def _end(command: subprocess.Popen[bytes]) -> None:
    """With all that it has started."""
    children = _below(command.pid)
    command.kill()
    command.wait()
    for pid in filter(_runs, children):
        os.kill(pid, signal.SIGKILL)


TERM = (signal.SIGTERM, cli.TERMINATED, "terminated")
HUP = (signal.SIGHUP, cli.HUNG_UP, "ended with its terminal")


@pytest.mark.parametrize(
    ("name", "number", "status", "how"),
    [pytest.param(name, *(HUP if name == "selftest" else TERM), id=name) for name in COMMANDS],
)
def test_terminated(tmp_path: Path, name: str, number: signal.Signals, status: int, how: str) -> None:
    with _started(COMMANDS[name], tmp_path) as command:
        assert _until(lambda: any(list(tmp_path.glob(place)) for place in AT_WORK), LIMIT_S)
        ranks = _below(command.pid)
        assert len(ranks) == 3
        command.send_signal(number)
        assert command.wait(LIMIT_S) == status
        said = (tmp_path / "said").read_text()
        assert said.strip().splitlines()[-1] == f"dovetail: {how}; nothing was saved"
        assert "Traceback" not in said
        assert _until(lambda: not any(map(_runs, ranks)), 10)
        assert not list(tmp_path.glob("dovetail-*"))


def test_terminated_while_ranks_start(tmp_path: Path) -> None:
    with _started(COMMANDS["bench-fused"], tmp_path) as command:
        assert _until(lambda: len(_below(command.pid)) > 1, LIMIT_S)
        ranks = _below(command.pid)
        command.send_signal(signal.SIGTERM)
        assert command.wait(LIMIT_S) == cli.TERMINATED
        said = (tmp_path / "said").read_text()
        assert "Traceback" not in said
        assert _until(lambda: not any(map(_runs, ranks)), 10)
        assert not list(tmp_path.glob("dovetail-*"))


def test_a_terminal_that_is_closed(tmp_path: Path) -> None:
    """The kernel sends SIGHUP to all that run in it, and nothing can be written to it any more."""
    ours, theirs = pty.openpty()
    env = {k: v for k, v in os.environ.items() if not k.startswith("DOVETAIL_")}
    env |= {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *COMMANDS["bench-fused"].split()], env=env, start_new_session=True,
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    try:
        at_work = (_until_said(ours, lambda: bool(list(tmp_path.glob(AT_WORK[0])))), _below(command.pid))
        os.close(ours)
        assert at_work[0]
        assert len(at_work[1]) == 3
        assert command.wait(LIMIT_S) == cli.HUNG_UP
        assert _until(lambda: not any(map(_runs, at_work[1])), 10)
        assert not list(tmp_path.glob("dovetail-*"))
    finally:
        _end(command)


#: The terminal is that of its session, which this process leads.
IN_TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from dovetail.cli import main
main()
"""


def _until_said(terminal: int, met: Callable[[], bool]) -> bool:
    """As `_until`; reads what is written to the terminal meanwhile, which would else be full one day."""

    def look() -> bool:
        while select.select([terminal], [], [], 0)[0]:
            os.read(terminal, 4096)
        return met()

    return _until(look, LIMIT_S)


def test_killed(tmp_path: Path) -> None:
    """Nobody is there to remove the folder; ranks end all the same."""
    with _started(COMMANDS["bench-fused"], tmp_path) as command:
        assert _until(lambda: any(list(tmp_path.glob(place)) for place in AT_WORK), LIMIT_S)
        ranks = _below(command.pid)
        command.kill()
        command.wait()
        assert _until(lambda: not any(map(_runs, ranks)), 10)
