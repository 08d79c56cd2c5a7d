"""What the plugin does with a real GPU."""

from __future__ import annotations

import pytest
import torch

from pytest_kernel_claims import arch, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.claim("PLUGIN-GPU", "comparisons and guard bands work on GPU tensors"),
]


@pytest.fixture
def out(device: torch.device, poison: compare.Poison) -> torch.Tensor:
    tensor: torch.Tensor = poison(torch.empty(64, 64, dtype=torch.bfloat16, device=device))
    return tensor


def test_comparisons_stay_on_the_device(out: torch.Tensor) -> None:
    out.copy_(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    want = out.clone()
    compare.assert_bitwise(out, want)
    compare.assert_numeric(out, want.double(), rel_rms=0.0, ulp=0)
    out[3, 4] += 1
    with pytest.raises(AssertionError, match=r"1 of 4096[\s\S]*first at \(3, 4\)"):
        compare.assert_bitwise(out, want)
    with pytest.raises(AssertionError, match=r"rel_rms[\s\S]*largest difference at \(3, 4\)"):
        compare.assert_numeric(out, want, rel_rms=1e-6)


def test_a_stray_write_is_found(out: torch.Tensor, device: torch.device) -> None:
    poison = compare.Poison()
    out = poison(out)
    poison.assert_untouched(out)
    out.fill_(1)
    poison.assert_overwritten(out)
    poison.check()
    out.as_strided((64 * 64 + 1,), (1,)).fill_(0)
    with pytest.raises(AssertionError, match="2 bytes outside"):
        poison.check()


def test_the_machine_is_described(device: torch.device, pytestconfig: pytest.Config) -> None:
    here = arch.machine(pytestconfig)
    if here.gpu is None:
        pytest.skip("runs in emulation")
    assert here.gpu.capability == torch.cuda.get_device_capability(device)
    assert arch.driver_version() is not None
