"""`dovetail simulate`: what plans and collectives would take on a machine that isn't here. All of it is simulated."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli import _table
from dovetail.cli._output import FILE, FOLDER, PLOT, Json, save
from dovetail.measure.sizes import format_bytes, geometric

_HELP = "Price plans, collectives and changes on a machine that isn't here. Every figure is simulated."
_COLLECTIVE_EXAMPLES = """Examples:

dovetail simulate collective --machine mi300x --collective all_gather --variant all --prelaunch both -b 1K -e 2G

dovetail simulate collective --collective all_to_all --variant pcpy,swap --plot all_to_all.html

dovetail simulate collective --collective copy -b 1K -e 32M
"""
_WHATIF_EXAMPLES = """Examples:

dovetail simulate whatif --machine mi300x

dovetail simulate whatif --collective all_to_all -b 64K -e 64M -f 4 --plot whatif.html
"""
_NETWORK_EXAMPLES = """Examples:

dovetail simulate network --shape ring:8,ring:16 --bandwidth 50 --latency 500 --collective all_to_all --algorithm all

dovetail simulate network --machine mi300x --collective all_reduce -b 16M -e 16G -f 4

dovetail simulate network --shape fully_connected:8,switch:16 --bandwidth 450,50 --collective all_reduce
"""
_FIT_EXAMPLES = """Examples:

dovetail simulate fit --machine mi300x --table all_gather=speedups.json --table phases.json

dovetail simulate fit --machine cpu-2core --table ~/.cache/dovetail/profile.json --output mine.toml
"""
_ASTRA_EXAMPLES = """Examples:

dovetail simulate astra --network N.yml --system S.json --collective all_to_all --size 1M

dovetail simulate astra --network N.yml --system S.json --workload traces/dlrm

dovetail simulate astra --network N.yml --mode links --collective all_to_all --size 64M

dovetail simulate astra --network N.yml --system S.json --collective all_reduce --size 16M --write to_astra_sim
"""
_ALL, _BOTH, _ON, _OFF = "all", "both", "on", "off"
_Machine = Annotated[str, typer.Option(help="A shipped machine, or the path of a machine file.")]
_Ranks = Annotated[int | None, typer.Option("--ranks", "-n", min=2, help="Ranks that take part; all if not given.")]
_Begin = Annotated[str, typer.Option("--begin", "-b", help="Smallest total: chunk x ranks.")]
_End = Annotated[str, typer.Option("--end", "-e", help="Largest total.")]
_Factor = Annotated[float, typer.Option("--factor", "-f", help="From one size to the next.")]
_Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", callback=PLOT, help="Also write a plot to FILE (.html).")
]


def register(app: typer.Typer) -> None:
    """Add the verb and its own verbs."""
    simulate = typer.Typer(name="simulate", help=_HELP, no_args_is_help=True, rich_markup_mode=None)
    simulate.command("collective", epilog=_COLLECTIVE_EXAMPLES)(collective)
    simulate.command("network", epilog=_NETWORK_EXAMPLES)(network)
    simulate.command("whatif", epilog=_WHATIF_EXAMPLES)(whatif)
    simulate.command("fit", epilog=_FIT_EXAMPLES)(fit)
    simulate.command("astra", epilog=_ASTRA_EXAMPLES)(astra)
    simulate.command("machines")(machines)
    app.add_typer(simulate)


def collective(
    machine: _Machine = "mi300x",
    collective: Annotated[str, typer.Option(help="all_gather, all_to_all, all_reduce, ..., or copy.")] = "all_gather",
    variant: Annotated[str, typer.Option(help="Variants such as pcpy,bcst,swap,b2b, or all.")] = _ALL,
    prelaunch: Annotated[str, typer.Option(help="both, on or off.")] = _OFF,
    ranks: _Ranks = None,
    complete: Annotated[bool, typer.Option("--complete", help="With the handshake and a rank's own piece.")] = False,
    begin: _Begin = "1K",
    end: _End = "2G",
    factor: _Factor = 2,
    plot: _Plot = None,
    json: Json = None,
) -> None:
    """Price the variants of a collective by size: time, speedup over the baseline variant, and four phases.

    The plans are those that executors run. The phases are those of the critical path, and add up to the time. Sizes are
    rounded down to what the ranks can share.
    """
    from dovetail.cli import _simulate_plans as work
    from dovetail.sim import files
    from dovetail.sim.collectives import variants

    there = files.load(machine)
    known = variants(collective)
    chosen = list(known) if variant == _ALL else _words("--variant", variant, known)
    launches = {_BOTH: (False, True), _ON: (True,), _OFF: (False,)}[_word("--prelaunch", prelaunch, (_BOTH, _ON, _OFF))]
    asked = work.Asked(collective, tuple(chosen), launches, complete, ranks)
    rows = work.rows(there, asked, geometric(begin, end, factor))
    title = f"{collective}, {rows[0]['ranks']} ranks"
    _print_table(f"{title} (simulated, {there.name}: {there.title})", *work.table(collective, rows))
    if plot is not None:
        series, limit, like = work.lines(rows)
        _plot(plot, series, limit, title, f"simulated, {there.name}: {there.title}", "total bytes", like)
    _record("simulate_collective", rows, json)


def whatif(
    machine: _Machine = "mi300x",
    collective: Annotated[str, typer.Option(help="all_gather, all_to_all, ...")] = "all_gather",
    ranks: _Ranks = None,
    begin: _Begin = "1K",
    end: _End = "1G",
    factor: _Factor = 4,
    plot: _Plot = None,
    json: Json = None,
) -> None:
    """Say how much each change of hardware or runtime closes the gap to the link limit, by size.

    Each change is priced alone and all together, with the best variant for it. 100% is what the links alone would need.
    """
    from dovetail.cli import _simulate_plans as work
    from dovetail.sim import files

    there = files.load(machine)
    rows = work.changes(there, collective, geometric(begin, end, factor), ranks)
    number = ranks or there.ranks
    title = f"{collective}, {number} ranks: share of the gap to the link limit that each change closes"
    _print_table(f"{title} (simulated, {there.name}: {there.title})", *work.change_table(rows))
    for line in work.legend():
        print(line)
    if plot is not None:
        series, limit = work.change_lines(rows)
        title = f"{collective}, {number} ranks: what each change would bring"
        _plot(plot, series, limit, title, f"simulated, {there.name}: {there.title}", "total bytes")
    _record("simulate_whatif", rows, json)


def network(
    machine: Annotated[str | None, typer.Option(help="The links of a machine, with its library's launch time.")] = None,
    shape: Annotated[str | None, typer.Option(help="Dimensions: ring:8,ring:16; also switch, fully_connected.")] = None,
    bandwidth: Annotated[str, typer.Option(help="GB/s of a link in one direction; one figure, or one each.")] = "50",
    latency: Annotated[str, typer.Option(help="ns of a link; one figure, or one for each dimension.")] = "500",
    collective: Annotated[str, typer.Option(help="all_reduce, all_gather, reduce_scatter, all_to_all.")] = "all_to_all",
    algorithm: Annotated[str, typer.Option(help="direct, ring, dimension, or all.")] = "direct",
    chunks: Annotated[int, typer.Option(min=1, help="Pieces that follow each other through the dimensions.")] = 1,
    ranks: _Ranks = None,
    begin: Annotated[str, typer.Option("--begin", "-b", help="Smallest size, as c10d counts it per rank.")] = "1M",
    end: Annotated[str, typer.Option("--end", "-e", help="Largest size.")] = "1G",
    factor: _Factor = 4,
    plot: _Plot = None,
    json: Json = None,
) -> None:
    """Price a collective on a network with real contention: messages share links fairly along their routes.

    Beside the time stand the limit that the links set, and the closed form where there is one.
    """
    from dovetail.cli import _simulate_network as work

    there, title, launch_ns = work.network_of(machine, shape, bandwidth, latency, ranks)
    rows = work.rows(there, title, launch_ns, collective, algorithm, geometric(begin, end, factor), chunks)
    lines = [
        {
            "size B": format_bytes(row["size_bytes"]), "algorithm": row["algorithm"],
            "time us": f"{row['time_us']:.5g}", "link limit us": f"{row['limit_us']:.5g}",
            "of limit": f"{row['limit_us'] / row['time_us']:.1%}" if row["time_us"] else "-",
            "closed form us": "-" if row["closed_form_us"] is None else f"{row['closed_form_us']:.5g}",
            "busiest link": f"{row['busiest_link']:.0%}",
        }
        for row in rows
    ]  # fmt: skip
    heading = f"{collective}, {there.ranks} ranks, {title}"
    _print_table(f"{heading} (simulated)", list(lines[0]), lines)
    if plot is not None:
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            series.setdefault(row["algorithm"], []).append((row["size_bytes"], row["time_us"]))
        first = [row for row in rows if row["algorithm"] == rows[0]["algorithm"]]
        limit = [(row["size_bytes"], row["limit_us"]) for row in first]
        _plot(plot, series, limit, heading, f"simulated, {title}", "bytes of a rank")
    _record("simulate_network", rows, json)


def fit(
    table: Annotated[
        list[str], typer.Option("--table", "-t", metavar="[COLLECTIVE=]FILE", help="What to fit to; may be repeated.")
    ],
    machine: _Machine = "mi300x",
    free: Annotated[str | None, typer.Option(help="Constants that may change, such as host.submit_ns,...")] = None,
    backend: Annotated[str, typer.Option(help="Whose points of a profile or record: cpu or cuda.")] = "cpu",
    check: Annotated[bool, typer.Option("--check", help="Only say the error; change nothing.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", callback=FILE, help="Write the machine file here.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The new machine's name.")] = None,
    json: Json = None,
) -> None:
    """Refit a machine's free constants to tables, on every second size; the other sizes show how well it holds.

    A table is DMA-Latte's of speedups (say which collective: all_gather=FILE), or of phases, a record of
    dovetail bench, or a profile that dovetail tune has measured. One set of constants serves all of them.
    """
    import dataclasses

    from dovetail.cli import _simulate_fit as work
    from dovetail.sim import files

    if check and (output is not None or name is not None or free is not None):
        raise ValueError("--check changes nothing: --free, --output and --name are for a fit")
    there = files.load(machine)
    targets = work.targets(table, backend)
    there.require(max(target.case.ranks for target in targets), "a table")
    if check:
        found, note = work.checked(there, targets), ""
    else:
        names = None if free is None else [word.strip() for word in free.split(",")]
        note = f"{', '.join(Path(word.rpartition('=')[2]).name for word in table)}, every second size"
        found = work.fitted(there, targets, names, note)
    if not check:
        _print_table(f"refitted constants (simulated, {there.name})", *work.constants(there, found))
    _print_table(f"error of the model (simulated, {there.name}: {there.title})", *work.errors(found))
    for line in work.winners(found):
        print(line)
    if poor := work.warning(found):
        print(f"warning: {poor}", file=sys.stderr)
    new = found.machine
    if name is not None:
        new = dataclasses.replace(new, name=name, title=f"{name}, fitted from {there.name} to {note}")
    if output is not None:
        print(f"machine file: {files.write(new, output)}")
    _record("simulate_fit", work.rows(new.name, found), json)


def astra(
    network: Annotated[Path, typer.Option(metavar="FILE", help="ASTRA-sim's network file (YAML).")],
    system: Annotated[Path | None, typer.Option(metavar="FILE", help="ASTRA-sim's system file (JSON).")] = None,
    collective: Annotated[str | None, typer.Option(help="all_reduce, all_gather, reduce_scatter, all_to_all.")] = None,
    size: Annotated[str | None, typer.Option(help="Bytes, as Chakra's comm_size counts them.")] = None,
    workload: Annotated[str | None, typer.Option(metavar="PREFIX", help="Chakra traces PREFIX.0.et, ...")] = None,
    mode: Annotated[str, typer.Option(help="astra: as ASTRA-sim counts; links: real contention.")] = "astra",
    algorithm: Annotated[str | None, typer.Option(help="links: direct (the default), ring or dimension.")] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FOLDER", callback=FOLDER, help="Write files that ASTRA-sim can run.")
    ] = None,
    json: Json = None,
) -> None:
    """Price a collective or a Chakra workload on a network, to the nanosecond as ASTRA-sim's analytical backend does.

    With --mode links the same network has real contention. --write puts the network, the system and a workload into a
    folder, to be run by ASTRA-sim.
    """
    from dovetail.cli import _simulate_astra as work

    rows, title = work.run(network, system, collective, size, workload, mode, algorithm, write)
    headings = [heading for heading in rows[0] if heading != "simulated"]
    _print_table(f"{title} (simulated)", headings, work.most(rows))
    _record("simulate_astra", rows, json)


def machines(json: Json = None) -> None:
    """List the shipped machines, and where their constants come from."""
    from collections import Counter

    from dovetail.sim import files
    from dovetail.sim.machine import Origin

    rows = []
    for name in files.names():
        there = files.load(name)
        origins = Counter(source.origin for source in there.sources.values())
        counts = {origin.value: origins[origin] for origin in Origin}
        rows.append({"name": name, "title": there.title, "ranks": there.ranks, **counts, "simulated": True})
    title = "simulated machines: ranks, and how many constants are of which origin"
    _print_table(title, list(rows[0])[:-1], rows)
    _record("simulate_machines", rows, json)


# --- shared ----------------------------------------------------------------------------------------------------------


def _words(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(_word(option, word.strip(), known) for word in text.split(",")))


def _word(option: str, word: str, known: tuple[str, ...]) -> str:
    if word not in known:
        raise ValueError(f"{option}: {word!r} is not known; there are {', '.join(known)}")
    return word


def _print_table(title: str, headings: list[str], rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for n, heading in enumerate(headings):
        table.add_column(str(heading), justify="left" if n == 0 or heading == "title" else "right")
    for row in rows:
        table.add_row(*(str(row[heading]) for heading in headings))
    _table.console(160).print(title, style="italic", highlight=False)
    _table.show(table, wide=160)


_Points = list[tuple[float, float]]


def _plot(
    path: Path, series: dict[str, _Points], limit: _Points, title: str, note: str, x: str,
    like: dict[str, str] | None = None,
) -> None:  # fmt: skip
    from dovetail.report import lines

    limits = {"link limit": limit}
    made = lines.write(path, series, limits=limits, like=like, title=title, note=note, x=x, y="time (us)")
    print(f"plot: {made}")


def _record(kind: str, rows: list[dict[str, Any]], path: Path | None) -> None:
    if path is None:
        return
    from dovetail.measure import record

    save(record.new(kind, ["dovetail", *sys.argv[1:]], rows, simulated=True), path)
