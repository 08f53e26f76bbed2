"""ASTRA-sim's analytical, congestion-unaware model in Python, to the nanosecond, and its file formats.

Owns `collective_time_ns` and `workload_time_ns`. It models what ASTRA-sim models, with its flaws: no link contention,
no one-sided puts, one collective at a time. Importing it loads no YAML reader.
"""

from dovetail.sim.astra.chakra import Attribute, CommType, Node, NodeType, Tensors, Trace
from dovetail.sim.astra.closed import closed_form_ns
from dovetail.sim.astra.model import collective_time_ns
from dovetail.sim.astra.network import AstraNetwork, Topology
from dovetail.sim.astra.system import Algorithm, AstraSystem, Optimization, Policy
from dovetail.sim.astra.workload import (
    read_workload,
    workload_time_ns,
    write_collective_workload,
    write_workload,
)
from dovetail.sim.net.algorithms import Collective

__all__ = [
    "Algorithm",
    "AstraNetwork",
    "AstraSystem",
    "Attribute",
    "Collective",
    "CommType",
    "Node",
    "NodeType",
    "Optimization",
    "Policy",
    "Tensors",
    "Topology",
    "Trace",
    "closed_form_ns",
    "collective_time_ns",
    "read_workload",
    "workload_time_ns",
    "write_collective_workload",
    "write_workload",
]
