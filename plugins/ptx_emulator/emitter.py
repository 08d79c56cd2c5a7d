"""Writes the Python source of single instructions: operands, destinations, masks.

In the generated code `U` is the unit, `R` its register file (one numpy array per register), `K` the
constants, `m` the mask of active lanes, `q` the mask of a guarded instruction, `t` a temporary.
Arrays are never changed in place, so a register move may share them.
"""

from __future__ import annotations

import numpy as np

from ptx_emulator.errors import Unmodelled
from ptx_emulator.ptx import (
    BITS,
    STORAGE,
    Address,
    Array,
    Imm,
    Kernel,
    Offset,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
    Vector,
)


def numpy_code(ty: str) -> str:
    """numpy type code that a PTX type is computed in: 's32' -> 'i4'. Half types are handled as
    bits.
    """
    if ty == "pred":
        return "b1"
    kind = {"s": "i", "f": "f"}.get(ty[0], "u") if ty in ("f32", "f64") or ty[0] == "s" else "u"
    return f"{kind}{BITS[ty] // 8}"


def unsigned(ty: str) -> str:
    """The bit type of the same width: 's32' -> 'b32'."""
    return ty if ty == "pred" else f"b{BITS[ty]}"


class Emitter:
    """Source of one kernel's blocks, for units of `width` lanes.

    `homes[r]` is the numpy type code in which register r is kept. A first pass over the kernel
    counts how registers are used (see `choose_homes`); registers mostly used as float32 are then
    kept as such, which saves conversions. `block` is the number of the block being written, `next`
    of the one that it goes on with.
    """

    def __init__(self, kernel: Kernel, width: int) -> None:
        self.kernel = kernel
        self.width = width
        self.homes = [
            "u8" if t == "b128" else numpy_code(unsigned(t)) for t in kernel.register_types
        ]
        self.constants: list[Array] = []
        self._constant_index: dict[tuple[int, int], int] = {}
        self._float_uses = [0] * len(self.homes)
        self.out: list[str] = []
        self.mask: str | None = None
        self.block = self.next = 0

    def choose_homes(self) -> None:
        """Use the counts gathered so far: keep 32-bit registers as float32 where that is the
        commoner use.
        """
        for i, uses in enumerate(self._float_uses):
            if uses > 0 and self.homes[i] == "u4":
                self.homes[i] = "f4"
        self._float_uses = [0] * len(self.homes)

    # ---- emission
    def emit(self, line: str) -> None:
        self.out.append(line)

    @property
    def active(self) -> str:
        """Expression for the mask of active lanes."""
        return self.mask or "m"

    @property
    def full(self) -> bool:
        """All lanes of the unit take part."""
        return self.mask is None

    def constant(self, value: int, ty: str) -> str:
        if ty == "pred":
            return "TRUE" if value else "FALSE"
        bits = BITS[ty]
        key = (value & ((1 << bits) - 1), bits)
        index = self._constant_index.get(key)
        if index is None:
            index = self._constant_index[key] = len(self.constants)
            self.constants.append(np.full(self.width, key[0], STORAGE[bits]))
        view = numpy_code(ty)
        return f"K[{index}]" + ("" if view[0] == "u" else f".view({view})")

    # ---- reading
    def get(self, o: Operand, ty: str) -> str:
        """Expression of the operand read as PTX type `ty`."""
        if isinstance(o, Reg):
            return self._register(o, ty)
        if isinstance(o, Imm):
            return self.constant(o.value, ty)
        if isinstance(o, Special):
            wide = f".astype({numpy_code(unsigned(ty))})" if BITS[ty] != 32 else ""
            return self._viewed(f"U.special({o.name!r}){wide}", unsigned(ty), ty)
        if isinstance(o, Symbol):
            return self._viewed(self._symbol(o, ty), unsigned(ty), ty)
        if isinstance(o, Offset):
            return f"({self.get(o.base, ty)}+{self.constant(o.bytes, ty)})"
        raise Unmodelled(f"operand {o} cannot be read as {ty}")

    def _register(self, o: Reg, ty: str) -> str:
        home, want = self.homes[o.index], numpy_code(ty)
        if home in ("u4", "f4"):
            self._float_uses[o.index] += 1 if want == "f4" else -1
        text = f"R[{o.index}]"
        if ty == "pred":
            return f"(~{text})" if o.negated else text
        if home == want:
            return text
        if home[1] == want[1]:
            return f"{text}.view({want})"
        bits = text if home[0] == "u" else f"{text}.view(u{home[1]})"
        extended = f"{bits}.astype(u{want[1]})"
        return extended if want[0] == "u" else f"{extended}.view({want})"

    @staticmethod
    def _viewed(expression: str, have: str, want: str) -> str:
        same = numpy_code(have) == numpy_code(want)
        return expression if same else f"{expression}.view({numpy_code(want)})"

    def _symbol(self, o: Symbol, ty: str) -> str:
        k = self.kernel
        if o.name in k.shared:  # a shared address carries the rank of its CTA
            return f"U.own({self.constant(k.shared[o.name].offset, unsigned(ty))})"
        if o.name in k.params:
            return self.constant(k.params[o.name].offset, unsigned(ty))
        if o.name in k.local:
            return self.constant(k.local[o.name].offset, unsigned(ty))
        if o.name in k.module:
            return f"U.module_address({o.name!r})"
        raise Unmodelled(f"unknown symbol {o.name}")

    def address(self, o: Operand, ty: str = "b64") -> str:
        """Address expression of `[base]` (the first item of an address operand)."""
        if not isinstance(o, Address):
            raise Unmodelled(f"{o} is not an address")
        return self.get(o.items[0], ty)

    def shared_address(self, o: Operand) -> str:
        """Address in shared memory, as 32 bits."""
        return self.address(o, "b32")

    def values(self, o: Operand, ty: str = "b32") -> str:
        """Python list of the vector's elements (a single operand counts as a vector of one)."""
        return "[" + ",".join(self.get(x, ty) for x in self.items(o)) + "]"

    @staticmethod
    def items(o: Operand) -> tuple[Operand, ...]:
        return o.items if isinstance(o, (Vector, Pair)) else (o,)

    def integer(self, o: Operand) -> int:
        """An operand that must be an immediate."""
        if not isinstance(o, Imm):
            raise Unmodelled("an immediate operand is expected here")
        return o.value

    # ---- writing
    def put(self, o: Operand, expression: str, ty: str) -> None:
        """Assign an expression of PTX type `ty`; a wider register takes the value extended by the
        type's sign.
        """
        if isinstance(o, Sink):
            return
        if not isinstance(o, Reg):
            raise Unmodelled(f"destination {o} is not modelled")
        home, have = self.homes[o.index], numpy_code(ty)
        if home in ("u4", "f4"):
            self._float_uses[o.index] += 1 if have == "f4" else -1
        if home != have:
            if home[1] == have[1]:
                expression = f"({expression}).view({home})"
            else:
                kind = "i" if have[0] == "i" else "u"
                view = f".view({home})" if home[0] != kind else ""
                expression = f"({expression}).astype({kind}{home[1]}){view}"
        if self.mask is not None:
            expression = f"where({self.mask},{expression},R[{o.index}])"
        self.emit(f"R[{o.index}]={expression}")

    def spread(self, o: Operand, ty: str = "b32") -> None:
        """Store the rows of `t` into a vector of destinations."""
        for j, d in enumerate(self.items(o)):
            self.put(d, f"t[{j}]", ty)

    # ---- convergence
    def whole(self, o: Operand | None) -> None:
        """Wait here until every lane named by the member mask (None: the whole warp) of a warp has
        arrived.
        """
        members = "None"
        if o is not None and not (isinstance(o, Imm) and o.value & 0xFFFFFFFF == 0xFFFFFFFF):
            members = self.get(o, "b32")
        if self.mask is not None or members != "None":
            self.emit(f"t=U.converge({members},{self.active},{self.block})")
            self.emit("if t is not None: return t")
