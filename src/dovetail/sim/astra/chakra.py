"""Chakra execution traces: one file per NPU, a header and then nodes, each after its length.

Owns the nodes and the file format, not what a node costs. The tables follow et_def.proto of mlcommons/chakra (schema
0.0.4). Everything in a file survives reading and writing; what the schema does not have is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from dovetail.sim.astra import wire
from dovetail.sim.astra.wire import Field, Table
from dovetail.sim.net.algorithms import Collective

Value = int | float | bool | str | bytes | tuple[int | float | bool | str | bytes, ...]


class NodeType(IntEnum):
    """What a node is."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class CommType(IntEnum):
    """What a collective node runs."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


_SCALARS = "double float int32 int64 uint32 uint64 sint32 sint64 fixed32 fixed64 sfixed32 sfixed64 bool string bytes"
_ATTRIBUTE: dict[int, Field] = {1: Field("name", "string"), 2: Field("doc_string", "string")}
for _number, _kind in enumerate(_SCALARS.split()):
    _ATTRIBUTE[3 + 2 * _number] = Field(f"{_kind}_val", _kind, explicit=True)
    _ATTRIBUTE[4 + 2 * _number] = Field(f"{_kind}_list", {1: Field("values", _kind, repeated=True)}, explicit=True)
_IO: Table = {1: Field("values", "string"), 2: Field("shapes", "string"), 3: Field("types", "string")}
_METADATA: Table = {1: Field("version", "string"), 2: Field("attr", _ATTRIBUTE, repeated=True)}
_NODE: Table = {
    1: Field("id", "uint64"),
    2: Field("name", "string"),
    3: Field("type", "int32"),
    4: Field("ctrl_deps", "uint64", repeated=True),
    5: Field("data_deps", "uint64", repeated=True),
    6: Field("start_time_micros", "uint64"),
    7: Field("duration_micros", "uint64"),
    8: Field("inputs", _IO),
    9: Field("outputs", _IO),
    10: Field("attr", _ATTRIBUTE, repeated=True),
}
_VALUES = frozenset(entry.name for number, entry in _ATTRIBUTE.items() if number > 2)


@dataclass(frozen=True, slots=True)
class Attribute:
    """A named value; `kind` is the schema's name of its type, such as `int64_val` or `bool_list`, or None."""

    name: str
    kind: str | None
    value: Value | None
    doc: str = ""

    def __post_init__(self) -> None:
        if self.kind is None and self.value is not None:
            raise ValueError(f"attribute {self.name} has a value but no kind; give one of {', '.join(sorted(_VALUES))}")
        if self.kind is not None and self.kind not in _VALUES:
            raise ValueError(f"attribute {self.name} has no kind {self.kind!r}; one of {', '.join(sorted(_VALUES))}")


@dataclass(frozen=True, slots=True)
class Tensors:
    """What a node reads or writes, as text."""

    values: str = ""
    shapes: str = ""
    types: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a trace; it starts when all nodes in `data_deps` and `ctrl_deps` have ended."""

    id: int
    type: NodeType
    name: str = ""
    ctrl_deps: tuple[int, ...] = ()
    data_deps: tuple[int, ...] = ()
    start_time_micros: int = 0
    duration_micros: int = 0
    inputs: Tensors | None = None
    outputs: Tensors | None = None
    attributes: tuple[Attribute, ...] = ()

    @classmethod
    def compute(cls, id: int, duration_micros: int, *, after: Sequence[int] = (), name: str = "") -> Node:  # noqa: A002
        """A node that computes for a time."""
        return cls(
            id=id,
            type=NodeType.COMP,
            name=name or f"comp_{id}",
            data_deps=tuple(after),
            duration_micros=duration_micros,
            attributes=(Attribute("is_cpu_op", "bool_val", False),),
        )

    @classmethod
    def collective(
        cls,
        id: int,  # noqa: A002
        collective: Collective | str,
        size_bytes: int,
        *,
        after: Sequence[int] = (),
        name: str = "",
    ) -> Node:
        """A node that runs a collective among all NPUs."""
        kind = CommType[str(Collective(collective)).upper()]
        return cls(
            id=id,
            type=NodeType.COMM_COLL,
            name=name or f"{collective}_{size_bytes}B",
            data_deps=tuple(after),
            attributes=(
                Attribute("is_cpu_op", "bool_val", False),
                Attribute("comm_type", "int64_val", int(kind)),
                Attribute("comm_size", "int64_val", size_bytes),
            ),
        )

    def attribute(self, name: str) -> Attribute | None:
        """The first attribute of a name."""
        return next((attribute for attribute in self.attributes if attribute.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one NPU does."""

    nodes: tuple[Node, ...]
    version: str = "0.0.4"
    attributes: tuple[Attribute, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))

    @classmethod
    def from_file(cls, path: str | Path) -> Trace:
        """Reads one `.et` file. Raises ValueError that names the file, the message and the byte."""
        try:
            return cls.from_bytes(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_file(self, path: str | Path) -> None:
        """Writes one `.et` file."""
        Path(path).write_bytes(self.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> Trace:
        """From the bytes of an `.et` file."""
        messages = list(_split(data))
        if not messages:
            raise ValueError("an empty file; a trace begins with its GlobalMetadata")
        nodes = []
        head = _decode(_METADATA, messages[0], "GlobalMetadata")
        for number, message in enumerate(messages[1:]):
            fields = _decode(_NODE, message, f"node {number}")
            try:
                nodes.append(_node(fields))
            except ValueError as error:
                raise ValueError(f"node {number} at byte {message[0]}: {error}") from None
        return cls(
            nodes=tuple(nodes), version=head.get("version", ""), attributes=tuple(map(_attribute, head.get("attr", ())))
        )

    def to_bytes(self) -> bytes:
        """The bytes of an `.et` file."""
        head = {"version": self.version, "attr": [_fields(attribute) for attribute in self.attributes]}
        return _framed(wire.encode(_METADATA, head)) + b"".join(_framed(wire.encode(_NODE, _of(n))) for n in self.nodes)


def _split(data: bytes) -> Iterable[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        start = at
        try:
            length, at = wire.read_varint(data, at)
        except ValueError as error:
            raise ValueError(f"byte {start}: {error}, where the length of a message is due") from None
        if at + length > len(data):
            raise ValueError(f"byte {start}: a message of {length} bytes is announced, {len(data) - at} are there")
        yield at, data[at : at + length]
        at += length


def _framed(message: bytes) -> bytes:
    return wire.varint(len(message)) + message


def _decode(table: Table, message: tuple[int, bytes], what: str) -> wire.Fields:
    try:
        return wire.decode(table, message[1])
    except ValueError as error:
        raise ValueError(f"{what} at byte {message[0]}: {error}") from None


def _node(fields: wire.Fields) -> Node:
    kind = fields.get("type", 0)
    if kind not in list(NodeType):
        raise ValueError(f"no type {kind}; the types are {', '.join(f'{int(t)} {t.name}' for t in NodeType)}")
    return Node(
        id=fields.get("id", 0),
        type=NodeType(kind),
        name=fields.get("name", ""),
        ctrl_deps=tuple(fields.get("ctrl_deps", ())),
        data_deps=tuple(fields.get("data_deps", ())),
        start_time_micros=fields.get("start_time_micros", 0),
        duration_micros=fields.get("duration_micros", 0),
        inputs=Tensors(**fields["inputs"]) if "inputs" in fields else None,
        outputs=Tensors(**fields["outputs"]) if "outputs" in fields else None,
        attributes=tuple(map(_attribute, fields.get("attr", ()))),
    )


def _of(node: Node) -> wire.Fields:
    fields: wire.Fields = {name: getattr(node, name) for name in ("id", "name", "ctrl_deps", "data_deps")}
    fields |= {"type": int(node.type), "attr": [_fields(attribute) for attribute in node.attributes]}
    fields |= {"start_time_micros": node.start_time_micros, "duration_micros": node.duration_micros}
    for side in ("inputs", "outputs"):
        tensors: Tensors | None = getattr(node, side)
        if tensors is not None:
            fields[side] = {"values": tensors.values, "shapes": tensors.shapes, "types": tensors.types}
    return fields


def _attribute(fields: Mapping[str, object]) -> Attribute:
    kinds = [name for name in fields if name in _VALUES]
    kind = kinds[-1] if kinds else None  # of a oneof the last one counts
    value = fields[kind] if kind else None
    if isinstance(value, dict):
        value = tuple(value.get("values", ()))
    return Attribute(str(fields.get("name", "")), kind, value, str(fields.get("doc_string", "")))  # type: ignore[arg-type]


def _fields(attribute: Attribute) -> wire.Fields:
    fields: wire.Fields = {"name": attribute.name, "doc_string": attribute.doc}
    if attribute.kind is not None:
        listed = attribute.kind.endswith("_list")
        fields[attribute.kind] = {"values": attribute.value} if listed else attribute.value
    return fields
