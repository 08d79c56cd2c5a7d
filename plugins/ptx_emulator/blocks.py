"""Writes the Python source of basic blocks: instructions one after the other, their guards, and
where a block goes next.
"""

from __future__ import annotations

from ptx_emulator import isa
from ptx_emulator.emitter import Emitter
from ptx_emulator.errors import Unmodelled
from ptx_emulator.ptx import Instr

EXIT = -1


class BlockEmitter(Emitter):
    """An emitter that knows the table of opcodes, and so whole blocks."""

    def body(
        self, instructions: list[Instr], targets: list[int | None], masked: bool
    ) -> list[Instr]:
        """Fill `out` with the block's lines; returns the instruction of each line. `targets`:
        branch target blocks.
        """
        self.out, lines = [], []
        ended = False
        for ins, target in zip(instructions, targets, strict=True):
            start = len(self.out)
            self.mask = "m" if masked else None
            form = isa.find(ins.op)
            if form is None:
                raise Unmodelled(f"{ins.op} is not accepted")
            if target is not None:
                self._branch(ins, target)
                ended = True
            elif ins.guard is not None:
                ended = self._guarded(ins, form)
            else:
                form.translate(self, ins)
                ended = form.ends
            lines += [ins] * (len(self.out) - start)
        if not ended:
            self.emit(f"return {self.next}")
            lines.append(instructions[-1])
        return lines

    def _guard(self, ins: Instr) -> str:
        return f"{'~' if ins.guard_negated else ''}R[{ins.guard}]"

    def _guarded(self, ins: Instr, form: isa.Form) -> bool:
        masked = self.mask is not None
        self.emit(f"q={self._guard(ins)}" + ("&m" if masked else ""))
        if form.leads or form.ends:  # run it with the lanes whose guard holds, the others go on
            self.emit("c=count(q)")
            self.emit(f"if c==0: return {self.next}")
            self.emit(f"if c!=count({self.active}): return (q,{self.block},{self.next})")
            form.translate(self, ins)
            return form.ends
        self.mask = "q"
        outer, self.out = self.out, []
        form.translate(self, ins)
        outer.append("if count(q):")
        outer.extend("  " + line for line in (self.out or ["pass"]))
        self.out = outer
        return False

    def _branch(self, ins: Instr, target: int) -> None:
        if ins.guard is None:
            self.emit(f"return {target}")
            return
        if self.mask is not None:
            self.emit(f"p={self._guard(ins)}&m")
            self.emit("c=count(p)")
            self.emit(f"if c==0: return {self.next}")
            self.emit(f"if c==count(m): return {target}")
        else:
            self.emit(f"p={self._guard(ins)}")
            self.emit("c=count(p)")
            self.emit(f"if c==0: return {self.next}")
            self.emit(f"if c=={self.width}: return {target}")
        self.emit(f"return (p,{target},{self.next})")
