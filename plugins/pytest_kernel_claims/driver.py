"""GPUs as the NVIDIA driver sees them, without torch: what can be asked before it is installed.

Needs nothing but the standard library, so that ``toxfile.py`` and ``noxfile.py`` can import it from
a checkout.
"""

from __future__ import annotations

import ctypes

from pytest_kernel_claims import Capability

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def capabilities() -> list[Capability] | None:
    """Compute capabilities of the visible GPUs; None where there is no driver to ask.

    ``CUDA_VISIBLE_DEVICES`` hides GPUs here as it does from torch.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return []  # such as CUDA_ERROR_NO_DEVICE
    except (OSError, AttributeError):
        return None
    return [(_ask(driver, _MAJOR, i), _ask(driver, _MINOR, i)) for i in range(count.value)]


def _ask(driver: ctypes.CDLL, attribute: int, device: int) -> int:
    value = ctypes.c_int(0)
    driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return value.value


def described(found: list[Capability] | None) -> str:
    """What ``capabilities`` found, in words."""
    if found is None:
        return "no NVIDIA driver"
    names = ", ".join(f"{major}.{minor}" for major, minor in found)
    return f"GPUs of compute capability {names}" if found else "a driver and no visible GPU"
