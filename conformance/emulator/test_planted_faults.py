"""A planted fault for every check: found by name, at its instruction; the corrected twin stays
silent.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from ptx_emulator.errors import CHECKS, Finding, KernelFault

from .bare_ptx import Bench, buffer, launch, machine_for, text

pytestmark = pytest.mark.claim("EMU-04", "each check finds the fault planted for it, and names it")

SHARED = ".shared .align 128 .b8 s[1024];"
SLOT = "mov.b32 %v, s; shl.b32 %w, %t, 2; add.s32 %v, %v, %w; "


def findings(body: str, threads: int = 64, **settings: Any) -> list[Finding]:
    bench = Bench(threads).set(a=1, b=2, c=3)
    settings.setdefault("declarations", SHARED)
    bench.run(body, **settings)
    assert bench.machine is not None
    return list(bench.machine.findings)


def only(found: list[Finding], check: str, message: str) -> Finding:
    assert {(f.check, f.message) for f in found} == {(check, message)}
    return found[0]


def fault(body: str, threads: int = 64, **settings: Any) -> Finding:
    settings.setdefault("declarations", SHARED)
    with pytest.raises(KernelFault) as e:
        Bench(threads).set(a=1, b=2, c=3).run(body, **settings)
    return e.value.finding


# ---- memcheck
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add.s64 %i, %i, 4096; ld.global.b32 %o, [%i];", "global load of 4 bytes out of bounds"),
        ((
            "setp.eq.b32 %p, %t, 37; "
            "@%p st.global.b32 [%u+216], %a;"
        ), "global store of 4 bytes out of bounds"),
        ("ld.global.b64 %O, [%i+4];", "misaligned global load of 8 bytes"),
        ("st.global.v2.b32 [%i+4], {%a, %b};", "misaligned global store of 8 bytes"),
        (SLOT + "st.shared.b32 [%v+1024], %a;", (
            "shared store of 4 bytes at "
            "0x800 is outside shared memory"
        )),
        (SLOT + "ld.shared.b32 %o, [%v+-4];", (
            "shared load of 4 bytes at "
            "0x3fc is outside shared memory"
        )),
        (SLOT + "ld.shared.v2.b32 {%o, %x}, [%v];", "misaligned shared load of 8 bytes"),
        ((
            "mov.b32 %v, s; add.s32 %v, %v, 8; "
            "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%o}, [%v];"
        ), "not 16-byte aligned"),
        ("mov.b64 %l, 0; ld.global.b32 %o, [%l];", "out of bounds at 0x0"),
    ],
)  # fmt: skip
def test_memcheck_stops_at_a_wild_access(body: str, message: str) -> None:
    """Whatever checks are chosen: the memory is the host's."""
    for checks in (CHECKS, ("synccheck",)):
        found = fault(body, checks=checks)
        assert found.check == "memcheck"
        assert message in found.message


def test_memcheck_names_warp_tensor_and_distance() -> None:
    found = fault("setp.eq.b32 %p, %t, 37; @%p st.global.b32 [%u+216], %a;")
    assert found.warps == (1,)
    assert found.cta == (0, 0, 0)
    assert found.kernel == "t"
    assert "4 bytes past out" in found.message
    assert found.instruction == "@%p st.global.b32 [%u+216], %a"


def test_memcheck_read_only_tensor() -> None:
    bench = Bench()
    bench.set(a=1)
    machine = machine_for(text("st.global.b32 [%i], %t;"))
    parameters = struct.pack("QQ", bench.inputs.ctypes.data, bench.outputs.ctypes.data)
    out = buffer("out", bench.outputs)
    launch(machine, [buffer("in", bench.inputs), out], parameters)
    before = bench.inputs.copy()
    with pytest.raises(KernelFault, match=r"store to read-only memory at .* of in"):
        launch(machine, [buffer("in", bench.inputs, readonly=True), out], parameters)
    assert (bench.inputs == before).all()


def test_memcheck_holes_of_a_strided_view() -> None:
    """Bytes between the elements of a view count as outside when asked for."""
    whole = np.zeros((32, 16), np.uint32)
    outputs = np.zeros(32, np.uint64)
    parameters = struct.pack("QQ", whole.ctypes.data, outputs.ctypes.data)
    buffers = [buffer("view", whole[:, ::2]), buffer("out", outputs)]
    ptx = text(
        (
            "mul.wide.u32 %l, %t, 64; ld.param.b64 %i, [in]; "
            "add.s64 %i, %i, %l; ld.global.b32 %o, [%i+4];"
        ),
        loads="",
    )
    launch(machine_for(ptx), buffers, parameters)
    with pytest.raises(KernelFault, match="access to a hole between the elements"):
        launch(machine_for(ptx, holes=True), buffers, parameters)
    clean = ptx.replace("[%i+4]", "[%i+8]")
    launch(machine_for(clean, holes=True), buffers, parameters)


def test_memcheck_or_initcheck_finds_uninitialised_shared_memory() -> None:
    body = (
        SLOT
        + "setp.lt.u32 %p, %t, 60; @%p st.shared.b32 [%v], %a; bar.sync 0; ld.shared.b32 %o, [%v];"
    )
    for checks, name in (
        (("memcheck",), "memcheck"),
        (("initcheck",), "initcheck"),
        (CHECKS, "initcheck"),
    ):
        found = only(findings(body, checks=checks), name, "read of uninitialised shared memory")
        assert found.instruction == "ld.shared.b32 %o, [%v]"
    assert findings(body, checks=("racecheck", "synccheck")) == []
    assert findings(body.replace("@%p st", "st")) == []


def test_initcheck_of_a_widened_load() -> None:
    """Words that the compiler loads along and says it does not use may hold anything."""
    slot = "mov.b32 %v, s; shl.b32 %w, %t, 3; add.s32 %v, %v, %w; "
    pragma = '.pragma "used_bytes_mask {}"; '
    body = slot + "st.shared.b32 [%v], %t; bar.sync 0; {}ld.shared.v2.b32 {%o, %x}, [%v];"
    only(findings(body.replace("{}ld", "ld")), "initcheck", "read of uninitialised shared memory")
    first = pragma.format("0xf")
    assert findings(body.replace("{}ld", first + "ld")) == []
    got = Bench(64).run(body.replace("{}ld", first + "ld"), declarations=SHARED)
    assert list(got) == list(range(64))
    both = pragma.format("0xff")
    only(
        findings(body.replace("{}ld", both + "ld")),
        "initcheck",
        "read of uninitialised shared memory",
    )
    later = first + "ld.shared.v2.b32 {%o, %x}, [%v]; "
    only(
        findings(body.replace("{}ld", later + "ld")),
        "initcheck",
        "read of uninitialised shared memory",
    )


def test_initcheck_global_memory() -> None:
    bench = Bench()
    parameters = struct.pack("QQ", bench.inputs.ctypes.data, bench.outputs.ctypes.data)
    buffers = [buffer("in", bench.inputs), buffer("out", bench.outputs, initialized=False)]
    body = "setp.lt.u32 %p, %t, 30; @%p st.global.b32 [%u], %a; ld.global.b32 %o, [%u];"
    with pytest.raises(KernelFault, match="initcheck: read of uninitialised global memory"):
        launch(machine_for(text(body)), buffers, parameters)
    launch(machine_for(text(body.replace("@%p st", "st"))), buffers, parameters)
    launch(machine_for(text(body), checks=("memcheck",)), buffers, parameters)


def test_memcheck_prefetch_beyond_a_tensor() -> None:
    body = "ld.param.b64 %l, [in]; mov.b32 %x, {n}; cp.async.bulk.prefetch.L2.global [%l], %x;"
    assert findings(body.replace("{n}", "2048")) == []
    found = findings(body.replace("{n}", "2064"))
    only(found, "memcheck", "bulk prefetch of 2064 bytes out of bounds, 16 bytes past in")


# ---- racecheck
WRITE_THEN_READ = (
    SLOT
    + """
    st.shared.b32 [%v], %a;  bar.sync 0;  xor.b32 %x, %t, 32;  shl.b32 %x, %x, 2;  mov.b32 %y, s;
    add.s32 %y, %y, %x;  ld.shared.b32 %o, [%y];"""
)


def test_racecheck_read_after_write() -> None:
    assert findings(WRITE_THEN_READ) == []
    found = findings(WRITE_THEN_READ.replace("bar.sync 0;", ""))
    assert only(
        found, "racecheck", "read after write: not ordered after the generic write"
    ).warps == (0, 1)


def test_racecheck_write_after_read() -> None:
    body = WRITE_THEN_READ + "bar.sync 0; st.shared.b32 [%v], %b;"
    assert findings(body) == []
    found = findings(WRITE_THEN_READ + "st.shared.b32 [%v], %b;")
    only(found, "racecheck", "write after read: not ordered after the generic read")


def test_racecheck_write_after_write() -> None:
    body = (
        "mov.b32 %v, s; setp.lt.u32 %p, %t, 32; "
        "@%p st.shared.b32 [%v], %a; {barrier} @!%p st.shared.b32 [%v], %b;"
    )
    assert findings(body.replace("{barrier}", "bar.sync 0;")) == []
    only(
        findings(body.replace("{barrier}", "")),
        "racecheck",
        "write after write: not ordered after the generic write",
    )
    together = findings("mov.b32 %v, s; st.shared.b32 [%v], %a;")
    only(together, "racecheck", "two warps write the same place in one instruction")


def test_racecheck_barrier_of_the_wrong_warps() -> None:
    """A barrier that the writer does not take part in orders nothing."""
    body = (
        SLOT
        + """
        setp.ge.u32 %q, %t, 32;  @%q bra READER;
        st.shared.b32 [%v], %a;  bar.sync 2, 32;  bra DONE;
        READER: bar.sync 1, 32;  sub.s32 %v, %v, 128;  ld.shared.b32 %o, [%v];
        DONE:"""
    )
    only(findings(body), "racecheck", "read after write: not ordered after the generic write")
    meeting = body.replace("bar.sync 2, 32", "bar.arrive 1, 64").replace(
        "bar.sync 1, 32", "bar.sync 1, 64"
    )
    assert findings(meeting) == []


def test_racecheck_neighbours_in_one_word_are_no_race() -> None:
    """Two warps store the halves of one word: the shadow is as fine as the smallest access."""
    body = """
        mov.b32 %v, s; and.b32 %w, %t, 31; shl.b32 %w, %w, 2; add.s32 %v, %v, %w; shr.u32 %x, %t, 5;
        shl.b32 %x, %x, 1; add.s32 %v, %v, %x; cvt.u16.u32 %h, %t; st.shared.b16 [%v], %h;"""
    assert findings(body) == []


def test_racecheck_cp_async_needs_its_wait() -> None:
    body = """
        mov.b32 %v, s; shl.b32 %w, %t, 4; add.s32 %v, %v, %w;
        cp.async.cg.shared.global [%v], [%i], 16; cp.async.commit_group; cp.async.wait_group {n};
        bar.sync 0; xor.b32 %w, %w, 512; mov.b32 %v, s; add.s32 %v, %v, %w;
         ld.shared.b32 %o, [%v];"""
    assert findings(body.replace("{n}", "0")) == []
    only(
        findings(body.replace("{n}", "1")),
        "racecheck",
        "read after write: not ordered after the cp.async write",
    )


BULK = """
    mov.b32 %v, s;  setp.ne.b32 %p, %t, 0;  @%p bra READY;
    mbarrier.init.shared.b64 [%v], 1;  fence.mbarrier_init.release.cluster;
    READY: bar.sync 0;  ld.param.b64 %l, [in];  @%p bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%v], 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%v+128], [%l], 512, [%v];
    WAIT: mbarrier.try_wait.parity.shared.b64 %q, [%v], 0;  @!%q bra WAIT;
    shl.b32 %w, %t, 2;  add.s32 %w, %v, %w;  ld.shared.b32 %o, [%w+128];"""


def test_racecheck_bulk_copy() -> None:
    for seed in (None, 1, 2):
        assert findings(BULK, seed=seed) == []
    unwaited = BULK.replace(
        "mbarrier.try_wait.parity.shared.b64 %q, [%v], 0;  @!%q bra WAIT;", "bar.sync 0;"
    )
    found = findings(unwaited)
    assert ("racecheck", "read after write: not ordered after the TMA write") in {
        (f.check, f.message) for f in found
    }


def test_racecheck_bulk_store_needs_a_proxy_fence() -> None:
    body = """
        mov.b32 %v, s; shl.b32 %w, %t, 2; add.s32 %w, %v, %w; st.shared.b32 [%w], %t;
        fence.proxy.async.shared::cta; bar.sync 0; setp.ne.b32 %p, %t, 0; @%p bra DONE;
         ld.param.b64 %l, [in];
        cp.async.bulk.global.shared::cta.bulk_group [%l], [%v], 256; cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0; DONE: bar.sync 0; st.shared.b32 [%w], %a;"""
    assert findings(body) == []
    missing = (
        "read after write: TMA store not ordered after the generic write (proxy fence missing)"
    )
    only(findings(body.replace("fence.proxy.async.shared::cta;", "")), "racecheck", missing)
    early = findings(body.replace("cp.async.bulk.wait_group.read 0;", ""))
    only(early, "racecheck", "write after read: not ordered after the TMA read")


# ---- synccheck
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bar.sync 1, 96;", "deadlock"),
        ((
            "setp.lt.u32 %p, %t, 32; @%p bra A; "
            "bar.sync 1, 96; bra B; A: bar.sync 1, 64; B:"
        ), "64 threads are named"),
        ("bar.sync 0; bar.sync 1, 32;", "barrier 1: 64 arrivals for 32"),
        ("bar.sync 1, 33;", "not whole warps"),
        ("bar.sync 16, 32;", "barrier 16 does not exist"),
        ("setp.lt.u32 %p, %t, 16; @%p bra A; bar.sync 0; bra B; A: bar.sync 0; B:", "deadlock"),
        ("mov.b32 %v, s; mbarrier.arrive.shared.b64 _, [%v];", "used before its init"),
        ("mov.b32 %v, s; mbarrier.init.shared.b64 [%v], 0;", "mbarrier.init with a count of 0"),
        ("mov.b32 %v, s; mbarrier.init.shared.b64 [%v+4], 1;", "not 8-byte aligned"),
        (
            ("mov.b32 %v, s; setp.eq.b32 %p, %t, 0; "
            "@%p mbarrier.init.shared.b64 [%v], 3; bar.sync 0;"
            "mbarrier.arrive.shared.b64 _, [%v], 2;"),
            "more arrivals than its 3",
        ),
        ("LOOP: bra LOOP;", "instruction budget exhausted"),
        ((
            "setp.lt.u32 %p, %t, 16; @%p bra A; "
            "shfl.sync.bfly.b32 %o, %a, 1, 31, 65535; A:"
        ), "does not name it"),
    ],
)  # fmt: skip
def test_synccheck_stops(body: str, message: str) -> None:
    found = fault(body, budget=100_000)
    assert found.check in ("synccheck", "memcheck")
    assert message in found.message


def test_deadlock_report_says_who_waits_for_what() -> None:
    body = """
        mov.b32 %v, s;  setp.ne.b32 %p, %t, 0;  @%p bra READY;  mbarrier.init.shared.b64 [%v], 2;
        mbarrier.arrive.expect_tx.shared.b64 _, [%v], 64;
        READY: bar.sync 0;  setp.ge.u32 %p, %t, 32;  @%p bar.sync 3, 64;
        SPIN: mbarrier.try_wait.parity.shared.b64 %q, [%v], 0;  @!%q bra SPIN;"""
    message = fault(body).message
    assert (
        "threads 0-31 wait for mbarrier 0x400 in its phase 0: 1 of 2 arrivals and 64 bytes missing"
        in message
    )
    assert "threads 32-63 wait for barrier 3: 32 of 64 threads arrived" in message
    assert "mbarrier.try_wait.parity.shared.b64 %q, [%v], 0" in message
    assert "@%p bar.sync 3, 64" in message


def test_divergent_barrier_report() -> None:
    """Halves of a warp at two barriers wait for each other."""
    message = fault(
        "setp.lt.u32 %p, %t, 16; @%p bra A; bar.sync 0; bra B; A: bar.sync 0; B:"
    ).message
    assert "threads 0-15 wait for the rest of the warp" in message
    assert "threads 16-31 wait for the rest of the warp" in message


def test_polling_a_value_that_never_comes() -> None:
    """A wait for another cluster (or for nobody) through global memory."""
    found = fault(
        "SPIN: ld.acquire.gpu.global.b32 %x, [%i]; setp.eq.b32 %p, %x, 99; @!%p bra SPIN;"
    )
    assert "deadlock" in found.message
    assert "a value in memory that it polls" in found.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "setp.ge.u32 %p, %t, 32; @%p bra A; bar.arrive 2, 64; A:",
            "barrier 2 was left with 32 of 64 arrivals",
        ),
        (
            ("mov.b32 %v, s; setp.ne.b32 %p, %t, 0; @%p bra A; mbarrier.init.shared.b64 [%v], 1;"
            "st.shared.b32 [%v], %a; A:"),
            "a store overwrites an mbarrier",
        ),
        (
            ("mov.b32 %v, s; setp.ne.b32 %p, %t, 0; @%p bra A; mbarrier.init.shared.b64 [%v], 2;"
            "mbarrier.arrive.shared.b64 _, [%v]; mbarrier.init.shared.b64 [%v], 2; A:"),
            "init of a live mbarrier 0x400 in its phase 0: 1 of 2 arrivals missing",
        ),
        (
            ("mov.b32 %v, s; setp.ne.b32 %p, %t, 0; @%p bra A; mbarrier.init.shared.b64 [%v], 2;"
            "mbarrier.arrive.expect_tx.shared.b64 _, [%v], 16; A:"),
            "left over: mbarrier 0x400 in its phase 0: 1 of 2 arrivals and 16 bytes missing",
        ),
        (
            (
                "and.b32 %x, %t, 31; setp.lt.u32 %p, %x, 16; "
                "@!%p bra A; shfl.sync.idx.b32 %o, %a, 20, 31, 65535; A:"
            ),
            "shfl.sync reads a lane that does not take part",
        ),
    ],
)  # fmt: skip
def test_synccheck_findings(body: str, message: str) -> None:
    only(findings(body), "synccheck", message)
    assert findings(body, checks=("racecheck", "memcheck", "initcheck")) == []


def test_lost_loads_are_reported() -> None:
    """A CTA that ends while a load is on its way (the late schedule shows it)."""
    body = BULK[: BULK.index("WAIT: ")] + "WAIT: mov.b32 %o, 1;"
    messages = {f.message for f in findings(body, seed=3)}
    assert any("loads into shared memory in flight" in m for m in messages)


def test_faults_carry_what_was_found_before() -> None:
    body = WRITE_THEN_READ.replace("bar.sync 0;", "") + "bar.sync 1, 96;"
    bench = Bench(64)
    with pytest.raises(KernelFault):
        bench.run(body, declarations=SHARED)
    assert bench.messages == ["racecheck: read after write: not ordered after the generic write"]


def test_unknown_check_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown checks"):
        Bench().run("mov.b32 %o, 1;", checks=("leakcheck",))


# ---- racecheck, across grids
BEFORE_WAIT = "global memory is touched before griddepcontrol.wait in a programmatic launch"
FIRST_WARP_WAITS = "setp.lt.u32 %p, %t, 32; @%p griddepcontrol.wait; "
TOUCHES = {
    "load": "ld.global.b32 %o, [%i];",
    "generic load": "ld.b32 %o, [%i];",
    "store": "st.global.b32 [%u], %a;",
    "generic store": "st.b32 [%u], %a;",
    "atomic": "atom.global.add.u32 %o, [%u], 1;",
    "reduction": "red.global.add.u32 [%u], 1;",
    "cp.async": SLOT.replace("2;", "4;") + "cp.async.cg.shared.global [%v], [%i], 16;",
    "bulk store": (
        SLOT.replace("2;", "4;") + "st.shared.b32 [%v], 1; fence.proxy.async.shared::cta; "
        "ld.param.b64 %u, [out]; setp.eq.b32 %p, %t, 0; "
        "@%p cp.async.bulk.global.shared::cta.bulk_group [%u], [%v], 16; "
        "@%p cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    ),
    "bulk load": BULK,
}


def across_grids(body: str, **settings: Any) -> list[Finding]:
    """Findings of racecheck; nothing but the body touches global memory."""
    settings = {"programmatic": True, "loads": "", "tail": "ret;", **settings}
    return findings(body, checks=("racecheck",), **settings)


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_racecheck_finds_memory_touched_before_the_grid_before_has_ended(touch: str) -> None:
    """In a programmatic launch, and only there; a kernel without a wait may touch nothing."""
    only(across_grids(touch), "racecheck", BEFORE_WAIT)
    only(across_grids(touch + " griddepcontrol.wait;"), "racecheck", BEFORE_WAIT)
    assert across_grids("griddepcontrol.wait; " + touch) == []
    assert across_grids(touch, programmatic=False) == []


def test_racecheck_orders_warps_behind_one_that_waits() -> None:
    """A barrier behind the wait hands it on, one in front of it does not."""
    load = TOUCHES["load"]
    assert across_grids(FIRST_WARP_WAITS + "bar.sync 0; " + load) == []
    for body in (FIRST_WARP_WAITS, "bar.sync 0; " + FIRST_WARP_WAITS):
        assert only(across_grids(body + load), "racecheck", BEFORE_WAIT).warps == (1,)
    again = "bar.sync 0; @%p griddepcontrol.wait; "
    assert across_grids(FIRST_WARP_WAITS + again + load + load) == []
