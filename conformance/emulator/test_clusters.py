"""Clusters: distributed shared memory, remote barriers, multicast, and races between CTAs."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ptx_emulator.errors import KernelFault

from .bare_ptx import Bench, buffer, launch, machine_for
from .test_tensor_copies import kernel as tma_kernel
from .tma_descriptors import encode

pytestmark = pytest.mark.claim(
    "EMU-07", "the CTAs of a cluster share memory and barriers as hardware does"
)
SHARED = ".shared .align 128 .b8 s[1024];"
PAIR = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "declarations": SHARED}
SLOT = """mov.b32 %v, s; shl.b32 %w, %t, 2; mov.u32 %x, %cluster_ctarank; xor.b32 %y, %x, 1;
  add.s32 %z, %v, %w; mapa.shared::cluster.u32 %y, %z, %y; mov.u32 %c, %ctaid.x; """

EXCHANGE = (
    SLOT
    + """
  shl.b32 %b, %x, 8;  add.s32 %b, %b, %t;
  st.shared::cluster.b32 [%y], %b;
  barrier.cluster.arrive.release.aligned;  barrier.cluster.wait.acquire.aligned;
  ld.shared.b32 %o, [%z];"""
)
PER_CTA = (
    "mul.wide.u32 %l, %c, 256; ld.param.b64 %u, [out]; "
    "mul.wide.u32 %O, %t, 8; add.s64 %u, %u, %O; add.s64 %u, %u, %l; "
)


def pair(body: str, seed: int | None = None, threads: int = 32) -> tuple[list[int], list[str]]:
    """Outputs of both CTAs, and what the checks found."""
    bench = Bench(threads)
    bench.outputs = np.zeros(2 * threads, np.uint64)
    got = bench.run(body + PER_CTA.replace("256", str(8 * threads)), seed=seed, **PAIR)
    return [int(x) for x in got], bench.messages


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_store_to_the_other_cta(seed: int | None) -> None:
    got, messages = pair(EXCHANGE, seed)
    assert got == [256 + t for t in range(32)] + list(range(32))
    assert messages == []


def test_load_from_the_other_cta() -> None:
    body = (
        SLOT
        + """
      shl.b32 %b, %x, 8;  add.s32 %b, %b, %t;  st.shared.b32 [%z], %b;
      barrier.cluster.arrive;  barrier.cluster.wait;
      ld.shared::cluster.b32 %o, [%y];
      barrier.cluster.arrive;  barrier.cluster.wait;"""
    )
    got, messages = pair(body)
    assert got == [256 + t for t in range(32)] + list(range(32))
    assert messages == []


def test_cta_that_ends_too_early() -> None:
    """Without a last cluster barrier, shared memory may be gone when the other CTA reads it."""
    body = (
        SLOT
        + """
      st.shared.b32 [%z], %t;  barrier.cluster.arrive;  barrier.cluster.wait;
      setp.eq.b32 %p, %x, 0;  @%p bra DONE;  ld.shared::cluster.b32 %o, [%y];
      DONE:"""
    )
    assert any(
        pair(body, seed)[1] == ["synccheck: access to the shared memory of a CTA that has ended"]
        for seed in (None, 0, 1, 2)
    )
    last = "DONE: barrier.cluster.arrive;  barrier.cluster.wait;"
    assert pair(body.replace("DONE:", last))[1] == []


def test_race_between_ctas() -> None:
    body = EXCHANGE.replace(
        "barrier.cluster.arrive.release.aligned;  barrier.cluster.wait.acquire.aligned;", ""
    )
    messages = {m for seed in range(4) for m in pair(body, seed)[1]}
    assert messages & {
        "racecheck: write after read: not ordered after the generic read",
        "racecheck: read after write: not ordered after the generic write",
    }


def test_generic_address_of_the_other_cta() -> None:
    body = (
        SLOT
        + """
      mov.b32 %b, %t;  cvt.u64.u32 %l, %y;  cvta.shared::cluster.u64 %l, %l;  st.b32 [%l], %b;
      barrier.cluster.arrive;  barrier.cluster.wait;  ld.shared.b32 %o, [%z];"""
    )
    got, messages = pair(body)
    assert got == list(range(32)) * 2
    assert messages == []


def test_remote_mbarrier() -> None:
    """Both CTAs arrive at the barrier of CTA 0, which waits; CTA 1 waits for the cluster."""
    body = """mov.b32 %v, s; mov.u32 %c, %ctaid.x; setp.ne.b32 %p, %t, 0; @%p bra READY;
      mbarrier.init.shared.b64 [%v], 2; fence.mbarrier_init.release.cluster;
      READY: barrier.cluster.arrive; barrier.cluster.wait;
      @%p bra WAIT; mov.b32 %y, 0; mapa.shared::cluster.u32 %z, %v, %y;
      mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%z];
      WAIT: setp.ne.b32 %q, %c, 0; @%q bra DONE;
      SPIN: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %q, [%v], 0; @!%q bra SPIN;
      DONE: barrier.cluster.arrive; barrier.cluster.wait; mov.b32 %o, 1; """
    for seed in (None, 1):
        got, messages = pair(body, seed)
        assert got == [1] * 64
        assert messages == []


def test_cluster_barrier_deadlock() -> None:
    body = (
        "mov.u32 %c, %ctaid.x; setp.ne.b32 %p, %c, 0; @%p bra DONE; "
        "barrier.cluster.arrive; barrier.cluster.wait; DONE: "
    )
    with pytest.raises(KernelFault, match="the cluster barrier: 32 of 64 threads arrived"):
        pair(body)


def test_address_beyond_the_cluster() -> None:
    with pytest.raises(KernelFault, match="names CTA 5 of 2"):
        pair(
            "mov.u32 %c, %ctaid.x; mov.b32 %v, s; mov.b32 %y, 5; "
            "mapa.shared::cluster.u32 %y, %v, %y; ld.shared::cluster.b32 %o, [%y];"
        )


@pytest.mark.parametrize("seed", [None, 3])
def test_tensor_multicast(seed: int | None) -> None:
    """CTA 0 loads one box into both CTAs; each gets the bytes and the completion at its own
    barrier.
    """
    tensor = np.arange(64, dtype=np.uint32).reshape(2, 32)
    body = """mov.u32 %c0, %ctaid.x;  @%p bra WAIT;
     mbarrier.arrive.expect_tx.shared.b64 _, [%v], 128;
      WAIT: barrier.cluster.arrive; barrier.cluster.wait;
      setp.ne.or.b32 %q, %c0, 0, %p;  @%q bra SPIN;  mov.b32 %c2, 0; mov.b16 %h, 3;
      cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
        [%v+1024],
        [%d, {%c2, %c1}], [%v], %h;
      SPIN: mbarrier.try_wait.parity.shared.b64 %q, [%v], 0;  @!%q bra SPIN;
      shl.b32 %w, %t, 2;  add.s32 %w, %v, %w;  ld.shared.b32 %y, [%w+1024];
      mul.wide.u32 %l, %c0, 128;  add.s64 %o, %o, %l;  mul.wide.u32 %l, %t, 4;  add.s64 %o, %o, %l;
      st.global.b32 [%o], %y;  barrier.cluster.arrive; barrier.cluster.wait;"""
    out = np.zeros(64, np.uint32)
    machine = machine_for(tma_kernel(body, (0, 1)), seed=seed)
    descriptor = encode(tensor.ctypes.data, "u32", (32, 2), (128,), (32, 1))
    parameters = descriptor + struct.pack("QQ", out.ctypes.data, 0)
    buffers = [buffer("tensor", tensor), buffer("out", out)]
    launch(machine, buffers, parameters, shared=4096, grid=(2, 1, 1), cluster=(2, 1, 1))
    assert out.tolist() == list(range(32, 64)) * 2
    assert not machine.findings
    assert machine.statistics.bytes_loaded == 256


def test_many_clusters_run_one_after_the_other() -> None:
    bench = Bench(32)
    bench.outputs = np.zeros(32 * 6, np.uint64)
    body = (
        "mov.u32 %c, %ctaid.x; mov.u32 %x, %clusterid.x; "
        "mov.u32 %y, %cluster_ctarank; shl.b32 %o, %x, 4; add.s32 %o, %o, %y;"
    )
    got = bench.run(body + PER_CTA, grid=(6, 1, 1), cluster=(2, 1, 1), declarations=SHARED)
    assert got.reshape(6, 32)[:, 0].tolist() == [0, 1, 16, 17, 32, 33]


def test_grid_must_be_whole_clusters() -> None:
    with pytest.raises(KernelFault, match="is not a multiple of the cluster"):
        Bench(32).run("mov.b32 %o, 1;", grid=(3, 1, 1), cluster=(2, 1, 1))
