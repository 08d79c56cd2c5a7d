"""What the emulator reports: findings of the checks, and the exceptions that end a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHECKS = ("memcheck", "synccheck", "racecheck", "initcheck")


@dataclass(frozen=True)
class Finding:
    """One kind of misbehaviour at one instruction.

    `check` is the sanitizer that owns it (a member of `CHECKS`) or "emulator" for what the emulator
    itself refuses; `cta` are block indices, `warps` the warps of that CTA that took part (empty
    when it concerns all of them), `source` is "file.py:line" of the kernel's Python source, or None
    when it was compiled without line information.
    """

    check: str
    message: str
    kernel: str
    cta: tuple[int, int, int] | None
    warps: tuple[int, ...]
    instruction: str
    ptx_line: int
    source: str | None

    def __str__(self) -> str:
        where = f"PTX line {self.ptx_line}: {self.instruction}"
        if self.source:
            where = f"{self.source}, {where}"
        who = f"kernel {self.kernel}"
        if self.cta is not None:
            who += f", CTA {self.cta}"
        if self.warps:
            who += f", warp{'s' if len(self.warps) > 1 else ''} {_ranges(self.warps)}"
        return f"{self.check}: {self.message}\n    {who}\n    at {where}"


def _ranges(numbers: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> '0-2, 5'."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def listing(findings: Sequence[tuple[Finding, int]]) -> str:
    """Findings as text, each with how often it was met."""
    return "\n".join(f"{f}" + (f"\n    {n} times" if n > 1 else "") for f, n in findings)


class EmulationError(RuntimeError):
    """Base class of everything that the emulator raises about a kernel."""


class UnsupportedInstruction(EmulationError):
    """The kernel uses something that the emulator does not model. Nothing is known about the
    kernel's correctness.
    """


class KernelFault(EmulationError):
    """The kernel did something that cannot be continued: a wild access, a misused barrier, a
    deadlock.

    `finding` is the fault; `earlier` are the findings of the checks up to it, with their counts.
    """

    def __init__(self, finding: Finding, earlier: Sequence[tuple[Finding, int]] = ()) -> None:
        text = str(finding)
        if earlier:
            text += "\n  found before it:\n" + listing(earlier)
        super().__init__(text)
        self.finding, self.earlier = finding, tuple(earlier)


class CheckFailure(EmulationError):
    """The kernel ran to its end, and the checks found faults."""

    def __init__(self, findings: Sequence[tuple[Finding, int]]) -> None:
        super().__init__(listing(findings))
        self.findings = tuple(findings)


class NoCompiler(EmulationError):
    """There is no C compiler to link the exported host code with the launch shim."""


class Fault(Exception):
    """Internal: a fault without its place; the machine turns it into a `KernelFault`."""

    def __init__(self, check: str, message: str, lane: int | None = None) -> None:
        super().__init__(message)
        self.check = check
        self.lane = lane


class Unmodelled(Exception):
    """Internal: something outside the model; becomes an `UnsupportedInstruction`."""
