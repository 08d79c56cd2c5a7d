"""A kernel as basic blocks of Python code: block structure, lazy compilation, register use.

Each block becomes up to two functions, for "all lanes of the unit active" and for a mask, written
by the `BlockEmitter` and compiled when the block first runs in that way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from linattn.reference import instructions
from ptx_emulator import isa, scalar
from ptx_emulator.blocks import EXIT, BlockEmitter
from ptx_emulator.errors import Unmodelled
from ptx_emulator.ptx import (
    Address,
    Array,
    Instr,
    Kernel,
    Offset,
    Operand,
    Pair,
    Reg,
    Symbol,
    Vector,
)

BlockFunction = Callable[[Any, list[Array], Array], Any]

_NAMES: dict[str, Any] = {
    "np": np,
    "A": instructions,
    "S": scalar,
    "where": np.where,
    "count": np.count_nonzero,
    "EXIT": EXIT,
}
_NAMES.update({f"{c}{n}": np.dtype(f"{c}{n}").type for c in "ui" for n in (1, 2, 4, 8)})
_NAMES.update({f"f{n}": np.dtype(f"f{n}").type for n in (2, 4, 8)})

_serial = itertools.count()

# Opcodes whose first operand is not a destination register.
_NO_RESULT = frozenset(
    [
        "st",
        "stmatrix",
        "red",
        "bra",
        "bar",
        "barrier",
        "cp",
        "fence",
        "membar",
        "prefetch",
        "setmaxnreg",
        "griddepcontrol",
        "nanosleep",
        "ret",
        "exit",
        "trap",
        "tensormap",
        "wgmma",
        "discard",
        "applypriority",
        "pmevent",
    ]
)


def _registers(o: Operand) -> frozenset[int]:
    if isinstance(o, Reg):
        return frozenset((o.index,))
    if isinstance(o, (Vector, Address, Pair)):
        return frozenset().union(*(_registers(x) for x in o.items))
    if isinstance(o, Offset):
        return _registers(o.base)
    return frozenset()


def written(ins: Instr) -> frozenset[int]:
    """Registers that an instruction writes when it completes at once (not those of
    `wgmma.mma_async`).
    """
    head = ins.op.split(".", 1)[0]
    if head in _NO_RESULT or not ins.ops or isinstance(ins.ops[0], Address):
        return frozenset()
    return _registers(ins.ops[0])


def asynchronous(ins: Instr) -> tuple[frozenset[int], frozenset[int]]:
    """Registers that an instruction fills later, and registers that it reads later."""
    if ins.op.startswith("wgmma.mma_async"):
        sources = _registers(ins.ops[1]) if isinstance(ins.ops[1], Vector) else frozenset()
        return _registers(ins.ops[0]), sources
    if ins.op.startswith("tcgen05.ld"):
        return _registers(ins.ops[0]), frozenset()
    return frozenset(), frozenset()


def is_move(ins: Instr) -> bool:
    """A register move. The compiler places moves of a result before the wait for it, and the
    assembler makes them vanish, so they count as another name of the register and not as a use."""
    return ins.op.startswith("mov.")


ACCUMULATOR_USED = "accumulators of a wgmma are used before its wait_group"
OPERAND_OVERWRITTEN = "A registers of a wgmma are overwritten before its wait_group"
LOAD_USED = "registers of a tcgen05.ld are used before tcgen05.wait::ld"


@dataclass(frozen=True)
class Hazard:
    """An instruction that uses a register still in flight from its own block."""

    instruction: Instr
    message: str


def _hazard(block: list[Instr]) -> tuple[Hazard | None, bool]:
    """The first hazard inside a block, and whether a move copies a register in flight."""
    nothing: frozenset[int] = frozenset()
    accumulators, operands, loads, copied = nothing, nothing, nothing, False
    for ins in block:
        fills, uses = asynchronous(ins)
        reads, writes = read(ins), written(ins)
        if is_move(ins) and reads & (accumulators | loads):
            copied = True
            if reads & accumulators:
                accumulators = accumulators | writes
            else:
                loads = loads | writes
            continue
        if not fills:
            for registers, message in (
                ((reads | writes) & accumulators, ACCUMULATOR_USED),
                (writes & operands, OPERAND_OVERWRITTEN),
                ((reads | writes) & loads, LOAD_USED),
            ):
                if registers:
                    return Hazard(ins, message), copied
        if ins.op.startswith("tcgen05.ld"):
            loads = loads | fills
        else:
            accumulators, operands = accumulators | fills, operands | uses
    return None, copied


def read(ins: Instr) -> frozenset[int]:
    """Registers that an instruction reads as ordinary operands (none for `wgmma.mma_async`)."""
    if ins.op.startswith("wgmma.mma_async"):
        return frozenset()
    first = 0 if not written(ins) else 1
    out = frozenset().union(*(_registers(o) for o in ins.ops[first:])) if ins.ops else frozenset()
    return out if ins.guard is None else out | {ins.guard}


class Program:
    """One kernel translated for units of `width` lanes.

    `lengths[b]` counts the instructions of block b, `starts[b]` is the index of its first one.
    `reads[b]` and `writes[b]` are the registers it touches (moves read nothing, see `is_move`),
    `moves[b]` its moves as (sources, destinations), `hazards[b]` the first use of a register still
    in flight from its own block, `copies[b]` says that a move copies such a register.
    `full[b]` and `masked[b]` are its functions, None until compiled.
    """

    def __init__(self, kernel: Kernel, width: int) -> None:
        self.kernel, self.width = kernel, width
        self._blocks = _block_instructions(kernel)
        self.starts = list(itertools.accumulate((len(b) for b in self._blocks[:-1]), initial=0))
        self.lengths = [len(b) for b in self._blocks]
        self._targets = _branch_targets(kernel, self._blocks, self.starts)
        self.full: list[BlockFunction | None] = [None] * len(self._blocks)
        self.masked: list[BlockFunction | None] = [None] * len(self._blocks)
        self.reads = [
            frozenset().union(*(read(i) for i in b if not is_move(i))) for b in self._blocks
        ]
        self.writes = [frozenset().union(*(written(i) for i in b)) for b in self._blocks]
        self.moves = [[(read(i), written(i)) for i in b if is_move(i)] for b in self._blocks]
        self.hazards = [_hazard(b)[0] for b in self._blocks]
        self.copies = [_hazard(b)[1] for b in self._blocks]
        self._lines: dict[str, list[Instr]] = {}
        self._name = f"<ptx {kernel.short_name} {next(_serial)}"
        self._emitter = BlockEmitter(kernel, width)
        for b in range(len(self._blocks)):
            self._emit(b, masked=False)
        self._emitter.choose_homes()
        self.homes = self._emitter.homes
        self._globals = dict(_NAMES, K=self._emitter.constants)
        self._globals["TRUE"] = np.ones(width, bool)
        self._globals["FALSE"] = np.zeros(width, bool)
        self.approximate = {
            i.op for i in kernel.instructions if (f := isa.find(i.op)) and f.approximate
        }

    def _emit(self, b: int, masked: bool) -> list[Instr]:
        e = self._emitter
        e.block, e.next = b, b + 1 if b + 1 < len(self._blocks) else EXIT
        try:
            return e.body(self._blocks[b], self._targets[b], masked)
        except Unmodelled as error:
            raise Unmodelled(f"{error}: {describe_failed(self._blocks[b], e)}") from None

    def function(self, b: int, masked: bool) -> BlockFunction:
        """The function of block b, compiled on first use."""
        table = self.masked if masked else self.full
        known = table[b]
        if known is not None:
            return known
        lines = self._emit(b, masked)
        name = f"{self._name} block {b}{' masked' if masked else ''}>"
        source = "def block(U,R,m):\n" + "\n".join("  " + x for x in self._emitter.out)
        self._lines[name] = [self._blocks[b][0], *lines]
        scope: dict[str, Any] = {}
        exec(compile(source, name, "exec"), self._globals, scope)
        made: BlockFunction = scope["block"]
        table[b] = made
        return made

    def registers(self) -> list[Array]:
        """A fresh register file, all zero."""
        return [np.zeros(self.width, h if h != "b1" else np.bool_) for h in self.homes]

    def first_instruction(self, b: int) -> Instr:
        return self._blocks[b][0]

    def last_instruction(self, b: int) -> Instr:
        return self._blocks[b][-1]

    def toucher(self, b: int, registers: frozenset[int]) -> Instr:
        """The first instruction of a block that reads or writes one of the registers."""
        for ins in self._blocks[b]:
            used = written(ins) if is_move(ins) else read(ins) | written(ins)
            if used & registers:
                return ins
        return self._blocks[b][0]

    def instruction_at(self, filename: str, line: int) -> Instr | None:
        lines = self._lines.get(filename)
        return lines[line - 1] if lines else None

    def instruction_on_stack(self, frame: FrameType | None) -> Instr | None:
        """The instruction whose generated code is on the Python call stack."""
        while frame is not None:
            found = self.instruction_at(frame.f_code.co_filename, frame.f_lineno)
            if found is not None:
                return found
            frame = frame.f_back
        return None

    def instruction_of(self, traceback: TracebackType | None) -> Instr | None:
        """The instruction whose generated code raised."""
        found = None
        while traceback is not None:
            at = self.instruction_at(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
            found = at or found
            traceback = traceback.tb_next
        return found


def describe_failed(block: list[Instr], emitter: BlockEmitter) -> str:
    """The first instruction of a block that the emitter cannot translate."""
    for ins in block:
        form = isa.find(ins.op)
        try:
            emitter.out, emitter.mask = [], None
            if form is not None and ins.op.split(".")[0] != "bra":
                form.translate(emitter, ins)
        except Unmodelled:
            return location(ins)
    return location(block[0])


def location(ins: Instr) -> str:
    """'PTX line 12: add.s32 ... (kernel.py:34)'."""
    return f"PTX line {ins.line}: {ins.text[:120]}" + (f" ({ins.source})" if ins.source else "")


def _is_jump(ins: Instr) -> bool:
    head = ins.op.split(".", 1)[0]
    return head == "bra" or (ins.guard is not None and head in ("ret", "exit"))


def _block_instructions(kernel: Kernel) -> list[list[Instr]]:
    instructions = kernel.instructions
    leaders = {0, len(instructions) - 1} | set(kernel.labels.values())
    for i, ins in enumerate(instructions):
        form = isa.find(ins.op)
        if form is None:
            raise Unmodelled(f"not accepted: {location(ins)}")
        if form.leads:
            leaders.add(i)
        if _is_jump(ins) or form.ends or (form.leads and ins.guard is not None):
            leaders.update((i, i + 1) if ins.guard is not None and form.ends else (i + 1,))
    starts = sorted(x for x in leaders if x < len(instructions))
    return [instructions[s:e] for s, e in itertools.pairwise([*starts, len(instructions)])]


def _branch_targets(
    kernel: Kernel, blocks: list[list[Instr]], starts: list[int]
) -> list[list[int | None]]:
    """Per block and instruction: the block a branch goes to, or None."""
    index = {s: b for b, s in enumerate(starts)}

    def target(ins: Instr) -> int | None:
        if not _is_jump(ins):
            return None
        if not ins.op.startswith("bra"):
            return len(blocks) - 1
        label = ins.ops[0]
        if isinstance(label, Symbol):
            for scope in reversed(label.scopes):
                if (scope, label.name) in kernel.labels:
                    return index[kernel.labels[(scope, label.name)]]
        raise Unmodelled(f"unknown label: {location(ins)}")

    return [[target(i) for i in b] for b in blocks]
