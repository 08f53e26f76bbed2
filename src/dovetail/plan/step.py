"""One step of a queue, as a row of a NumPy table.

Owns the row layout (`STEP`, `SOURCE`), the opcodes, and vectorised row makers; a `Step` is a read-only view of one
row for people and error messages. It knows nothing of plans, collectives or hardware. The layout of `STEP` and
`SOURCE` is an ABI: `native/program.h` mirrors it, and a test compares the two.

Shapes: every row maker takes scalars or arrays of one common length K and returns K rows.
Addresses: (rank, buffer, offset) with `buffer` an index into `Plan.buffers`; all sizes and offsets are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.void]

#: A length that a parameter alone decides.
UNBOUNDED = 1 << 62
#: "No buffer", "no signal", "no parameter".
NONE = -1


class Op(IntEnum):
    """What a step does. The first four mirror the packets of an SDMA ring."""

    COPY = 0  #: `length` bytes from src to dst
    COPY2D = 1  #: `rows` rows of `length` bytes, `src_pitch` and `dst_pitch` apart
    BROADCAST = 2  #: `length` bytes from src to dst and dst2, the source read once
    SWAP = 3  #: exchange `length` bytes of src and dst in place
    SIGNAL = 4  #: raise `signal` to base + `value`, after all earlier steps of the queue
    WAIT = 5  #: hold the queue until `signal` has reached base + `value`
    STAMP = 6  #: write the time into stamp `value`
    REDUCE = 7  #: dst = op over `num_sources` sources, in the order of the source table
    RESET = 8  #: set `signal` to zero: the last word on it in a run whose values are fixed (a captured graph)


#: Ops that move bytes, in the order of their numbers.
MOVES = (Op.COPY, Op.COPY2D, Op.BROADCAST, Op.SWAP, Op.REDUCE)


def among(op: NDArray[np.uint8], ops: Collection[Op]) -> NDArray[np.bool_]:
    """For each opcode: is it one of `ops`? An unknown opcode is none of them."""
    table = np.zeros(256, bool)
    table[list(ops)] = True
    found: NDArray[np.bool_] = table[op]
    return found


class ReduceOp(IntEnum):
    """How a `REDUCE` combines its sources. `AVG` is the sum divided by their number."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


class DType(IntEnum):
    """Element types a `REDUCE` knows. 8- and 16-bit floats are summed in fp32 and rounded once."""

    UINT8 = 0
    INT8 = 1
    INT16 = 2
    INT32 = 3
    INT64 = 4
    UINT16 = 5
    UINT32 = 6
    UINT64 = 7
    BOOL = 8
    FLOAT16 = 9
    BFLOAT16 = 10
    FLOAT32 = 11
    FLOAT64 = 12
    FLOAT8_E4M3FN = 13
    FLOAT8_E5M2 = 14
    FLOAT8_E4M3FNUZ = 15
    FLOAT8_E5M2FNUZ = 16

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]


_ITEMSIZE = (1, 1, 2, 4, 8, 2, 4, 8, 1, 2, 2, 4, 8, 1, 1, 1, 1)

STEP = np.dtype(
    [
        ("op", "u1"),
        ("dtype", "u1"),
        ("reduce_op", "u1"),
        ("flags", "u1"),
        ("signal", "i4"),
        ("value", "i8"),
        ("src_rank", "i2"),
        ("dst_rank", "i2"),
        ("dst2_rank", "i2"),
        ("src_buffer", "i2"),
        ("dst_buffer", "i2"),
        ("dst2_buffer", "i2"),
        ("num_sources", "i4"),  # REDUCE: rows first_source .. first_source + num_sources of Plan.sources
        ("src_offset", "i8"),
        ("src_alt", "i8"),  # the offset instead of src_offset where src is a VIEW that its rank stages
        ("dst_offset", "i8"),
        ("dst2_offset", "i8"),
        ("src_param", "i4"),  # added to the offset, NONE if it is a number
        ("dst_param", "i4"),
        ("dst2_param", "i4"),
        ("length_param", "i4"),  # the length is then min(length, max(param - skip, 0))
        ("length", "i8"),
        ("skip", "i8"),
        ("rows", "i8"),
        ("src_pitch", "i8"),
        ("dst_pitch", "i8"),
        ("first_source", "i8"),
    ],
    align=True,
)

SOURCE = np.dtype(
    [("rank", "i2"), ("buffer", "i2"), ("param", "i4"), ("offset", "i8"), ("alt", "i8")],
    align=True,
)

#: An operand is (rank, buffer, offset) or (rank, buffer, offset, param); each part a number or an array.
Operand = tuple[Any, ...]


# Structured rows are copied as plain bytes: NumPy's field-wise promotion would cost more than the plan.
_RAW = np.dtype(f"V{STEP.itemsize}")


def _absent() -> Rows:
    row = np.zeros(1, STEP)
    for name in ("signal", "src_rank", "dst_rank", "dst2_rank", "src_buffer", "dst_buffer", "dst2_buffer"):
        row[name] = NONE
    for name in ("src_param", "dst_param", "dst2_param", "length_param"):
        row[name] = NONE
    row["rows"] = 1
    return row


_BLANK = _absent()


def blank(num_rows: int) -> Rows:
    """`num_rows` rows with every reference absent."""
    return _BLANK.copy() if num_rows == 1 else np.repeat(_BLANK, num_rows)


def _length_of(*parts: Any) -> int:
    length = None
    for part in parts:
        if isinstance(part, (np.ndarray, list, tuple)):
            length = len(part) if length is None else max(length, len(part))
    return 1 if length is None else length


def _set(rows: Rows, side: str, operand: Operand) -> None:
    rows[f"{side}_rank"], rows[f"{side}_buffer"], rows[f"{side}_offset"] = operand[:3]
    if side == "src":
        rows["src_alt"] = operand[2]
    if len(operand) > 3:
        rows[f"{side}_param"] = operand[3]


def _move(op: Op, length: Any, length_param: Any, skip: Any, **sides: Operand) -> Rows:
    rows = blank(_length_of(length, length_param, skip, *(p for s in sides.values() for p in s)))
    rows["op"] = op
    rows["length"] = length
    rows["length_param"] = length_param
    rows["skip"] = skip
    for side, operand in sides.items():
        _set(rows, side, operand)
    return rows


def copy(src: Operand, dst: Operand, length: Any, *, length_param: Any = NONE, skip: Any = 0, alt: Any = None) -> Rows:
    """Linear copies; `alt` is the source offset where the source is a staged view."""
    rows = _move(Op.COPY, length, length_param, skip, src=src, dst=dst)
    if alt is not None:
        rows["src_alt"] = alt
    return rows


def copy2d(src: Operand, dst: Operand, length: Any, num_rows: Any, src_pitch: Any, dst_pitch: Any) -> Rows:
    """Strided copies of `num_rows` rows of `length` bytes each."""
    rows = _move(Op.COPY2D, length, NONE, 0, src=src, dst=dst)
    rows["rows"], rows["src_pitch"], rows["dst_pitch"] = num_rows, src_pitch, dst_pitch
    return rows


def broadcast(src: Operand, dst: Operand, dst2: Operand, length: Any) -> Rows:
    """One source, two destinations."""
    return _move(Op.BROADCAST, length, NONE, 0, src=src, dst=dst, dst2=dst2)


def swap(src: Operand, dst: Operand, length: Any) -> Rows:
    """In-place exchange of two ranges."""
    return _move(Op.SWAP, length, NONE, 0, src=src, dst=dst)


def reduce(dst: Operand, length: Any, first_source: Any, num_sources: int, dtype: DType, reduce_op: ReduceOp) -> Rows:
    """Reductions; the sources stand in the plan's source table."""
    rows = _move(Op.REDUCE, length, NONE, 0, dst=dst)
    rows["first_source"], rows["num_sources"] = first_source, num_sources
    rows["dtype"], rows["reduce_op"] = dtype, reduce_op
    return rows


def _word(op: Op, signal: Any, value: Any) -> Rows:
    rows = blank(_length_of(signal, value))
    rows["op"], rows["signal"], rows["value"] = op, signal, value
    return rows


def signal(index: Any, value: Any = 1) -> Rows:
    """Raise signals."""
    return _word(Op.SIGNAL, index, value)


def wait(index: Any, value: Any = 1) -> Rows:
    """Wait for signals."""
    return _word(Op.WAIT, index, value)


def reset(index: Any) -> Rows:
    """Set signals back to zero."""
    return _word(Op.RESET, index, 0)


def stamp(index: Any) -> Rows:
    """Record the time."""
    return _word(Op.STAMP, NONE, index)


def sources(rank: Any, buffer: Any, offset: Any, *, alt: Any = None, param: Any = NONE) -> Rows:
    """Rows of a source table."""
    rows = np.zeros(_length_of(rank, buffer, offset, alt, param), SOURCE)
    rows["rank"], rows["buffer"], rows["offset"], rows["param"] = rank, buffer, offset, param
    rows["alt"] = offset if alt is None else alt
    return rows


def sequence(*blocks: Rows) -> Rows:
    """Blocks one after the other."""
    if not blocks:
        return blank(0)
    return np.concatenate([np.ascontiguousarray(b).view(_RAW) for b in blocks]).view(STEP)


def interleave(*blocks: Rows) -> Rows:
    """Row 0 of every block, then row 1 of every block, ...; all blocks have the same number of rows."""
    out = np.empty((len(blocks[0]), len(blocks)), _RAW)
    for column, block in enumerate(blocks):
        out[:, column] = np.ascontiguousarray(block).view(_RAW)
    return out.reshape(-1).view(STEP)


@dataclass(frozen=True, slots=True)
class Step:
    """A row, for people: attributes by column name and a one-line `str`."""

    row: np.void
    sources: Rows

    @property
    def op(self) -> Op:
        return Op(int(self.row["op"]))

    def __getattr__(self, name: str) -> int:
        try:
            return int(self.row[name])
        except ValueError:
            raise AttributeError(name) from None

    def describe(self, buffers: Sequence[str], signals: Sequence[str]) -> str:
        """`copy 512 B r0.input+0 -> r1.output+512`, with the plan's own names."""
        r = self.row

        def at(side: str) -> str:
            param = "" if r[f"{side}_param"] < 0 else f"+p{r[f'{side}_param']}"
            return f"r{r[f'{side}_rank']}.{buffers[r[f'{side}_buffer']]}+{r[f'{side}_offset']}{param}"

        size = f"{r['length']} B" if r["length_param"] < 0 else f"p{r['length_param']} B"
        match self.op:
            case Op.COPY:
                return f"copy {size} {at('src')} -> {at('dst')}"
            case Op.COPY2D:
                return f"copy2d {r['rows']} x {size} {at('src')} -> {at('dst')}"
            case Op.BROADCAST:
                return f"broadcast {size} {at('src')} -> {at('dst')}, {at('dst2')}"
            case Op.SWAP:
                return f"swap {size} {at('src')} <-> {at('dst')}"
            case Op.REDUCE:
                name = ReduceOp(int(r["reduce_op"])).name.lower()
                of = ", ".join(f"r{s['rank']}.{buffers[s['buffer']]}+{s['offset']}" for s in self.sources)
                return f"reduce {name} {size} {of} -> {at('dst')}"
            case Op.SIGNAL:
                return f"signal {signals[r['signal']]} = {r['value']}"
            case Op.WAIT:
                return f"wait {signals[r['signal']]} >= {r['value']}"
            case Op.RESET:
                return f"reset {signals[r['signal']]}"
            case Op.STAMP:
                return f"stamp {r['value']}"
