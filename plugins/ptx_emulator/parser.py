"""PTX text -> `Kernel` objects. Strict: an opcode spelling outside the table of `isa` is refused
with its line.

Traps of the text that the CuTe DSL compiler writes, all handled here: inline assembly opens `{ }`
scopes that declare registers and labels again; `.loc` and its kin end at the newline and also stand
inside inline assembly; `name:` is a label but `::` belongs to an opcode; braces are scopes at the
start of a statement and vectors inside one; one `.reg` mixes ranges and plain names; offsets may be
negative.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field

from ptx_emulator import (  # the isa modules fill the table of accepted opcodes
    isa,
    isa_float,
    isa_integer,
    isa_memory,
    isa_sync,
    isa_tensor,
)
from ptx_emulator.errors import UnsupportedInstruction
from ptx_emulator.ptx import (
    BITS,
    Address,
    GlobalVariable,
    Imm,
    Instr,
    Kernel,
    Offset,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
    align_up,
)

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_TARGET = re.compile(r"\.target\s+(\w+)")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*([^{;]*)\{", re.S)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"(?:\.ptr\s+(?:\.(?:global|shared|const)\s+)?(?:\.align\s+\d+\s+)?)?([\w$]+)(?:\[(\d+)\])?\Z"
)
_VARIABLE = re.compile(
    r"(?:\.(?:extern|visible|weak)\s+)*\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?"
    r"(?:\.attribute\([^)]*\)\s+)?\.(\w+)\s+([\w$]+)\s*(?:(\[)(\d*)\])?\s*(?:=\s*(.*))?\Z",
    re.S,
)
_USED_BYTES = re.compile(r'"used_bytes_mask\s+(0x[0-9a-fA-F]+)"')
_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)")
_STATEMENT = re.compile(r"(?:@(!?)\s*([\w$%]+)\s+)?([\w.:]+)\s*(.*)", re.S)
_OFFSET = re.compile(r"([\w$%.]+?)\s*\+\s*(-?(?:0[xX][0-9a-fA-F]+|\d+))\Z")
_DECIMAL = re.compile(r"-?\d+U?\Z")
_HEX = re.compile(r"-?0[xX][0-9a-fA-F]+U?\Z")
_FLOAT = re.compile(r"0[fF][0-9a-fA-F]{8}\Z|0[dD][0-9a-fA-F]{16}\Z")
_NAME = re.compile(r"[\w$%.]+\Z")
# the .loc directives inside count lines of the assembly text, not of the source
_INLINE = re.compile(r"// begin inline asm\n.*?// end inline asm", re.S)
_LINE_DIRECTIVE = re.compile(r"\.(?:loc|file|section)\b")


ISA_MODULES = (isa_float, isa_integer, isa_memory, isa_sync, isa_tensor)


def accepts(spelling: str) -> bool:
    """True when the emulator models this complete opcode spelling."""
    return isa.find(spelling) is not None


def parse(ptx: str) -> dict[str, Kernel]:
    """All kernels of a PTX module by entry name.

    Raises `UnsupportedInstruction` for a spelling or a construct that is not modelled, with its
    line.
    """
    files = {int(m[1]): m[2] for m in _FILE.finditer(ptx)}
    text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), ptx)  # keeps line numbers
    target = _TARGET.search(text)
    if target is None:
        raise UnsupportedInstruction("not a PTX module: no .target directive")
    if re.search(r"\.func\b", text):
        raise UnsupportedInstruction("the module defines or declares device functions (.func)")
    newlines = [m.start() for m in re.finditer("\n", text)]
    inline = [m.span() for m in _INLINE.finditer(ptx)]
    kernels: dict[str, Kernel] = {}
    outside, at = [], 0
    bodies = []
    for entry in _ENTRY.finditer(text):
        kernel = Kernel(entry[1], target[1])
        _parameters(kernel, entry[2] or "")
        kernel.required_block = _dimensions(entry[3], "reqntid")
        kernel.maximum_block = _dimensions(entry[3], "maxntid")
        kernel.required_cluster = _dimensions(entry[3], "reqnctapercluster")
        body = _Body(kernel, text, entry.end(), newlines, files, inline)
        outside.append(text[at : entry.start()])
        at = body.parse()
        bodies.append(body)
        kernels[kernel.name] = kernel
    outside.append(text[at:])
    for body in bodies:
        _module_variables(body, " ".join(outside))
        body.place_dynamic()
    return kernels


def _dimensions(directives: str, name: str) -> tuple[int, ...] | None:
    m = re.search(rf"\.{name}\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
    return tuple(int(x or 1) for x in m.groups()) if m else None


def _parameters(kernel: Kernel, text: str) -> None:
    offset = 0
    for declaration in split_operands(text):
        m = _PARAM.match(" ".join(declaration.split()))
        if m is None:
            raise UnsupportedInstruction(f"parameter not understood: {declaration}")
        size = BITS[m[2]] // 8 * int(m[4] or 1)
        offset = align_up(offset, int(m[1] or size))
        kernel.params[m[3]] = Variable(offset, size)
        offset += size
    kernel.param_bytes = offset


def _module_variables(body: _Body, text: str) -> None:
    """Shared, global and constant variables declared at module scope."""
    for piece in re.split(r"[;\n](?=\s*\.)|;", text):
        statement = " ".join(piece.split())
        if re.match(r"(?:\.(?:extern|visible|weak)\s+)*\.(?:shared|global|const)\b", statement):
            body.variable(statement)


def split_operands(text: str) -> list[str]:
    """Split at the commas that stand outside every bracket."""
    out, depth, current = [], 0, ""
    for ch in text:
        depth += (ch in "{[(") - (ch in "}])")
        if ch == "," and depth == 0:
            out.append(current.strip())
            current = ""
        else:
            current += ch
    if current.strip():
        out.append(current.strip())
    return out


@dataclass
class _Body:
    """Parser state inside the braces of one kernel."""

    kernel: Kernel
    text: str
    at: int
    newlines: list[int]
    files: dict[int, str]
    inline: list[tuple[int, int]]
    registers: list[dict[str, int]] = field(default_factory=lambda: [{}])
    scopes: list[int] = field(default_factory=lambda: [0])
    scope_count: int = 0
    loc: tuple[str, int] | None = None
    used: int | None = None
    dynamic: list[tuple[str, int]] = field(default_factory=list)

    def parse(self) -> int:
        """Parse up to the closing brace; returns the position after it."""
        text, depth = self.text, 1
        while True:
            while text[self.at].isspace():
                self.at += 1
            ch = text[self.at]
            if ch == "{":
                depth += 1
                self.at += 1
                self.scope_count += 1
                self.registers.append({})
                self.scopes.append(self.scope_count)
            elif ch == "}":
                depth -= 1
                self.at += 1
                self.registers.pop()
                self.scopes.pop()
                if depth == 0:
                    break
            elif _LINE_DIRECTIVE.match(text, self.at):
                self._line_directive()
            elif m := _LABEL.match(text, self.at):
                self.kernel.labels[(self.scopes[-1], m[1])] = len(self.kernel.instructions)
                self.at = m.end()
            else:
                end = text.index(";", self.at)
                line = bisect.bisect_left(self.newlines, self.at) + 1
                self._statement(" ".join(text[self.at : end].split()), line)
                self.at = end + 1
        # the target of guarded returns: a last block that only returns
        self.kernel.instructions.append(Instr("ret", (), "ret", 0, None))
        return self.at

    def _line_directive(self) -> None:
        end = self.text.index("\n", self.at)
        m = re.match(r"\.loc\s+(\d+)\s+(\d+)", self.text[self.at : end])
        before = bisect.bisect_right(self.inline, (self.at, len(self.text))) - 1
        inside = before >= 0 and self.at < self.inline[before][1]
        if m and int(m[2]) and not inside:
            self.loc = (self.files.get(int(m[1]), f"file {m[1]}"), int(m[2]))
        self.at = end

    def _statement(self, statement: str, line: int) -> None:
        if statement.startswith(".reg"):
            self._declare_registers(statement)
        elif statement.startswith((".shared", ".local")):
            self.variable(statement)
        elif statement.startswith(".pragma"):
            mask = _USED_BYTES.search(statement)
            self.used = int(mask[1], 16) if mask else self.used
        elif not statement:
            return
        elif statement.startswith("."):
            raise UnsupportedInstruction(f"directive not modelled: PTX line {line}: {statement}")
        else:
            self._instruction(statement, line)

    def _declare_registers(self, statement: str) -> None:
        m = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement)
        if m is None or m[1] not in BITS:
            raise UnsupportedInstruction(f"register declaration not understood: {statement}")
        for name in split_operands(m[2]):
            span = re.match(r"(.*)<(\d+)>", name)
            names = [f"{span[1]}{n}" for n in range(int(span[2]))] if span else [name]
            for each in names:
                self.registers[-1][each] = len(self.kernel.register_types)
                self.kernel.register_types.append(m[1])

    def variable(self, statement: str) -> None:
        """A `.shared`, `.local`, `.global` or `.const` declaration."""
        m = _VARIABLE.match(statement)
        if m is None:
            raise UnsupportedInstruction(f"declaration not understood: {statement[:200]}")
        space, alignment, ty, name, bracket, count, initial = m.groups()
        element = BITS[ty] // 8
        to = int(alignment or element)
        k = self.kernel
        if space == "shared":
            if bracket and not count:
                self.dynamic.append((name, to))
                return
            k.shared_static_end = align_up(k.shared_static_end, to)
            k.shared[name] = Variable(k.shared_static_end, element * int(count or 1))
            k.shared_static_end += k.shared[name].bytes
        elif space == "local":
            k.local_bytes = align_up(k.local_bytes, to)
            k.local[name] = Variable(k.local_bytes, element * int(count or 1))
            k.local_bytes += k.local[name].bytes
        else:
            data = _initial(initial or "", element, int(count or 1), statement)
            k.module[name] = GlobalVariable(data, max(to, 16), space == "const")

    def place_dynamic(self) -> None:
        """Dynamic shared memory starts after everything static."""
        for name, to in self.dynamic:
            self.kernel.shared_static_end = align_up(self.kernel.shared_static_end, to)
            self.kernel.shared[name] = Variable(self.kernel.shared_static_end, 0)

    def _instruction(self, statement: str, line: int) -> None:
        m = _STATEMENT.match(statement)
        if m is None:
            raise UnsupportedInstruction(f"not understood: PTX line {line}: {statement}")
        ins = Instr(m[3], (), statement, line, self.loc, used=self.used)
        self.used = None
        where = f"PTX line {line}: {statement[:200]}" + (f" ({ins.source})" if ins.source else "")
        if not accepts(m[3]):
            raise UnsupportedInstruction(f"instruction not modelled: {where}")
        if m[2]:
            ins.guard, ins.guard_negated = self._lookup(m[2]), bool(m[1])
            if ins.guard is None:
                raise UnsupportedInstruction(f"unknown guard {m[2]}: {where}")
        try:
            ins.ops = tuple(self._operand(o) for o in split_operands(m[4]))
        except ValueError as e:
            raise UnsupportedInstruction(f"{e}: {where}") from None
        self.kernel.instructions.append(ins)

    def _lookup(self, name: str) -> int | None:
        for scope in reversed(self.registers):
            if name in scope:
                return scope[name]
        return None

    def _operand(self, text: str) -> Operand:
        text = text.strip()
        if not text:
            raise ValueError("empty operand")
        if text[0] == "{":
            return Vector(tuple(self._operand(x) for x in split_operands(text[1:-1])))
        if text[0] == "[":
            return Address(tuple(self._operand(x) for x in split_operands(text[1:-1])))
        if "|" in text:
            return Pair(tuple(self._operand(x) for x in text.split("|")))
        if m := _OFFSET.match(text):
            return Offset(self._operand(m[1]), int(m[2], 0))
        negated = text[0] == "!"
        register = self._lookup(text[1:] if negated else text)
        if register is not None:
            return Reg(register, negated)
        if _DECIMAL.match(text):
            return Imm(int(text.rstrip("U")))
        if _HEX.match(text):
            return Imm(int(text.rstrip("U"), 16))
        if _FLOAT.match(text):
            return Imm(int(text[2:], 16))
        if text == "_":
            return Sink()
        if not _NAME.match(text):
            raise ValueError(f"operand not understood: {text}")
        return Special(text) if text[0] == "%" else Symbol(text, tuple(self.scopes))


def _initial(text: str, element: int, count: int, statement: str) -> bytearray:
    """Initial bytes of a module variable; only numbers are understood."""
    data = bytearray(element * count)
    if not text:
        return data
    numbers = re.findall(r"[^\s,{}]+", text)
    for i, number in enumerate(numbers):
        if _FLOAT.match(number):
            value = int(number[2:], 16)
        elif _DECIMAL.match(number) or _HEX.match(number):
            value = int(number.rstrip("U"), 0)
        else:
            raise UnsupportedInstruction(f"initial value not understood: {statement[:200]}")
        mask = (1 << (8 * element)) - 1
        data[i * element : (i + 1) * element] = (value & mask).to_bytes(element, "little")
    return data
