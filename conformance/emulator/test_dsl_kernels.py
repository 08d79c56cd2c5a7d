"""Whole CuTe DSL kernels through their compiled host code: results, checks, schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ptx_emulator
from linattn.reference.arithmetic import mma
from ptx_emulator import CheckFailure, EmulatedFunction, KernelFault

pytestmark = pytest.mark.claim(
    "EMU-08", "CuTe DSL kernels run as they ship, and clean ones are silent"
)
Build = Callable[..., EmulatedFunction]
SCHEDULES = [None, *range(10)]


def operands(
    m: int, n: int, k: int, out: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(k)
    a, b = (torch.randn(r, k, generator=g).to(torch.bfloat16) for r in (m, n))
    return a, b, torch.full((m, n), torch.nan, dtype=out)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A B^T by the tensor-core model, K in steps of 16."""
    return mma(torch.zeros(a.shape[0], b.shape[0]), a.float(), b.float().T)


@pytest.mark.parametrize("size", [1, 1000, 4096])
def test_elementwise(size: int, emulated: Build) -> None:
    a, b = torch.randn(size), torch.full((size,), torch.nan)
    result = emulated("elementwise")(a, b, readonly=[a], uninitialized=[b])
    assert torch.equal(b, 2 * a)
    launch = result.launches[0]
    assert (launch.grid, launch.block, launch.cluster) == (
        (-(-size // 128), 1, 1),
        (128, 1, 1),
        (1, 1, 1),
    )
    assert result.statistics.instructions > 0


@pytest.mark.parametrize("shape", [(64, 64, 64), (72, 200, 328)], ids=str)
@pytest.mark.parametrize("seed", [None, 0, 1], ids=str)
def test_hopper_gemm(shape: tuple[int, int, int], seed: int | None, emulated: Build) -> None:
    """TMA ring, warp specialisation, wgmma, TMA store; ragged edges."""
    a, b, c = operands(*shape, torch.bfloat16)
    result = emulated("gemm_sm90")(a, b, c, readonly=[a, b], uninitialized=[c], seed=seed)
    assert torch.equal(c, product(a, b).bfloat16())
    tiles = [-(-n // 64) for n in shape]
    assert result.statistics.mma == 4 * tiles[0] * tiles[1] * tiles[2]
    assert result.statistics.bytes_loaded == 2 * 8192 * tiles[0] * tiles[1] * tiles[2]


def test_clean_kernel_is_silent_under_ten_schedules(emulated: Build) -> None:
    a, b, _ = operands(64, 128, 256, torch.bfloat16)
    want = product(a, b).bfloat16()
    for seed in SCHEDULES:
        c = torch.full_like(want, torch.nan)
        result = emulated("gemm_sm90")(a, b, c, seed=seed, collect=True)
        assert result.findings == []
        assert torch.equal(c, want), seed


@pytest.mark.parametrize("k", [32, 256])
def test_cp_async_gemm(k: int, emulated: Build) -> None:
    """cp.async ring, ldmatrix, mma.sync."""
    a, b, c = operands(64, 64, k, torch.float32)
    emulated("gemm_cp_async")(a, b, c, readonly=[a, b], uninitialized=[c])
    assert torch.equal(c, product(a, b))


@pytest.mark.parametrize(
    ("old", "new"), [("wait_group \\t1;", "wait_group \\t2;"), ("bar.sync \\t0;", ";")]
)
def test_cp_async_faults(old: str, new: str, emulated: Build) -> None:
    """A wait that is too loose, a missing barrier: the result stays right, the check does not."""
    f = emulated("gemm_cp_async")
    assert old.encode().decode("unicode_escape") in f.ptx
    mutant = f.with_ptx(
        f.ptx.replace(old.encode().decode("unicode_escape"), new.encode().decode("unicode_escape"))
    )
    a, b, c = operands(64, 64, 256, torch.float32)
    with pytest.raises(CheckFailure, match=r"racecheck: .* not ordered after") as e:
        mutant(a, b, c)
    assert torch.equal(c, product(a, b))
    assert "gemm_cp_async.py:" in str(e.value)


@pytest.mark.parametrize("k", [64, 320])
@pytest.mark.parametrize("seed", [None, 1], ids=str)
def test_blackwell_gemm(k: int, seed: int | None, emulated: Build) -> None:
    """TMA, tcgen05.mma into tensor memory, tcgen05.ld."""
    a, b, c = operands(128, 64, k, torch.float32)
    result = emulated("gemm_sm100")(a, b, c, readonly=[a, b], uninitialized=[c], seed=seed)
    assert torch.equal(c, product(a, b))
    assert result.statistics.mma == k // 16


TMEM_FAULTS = {
    "load not awaited": (r"tcgen05.wait::ld.sync.aligned;", ";", "used before tcgen05.wait::ld"),
    "tensor memory not freed": (
        r"tcgen05.dealloc.cta_group::1.sync.aligned.b32",
        None,
        "tensor memory was not freed",
    ),
}


@pytest.mark.parametrize("name", TMEM_FAULTS)
def test_tensor_memory_faults(name: str, emulated: Build) -> None:
    f = emulated("gemm_sm100")
    old, new, message = TMEM_FAULTS[name]
    at = f.ptx.index(old)
    end = f.ptx.index(";", at) + 1
    mutant = f.with_ptx(f.ptx[:at] + (new or ";") + f.ptx[end:])
    a, b, c = operands(128, 64, 64, torch.float32)
    with pytest.raises(CheckFailure, match=message):
        mutant(a, b, c)


def test_accumulator_read_before_its_commit(emulated: Build) -> None:
    """The wait for the tensor core's mbarrier is left out."""
    f = emulated("gemm_sm100")
    commit = f.ptx.index("tcgen05.commit")
    at = f.ptx.index("@P1 bra.uni DONE;", commit)
    mutant = f.with_ptx(f.ptx[:at] + "bra.uni DONE;" + f.ptx[at + len("@P1 bra.uni DONE;") :])
    wait = mutant.ptx.rindex("mbarrier.try_wait", 0, at)
    end = mutant.ptx.index(";", wait) + 1
    mutant = mutant.with_ptx(mutant.ptx[:wait] + mutant.ptx[end:])
    a, b, c = operands(128, 64, 64, torch.float32)
    with pytest.raises(
        CheckFailure, match=r"tensor memory is used before a tcgen05.mma on it is complete"
    ):
        mutant(a, b, c)


def test_arguments_by_address(emulated: Build) -> None:
    """A kernel that takes an address may touch what `memory` names, and nothing else."""
    f = emulated("elementwise", "build_by_address")
    a, b = torch.randn(500), torch.zeros(500)
    f(a, b.data_ptr(), memory={"result": b})
    assert torch.equal(b, 2 * a)
    with pytest.raises(
        KernelFault, match=r"global store of 4 bytes out of bounds .* past result \(499,\)"
    ):
        f(a, b.data_ptr(), memory={"result": b[:499]})
    with pytest.raises(KernelFault, match="store to read-only memory"):
        f(a, b.data_ptr(), memory=[b], readonly=[b])
    with pytest.raises(KernelFault, match="out of bounds"):
        f(a, b.data_ptr())


def test_host_code_checks_its_arguments(emulated: Build) -> None:
    f = emulated("elementwise")
    with pytest.raises(ValueError, match="Mismatched"):
        f(torch.zeros(10), torch.zeros(9))
    with pytest.raises(ValueError, match="expected dtype=float32"):
        f(torch.zeros(10), torch.zeros(10, dtype=torch.float64))


def test_reports_name_the_python_line(emulated: Build) -> None:
    f = emulated("elementwise")
    a = torch.zeros(1000)
    with pytest.raises(KernelFault) as e:
        f(a, torch.zeros(1000), readonly=[a], memory=[], uninitialized=[a])
    assert e.value.finding.check == "initcheck"
    source = e.value.finding.source
    assert source is not None
    name, line = source.split(":")
    assert name == "elementwise.py"
    from .kernels import elementwise

    with open(elementwise.__file__) as lines:
        assert "b[i] = a[i] * 2.0" in list(lines)[int(line) - 1]


def test_run_takes_a_compiled_function() -> None:
    from .kernels import elementwise

    compiled: Any = elementwise.build()
    a, b = torch.randn(100), torch.zeros(100)
    result = ptx_emulator.run(compiled, a, b, checks=("memcheck",))
    assert torch.equal(b, 2 * a)
    assert len(result.launches) == 1
    assert ptx_emulator.from_compiled(compiled) is ptx_emulator.from_compiled(compiled)


def test_budget_ends_a_run(emulated: Build) -> None:
    with pytest.raises(KernelFault, match=r"exhausted: .* of 1000 warp instructions"):
        emulated("gemm_sm90")(*operands(64, 64, 512, torch.bfloat16), budget=1000)
