"""The command `dovetail`: one file per verb; a verb parses, calls the library and prints.

Convention: a file ``cli/VERB.py`` is the verb ``dovetail VERB``. It defines ``register(app: typer.Typer) -> None``,
which adds one command (or, for a verb with verbs of its own, one sub-application) of that name. Nothing else has to be
edited. A verb's file imports only light modules at its top; torch and the rest come in inside its functions, so
`dovetail --help`, which imports every verb's file, stays fast. Running one verb imports that verb's file only.

Exit status: 0 ok, 1 a check failed, 2 usage. A verb raises ``typer.Exit(1)`` when a check of its own failed. A
`DovetailError` that escapes ends the command with its message and status 1; a `ValueError` (a bad argument or a file
that is no record) and an `OSError` with status 2. Messages go to stderr; what a verb was asked for goes to stdout.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from dovetail import __version__, env
from dovetail.errors import DovetailError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


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
    try:
        build(words[0] if words else None)(args=words, prog_name="dovetail")
    except DovetailError as error:
        _fail(error, FAILED)
    except (ValueError, OSError) as error:
        _fail(error, USAGE)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            print("dovetail: interrupted; nothing was saved", file=sys.stderr)
        raise


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
