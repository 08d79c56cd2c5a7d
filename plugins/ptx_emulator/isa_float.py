"""Floating-point instructions and conversions from and to floats."""

from __future__ import annotations

from ptx_emulator.emitter import Emitter, numpy_code
from ptx_emulator.errors import Unmodelled
from ptx_emulator.isa import op
from ptx_emulator.isa_integer import put_predicate
from ptx_emulator.ptx import Instr, Operand

_SYMBOL = {"add": "+", "sub": "-", "mul": "*"}


def _flag(i: Instr, name: str) -> bool:
    return name in i.parts


def _source(e: Emitter, i: Instr, o: Operand) -> str:
    """A float32 operand, flushed when the instruction says `.ftz`."""
    value = e.get(o, "f32")
    return f"A.ftz({value})" if _flag(i, "ftz") else value


def _store(e: Emitter, i: Instr, value: str) -> None:
    """A float32 result with the instruction's `.ftz` and `.sat`."""
    if _flag(i, "ftz"):
        value = f"A.ftz({value})"
    if _flag(i, "sat"):
        value = f"A.saturate({value})"
    e.put(i.ops[0], value, "f32")


@op(r"(?:add|sub|mul)(?:\.rn)?(?:\.ftz)?(?:\.sat)?\.f32")
def arithmetic(e: Emitter, i: Instr) -> None:
    a, b = (_source(e, i, o) for o in i.ops[1:3])
    _store(e, i, f"({a}{_SYMBOL[i.parts[0]]}{b})")


@op(r"fma\.rn(?:\.ftz)?(?:\.sat)?\.f32", r"mad\.rn(?:\.ftz)?\.f32")
def fused(e: Emitter, i: Instr) -> None:
    _store(e, i, f"A.fma({','.join(_source(e, i, o) for o in i.ops[1:4])})")


@op(r"(?:add|sub|mul)(?:\.rn)?(?:\.ftz)?\.f32x2", r"fma\.rn(?:\.ftz)?\.f32x2")
def packed(e: Emitter, i: Instr) -> None:
    """Two float32 in a 64-bit register."""
    values = [f"{e.get(o, 'b64')}.view(f4)" for o in i.ops[1:]]
    if _flag(i, "ftz"):
        values = [f"A.ftz({v})" for v in values]
    if i.parts[0] == "fma":
        result = f"A.fma({','.join(values)})"
    else:
        result = f"({values[0]}{_SYMBOL[i.parts[0]]}{values[1]})"
    if _flag(i, "ftz"):
        result = f"A.ftz({result})"
    e.put(i.ops[0], f"{result}.view(u8)", "b64")


@op(r"div\.rn(?:\.ftz)?\.f32")
def divide(e: Emitter, i: Instr) -> None:
    a, b = (_source(e, i, o) for o in i.ops[1:3])
    _store(e, i, f"({a}/{b})")


@op(r"sqrt\.rn(?:\.ftz)?\.f32")
def square_root(e: Emitter, i: Instr) -> None:
    _store(e, i, f"np.sqrt({_source(e, i, i.ops[1])})")


@op(r"rcp\.rn(?:\.ftz)?\.f32")
def reciprocal(e: Emitter, i: Instr) -> None:
    _store(e, i, f"(f4(1)/{_source(e, i, i.ops[1])})")


@op(r"neg(?:\.ftz)?\.f32", r"abs(?:\.ftz)?\.f32")
def sign(e: Emitter, i: Instr) -> None:
    a = _source(e, i, i.ops[1])
    e.put(i.ops[0], f"(-{a})" if i.parts[0] == "neg" else f"np.abs({a})", "f32")


@op(r"copysign\.f32")
def copysign(e: Emitter, i: Instr) -> None:
    e.put(i.ops[0], f"np.copysign({e.get(i.ops[2], 'f32')},{e.get(i.ops[1], 'f32')})", "f32")


@op(r"(?:min|max)(?:\.ftz)?(?:\.NaN)?\.f32")
def extreme(e: Emitter, i: Instr) -> None:
    """Two or three operands; `.NaN` keeps a NaN, the plain form drops it."""
    f = f"A.{i.parts[0]}imum{'_nan' if _flag(i, 'NaN') else ''}"
    value = _source(e, i, i.ops[1])
    for o in i.ops[2:]:
        value = f"{f}({value},{_source(e, i, o)})"
    e.put(i.ops[0], value, "f32")


_ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@op(
    r"setp\.(?:eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|nan|num)(?:\.(?:and|or|xor))?"
    r"(?:\.ftz)?\.f32"
)
def compare(e: Emitter, i: Instr) -> None:
    """Ordered comparisons are false on a NaN (also `ne`), those ending in `u` are true."""
    c = i.parts[1]
    a, b = (_source(e, i, o) for o in i.ops[1:3])
    nan = f"(np.isnan({a})|np.isnan({b}))"
    if c in ("nan", "num"):
        value = nan if c == "nan" else f"(~{nan})"
    elif c == "ne":
        value = f"(({a}!={b})&~{nan})"
    else:
        value = f"({a}{_ORDERED[c[:2]]}{b})"
        if c.endswith("u") and c != "neu":
            value = f"({value}|{nan})"
    put_predicate(e, i, value)


# ---- half precision
@op(r"(?:add|sub|mul)(?:\.rn)?\.(?:f16|f16x2|bf16|bf16x2)")
def half_arithmetic(e: Emitter, i: Instr) -> None:
    """float32 holds the exact product and rounds the sum innocuously before the rounding to half
    precision.
    """
    ty, a, b = _half_operands(e, i, i.ops[1:3])
    if i.parts[0] == "mul" and ty == "bf16":  # subnormal products would be rounded twice
        _half_store(e, i, f"A.fma_bf16({a},{b},np.array([0x8000],u2))")
        return
    value = f"A.{ty}_rn(A.widen({a},{ty!r}){_SYMBOL[i.parts[0]]}A.widen({b},{ty!r})).astype(u2)"
    _half_store(e, i, value)


@op(r"fma\.rn\.(?:f16|f16x2|bf16|bf16x2)")
def half_fused(e: Emitter, i: Instr) -> None:
    ty, *values = _half_operands(e, i, i.ops[1:4])
    _half_store(e, i, f"A.fma_{ty}({','.join(values)})")


@op(r"neg\.(?:f16|f16x2|bf16|bf16x2)")
def half_negate(e: Emitter, i: Instr) -> None:
    _, a = _half_operands(e, i, i.ops[1:2])
    _half_store(e, i, f"({a}^u2(0x8000))")


def _half_operands(e: Emitter, i: Instr, operands: tuple[Operand, ...]) -> tuple[str, ...]:
    name = i.parts[-1]
    ty, packed_ = name.removesuffix("x2"), name.endswith("x2")
    read = [e.get(o, "b32") + ".view(u2)" if packed_ else e.get(o, "b16") for o in operands]
    return (ty, *read)


def _half_store(e: Emitter, i: Instr, value: str) -> None:
    if i.parts[-1].endswith("x2"):
        e.put(i.ops[0], f"{value}.view(u4)", "b32")
    else:
        e.put(i.ops[0], value, "b16")


# ---- conversions
@op(
    r"cvt\.(?:rn|rz)(?:\.relu)?\.(?:bf16x2|f16x2)\.f32",
    r"cvt\.(?:rn|rz)(?:\.relu)?\.(?:bf16|f16)\.f32",
)
def to_half(e: Emitter, i: Instr) -> None:
    """`x2`: the first source goes to the upper half."""
    ty, rounding = i.parts[-2], i.parts[1]
    base = ty.removesuffix("x2")
    if base == "f16" and rounding == "rz":
        raise Unmodelled("cvt.rz to f16")
    values = [e.get(o, "f32") for o in i.ops[1:3]]
    if _flag(i, "relu"):
        values = [f"A.maximum_nan({v},f4(0))" for v in values]
    bits = [f"A.{base}_{rounding}({v})" for v in values]
    if ty.endswith("x2"):
        e.put(i.ops[0], f"(({bits[0]}<<u4(16))|{bits[1]})", "b32")
    else:
        e.put(i.ops[0], f"{bits[0]}.astype(u2)", "b16")


@op(r"cvt(?:\.ftz)?\.f32\.(?:bf16|f16)")
def from_half(e: Emitter, i: Instr) -> None:
    value = f"A.widen({e.get(i.ops[1], 'b16')},{i.parts[-1]!r})"
    e.put(i.ops[0], f"A.ftz({value})" if _flag(i, "ftz") else value, "f32")


@op(r"cvt\.rna\.tf32\.f32")
def to_tf32(e: Emitter, i: Instr) -> None:
    e.put(i.ops[0], f"A.tf32_rna({e.get(i.ops[1], 'f32')})", "b32")


@op(r"cvt\.rn\.f32\.[su](?:8|16|32|64)")
def from_integer(e: Emitter, i: Instr) -> None:
    e.put(i.ops[0], f"{e.get(i.ops[1], i.parts[-1])}.astype(f4)", "f32")


@op(r"cvt\.r[nzmp]i(?:\.ftz)?\.(?:[su](?:8|16|32|64)|f32)\.f32")
def to_integer(e: Emitter, i: Instr) -> None:
    """Saturates; NaN becomes 0 (64-bit types: their top bit). To f32: an integral value."""
    to, value = i.parts[-2], _source(e, i, i.ops[1])
    if to == "f32":
        f = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[i.parts[1]]
        e.put(i.ops[0], f"np.{f}({value})", "f32")
    else:
        e.put(i.ops[0], f"S.float_to_integer({value},{i.parts[1]!r},{numpy_code(to)!r})", to)


# ---- transcendental
@op(r"ex2\.approx\.ftz\.f32")
def exponential(e: Emitter, i: Instr) -> None:
    e.put(i.ops[0], f"A.ex2_approx_ftz({e.get(i.ops[1], 'f32')})", "f32")


_APPROXIMATE = {
    "ex2": "np.exp2({})",
    "lg2": "np.log2({})",
    "rcp": "(f4(1)/{})",
    "sqrt": "np.sqrt({})",
    "rsqrt": "(f4(1)/np.sqrt({}))",
    "tanh": "np.tanh({})",
    "sin": "np.sin({})",
    "cos": "np.cos({})",
}


@op(r"(?:rcp|sqrt|rsqrt)\.approx(?:\.ftz)?\.f32", approximate="1 to 2 ulp (PTX ISA bounds)")
@op(r"ex2\.approx\.f32", approximate="2 ulp; exact only in its .ftz form")
@op(r"lg2\.approx(?:\.ftz)?\.f32", approximate="absolute 2**-22 near 1, else 2**-22 relative")
@op(r"tanh\.approx\.f32", approximate="relative 2**-11")
@op(r"(?:sin|cos)\.approx(?:\.ftz)?\.f32", approximate="absolute 2**-20.5 in [-pi, pi]")
def approximate(e: Emitter, i: Instr) -> None:
    """Correctly rounded stand-ins: the hardware's last bits differ, so no bit promise may rest on
    them.
    """
    _store(e, i, _APPROXIMATE[i.parts[0]].format(_source(e, i, i.ops[1])))


@op(r"div\.(?:approx|full)(?:\.ftz)?\.f32", approximate="2 ulp (PTX ISA bound)")
def approximate_divide(e: Emitter, i: Instr) -> None:
    a, b = (_source(e, i, o) for o in i.ops[1:3])
    _store(e, i, f"({a}/{b})")
