"""The wire format of Protocol Buffers, as much of it as an execution trace needs.

Owns bytes <-> fields of a message that a table describes. Written as the reference implementation writes it: fields in
order of their numbers, zeros left out, repeated numbers packed. A field that the table does not have is an error, since
dropping it would change the file.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its name, its type (a scalar or another table), whether it repeats, and whether a zero is written."""

    name: str
    kind: str | Mapping[int, Field]
    repeated: bool = False
    explicit: bool = False  #: a member of a oneof: present even if zero


Table = Mapping[int, Field]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_INTEGERS = {  # low, high
    "int32": (-(1 << 31), (1 << 31) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
    "uint32": (0, (1 << 32) - 1),
    "uint64": (0, (1 << 64) - 1),
    "sint32": (-(1 << 31), (1 << 31) - 1),
    "sint64": (-(1 << 63), (1 << 63) - 1),
    "bool": (0, 1),
}
_FIXED = {
    "double": (_FIXED64, "<d"),
    "fixed64": (_FIXED64, "<Q"),
    "sfixed64": (_FIXED64, "<q"),
    "float": (_FIXED32, "<f"),
    "fixed32": (_FIXED32, "<I"),
    "sfixed32": (_FIXED32, "<i"),
}
_ZERO: dict[str, Any] = {"string": "", "bytes": b"", "bool": False, "double": 0.0, "float": 0.0}


def encode(table: Table, fields: Fields) -> bytes:
    """Bytes of a message. Raises ValueError for a value that its field cannot hold."""
    out = bytearray()
    names = {field.name for field in table.values()}
    if unknown := sorted(set(fields) - names):
        raise ValueError(f"no field {', '.join(unknown)}; there are {', '.join(sorted(names))}")
    for number, field in sorted(table.items()):
        if field.name not in fields:
            continue
        value = fields[field.name]
        if not field.repeated:
            if field.explicit or not isinstance(field.kind, str) or value != _ZERO.get(field.kind, 0):
                out += _one(number, field, value)
        elif isinstance(field.kind, str) and field.kind not in ("string", "bytes"):
            if value:
                body = b"".join(_scalar(field, item) for item in value)
                out += varint(number << 3 | _BYTES) + varint(len(body)) + body
        else:
            for item in value:
                out += _one(number, field, item)
    return bytes(out)


def decode(table: Table, data: bytes) -> Fields:
    """Fields of a message; absent ones are absent. Raises ValueError with the byte at fault, counted from its start."""
    fields: Fields = {}
    at = 0
    while at < len(data):
        start = at
        tag, at = read_varint(data, at)
        number, wire = tag >> 3, tag & 7
        field = table.get(number)
        if field is None:
            known = ", ".join(f"{n} {f.name}" for n, f in sorted(table.items()))
            raise ValueError(f"byte {start}: no field {number}; the fields are {known}")
        try:
            at = _read(field, wire, data, at, fields)
        except ValueError as error:
            raise ValueError(f"byte {start}: {field.name}: {error}") from None
    return fields


def varint(value: int) -> bytes:
    """Seven bits at a time, the lowest first."""
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place after it."""
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("the data ends inside a number")
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value & ((1 << 64) - 1), at


def _one(number: int, field: Field, value: Any) -> bytes:
    if not isinstance(field.kind, str):
        body = encode(field.kind, value)
        return varint(number << 3 | _BYTES) + varint(len(body)) + body
    return varint(number << 3 | _wire(field.kind)) + _scalar(field, value)


def _wire(kind: str) -> int:
    if kind in _INTEGERS:
        return _VARINT
    return _FIXED[kind][0] if kind in _FIXED else _BYTES


def _scalar(field: Field, value: Any) -> bytes:
    kind = field.kind
    assert isinstance(kind, str)
    try:
        if kind in _INTEGERS:
            low, high = _INTEGERS[kind]
            if not isinstance(value, int) or not low <= value <= high:
                raise ValueError
            return varint((value << 1) ^ (value >> 63) if kind.startswith("sint") else int(value))
        if kind in _FIXED:
            return struct.pack(_FIXED[kind][1], value)
        body = value.encode() if kind == "string" else bytes(value)
        return varint(len(body)) + body
    except (ValueError, TypeError, AttributeError, OverflowError, struct.error):
        raise ValueError(f"{field.name} must be a {kind}, not {value!r}") from None


def _read(field: Field, wire: int, data: bytes, at: int, fields: Fields) -> int:
    kind = field.kind
    packed = field.repeated and wire == _BYTES and isinstance(kind, str) and kind not in ("string", "bytes")
    if not packed and wire != (_wire(kind) if isinstance(kind, str) else _BYTES):
        raise ValueError(f"wire type {wire} does not fit")
    if wire == _BYTES:
        length, at = read_varint(data, at)
        if at + length > len(data):
            raise ValueError(f"{length} bytes announced, {len(data) - at} there")
        body, at = data[at : at + length], at + length
        if packed:
            items, place = fields.setdefault(field.name, []), 0
            while place < length:
                item, place = _read_scalar(str(kind), body, place)
                items.append(item)
            return at
        value: Any = _text(body) if kind == "string" else body if isinstance(kind, str) else decode(kind, body)
    else:
        value, at = _read_scalar(str(kind), data, at)
    if field.repeated:
        fields.setdefault(field.name, []).append(value)
    else:
        fields[field.name] = value
    return at


def _read_scalar(kind: str, data: bytes, at: int) -> tuple[Any, int]:
    if kind in _FIXED:
        form = _FIXED[kind][1]
        if at + struct.calcsize(form) > len(data):
            raise ValueError("the data ends inside a number")
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    value, at = read_varint(data, at)
    if kind == "bool":
        return bool(value), at
    if kind.endswith("32"):
        value &= (1 << 32) - 1
    bits = 32 if kind.endswith("32") else 64
    if kind.startswith("sint"):
        return (value >> 1) ^ -(value & 1), at
    if kind.startswith("int") and value >> (bits - 1):
        value -= 1 << bits
    return value, at


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise ValueError(f"not UTF-8 text: {body[:20]!r}") from None
