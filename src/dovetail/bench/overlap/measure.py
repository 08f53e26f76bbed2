"""All scenarios of a spec on one site."""

from __future__ import annotations

from dovetail.bench.overlap.sample import Gauge, Sampled, Scaler, Site, sample
from dovetail.bench.overlap.spec import Progress, Spec
from dovetail.errors import NotSupported
from dovetail.overlap.tables import Tables


def measure(
    site: Site, progress: Progress | None, spec: Spec, tables: Tables | None, gauge: Gauge | None = None
) -> tuple[list[Sampled], list[str], float | None]:
    """A sample of each scenario, lines about what was left out, and the rate of memory (bytes/s; None: not known)."""
    found: list[Sampled] = []
    notes: dict[str, None] = {}
    memory = site.memory_bytes_per_s()
    scaler = Scaler(site)
    for done, scenario in enumerate(spec.scenarios):
        if progress:
            progress(done, len(spec.scenarios), scenario.name)
        try:
            one = sample(site, scenario, spec, scaler, tables, gauge)
        except NotSupported as error:
            notes[f"{scenario.name} left out: {error}"] = None
            continue
        notes.update(dict.fromkeys(one.notes))
        found.append(one)
    return found, list(notes), memory
