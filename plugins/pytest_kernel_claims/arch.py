"""Which GPU tests run on: families, detection, ``--gpu-arch`` and the seam for device providers.

A family marker means "needs a GPU whose compute capability is in this tuple": exact, not a
minimum, because architecture-specific code does not load on a newer GPU. Several family markers
on one test mean any of them. The machine is looked at once, when the first test needs to know.

Two seams:

* ``detect`` is called through this module, so a test may replace it
  (``monkeypatch.setattr(arch, "detect", lambda: arch.Gpu("NVIDIA H200", (9, 0)))``).
* ``pytest_kernel_claims_device`` is a hook: a plugin that can run kernels without a GPU answers
  ``--gpu-arch=emulated`` with a ``DeviceProvider``, and ``--sanitizer`` on a machine without a GPU
  with a ``CheckingProvider``.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pytest

from pytest_kernel_claims import FAMILIES as FAMILIES
from pytest_kernel_claims import Capability as Capability

if TYPE_CHECKING:
    import torch

ANY_GPU = "gpu"
EMULATED: dict[str, str | None] = {
    "emulated": None,
    "emulated-sm90": "sm90",
    "emulated-sm100": "sm100",
}
CHOICES = ("any", "auto", "none", *FAMILIES, *EMULATED)

FOREIGN_MARKERS = pytest.StashKey[frozenset[str]]()
"""Names of this plugin's markers that the tested project has registered for itself."""


def sm_name(capability: Capability) -> str:
    """``(9, 0)`` -> ``"sm90"``."""
    return f"sm{capability[0]}{capability[1]}"


@dataclass(frozen=True)
class Gpu:
    """A CUDA GPU: product name, compute capability, and its index among the visible ones."""

    name: str
    capability: Capability
    index: int = 0

    def __str__(self) -> str:
        return f"{self.name} ({self.capability[0]}.{self.capability[1]})"


class DeviceProvider(Protocol):
    """Stands in for a GPU under ``--gpu-arch=emulated...``."""

    @property
    def name(self) -> str:
        """Shown in reports, for example ``"ptx_emulator"``."""

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        """Compute capabilities it can run, the preferred one first; never empty."""

    def open(
        self, node: pytest.Item, capability: Capability
    ) -> AbstractContextManager[torch.device]:
        """For one test: make kernels of ``capability`` runnable, give the tensors' device."""

    def launched(self, node: pytest.Item) -> Collection[str]:
        """Targets, such as ``"sm_90a"``, of the kernels that have run for a test so far."""


class CheckingProvider(DeviceProvider, Protocol):
    """A provider whose checks serve ``--sanitizer=TOOL``.

    The provider reads the tool from ``config.getoption("sanitizer")`` (None: not asked for) and
    turns its checks on. A fault is an exception with the full report as its text, raised from the
    launch that has it or at the latest when the context manager of ``open`` is left.
    """

    @property
    def checks(self) -> tuple[str, ...]:
        """Tools of compute-sanitizer whose faults it finds."""

    def canary(self, tool: str) -> str:
        """Run a kernel that has the planted fault of ``tool``, with the checks of a test.

        Returns the report, or "" when nothing was found. Does not raise for the fault.
        """


@pytest.hookspec
def pytest_kernel_claims_child_options(config: pytest.Config) -> list[str] | None:
    """Return pytest options that a child which runs one test again needs, such as a project's own
    ``--problem=...``. Selections and reports stay with the parent.
    Implementations outside this package are declared with ``optionalhook=True``."""


@pytest.hookspec(firstresult=True)
def pytest_kernel_claims_device(config: pytest.Config, arch: str | None) -> DeviceProvider | None:
    """Return a provider for ``--gpu-arch=emulated`` (``arch`` None: whatever a test needs) or
    ``--gpu-arch=emulated-sm90`` (``arch`` "sm90"); None when this plugin cannot.
    Implementations outside this package are declared with ``optionalhook=True``."""


class Machine(NamedTuple):
    """What tests may run on: a GPU, or a provider, or (both None) only the CPU, and then why."""

    gpu: Gpu | None = None
    provider: DeviceProvider | None = None
    absence: str = ""

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        if self.provider is not None:
            return self.provider.capabilities
        return (self.gpu.capability,) if self.gpu is not None else ()

    def __str__(self) -> str:
        if self.provider is not None:
            listed = ", ".join(map(sm_name, self.capabilities))
            return f"emulated here: {listed} by {self.provider.name}"
        if self.gpu is None and self.absence:
            return f"GPU here: none ({self.absence})"
        return f"GPU here: {self.gpu or 'none'}"

    def choose(self, needs: tuple[str, ...]) -> Capability | None:
        """The capability a test with these markers runs on, or None when it cannot run.

        ``needs`` holds family names and ``"gpu"``; empty means whatever there is.
        """
        for capability in self.capabilities:
            if not needs or ANY_GPU in needs or any(capability in FAMILIES[n] for n in needs):
                return capability
        return None


_MACHINE = pytest.StashKey[Machine]()
_OPENED = pytest.StashKey[bool]()


def detect() -> Gpu | None:
    """The GPU that torch would use, or None. Initialises CUDA where there is one."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device()
    major, minor = torch.cuda.get_device_capability(index)
    return Gpu(torch.cuda.get_device_name(index), (major, minor), index)


def driver_version() -> str | None:
    """Version of the NVIDIA kernel driver, or None; asks no CUDA library."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = _nvidia_smi_driver()
    found = re.search(r"\b\d{3}(?:\.\d+)+\b", text)
    return found[0] if found else None


def _nvidia_smi_driver() -> str:
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def machine(config: pytest.Config) -> Machine:
    """The machine of this session; looked at on the first call."""
    if _MACHINE not in config.stash:
        if config.getoption("gpu_arch") == "none":
            found = Machine(absence="hidden by --gpu-arch=none")
        else:
            gpu = detect()
            found = Machine(gpu, absence="" if gpu else _advised(config, absence()))
        config.stash[_MACHINE] = found
    return config.stash[_MACHINE]


def absence() -> str:
    """Why torch has no GPU here, as far as one can tell without asking CUDA."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "hidden by CUDA_VISIBLE_DEVICES"
    driver = driver_version()
    return f"torch finds none, driver {driver}" if driver else "no NVIDIA driver"


def _advised(config: pytest.Config, why: str) -> str:
    """With what can be done about it, where an installed plugin emulates GPUs."""
    emulators = config.hook.pytest_kernel_claims_device.get_hookimpls()
    return f"{why}; --gpu-arch=emulated runs kernels without one" if emulators else why


def known_machine(config: pytest.Config) -> Machine | None:
    """The machine if a test or option has already asked for it, else None."""
    return config.stash.get(_MACHINE, None)


def configure(config: pytest.Config) -> None:
    """Fulfil ``--gpu-arch`` before collection, or stop the run.

    Raises pytest.UsageError (exit 4) when a named architecture is not there.
    """
    wanted: str = config.getoption("gpu_arch")
    if wanted == "none":
        _hide_gpus(config)
    elif wanted == "auto":
        if machine(config).choose((*FAMILIES,)) is None:
            emulate(config)
    elif wanted in EMULATED:
        if emulate(config, EMULATED[wanted]) is None:
            raise pytest.UsageError(
                f"--gpu-arch={wanted} needs an emulator, and no installed plugin provides one "
                "(hook pytest_kernel_claims_device)"
            )
    elif wanted in FAMILIES and machine(config).choose((wanted,)) is None:
        listed = " or ".join(f"{major}.{minor}" for major, minor in FAMILIES[wanted])
        raise pytest.UsageError(
            f"--gpu-arch={wanted} requires a GPU of compute capability {listed}; {machine(config)}"
        )


def _hide_gpus(config: pytest.Config) -> None:
    """Tests that ask torch themselves, and child processes, must see no GPU either."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")

    def restore() -> None:
        if before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config.add_cleanup(restore)


def emulate(config: pytest.Config, family: str | None = None) -> DeviceProvider | None:
    """Let tests run on an installed provider (of one family); None when there is none."""
    provider: DeviceProvider | None = config.hook.pytest_kernel_claims_device(
        config=config, arch=family
    )
    if provider is not None:
        if not hasattr(provider, "launched"):
            raise pytest.UsageError(
                f"--gpu-arch: {provider.name} does not say which kernels have run for a test "
                "(DeviceProvider.launched), so that a test without any would look verified"
            )
        config.stash[_MACHINE] = Machine(provider=provider)
    return provider


def marks(item: pytest.Item, name: str) -> Iterator[pytest.Mark]:
    """Marks of this name on a test, nearest first; none when the project owns the name."""
    if name not in item.config.stash.get(FOREIGN_MARKERS, frozenset()):
        yield from item.iter_markers(name)


def needs(item: pytest.Item) -> tuple[str, ...]:
    """Architecture markers of a test: family names and ``"gpu"``, in the order of the table."""
    return tuple(name for name in (*FAMILIES, ANY_GPU) if any(marks(item, name)))


def other_gpu(item: pytest.Item) -> str | None:
    """Why the limits of a test do not hold here: they are for another GPU (``limits_for``)."""
    named = [str(name) for mark in marks(item, "limits_for") for name in mark.args]
    gpu = machine(item.config).gpu if named else None
    if gpu is None or any(re.search(rf"\b{re.escape(name)}\b", gpu.name) for name in named):
        return None
    return f"measured on {gpu.name}; the limits are for an {' or '.join(named)}"


def skip_reason(item: pytest.Item) -> str | None:
    """Why a test cannot run on this machine, or None. Looks at the machine only if it must."""
    wanted = needs(item)
    if not wanted or machine(item.config).choose(wanted) is not None:
        return None
    return f"needs {' or '.join(wanted)}; {machine(item.config)}"


def family(item: pytest.Item) -> str:
    """The family that a test runs on here, of those that it is for; "" where it is for none."""
    wanted = needs(item)
    found = machine(item.config).choose(wanted) if wanted else None
    if found is None:
        return ""
    return next((name for name in wanted if found in FAMILIES.get(name, ())), sm_name(found))


def not_launched(item: pytest.Item, always: bool = False) -> str | None:
    """Why a test that has passed says nothing of kernels: an emulator has run none for it.

    It concerns tests for a family of GPUs, and with ``always`` (a sanitizer's tool watches) all;
    but not claims of kind ``dispatch``, which are about the host's side.

    Raises AssertionError when what ran was made for another family alone.
    """
    if any(marks(item, "dispatch")) or not (always or needs(item)):
        return None
    provider = machine(item.config).provider
    if provider is None:
        return None
    chosen = machine(item.config).choose(needs(item))
    targets = sorted(provider.launched(item) if opened(item) else ())
    foreign = [target for target in targets if chosen and not _runs_on(target, chosen)]
    if foreign and chosen:
        raise AssertionError(
            f"ran kernels for {', '.join(foreign)}, expected such for {sm_name(chosen)}"
        )
    return None if targets else f"no kernel was launched; {machine(item.config)}"


def _runs_on(target: str, capability: Capability) -> bool:
    """Whether code of a target can be for a GPU: of its own architecture, or of one before it
    that is not tied to it by an "a"."""
    found = re.fullmatch(r"sm_(\d+)(\d)([af]?)", target)
    if found is None:
        return False
    own = (int(found[1]), int(found[2]))
    if found[3] == "a":
        return own == capability
    return own <= capability and (found[3] != "f" or own[0] == capability[0])


@contextmanager
def open_device(item: pytest.Item) -> Iterator[torch.device]:
    """The torch device a test computes on; skips the test when there is none."""
    here = machine(item.config)
    capability = here.choose(needs(item))
    if capability is None:
        pytest.skip(f"needs a GPU; {here}")
    item.stash[_OPENED] = True
    if here.provider is not None:
        with here.provider.open(item, capability) as device:
            yield device
    elif here.gpu is not None:
        import torch

        yield torch.device("cuda", here.gpu.index)


def opened(item: pytest.Item) -> bool:
    """Whether the test has asked for its device."""
    return item.stash.get(_OPENED, False)
