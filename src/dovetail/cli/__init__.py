"""The command `dovetail`: one file per verb; a verb parses, calls the library and prints.

Convention: a file ``cli/VERB.py`` is the verb ``dovetail VERB``. It defines ``register(app: typer.Typer) -> None``,
which adds one command (or, for a verb with verbs of its own, one sub-application) of that name. Nothing else has to be
edited. A verb's file imports only light modules at its top; torch and the rest come in inside its functions, so
`dovetail --help`, which imports every verb's file, stays fast. Running one verb imports that verb's file only.

Exit status: 0 ok, 1 a check failed, 2 usage. A verb raises ``typer.Exit(1)`` when a check of its own failed. A
`DovetailError` that escapes ends the command with its message and status 1; a `ValueError` (a bad argument or a file
that is no record) and an `OSError` with status 2. Messages go to stderr; what a verb was asked for goes to stdout.
Ctrl-C ends it with 130, SIGTERM with 143 and SIGHUP, of a closed terminal, with 129, each after ranks and temporary
folders are gone.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from dovetail import __version__, env
from dovetail.cli import _output
from dovetail.errors import DovetailError

OK, FAILED, USAGE, HUNG_UP, INTERRUPTED, TERMINATED = 0, 1, 2, 129, 130, 143
#: How a signal ends a command: its status, and the word for it.
_ENDS = {signal.SIGTERM: (TERMINATED, "terminated"), signal.SIGHUP: (HUNG_UP, "ended with its terminal")}
_PUT_AWAY_S = 5.0


def verbs() -> list[str]:
    """The names of all verbs, from the files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def build(first: str | None = None) -> typer.Typer:
    """The application. If `first`, the first word of the command line, is a verb, only that verb's file is imported."""
    app = typer.Typer(
        name="dovetail",
        help="Fit communication into computation: look at this machine, measure collectives, tune them.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    app.callback()(_options)
    known = verbs()
    for verb in [first] if first in known else known:
        importlib.import_module(f"dovetail.cli.{verb}").register(app)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    words = list(sys.argv[1:] if argv is None else argv)
    _output.KEPT.clear()
    with _ended_like_interrupted() as came:
        try:
            build(words[0] if words else None)(args=words, prog_name="dovetail")
        except DovetailError as error:
            _fail(error, FAILED)
        except (ValueError, OSError) as error:
            _fail(error, USAGE)
        except (SystemExit, KeyboardInterrupt) as ended:
            if isinstance(ended, SystemExit) and ended.code != INTERRUPTED:
                raise
            saved = f"what was done is in {', '.join(_output.KEPT)}" if _output.KEPT else "nothing was saved"
            status, how = _ENDS[came[-1][0]] if came else (INTERRUPTED, "interrupted")
            print(f"dovetail: {how}; {saved}", file=sys.stderr)
            raise SystemExit(status) from None


@contextmanager
def _ended_like_interrupted() -> Iterator[list[tuple[signal.Signals, float]]]:
    """SIGTERM and SIGHUP end the command as Ctrl-C does, so that its ranks and temporary folders go with it. Yields
    what came, and when. Another one soon after it, as `timeout` sends, does not disturb what is being put away."""
    came: list[tuple[signal.Signals, float]] = []

    def end(number: int, _: object) -> None:
        if not came or time.monotonic() > came[-1][1] + _PUT_AWAY_S:
            came.append((signal.Signals(number), time.monotonic()))
            if number == signal.SIGHUP:
                _write_to_nobody()
            raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in _ENDS if in_main and signal.getsignal(number) == signal.SIG_DFL]  # not under nohup
    for number in ours:
        signal.signal(number, end)
    try:
        yield came
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _write_to_nobody() -> None:
    """A closed terminal takes no word more: writing to it would be an error in the midst of what is being put away."""
    nobody = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(nobody, stream)


def _fail(error: Exception, status: int) -> None:
    logging.getLogger("dovetail").debug("the error in full", exc_info=error)
    print(f"dovetail: {error}", file=sys.stderr)
    raise SystemExit(status)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dovetail {__version__}")
        raise typer.Exit


_Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)]


def _options(version: _Version = False) -> None:
    logging.basicConfig(level=env.log_level(), format="%(levelname)s %(name)s: %(message)s")
