"""ASTRA-sim's system file: JSON. Every key is used, listed as without effect, or refused; none is dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.errors import NotSupported
from dovetail.sim.astra.system import AstraSystem, Optimization, Policy
from dovetail.sim.net.algorithms import Collective

_IMPLEMENTATIONS = {f"{name.replace('_', '-')}-implementation": name for name in Collective}
_WHOLE = {
    "preferred-dataset-splits": "splits",
    "active-chunks-per-dimension": "active_chunks",
    "endpoint-delay": "endpoint_delay_ns",
}
_REAL = {"local-mem-bw": "local_mem_bw_gbps", "peak-perf": "peak_perf_tflops"}
_FLAGS = {"roofline-enabled": "roofline", "replay-only": "replay_only"}
_WORDS = {"collective-optimization": ("optimization", Optimization), "scheduling-policy": ("policy", Policy)}
_USED = (*_IMPLEMENTATIONS, *_WHOLE, *_REAL, *_FLAGS, *_WORDS)

INERT = {
    "boost-mode": "ASTRA-sim 2 does not read it",
    "intra-dimension-scheduling": "ASTRA-sim 2 does not read it",
    "inter-dimension-scheduling": "ASTRA-sim 2 does not read it",
    "local-reduction-delay": "acts on a shared bus only",
    "model-shared-bus": "0: no shared bus",
    "L": "acts on a shared bus only",
    "o": "acts on a shared bus only",
    "g": "acts on a shared bus only",
    "G": "acts on a shared bus only",
    "trace-enabled": "logging",
    "track-local-mem": "statistics",
    "local-mem-trace-filename": "statistics",
}  #: keys that ASTRA-sim knows and that change no time here, with the reason


def read_system(path: str | Path) -> AstraSystem:
    """Reads a system file.

    Raises:
        ValueError: names file, key, what was found and what is allowed.
        NotSupported: a key asks for what is not modelled (a shared bus, custom collectives).
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: an object is expected, not {type(data).__name__}")
    fields: dict[str, Any] = dict.fromkeys(Collective, ())  # a collective without implementation cannot be run
    inert: dict[str, object] = {}
    for key, value in data.items():
        try:
            if key in INERT:
                inert[key] = value
            else:
                fields.update([_field(key, value)])
        except (ValueError, NotSupported) as error:
            raise type(error)(f"{path}: {key}: {error}") from None
    if inert.get("model-shared-bus") == 1:
        raise NotSupported(f"{path}: model-shared-bus: a shared bus is not modelled; set it to 0")
    if "splits" not in fields:
        raise ValueError(f"{path}: preferred-dataset-splits is missing; ASTRA-sim cannot do without it")
    fields.setdefault("local_mem_bw_gbps", 0.0)
    try:
        return AstraSystem(**fields, inert=inert)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_system(system: AstraSystem, path: str | Path) -> None:
    """Writes a system file that ASTRA-sim reads."""
    data: dict[str, object] = {
        "scheduling-policy": system.policy,
        "endpoint-delay": system.endpoint_delay_ns,
        "active-chunks-per-dimension": system.active_chunks,
        "preferred-dataset-splits": system.splits,
    }
    for key, name in _IMPLEMENTATIONS.items():
        if words := getattr(system, name):
            data[key] = list(words)
    data |= {
        "collective-optimization": system.optimization,
        "local-mem-bw": system.local_mem_bw_gbps,
        "roofline-enabled": int(system.roofline),
        "peak-perf": system.peak_perf_tflops,
        "replay-only": int(system.replay_only),
        **system.inert,
    }
    Path(path).write_text(json.dumps(data, indent=4) + "\n", encoding="utf-8")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key} is given twice")
        found[key] = value
    return found


def _field(key: str, value: Any) -> tuple[str, Any]:
    if key.endswith("-implementation-custom") or key == "per-node-custom-implementation":
        raise NotSupported("custom collectives are not modelled; the native implementations are")
    if key in _IMPLEMENTATIONS:
        if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
            raise ValueError(f'it must be a list with a word per dimension, such as ["ring"], not {value!r}')
        return _IMPLEMENTATIONS[key], tuple(value)
    if key in _WORDS:
        name, kind = _WORDS[key]
        if value not in list(kind):
            raise ValueError(f"it must be one of {', '.join(kind)}, not {value!r}")
        return name, kind(value)
    if key not in _USED:
        raise ValueError(f"no such key; there are {', '.join(_USED)}, and without effect {', '.join(INERT)}")
    if isinstance(value, bool) and key in _FLAGS:
        return _FLAGS[key], value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"it must be a number, not {value!r}")
    if key in _FLAGS:
        return _FLAGS[key], value != 0
    if key in _WHOLE:
        if value != int(value):
            raise ValueError(f"it must be a whole number, not {value!r}")
        return _WHOLE[key], int(value)
    return _REAL[key], float(value)
