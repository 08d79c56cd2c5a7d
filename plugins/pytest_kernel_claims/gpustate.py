"""State of the GPU around a measurement: clocks, power, temperature, utilisation, slow-downs.

Observation goes through NVML (``nvidia-ml-py``). Where that is missing, or cannot name the GPU,
nothing is observed: measurements run all the same and their records say so.

``observer`` is called through this module, so a test may replace it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from pytest_kernel_claims import arch, figures

SETTLE_SECONDS = 3.0
"""How long the last process's own load may linger in NVML's utilisation, which averages."""

REASONS = {
    0x02: "application_clocks",
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
"""Bits of NVML's clock event reasons; an idle GPU is not slowed down."""

State = dict[str, Any]
"""``sm_mhz memory_mhz temperature_c power_w utilisation_percent reasons``; None: not reported."""


class Observer(Protocol):
    def sample(self) -> State | None:
        """The state at this moment, or None."""


class Blind:
    """Observes nothing."""

    def sample(self) -> State | None:
        return None


class Nvml:
    """One GPU through NVML."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None

    def sample(self) -> State | None:
        nvml = self._nvml
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage)
        bits = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        return {
            "sm_mhz": self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            "memory_mhz": self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            "temperature_c": self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            "power_w": None if power is None else power / 1000,
            "utilisation_percent": None if rates is None else rates.gpu,
            "reasons": [name for bit, name in REASONS.items() if bits is not None and bits & bit],
        }


def observer(gpu: arch.Gpu) -> Observer:
    """An observer of this GPU. NVML numbers GPUs in its own way, so it is found by its UUID."""
    try:
        import pynvml
        import torch

        uuid = f"GPU-{torch.cuda.get_device_properties(gpu.index).uuid}"
    except (ImportError, AttributeError, RuntimeError):
        return Blind()
    try:
        pynvml.nvmlInit()
        return Nvml(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError:
        return Blind()


def settled(watch: Observer) -> State | None:
    """A sample taken when the GPU has come to rest, or after ``SETTLE_SECONDS`` of waiting."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        state = watch.sample()
        busy = state and state["utilisation_percent"]
        if not busy or busy <= figures.BUSY_PERCENT or time.monotonic() > deadline:
            return state
        time.sleep(0.1)
