"""Rows of the draft timings, and what each implementation of a row does.

K = V = 128, H = HV, bf16 tokens, FP32 states, ALiBi slopes, all drafts accepted. A pool holds the
row's requests in shuffled slots. Every call steps the states, so they change while they are timed;
what a step computes is checked against the definition once, before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peers import sglang

import linattn
from linattn.reference import lightning_recurrent
from pytest_kernel_claims.events import Workload

STATE_BYTES = 128 * 128 * 4
RMS = 2.7e-3
"""Relative RMS of an output: its rounding to bf16 is 1.7e-3, and SGLang's own partial sums more."""


@dataclass(frozen=True)
class Row:
    """One shape."""

    batch: int
    tokens: int
    heads: int = 64

    def __str__(self) -> str:
        return f"hv{self.heads}_b{self.batch}_t{self.tokens}"

    @property
    def pass_bytes(self) -> int:
        """Bytes of the states, once."""
        return self.batch * self.heads * STATE_BYTES

    @property
    def token_bytes(self) -> int:
        """Bytes of q, k, v and o."""
        return self.batch * self.tokens * self.heads * 128 * 2 * 4


@dataclass
class Draft:
    """Tensors of a row: slots in an order of their own, states of unit variance."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    pool: torch.Tensor
    decay: torch.Tensor
    indices: torch.Tensor
    accepted: torch.Tensor
    held: dict[str, torch.Tensor]
    scale: float = 128**-0.5

    @property
    def rest(self) -> tuple[Any, ...]:
        return self.pool, self.decay, self.indices, self.scale


def draft(row: Row, device: torch.device) -> Draft:
    generator = torch.Generator(device).manual_seed(row.batch + row.tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    shape = (row.batch, row.tokens, row.heads, 128)
    q, k, v = (normal(*shape).bfloat16() for _ in range(3))
    decay = 2.0 ** (-8.0 * torch.arange(1, row.heads + 1, device=device) / row.heads)
    indices = torch.randperm(row.batch, generator=generator, device=device).int()
    accepted = torch.full_like(indices, row.tokens)
    held = {
        name: torch.zeros(row.batch, row.tokens, row.heads, 128, dtype=q.dtype, device=device)
        for name in ("k_buffer", "v_buffer")
    }
    pool = normal(row.batch, row.heads, 128, 128)
    return Draft(q, k, v, torch.empty_like(v), pool, decay, indices, accepted, held)


def exact(inputs: Draft, heads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What some heads of the first requests should give, from the states as they are."""
    few = slice(0, min(4, len(inputs.q)))
    q, k, v = (x[few][:, :, heads] for x in (inputs.q, inputs.k, inputs.v))
    states = inputs.pool[inputs.indices[few].long()][:, heads]
    return lightning_recurrent(q, k, v, inputs.decay[heads], inputs.scale, states)


def rms(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def workload(
    inputs: Draft, launch: Callable[[], Any], steps: bool, *operators: str
) -> Workload:  # fmt: skip
    """A launch into ``inputs.out``; ``steps`` says that it leaves the states behind all drafts."""
    known: list[bool] = []

    def prepare() -> None:
        for name in operators:
            linattn.warm_up(name)

    def check(result: Any) -> None:
        __tracebackhide__ = True
        torch.cuda.synchronize()
        assert bool(inputs.out.isfinite().all()), "out holds numbers that are not finite"
        assert bool(inputs.pool.isfinite().all()), "the pool holds numbers that are not finite"
        if known:
            return
        heads = sorted({0, inputs.v.shape[2] // 2, inputs.v.shape[2] - 1})
        want, states = exact(inputs, heads)
        launch()
        few = len(want)
        error = rms(inputs.out.view_as(inputs.v)[:few][:, :, heads], want)
        assert error <= RMS, f"relative RMS {error:.2e} of the outputs"
        if steps:
            error = rms(inputs.pool[inputs.indices[:few].long()][:, heads], states)
            assert error <= 1e-6, f"relative RMS {error:.2e} of the states"
        known.append(True)

    return Workload(launch, check, outputs=lambda result: [inputs.out], prepare=prepare)


def verify(row: Row, device: torch.device) -> Workload:
    """Verification alone, with the drafts written to the buffers."""
    x = draft(row, device)

    def launch() -> Any:
        return linattn.la_verify_kvbuffer(x.q, x.k, x.v, *x.rest, **x.held, out=x.out)

    return workload(x, launch, False, "la_verify_kvbuffer")


def chain(row: Row, device: torch.device) -> Workload:
    """Verification, then commit of all drafts."""
    x = draft(row, device)

    def launch() -> Any:
        linattn.la_verify_kvbuffer(x.q, x.k, x.v, *x.rest, **x.held, out=x.out)
        linattn.la_state_update_kvbuffer(*x.held.values(), *x.rest[:3], x.accepted)
        return x.out

    return workload(x, launch, True, "la_verify_kvbuffer", "la_state_update_kvbuffer")


def folded(row: Row, device: torch.device) -> Workload:
    """Commit of the drafts of the step before and verification in one launch.

    The drafts are the same in every step, so a step commits what it then verifies.
    """
    x = draft(row, device)
    linattn.la_verify_kvbuffer(x.q, x.k, x.v, *x.rest, **x.held)

    def launch() -> Any:
        return linattn.la_verify_kvbuffer(
            x.q, x.k, x.v, *x.rest, **x.held, accepted_len=x.accepted, out=x.out
        )

    def check(result: Any) -> None:
        __tracebackhide__ = True
        launch()
        torch.cuda.synchronize()
        want = linattn.la_verify_kvbuffer(x.q, x.k, x.v, *x.rest)
        assert torch.equal(x.out, want), "a folded step is not a verification of what it leaves"
        assert bool(x.pool.isfinite().all()), "the pool holds numbers that are not finite"

    def prepare() -> None:
        linattn.warm_up("la_verify_kvbuffer")

    return Workload(launch, check, outputs=lambda result: [x.out], prepare=prepare)


def decode(row: Row, device: torch.device) -> Workload:
    """Fused decode of all drafts."""
    x = draft(row, device)

    def launch() -> Any:
        return linattn.la_decode_mtp(x.q, x.k, x.v, *x.rest, out=x.out)

    return workload(x, launch, True, "la_decode_mtp")


def by_sglang(row: Row, device: torch.device) -> Workload:
    """SGLang's verification with its cache of states, then its scatter of the accepted ones."""
    x = draft(row, device)
    pool = x.pool[x.indices.long()].mT.contiguous()
    verified = sglang.verify(x.q, x.k, x.v, pool, x.decay, x.scale)
    _, caches = verified()
    committed = sglang.commit(pool, caches, x.accepted)
    known: list[bool] = []

    def launch() -> Any:
        o, _ = verified()
        committed()
        return o

    def check(result: torch.Tensor) -> None:
        __tracebackhide__ = True
        assert bool(result.isfinite().all()), "o holds numbers that are not finite"
        if known:
            return
        heads = [0, row.heads - 1]
        few = min(4, row.batch)
        states = pool[:few, heads].mT
        want, after = lightning_recurrent(
            *(y[:few][:, :, heads] for y in (x.q, x.k, x.v)), x.decay[heads], x.scale, states
        )
        error = rms(launch()[:few][:, :, heads], want)
        assert error <= 4 * 2.0**-8, f"relative RMS {error:.2e} of the outputs"
        error = rms(pool[:few, heads].mT, after)
        assert error <= 1e-2, f"relative RMS {error:.2e} of the states"
        known.append(True)

    return Workload(launch, check, about={"sglang": sglang.VERSION})


def copy(count: int, device: torch.device) -> Workload:
    """An elementwise kernel that moves ``count`` bytes, half of them in and half of them out.

    Not ``copy_``: in a graph that becomes a memcpy node, which was seen to be slower.
    """
    source = torch.ones(count // 8, device=device)
    target = torch.empty_like(source)

    def judge(result: torch.Tensor) -> None:
        assert torch.equal(result, source), "the copy is not equal to its source"

    return Workload(
        lambda: torch.add(source, 0, out=target), judge, outputs=lambda result: [result]
    )
