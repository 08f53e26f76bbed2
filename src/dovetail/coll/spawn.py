"""`launch(fn, ranks=N)`: runs a function on N ranks of this machine, from a script or a notebook.

Owns the child processes: starts them, collects results and errors, and ends all of them by their ids when one fails,
when the caller is interrupted, or when time is up. Should this process be killed, they end by themselves. Nothing is
left running.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import importlib
import io
import multiprocessing as mp
import multiprocessing.connection as mpc
import operator
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import process as processes
from multiprocessing import resource_tracker
from typing import Any

from dovetail.errors import DovetailError, NotSupported, PeerError, Timeout
from dovetail.measure import cores

MOST_RANKS = 1024
"""No machine has memory for as many processes; a larger number is a slip, and would take the machine down."""
_GRACE_S = 2.0
#: With this status a new process ends that calls `launch` before it is a rank: the program has no guard.
_NO_GUARD = 113
_NAME = "dovetail rank"  # of our processes, from the start
#: Who set one of these has decided how many threads a process computes with.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_PR_SET_PDEATHSIG = 1
_beginning = threading.Lock()  # the environment is this process's, whichever thread launches


def _let_torch_ops_pass() -> None:
    """cloudpickle takes a name `ops` in a function that also names `torch` for the module `torch.ops`, which is an
    object that can't be pickled; it is sent by its name instead."""
    if "torch" in sys.modules:
        import torch

        copyreg.pickle(type(torch.ops), _name_of_torch_ops)


def _name_of_torch_ops(_: Any) -> tuple[Any, ...]:
    return operator.attrgetter("ops"), (sys.modules["torch"],)


def _packed(job: tuple[Callable[..., Any], tuple[Any, ...]]) -> bytes:
    """What is sent to the ranks: by value, so that functions of a notebook can go, but for Triton's kernels.

    A kernel holds locks and can't be copied; it goes by its module and name, also if that is the program itself, which
    every rank has imported.
    """
    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            found = _home_of(obj)
            return super().reducer_override(obj) if found is None else (_from_home, found)

    _let_torch_ops_pass()
    text = io.BytesIO()
    try:
        Pickler(text).dump(job)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        name = getattr(job[0], "__name__", repr(job[0]))
        mend = "put what can't be sent, such as a Triton kernel, at the top level of a file, or make it inside"
        raise TypeError(f"{name} or its arguments can't be sent to the ranks: {error}; {mend} {name}") from error
    return text.getvalue()


def _home_of(obj: Any) -> tuple[str, str] | None:
    """Module and name of a Triton kernel that the ranks can import; None for all else."""
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None or not isinstance(obj, jit.KernelInterface):
        return None
    function = obj
    while hasattr(function, "fn"):  # tuned kernels hold kernels
        function = function.fn
    module, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    if getattr(sys.modules.get(module), name, None) is not obj or (module == "__main__" and not _ranks_import_main()):
        return None
    return module, name


def _ranks_import_main() -> bool:
    """Whether the program is a file or a module, which new processes import; a notebook or a terminal is none."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return not (spec.name == "__main__" or spec.name.endswith(".__main__"))
    return getattr(main, "__file__", None) is not None


def _from_home(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def launch(
    fn: Callable[..., Any],
    ranks: int,
    args: Sequence[Any] = (),
    *,
    timeout: float | None = None,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Calls `fn(*args)` in `ranks` new processes, each with `dovetail.init()` done; returns the results by rank.

    Each rank computes with its share of this process's cores, one thread at least: with all of them, as torch would by
    itself, ranks would wait for each other's threads. `torch.set_num_threads` or `OMP_NUM_THREADS` change that.

    Args:
        fn: any callable, lambdas and functions of a notebook included; sent by cloudpickle. Triton kernels that it uses
            must be at the top level of a file.
        ranks: how many, at most 1024.
        timeout: seconds for everything (default: no limit).
        env: variables to set in the children.

    Raises:
        The error of the first rank that failed, with its traceback as a note; `PeerError` if a rank died without one
        or called `sys.exit`; `Timeout` if time is up; `DovetailError` if the program calls `launch` when it is
        imported. Before anything starts: `ValueError` for a wrong number of ranks, `TypeError` for arguments of a wrong
        type and what can't be sent, `NotSupported` on a rank, and in a program that ranks can't import.
    """
    ranks = _refuse(fn, ranks)
    job = _packed((fn, tuple(args)))
    token = uuid.uuid4().hex
    context = mp.get_context("spawn")
    workers: list[tuple[Any, Any]] = []
    asks = any(os.environ.get(name) or (env or {}).get(name) for name in _THREADS)
    share = {} if asks else {_THREADS[0]: str(max(1, cores.usable() // ranks))}
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            more = {
                **(env or {}),
                "DOVETAIL_RENDEZVOUS": token,
                "DOVETAIL_RANK": str(rank),
                "DOVETAIL_WORLD_SIZE": str(ranks),
            }
            with _interrupts_held(), _inherited(share):
                process = context.Process(
                    target=_child, args=(job, more, theirs), daemon=True, name=f"{_NAME} {rank}"
                )  # fmt: skip
                process.start()
                theirs.close()
                workers.append((process, ours))
        return _collect(workers, None if timeout is None else time.monotonic() + timeout)
    finally:
        _end(workers)


def _refuse(fn: Any, ranks: Any) -> int:
    """Raises what is wrong before anything is started; the number of ranks as an int."""
    if not callable(fn):
        raise TypeError(f"fn must be a function, not {fn!r}: launch(fn, ranks, args)")
    try:
        number = operator.index(ranks)
    except TypeError:
        raise TypeError(f"ranks must be an int, 1 to {MOST_RANKS}, not {ranks!r}") from None
    if not 1 <= number <= MOST_RANKS:
        raise ValueError(f"ranks must be 1 to {MOST_RANKS}, not {number}: each is a process of this machine")
    here = processes.current_process()
    if getattr(here, "_inheriting", False):  # multiprocessing's: this process imports the program before it begins
        if here.name.startswith(_NAME):
            raise SystemExit(_NO_GUARD)  # without a traceback: the launcher says it once
        raise _no_guard()
    if here.daemon:
        raise NotSupported(
            "launch can't be called on a rank, or in another daemonic process: such processes start none. Call it in "
            "the program that started them; dovetail.new_group makes groups of the ranks that there are"
        )
    program = getattr(sys.modules["__main__"], "__file__", None) or ""
    if program.startswith("<") and _ranks_import_main() and not os.path.exists(program):
        raise NotSupported(
            f"the program comes from {program.strip('<>')}, which ranks can't import: save it as a file and run that, "
            "or give it to `python -c`"
        )
    return number


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """A Ctrl-C of the terminal reaches all its processes: a new one inherits that it is held, until it is ready for it.

    Here it comes when this ends, also if another thread gets it meanwhile, and so do SIGTERM and SIGHUP where they are
    handled: a process that is half started would talk, or be forgotten.
    """
    resource_tracker.ensure_running()  # it lets go of the signal when it starts its process
    came: list[tuple[int, Any]] = []
    held: dict[int, Callable[[int, Any], Any]] = {}
    if threading.current_thread() is threading.main_thread():
        ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handlers = [(int(number), signal.getsignal(number)) for number in ends]
        held = {number: handler for number, handler in handlers if callable(handler)}
    for number in held:
        signal.signal(number, lambda *args: came.append(args))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in held.items():
            signal.signal(number, handler)
    for number, frame in came[:1]:
        held[number](number, frame)


def _end_with_launcher() -> None:
    """In a rank: it is killed when the thread that launched it ends, which waits for it as long as it lives.

    So a launcher that was killed leaves no rank behind; a rank may be inside a call that never looks at a pipe.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only, as ranks are
    if prctl:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    launcher = mp.parent_process()
    if launcher is not None and not launcher.is_alive():  # gone before that was set
        os._exit(1)


@contextlib.contextmanager
def _inherited(variables: dict[str, str]) -> Iterator[None]:
    """Processes that begin meanwhile have these from the start, before the program and torch are imported there."""
    with _beginning:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _compute_with(asked: str | None) -> None:
    """So many threads as `env` asks for: torch may have been imported with the program, before that was in force."""
    if asked and asked.isdecimal() and int(asked) and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(asked))


def _child(job: bytes, more: dict[str, str], pipe: Any) -> None:
    _end_with_launcher()
    os.environ.update(more)
    _compute_with(next((value for name in _THREADS if (value := more.get(name))), None))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent ends us; no traceback of ours in between
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        from dovetail.coll import session

        session.init()
        fn, args = pickle.loads(job)
        result = fn(*args)
        import cloudpickle

        message = cloudpickle.dumps(("result", result))
    except BaseException as ended:
        text = traceback.format_exc()
        error = _of_this_rank(ended, int(more["DOVETAIL_RANK"]))
        try:
            message = pickle.dumps(("error", error, text))
            pickle.loads(message)
        except Exception:
            message = pickle.dumps(("error", DovetailError(f"{type(error).__name__}: {error}"), text))
    pipe.send_bytes(message)
    pipe.close()


def _of_this_rank(ended: BaseException, rank: int) -> BaseException:
    """What the launcher raises for what ended a rank: that must not end the launcher itself without a word."""
    if isinstance(ended, SystemExit):
        how = "" if ended.code is None else repr(ended.code)
        return PeerError(f"rank {rank} called sys.exit({how}) before its function returned a result", rank=rank)
    if isinstance(ended, KeyboardInterrupt):
        return PeerError(f"rank {rank} raised KeyboardInterrupt before its function returned a result", rank=rank)
    return ended


def _collect(workers: list[tuple[Any, Any]], deadline: float | None) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
    failed: list[tuple[int, BaseException]] = []
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if failed:
            left = min(_GRACE_S, left if left is not None else _GRACE_S)  # the others' errors may say more
        ready = mpc.wait(list(waiting), timeout=left)
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                kind, *content = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                workers[rank][0].join(_GRACE_S)
                failed.append((rank, _without_a_word(rank, workers[rank][0].exitcode)))
                continue
            if kind == "result":
                results[rank] = content[0]
            else:
                content[0].add_note(f"on rank {rank}:\n{content[1]}")
                failed.append((rank, content[0]))
    if failed:
        raise min(failed, key=_consequence)[1]
    if waiting:
        raise Timeout(f"ranks {sorted(waiting.values())} did not finish in time; they were ended")
    return [results[r] for r in range(len(workers))]


def _consequence(failed: tuple[int, BaseException]) -> int:
    """An error about a peer is a consequence; the cause, if some rank reports one, is worth more."""
    rank, error = failed
    if isinstance(error, PeerError):
        return 1 if error.rank == rank else 2
    return 2 if isinstance(error, Timeout) else 0


def _without_a_word(rank: int, code: int | None) -> DovetailError:
    """The error of a rank that ended and said nothing."""
    if code == _NO_GUARD:
        return _no_guard()
    return PeerError(f"rank {rank} ended without a result, {_how(code)}", rank=rank)


def _no_guard() -> DovetailError:
    return DovetailError(
        'the program calls launch when a rank imports it: put that call under `if __name__ == "__main__":`, since '
        "each rank imports the program before it begins"
    )


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _end(workers: list[tuple[Any, Any]]) -> None:
    for process, pipe in workers:
        pipe.close()
        if process.is_alive():
            process.join(0.2)
    for process, _ in workers:
        if process.is_alive():
            process.terminate()
    for process, _ in workers:
        process.join(_GRACE_S)
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.join(_GRACE_S)
