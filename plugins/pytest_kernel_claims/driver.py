"""GPUs as the NVIDIA driver sees them, without torch: what can be asked before it is installed.

Needs nothing but the standard library, so that ``toxfile.py`` and ``noxfile.py`` can import it from
a checkout.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from pytest_kernel_claims import Capability

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


@dataclass(frozen=True)
class Visible:
    """Compute capabilities of the visible GPUs, in the driver's order, which is torch's; and why
    there are none."""

    capabilities: tuple[Capability, ...] = ()
    absence: str = ""

    def __str__(self) -> str:
        names = ", ".join(f"{major}.{minor}" for major, minor in self.capabilities)
        return f"GPUs of compute capability {names}" if names else self.absence


def visible() -> Visible:
    """Ask the driver. ``CUDA_VISIBLE_DEVICES`` hides GPUs here as it does from torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        start, count = driver.cuInit, ctypes.c_int(0)
    except (OSError, AttributeError):
        return Visible(absence="no NVIDIA driver")
    status = start(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status not in (0, _NO_DEVICE):
        return Visible(absence=f"an NVIDIA driver that cannot be used (CUDA error {status})")
    found = tuple((_ask(driver, _MAJOR, i), _ask(driver, _MINOR, i)) for i in range(count.value))
    return Visible(found, "" if found else "a driver and no visible GPU")


def _ask(driver: ctypes.CDLL, attribute: int, device: int) -> int:
    value = ctypes.c_int(0)
    driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return value.value
