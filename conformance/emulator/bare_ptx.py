"""Runs hand-written PTX without a compiler: a body between a fixed head and tail, one value a lane
in and out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from ptx_emulator.errors import CHECKS
from ptx_emulator.machine import Machine
from ptx_emulator.memory import Buffer
from ptx_emulator.parser import parse
from ptx_emulator.state import Launch

HEAD = """
.version 8.0
.target {target}
.address_size 64
{module}
.visible .entry t(.param .u64 in, .param .u64 out)
.reqntid {threads}, 1, 1
{{
 .reg .pred %p, %q, %s; .reg .b16 %h, %g, %k; .reg .b32 %a, %b, %c, %o, %t, %v, %w, %x, %y, %z;
 .reg .b64 %i, %u, %l, %A, %B, %O; .reg .f32 %f, %e;
 {declarations}
 mov.u32 %t, %tid.x;  mov.b32 %o, 0;  mov.b64 %O, 0;
 mul.wide.u32 %l, %t, 32;  ld.param.b64 %i, [in];  add.s64 %i, %i, %l;
 mul.wide.u32 %l, %t, 8;  ld.param.b64 %u, [out];  add.s64 %u, %u, %l;
 {loads}
 {body}
 {tail}
}}
"""
LOADS = """
 ld.global.b32 %a, [%i];  ld.global.b32 %b, [%i+4];  ld.global.b32 %c, [%i+8];
 ld.global.b64 %A, [%i+16];  ld.global.b64 %B, [%i+24];
"""


def text(
    body: str,
    *,
    threads: int = 32,
    declarations: str = "",
    module: str = "",
    tail: str = "st.global.b32 [%u], %o;  ret;",
    loads: str = LOADS,
    target: str = "sm_90a",
) -> str:
    """A whole PTX module. In the body, lane inputs are %a %b %c (32 bits) and %A %B (64 bits), the
    result goes to %o; %i and %u are the lane's input and output addresses, %t its number; the other
    declared registers are free.
    """
    return HEAD.format(
        body=body, threads=threads, declarations=declarations, module=module, tail=tail,
        loads=loads, target=target,
    )  # fmt: skip


def machine_for(
    ptx: str, checks: Iterable[str] = CHECKS, seed: int | None = None, **settings: Any
) -> Machine:
    return Machine(parse(ptx), frozenset(checks), seed, **settings)


def launch(
    machine: Machine,
    buffers: list[Buffer],
    parameters: bytes,
    *,
    threads: int = 32,
    grid: tuple[int, int, int] = (1, 1, 1),
    cluster: tuple[int, int, int] = (1, 1, 1),
    shared: int = 0,
    kernel: str = "t",
    programmatic: bool = False,
) -> None:
    machine.launch(
        Launch(
            kernel, grid, (threads, 1, 1), cluster, shared, parameters,
            programmatic_serialization=programmatic, max_dynamic_shared=shared,
        ),
        buffers,
    )  # fmt: skip


def buffer(name: str, array: np.ndarray, **flags: Any) -> Buffer:
    return Buffer(name, array.ctypes.data, array.shape, array.strides, array.itemsize, **flags)


class Bench:
    """Inputs and outputs of the lanes of one CTA, and the machine that ran it."""

    def __init__(self, threads: int = 32) -> None:
        self.inputs = np.zeros((threads, 8), np.uint32)
        self.outputs = np.zeros(threads, np.uint64)
        self.threads = threads
        self.machine: Machine | None = None

    def set(self, a: Any = 0, b: Any = 0, c: Any = 0, A: Any = 0, B: Any = 0) -> Bench:  # noqa: N803
        """Lane inputs (broadcast)."""
        for column, value in ((0, a), (1, b), (2, c)):
            self.inputs[:, column] = np.asarray(value, np.uint64)
        wide = self.inputs.view(np.uint64)
        wide[:, 2], wide[:, 3] = A, B
        return self

    def run(
        self, body: str, *,
        checks: Iterable[str] = CHECKS, seed: int | None = None, shared: int = 0,
        grid: tuple[int, int, int] = (1, 1, 1), cluster: tuple[int, int, int] = (1, 1, 1),
        budget: int = 1_000_000, programmatic: bool = False, **parts: Any,
    ) -> np.ndarray:  # fmt: skip
        """Run a body; returns the 64-bit output words of the lanes."""
        ptx = text(body, threads=self.threads, **parts)
        self.machine = machine_for(ptx, checks, seed, budget=budget)
        buffers = [buffer("in", self.inputs), buffer("out", self.outputs)]
        parameters = struct.pack("QQ", self.inputs.ctypes.data, self.outputs.ctypes.data)
        launch(
            self.machine, buffers, parameters, threads=self.threads, grid=grid, cluster=cluster,
            shared=shared, programmatic=programmatic,
        )  # fmt: skip
        return self.outputs

    @property
    def messages(self) -> list[str]:
        """What the checks found, as "check: message"."""
        assert self.machine is not None
        return sorted({f"{f.check}: {f.message}" for f in self.machine.findings})


def words(
    body: str, *, wide: bool = False, threads: int = 32, lanes: dict[str, Any] | None = None
) -> list[int]:
    """Results of a body, as unsigned integers of 32 or 64 bits."""
    bench = Bench(threads).set(**(lanes or {}))
    tail = "st.global.b64 [%u], %O;  ret;" if wide else "st.global.b32 [%u], %o;  ret;"
    out = bench.run(body, tail=tail)
    assert bench.messages == []
    return [int(x) & ((1 << 64) - 1 if wide else 0xFFFFFFFF) for x in out]
