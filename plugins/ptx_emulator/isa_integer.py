"""Integer, bit, move and integer-convert instructions."""

from __future__ import annotations

from ptx_emulator.emitter import Emitter, numpy_code, unsigned
from ptx_emulator.errors import Unmodelled
from ptx_emulator.isa import BIT, INT, op
from ptx_emulator.ptx import (
    BITS,
    CTA_SHIFT,
    LOCAL_BASE,
    OFFSET_MASK,
    PARAM_BASE,
    SHARED_BASE,
    Imm,
    Instr,
    Vector,
)

_WRAPPING = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^", "mul": "*"}


@op(rf"(?:add|sub)\.{INT}", rf"(?:and|or|xor)\.(?:pred|{BIT})", rf"mul\.lo\.{INT}")
def wrapping(e: Emitter, i: Instr) -> None:
    """Operations whose bits do not depend on signedness."""
    ty = unsigned(i.parts[-1])
    d, a, b = i.ops
    e.put(d, f"({e.get(a, ty)}{_WRAPPING[i.parts[0]]}{e.get(b, ty)})", ty)


@op(rf"mad\.lo\.{INT}")
def mad_lo(e: Emitter, i: Instr) -> None:
    ty = unsigned(i.parts[-1])
    d, a, b, c = i.ops
    e.put(d, f"({e.get(a, ty)}*{e.get(b, ty)}+{e.get(c, ty)})", ty)


@op(r"(?:mul|mad)\.wide\.[su](?:16|32)")
def wide(e: Emitter, i: Instr) -> None:
    ty = i.parts[-1]
    result = ty[0] + str(2 * BITS[ty])
    n = numpy_code(result)
    product = f"({e.get(i.ops[1], ty)}.astype({n})*{e.get(i.ops[2], ty)}.astype({n})"
    addend = f"+{e.get(i.ops[3], result)}" if i.parts[0] == "mad" else ""
    e.put(i.ops[0], product + addend + ")", result)


@op(r"(?:mul|mad)\.hi\.[su](?:16|32|64)")
def high(e: Emitter, i: Instr) -> None:
    ty = i.parts[-1]
    a, b = e.get(i.ops[1], ty), e.get(i.ops[2], ty)
    if BITS[ty] == 64:
        value = f"S.multiply_high{'_signed' if ty[0] == 's' else ''}({a},{b})"
    else:
        n = numpy_code(ty[0] + str(2 * BITS[ty]))
        value = f"(({a}.astype({n})*{b}.astype({n}))>>{n}({BITS[ty]})).astype({numpy_code(ty)})"
    if i.parts[0] == "mad":
        value = f"({value}+{e.get(i.ops[3], ty)})"
    e.put(i.ops[0], value, ty)


@op(rf"(?:div|rem)\.{INT}")
def divide(e: Emitter, i: Instr) -> None:
    ty = i.parts[-1]
    f = "divide" if i.parts[0] == "div" else "remainder"
    e.put(i.ops[0], f"S.{f}({e.get(i.ops[1], ty)},{e.get(i.ops[2], ty)})", ty)


@op(rf"not\.(?:pred|{BIT})")
def invert(e: Emitter, i: Instr) -> None:
    ty = i.parts[-1]
    e.put(i.ops[0], f"(~{e.get(i.ops[1], ty)})", ty)


@op(rf"cnot\.{BIT}")
def logical_not(e: Emitter, i: Instr) -> None:
    ty = i.parts[-1]
    e.put(i.ops[0], f"({e.get(i.ops[1], ty)}==0).astype({numpy_code(ty)})", ty)


@op(r"neg\.s(?:16|32|64)")
def negate(e: Emitter, i: Instr) -> None:
    ty = i.parts[-1]
    e.put(i.ops[0], f"(-{e.get(i.ops[1], ty)})", ty)


@op(r"abs\.s(?:16|32|64)")
def absolute(e: Emitter, i: Instr) -> None:
    ty = i.parts[-1]
    e.put(i.ops[0], f"np.abs({e.get(i.ops[1], ty)})", ty)


@op(rf"(?:min|max)\.{INT}", r"(?:min|max)\.relu\.s32")
def extreme(e: Emitter, i: Instr) -> None:
    ty = i.parts[-1]
    value = f"np.{i.parts[0]}imum({e.get(i.ops[1], ty)},{e.get(i.ops[2], ty)})"
    if "relu" in i.parts:
        value = f"np.maximum({value},i4(0))"
    e.put(i.ops[0], value, ty)


@op(rf"shl\.{BIT}", rf"shr\.(?:{BIT}|{INT})")
def shift(e: Emitter, i: Instr) -> None:
    ty = i.parts[-1]
    left, a, n = i.parts[0] == "shl", e.get(i.ops[1], ty), i.ops[2]
    if isinstance(n, Imm):
        count, width = n.value, BITS[ty]
        if count >= width and (left or ty[0] != "s"):
            e.put(i.ops[0], e.constant(0, ty), ty)
        else:
            by = e.constant(min(count, width - 1), ty)
            e.put(i.ops[0], f"({a}{'<<' if left else '>>'}{by})", ty)
        return
    e.put(i.ops[0], f"S.shift_{'left' if left else 'right'}({a},{e.get(n, 'b32')})", ty)


@op(r"shf\.[lr]\.(?:clamp|wrap)\.b32")
def funnel_shift(e: Emitter, i: Instr) -> None:
    low, high_, n = (e.get(o, "b32") for o in i.ops[1:4])
    flags = f"{i.parts[1] == 'l'},{i.parts[2] == 'clamp'}"
    e.put(i.ops[0], f"S.funnel({low},{high_},{n},{flags})", "b32")


@op(r"lop3\.b32")
def lop3(e: Emitter, i: Instr) -> None:
    sources = [e.get(o, "b32") for o in i.ops[1:4]]
    table = e.integer(i.ops[4])
    terms = [
        "&".join(s if row >> (2 - j) & 1 else f"~{s}" for j, s in enumerate(sources))
        for row in range(8)
        if table >> row & 1
    ]
    e.put(i.ops[0], "|".join(f"({t})" for t in terms) or e.constant(0, "b32"), "b32")


@op(r"prmt\.b32")
def permute(e: Emitter, i: Instr) -> None:
    e.put(i.ops[0], f"S.permute({','.join(e.get(o, 'b32') for o in i.ops[1:4])})", "b32")


@op(r"bfe\.[su](?:32|64)")
def extract(e: Emitter, i: Instr) -> None:
    ty = i.parts[-1]
    where = f"{e.get(i.ops[2], 'b32')},{e.get(i.ops[3], 'b32')}"
    e.put(i.ops[0], f"S.bit_field_extract({e.get(i.ops[1], ty)},{where})", ty)


@op(r"bfi\.b(?:32|64)")
def insert(e: Emitter, i: Instr) -> None:
    ty = i.parts[-1]
    a, b = e.get(i.ops[1], ty), e.get(i.ops[2], ty)
    where = f"{e.get(i.ops[3], 'b32')},{e.get(i.ops[4], 'b32')}"
    e.put(i.ops[0], f"S.bit_field_insert({a},{b},{where})", ty)


@op(r"popc\.b(?:32|64)", r"clz\.b(?:32|64)")
def count_bits(e: Emitter, i: Instr) -> None:
    a = e.get(i.ops[1], i.parts[-1])
    f = f"S.population({a})" if i.parts[0] == "popc" else f"S.leading_zeros({a})"
    e.put(i.ops[0], f, "b32")


@op(r"brev\.b32", r"bfind\.u32")
def bit_scan(e: Emitter, i: Instr) -> None:
    f = "reverse_bits" if i.parts[0] == "brev" else "find_first"
    e.put(i.ops[0], f"S.{f}({e.get(i.ops[1], 'b32')})", "b32")


# ---- comparison and selection
_RELATION = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_RELATION.update({"lo": "<", "ls": "<=", "hi": ">", "hs": ">="})
_LOGIC = {"and": "&", "or": "|", "xor": "^"}


def put_predicate(e: Emitter, i: Instr, value: str) -> None:
    """Combine a comparison with the optional predicate operand and store it (and its complement,
    for `p|q`).
    """
    if len(i.ops) > 3:
        logic = _LOGIC[next(p for p in i.parts if p in _LOGIC)]
        value = f"({value}{logic}{e.get(i.ops[3], 'pred')})"
    destinations = e.items(i.ops[0])
    if len(destinations) > 1:
        if len(i.ops) > 3:
            raise Unmodelled("setp with two destinations and a predicate operand")
        e.emit(f"t={value}")
        e.put(destinations[1], "(~t)", "pred")
        value = "t"
    e.put(destinations[0], value, "pred")


@op(
    rf"setp\.(?:eq|ne)(?:\.(?:and|or|xor))?\.(?:{BIT}|{INT})",
    rf"setp\.(?:lt|le|gt|ge|lo|ls|hi|hs)(?:\.(?:and|or|xor))?\.{INT}",
)
def compare(e: Emitter, i: Instr) -> None:
    ty = i.parts[-1]
    a, b = e.get(i.ops[1], ty), e.get(i.ops[2], ty)
    put_predicate(e, i, f"({a}{_RELATION[i.parts[1]]}{b})")


@op(rf"selp\.(?:{BIT}|{INT}|f32|f64)")
def select(e: Emitter, i: Instr) -> None:
    ty = i.parts[-1]
    a, b = e.get(i.ops[1], ty), e.get(i.ops[2], ty)
    e.put(i.ops[0], f"where({e.get(i.ops[3], 'pred')},{a},{b})", ty)


@op(rf"slct\.(?:{BIT}|{INT}|f32)\.s32")
def select_by_sign(e: Emitter, i: Instr) -> None:
    ty = i.parts[1]
    a, b = e.get(i.ops[1], ty), e.get(i.ops[2], ty)
    e.put(i.ops[0], f"where({e.get(i.ops[3], 's32')}>=0,{a},{b})", ty)


# ---- moves and address conversion
@op(rf"mov\.(?:pred|{BIT}|{INT}|f32|f64)")
def move(e: Emitter, i: Instr) -> None:
    ty = i.parts[-1]
    d, s = i.ops
    if isinstance(d, Vector):
        width = BITS[ty] // len(d.items)
        e.emit(f"t={e.get(s, unsigned(ty))}")
        for j, part in enumerate(d.items):
            shifted = f"(t>>{e.constant(j * width, unsigned(ty))})" if j else "t"
            e.put(part, f"{shifted}.astype(u{width // 8})", f"b{width}")
    elif isinstance(s, Vector):
        width, whole = BITS[ty] // len(s.items), unsigned(ty)
        parts = [f"{e.get(x, f'b{width}')}.astype({numpy_code(whole)})" for x in s.items]
        placed = [f"({p}<<{e.constant(j * width, whole)})" for j, p in enumerate(parts) if j]
        e.put(d, "(" + "|".join([parts[0], *placed]) + ")", whole)
    else:
        e.put(d, e.get(s, ty), ty)


_WINDOW = {"shared": SHARED_BASE, "local": LOCAL_BASE, "param": PARAM_BASE}


@op(r"cvta(?:\.to)?\.(?:global|const|shared|shared::cta|shared::cluster|local|param)\.u64")
def convert_address(e: Emitter, i: Instr) -> None:
    """Generic addresses of shared, local and parameter memory lie in windows of their own."""
    space = i.parts[-2].split("::")[0]
    value = e.get(i.ops[1], "b64")
    if space in _WINDOW:
        value = f"({value}{'-' if 'to' in i.parts else '+'}{e.constant(_WINDOW[space], 'b64')})"
    e.put(i.ops[0], value, "b64")


@op(r"mapa(?:\.shared::cluster)?\.u(?:32|64)")
def map_address(e: Emitter, i: Instr) -> None:
    """The same shared-memory address in another CTA of the cluster."""
    ty = f"b{BITS[i.parts[-1]]}"
    if "shared::cluster" not in i.parts:
        raise Unmodelled("mapa on generic addresses")
    rank = f"({e.get(i.ops[2], 'b32')}<<u4({CTA_SHIFT}))"
    offset = f"({e.get(i.ops[1], 'b32')}&u4({OFFSET_MASK}))"
    e.put(i.ops[0], f"({offset}|{rank}).astype({numpy_code(ty)})", ty)


@op(r"cvt\.[su](?:8|16|32|64)\.[su](?:8|16|32|64)")
def convert_integer(e: Emitter, i: Instr) -> None:
    """Truncate, or extend by the source's sign; a wider register is filled by the destination
    type's sign.
    """
    d, s = i.parts[-2:]
    e.put(i.ops[0], f"{e.get(i.ops[1], s)}.astype({numpy_code(d)})", d)
