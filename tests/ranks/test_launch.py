"""`dovetail.launch`: what it sends, how many ranks it takes, and that none outlives it. Ranks are new processes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dovetail
from dovetail.errors import NotSupported, PeerError

ROOT = Path(__file__).parents[2]
LIMIT_S = 100.0


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("DOVETAIL_")}
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _script(folder: Path, text: str, interpret: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of a user's to its end."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    env = _environment() | {"TRITON_INTERPRET": interpret}
    return subprocess.run(
        [sys.executable, str(path)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.parametrize("ranks", [-1, 0, 1025, 100_000])
def test_a_wrong_number_of_ranks_starts_nothing(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.coll.spawn.mp", None)
    with pytest.raises(ValueError, match=f"ranks must be 1 to 1024, not {ranks}"):
        dovetail.launch(print, ranks=ranks)


def test_what_cannot_be_sent_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.coll.spawn.mp", None)
    lock = threading.Lock()

    def work() -> bool:
        return lock.locked()

    with pytest.raises(TypeError, match=r"work or its arguments can't be sent to the ranks: .*lock.*a file"):
        dovetail.launch(work, ranks=2)


@pytest.mark.parametrize(
    ("fn", "ranks", "text"),
    [
        (3, 2, r"fn must be a function, not 3: launch\(fn, ranks, args\)"),
        (print, "2", "ranks must be an int, 1 to 1024, not '2'"),
        (print, 2.0, "ranks must be an int, 1 to 1024, not 2.0"),
    ],
    ids=["no function", "text", "float"],
)  # fmt: skip
def test_arguments_of_a_wrong_type_start_nothing(
    fn: Any, ranks: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.coll.spawn.mp", None)
    with pytest.raises(TypeError, match=text):
        dovetail.launch(fn, ranks)


def _leave(how: Any) -> None:
    """Ends rank 1, for which rank 0 waits."""
    if dovetail.init().rank == 1:
        raise how
    dovetail.barrier()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (SystemExit(0), r"rank 1 called sys\.exit\(0\) before"),
        (SystemExit("enough"), r"rank 1 called sys\.exit\('enough'\) before"),
        (SystemExit(), r"rank 1 called sys\.exit\(\) before"),
        (KeyboardInterrupt(), "rank 1 raised KeyboardInterrupt before"),
    ],
    ids=["0", "text", "nothing", "interrupt"],
)  # fmt: skip
@pytest.mark.usefixtures("forked")
def test_a_rank_that_leaves_does_not_end_the_program(how: BaseException, text: str) -> None:
    """It would end without a word, and with status 0."""
    with pytest.raises(PeerError, match=text) as caught:
        dovetail.launch(_leave, ranks=2, args=(how,))
    assert caught.value.rank == 1
    assert "_leave" in caught.value.__notes__[0]  # where it was


def _launches() -> None:
    dovetail.launch(print, ranks=2)


@pytest.mark.usefixtures("forked")
def test_a_rank_launches_no_ranks() -> None:
    with pytest.raises(NotSupported, match=r"launch can't be called on a rank.*dovetail\.new_group"):
        dovetail.launch(_launches, ranks=1)


NO_GUARD = """
    import dovetail

    def work():
        return 1

    dovetail.launch(work, ranks=2)
"""


def test_a_program_without_a_guard_is_told_once(tmp_path: Path) -> None:
    """Each rank would launch ranks of its own when it imports the program."""
    done = _script(tmp_path, NO_GUARD, "0")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert 'put that call under `if __name__ == "__main__":`' in last


def test_a_program_from_standard_input_is_refused() -> None:
    done = subprocess.run(
        [sys.executable], cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
        input=textwrap.dedent(NO_GUARD),
    )  # fmt: skip
    assert "NotSupported: the program comes from stdin, which ranks can't import: save it" in done.stderr


THREADS = """
    import os, sys
    {first}import torch; torch.set_num_threads({at_first}) if {at_first} else None
    import dovetail

    def work(asked):
        import torch
        if asked:
            torch.set_num_threads(asked)
        return torch.get_num_threads()

    if __name__ == "__main__":
        os.sched_setaffinity(0, [int(core) for core in sys.argv[1].split(",")])
        for asked, env in ((0, {{}}), (5, {{}}), (0, {{"OMP_NUM_THREADS": "3"}})):
            print(*dovetail.launch(work, ranks=2, args=(asked,), env=env))
        assert "OMP_NUM_THREADS" not in os.environ  # the launcher's own
"""


@pytest.mark.parametrize(
    ("first", "at_first"), [("", 0), ("", 7), ("# ", 0)],
    ids=["imported with the program", "the program says how many", "imported later"],
)  # fmt: skip
def test_ranks_share_the_cores(first: str, at_first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computes with one thread on two cores, and on one; but for what it, the program or the caller says."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(THREADS.format(first=first, at_first=at_first)))
    alone = str(at_first or 1)
    for some in (cores[:1], cores):
        command = [sys.executable, str(path), ",".join(map(str, some))]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert ended.stdout.split() == [alone, alone, "5", "5", "3", "3"], ended.stderr


STUCK = """
    import os, sys, threading, time
    import dovetail

    def work(folder):
        with open(f"{folder}/{os.environ['DOVETAIL_RANK']}.tmp", "w") as file:
            file.write(str(os.getpid()))
        os.rename(file.name, file.name.removesuffix(".tmp"))
        time.sleep(600)

    if __name__ == "__main__":
        run = lambda: dovetail.launch(work, ranks=2, args=(sys.argv[1],))
        if sys.argv[2] == "thread":
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        else:
            run()
"""


def _until(met: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not met() and time.monotonic() < deadline:
        time.sleep(0.02)
    return met()


def _runs(pid: int) -> bool:
    """A process that has ended and waits to be collected does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
@pytest.mark.parametrize("caller", ["main", "thread"])
def test_ranks_end_with_their_launcher(tmp_path: Path, number: signal.Signals, caller: str) -> None:
    """However it ends, and whichever of its threads has launched them."""
    program, told = tmp_path / "program.py", tmp_path / "ranks"
    program.write_text(textwrap.dedent(STUCK))
    told.mkdir()
    command = [sys.executable, str(program), str(told), caller]
    launcher = subprocess.Popen(command, env=_environment(), stderr=subprocess.DEVNULL)
    ranks: list[int] = []
    try:
        assert _until(lambda: {"0", "1"} <= {path.name for path in told.iterdir()}, LIMIT_S)
        ranks = [int((told / name).read_text()) for name in ("0", "1")]
        assert all(_runs(pid) for pid in ranks)
        launcher.send_signal(number)
        launcher.wait(LIMIT_S)
        assert _until(lambda: not any(map(_runs, ranks)), 10)
    finally:
        launcher.kill()
        launcher.wait()
        for pid in filter(_runs, ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_rank_whose_launcher_went_before_it_was_ready(tmp_path: Path) -> None:
    """The launcher is killed as soon as a rank exists; the rank still imports, and ends when it has."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(STUCK))
    launcher = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path), "main"], env=_environment(), stderr=subprocess.DEVNULL
    )
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    found: list[int] = []

    def started() -> bool:
        found[:] = [int(word) for word in children.read_text().split()]
        return len(found) >= 3  # multiprocessing's tracker, and two ranks

    try:
        assert _until(started, LIMIT_S)
        launcher.kill()
        launcher.wait()
        assert _until(lambda: not any(map(_runs, found)), LIMIT_S)
        assert not {"0", "1"} & {path.name for path in tmp_path.iterdir()}
    finally:
        launcher.kill()
        launcher.wait()
        for pid in filter(_runs, found):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


KERNELS = """
    import torch, triton
    import triton.language as tl
    import dovetail
    from dovetail.language import put

    @triton.jit
    def double(x):
        tl.store(x, 2 * tl.load(x))

    @triton.autotune([triton.Config({})], key=[])
    @triton.jit
    def tuned(x):
        tl.store(x, 3 * tl.load(x))

    def work(*kernels):
        import __main__
        return [kernel is mine for kernel, mine in zip(kernels, (__main__.double, __main__.tuned, put))]

    if __name__ == "__main__":
        assert type(double).__name__ == "JITFunction"  # interpreted ones could be copied
        assert dovetail.launch(work, ranks=2, args=(double, tuned, put)) == [[True] * 3] * 2
        assert dovetail.launch(lambda: work(double, tuned, put), ranks=2) == [[True] * 3] * 2

        def inside():
            @triton.jit
            def hidden(x):
                tl.store(x, 0)
            return hidden

        try:
            dovetail.launch(work, ranks=2, args=(inside(),))
        except TypeError as error:
            assert "at the top level of a file" in str(error), error
            print("well")
"""


@pytest.fixture
def triton(need: Callable[[str, object], None]) -> None:
    need("triton", importlib.util.find_spec("triton"))


@pytest.mark.usefixtures("triton")
def test_kernels_of_a_program(tmp_path: Path) -> None:
    """They can't be copied: they go by name, also beside functions that have none."""
    done = _script(tmp_path, KERNELS, "0")
    assert done.stdout == "well\n", done.stderr[-3000:]


@pytest.mark.usefixtures("triton")
def test_the_example_of_the_language_page_is_a_program(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/language.md").read_text(), re.DOTALL)
    done = _script(tmp_path, example, "1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "[4.0, 2.0]\n"
