"""One planted fault a check: shows that a check which stayed silent could have spoken."""

from __future__ import annotations

import struct

import numpy as np

from ptx_emulator.errors import EmulationError, listing
from ptx_emulator.machine import Machine
from ptx_emulator.memory import Buffer
from ptx_emulator.parser import parse
from ptx_emulator.state import Launch

THREADS = 64

_KERNEL = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry planted_{tool}(.param .u64 buffer)
.reqntid 64, 1, 1
{{
 .shared .align 4 .b8 row[256];
 .reg .pred %p; .reg .b32 %t, %v, %a, %b, %r; .reg .b64 %u;
 ld.param.b64 %u, [buffer];  mov.u32 %t, %tid.x;  mov.b32 %r, row;  mov.b32 %v, 1;
 shl.b32 %a, %t, 2;  xor.b32 %b, %a, 128;  add.s32 %a, %a, %r;  add.s32 %b, %b, %r;
 {body}
 ret;
}}
"""

FAULTS = {
    "memcheck": "st.global.b32 [%u+4000], %v;",
    "synccheck": "setp.lt.s32 %p, %t, 32;  @%p bar.sync 1, 96;",
    "racecheck": "st.shared.b32 [%a], %t;  ld.shared.b32 %v, [%b];",
    "initcheck": "ld.shared.b32 %v, [%a];",
}
"""By check: a store outside a buffer, a barrier that waits for threads which never come, a read of
what another warp writes without a barrier between, and a read of what nothing wrote."""


def report(tool: str) -> str:
    """What the check ``tool`` says of its planted fault; "" when it says nothing."""
    machine = Machine(parse(_KERNEL.format(tool=tool, body=FAULTS[tool])), frozenset({tool}), None)
    memory = np.zeros(100, np.uint32)
    buffer = Buffer("buffer", memory.ctypes.data, memory.shape, memory.strides, memory.itemsize)
    launch = Launch(
        f"planted_{tool}",
        (1, 1, 1),
        (THREADS, 1, 1),
        (1, 1, 1),
        0,
        struct.pack("Q", memory.ctypes.data),
        max_dynamic_shared=0,
    )
    try:
        machine.launch(launch, [buffer])
    except EmulationError as error:
        return str(error)
    return listing(list(machine.findings.items()))
