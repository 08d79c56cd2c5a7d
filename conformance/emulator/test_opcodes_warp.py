"""Control flow, divergence and warp-level instructions."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_, xor

import numpy as np
import pytest

from ptx_emulator.errors import KernelFault

from .bare_ptx import Bench, words
from .oracles import s32

pytestmark = pytest.mark.claim("EMU-02", "every opcode family computes what the PTX ISA says")
M32 = (1 << 32) - 1
VALUES = [int(x) for x in np.random.default_rng(8).integers(0, 1 << 32, 64)]

WARP: dict[str, Callable[[list[int], int], int]] = {  # from the warp's values and the lane
    "shfl.sync.bfly.b32 %o, %a, 5, 31, -1;": lambda v, i: v[i ^ 5],
    "shfl.sync.up.b32 %o, %a, 3, 0, -1;": lambda v, i: v[i - 3] if i >= 3 else v[i],
    "shfl.sync.down.b32 %o, %a, 3, 31, -1;": lambda v, i: v[i + 3] if i + 3 < 32 else v[i],
    "shfl.sync.down.b32 %o, %a, 2, 6175, -1;": lambda v, i: v[i + 2] if i % 8 < 6 else v[i],
    "shfl.sync.idx.b32 %o, %a, 7, 31, -1;": lambda v, i: v[7],
    "shfl.sync.idx.b32 %o, %a, 3, 6175, -1;": lambda v, i: v[i // 8 * 8 + 3],
    "shfl.sync.up.b32 %x|%p, %a, 4, 0, -1; selp.b32 %o, 1, 0, %p;": lambda v, i: int(i >= 4),
    "and.b32 %y, %t, 31; setp.lt.u32 %p, %y, 5; vote.sync.ballot.b32 %o, %p, -1;": lambda v, i: 31,
    (
        "and.b32 %y, %t, 31; setp.lt.u32 %p, %y, 5; "
        "vote.sync.any.pred %q, %p, -1; selp.b32 %o, 1, 0, %q;"
    ): (lambda v, i: 1),
    (
        "and.b32 %y, %t, 31; setp.lt.u32 %p, %y, 5; "
        "vote.sync.all.pred %q, %p, -1; selp.b32 %o, 1, 0, %q;"
    ): (lambda v, i: 0),
    "setp.lt.u32 %p, %t, 500; vote.sync.uni.pred %q, %p, -1; selp.b32 %o, 1, 0, %q;": lambda v, i: (
        1
    ),
    "elect.sync %o|%p, -1; selp.b32 %o, %a, 0, %p;": lambda v, i: v[0] if i == 0 else 0,
    "activemask.b32 %o;": lambda v, i: M32,
    "redux.sync.add.s32 %o, %a, -1;": lambda v, i: sum(v),
    "redux.sync.min.s32 %o, %a, -1;": lambda v, i: min(map(s32, v)),
    "redux.sync.max.u32 %o, %a, -1;": lambda v, i: max(v),
    "redux.sync.xor.b32 %o, %a, -1;": lambda v, i: reduce(xor, v),
    "redux.sync.and.b32 %o, %a, -1;": lambda v, i: reduce(and_, v),
    "and.b32 %x, %t, 3; match.any.sync.b32 %o, %x, -1;": lambda v, i: sum(
        1 << k for k in range(i % 4, 32, 4)
    ),
    "bar.warp.sync -1; mov.b32 %o, %a;": lambda v, i: v[i],
}


@pytest.mark.parametrize("body", WARP)
def test_warp_exchange(body: str) -> None:
    """Each of two warps on its own values."""
    want = [WARP[body](VALUES[w * 32 : w * 32 + 32], i) & M32 for w in range(2) for i in range(32)]
    assert words(body, threads=64, lanes={"a": VALUES}) == want


def test_loop_with_a_different_count_in_each_lane() -> None:
    body = """
        and.b32 %x, %a, 15;  mov.b32 %y, 0;
        LOOP: setp.ge.u32 %p, %y, %x;  @%p bra DONE;  add.s32 %o, %o, %y;  add.s32 %y, %y, 1;
         bra LOOP;
        DONE: add.s32 %o, %o, 1000;"""
    assert words(body, threads=64, lanes={"a": VALUES}) == [
        1000 + sum(range(v & 15)) for v in VALUES
    ]


def test_nested_divergence_reconverges() -> None:
    body = """
        and.b32 %x, %t, 1;  setp.eq.b32 %p, %x, 0;  @%p bra EVEN;
        and.b32 %x, %t, 2;  setp.eq.b32 %q, %x, 0;  @%q bra ODD;
        mov.b32 %y, 3;  bra JOIN;
        ODD: mov.b32 %y, 1;  bra JOIN;
        EVEN: mov.b32 %y, 0;
        JOIN: redux.sync.add.s32 %o, %y, -1;"""
    assert words(body) == [8 * 1 + 8 * 3] * 32


def test_guarded_return_ends_only_its_lanes() -> None:
    body = "setp.lt.u32 %p, %t, 16; @%p ret; mov.b32 %o, 7;"
    assert words(body) == [0] * 16 + [7] * 16


def test_guarded_store_touches_only_its_lanes() -> None:
    body = (
        "setp.lt.u32 %p, %t, 4; @%p ld.global.b32 %o, [%i+4]; "
        "@!%p mov.b64 %i, 0; @!%p mov.b32 %o, 9;"
    )
    assert words(body, lanes={"b": 5}) == [5] * 4 + [9] * 28


def test_member_mask_waits_for_its_lanes_only() -> None:
    """Half a warp exchanges values while the other half is elsewhere."""
    body = """
        setp.lt.u32 %p, %t, 16;  @!%p bra OTHER;
        shfl.sync.bfly.b32 %o, %a, 1, 31, 65535;  bra DONE;
        OTHER: mov.b32 %o, 5;
        DONE: shfl.sync.idx.b32 %x, %o, 0, 31, -1;"""
    assert words(body, lanes={"a": VALUES[:32]}) == [VALUES[i ^ 1] for i in range(16)] + [5] * 16


def test_lanes_that_left_are_not_waited_for() -> None:
    body = """
        setp.lt.u32 %p, %t, 16;  @%p bra LEAVE;  shfl.sync.idx.b32 %o, %a, 20, 31, -1;  bra DONE;
        LEAVE: mov.b32 %y, 0;  st.global.b32 [%u], %y;  ret;
        DONE:"""
    assert words(body, lanes={"a": VALUES[:32]}) == [0] * 16 + [VALUES[20]] * 16


def test_warp_instruction_waits_for_the_whole_warp() -> None:
    """A lane that is late still contributes."""
    body = """
        mov.b32 %y, 1;  setp.eq.b32 %p, %t, 5;  @!%p bra JOIN;
        mov.b32 %y, 100;
        JOIN: redux.sync.add.s32 %o, %y, -1;"""
    assert words(body) == [131] * 32


def test_a_complete_warp_does_not_wait_for_another() -> None:
    """Warp 1 passes a shuffle and then frees the half of warp 0 that the other half waits for."""
    body = """
        mov.b32 %v, s;  setp.ne.b32 %p, %t, 0;  @%p bra READY;  mbarrier.init.shared.b64 [%v], 1;
        READY: bar.sync 0;  setp.ge.u32 %p, %t, 16;  @%p bra JOIN;
        SPIN: mbarrier.try_wait.parity.shared.b64 %q, [%v], 0;  @!%q bra SPIN;
        JOIN: redux.sync.add.s32 %o, %a, -1;
        setp.eq.b32 %p, %t, 32;  @%p mbarrier.arrive.shared.b64 _, [%v];"""
    bench = Bench(64).set(a=1)
    assert bench.run(body, declarations=".shared .align 8 .b8 s[8];").tolist() == [32] * 64


def test_barrier_over_part_of_the_block() -> None:
    """Two warps meet at barrier 1, the third passes by; producers arrive without waiting."""
    body = """
        setp.ge.u32 %p, %t, 64;  @%p bra DONE;
        mov.b32 %v, s;  setp.ge.u32 %q, %t, 32;  @%q bra CONSUMER;
        shl.b32 %w, %t, 2;  add.s32 %v, %v, %w;  st.shared.b32 [%v], %a;  bar.arrive 1, 64;
         bra DONE;
        CONSUMER: bar.sync 1, 64;  sub.s32 %x, %t, 32;  shl.b32 %w, %x, 2;  add.s32 %v, %v, %w;
        ld.shared.b32 %o, [%v];
        DONE:"""
    bench = Bench(96).set(a=[*VALUES, *VALUES[:32]])
    got = bench.run(body, declarations=".shared .align 4 .b8 s[128];")
    assert got[32:64].tolist() == VALUES[:32]
    assert bench.messages == []


def test_guarded_barrier_counts_the_warps_that_run_it() -> None:
    body = "setp.lt.u32 %p, %t, 64; @%p bar.sync 1, 64; mov.b32 %o, 1;"
    assert words(body, threads=128) == [1] * 128


def test_barriers_of_single_warps_do_not_mix() -> None:
    """Each warp uses the barrier of its own number."""
    body = "shr.u32 %x, %t, 5; add.s32 %x, %x, 1; bar.sync %x, 32; mov.b32 %o, %x;"
    assert words(body, threads=128) == [1 + i // 32 for i in range(128)]


def test_mbarrier_phases_and_tokens() -> None:
    """A warp waits on parities 0, 1, 0 while another arrives three times; tokens name the phase of
    the arrival.
    """
    body = """
        mov.b32 %v, s;  setp.ne.b32 %p, %t, 0;  @%p bra READY;
        mbarrier.init.shared.b64 [%v], 1;  mbarrier.init.shared.b64 [%v+8], 1;
        READY: bar.sync 0;  setp.ge.u32 %p, %t, 32;  @%p bra WAITER;
        setp.ne.b32 %p, %t, 0;  @%p bra DONE;  mov.b32 %y, 0;
        AGAIN: mbarrier.arrive.shared.b64 %A, [%v];
        CREDIT: and.b32 %z, %y, 1;  mbarrier.try_wait.parity.shared.b64 %q, [%v+8], %z;
         @!%q bra CREDIT;
        add.s32 %y, %y, 1;  setp.lt.u32 %q, %y, 3;  @%q bra AGAIN;
        cvt.u32.u64 %o, %A;  bra DONE;
        WAITER: mov.b32 %y, 0;
        NEXT: and.b32 %z, %y, 1;
        SPIN: mbarrier.try_wait.parity.shared.b64 %q, [%v], %z, 10000;  @!%q bra SPIN;
        add.s32 %o, %o, 1;  setp.ne.b32 %q, %t, 32;  @%q bra SKIP;
        mbarrier.arrive.release.cta.shared.b64 _, [%v+8];
        SKIP: add.s32 %y, %y, 1;  setp.lt.u32 %q, %y, 3;  @%q bra NEXT;
        DONE:"""
    for seed in (None, 0, 1, 2):
        bench = Bench(64)
        got = bench.run(body, declarations=".shared .align 8 .b8 s[16];", seed=seed)
        assert got.tolist() == [0] * 32 + [3] * 32
        assert bench.messages == []


def test_wait_with_a_state_token() -> None:
    body = """
        mov.b32 %v, s;  setp.ne.b32 %p, %t, 0;  @%p bra READY;  mbarrier.init.shared.b64 [%v], 32;
        READY: bar.sync 0;  mbarrier.arrive.shared.b64 %A, [%v];
        SPIN: mbarrier.test_wait.shared.b64 %q, [%v], %A;  @!%q bra SPIN;  mov.b32 %o, 1;"""
    assert Bench().run(body, declarations=".shared .align 8 .b8 s[8];").tolist() == [1] * 32


def test_trap_is_a_fault() -> None:
    with pytest.raises(KernelFault, match="trap"):
        Bench().run("setp.eq.b32 %p, %t, 3; @%p trap;")
