"""The one seam between a plan and the GPU.

A plan is a list of launches: one, mostly; several for more requests than one grid takes, or where
an operator has several kernels.

Operators ask the current launcher which tensors it takes, which architecture a device has and
which function runs a configuration. The emulator, the meta-tensor audits and injected
architectures each are a launcher; nothing else replaces the GPU.

The current launcher is a plain module global, because a context variable costs a tenth of the host
time of a call. Hence the rule: ``use_launcher`` is for one thread (a test, a tool); threads that
are running operators meanwhile see the replacement too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from linattn.host import cache, workspace
from linattn.host.arch import Arch, ArchLike, device_arch
from linattn.spec.operator import Operator

H200_MULTIPROCESSORS = 132
"""Assumed where there is no device to ask."""


@dataclass(frozen=True)
class Launch:
    """One launch of a call.

    Attributes:
        function: the compiled function.
        layout: its layout block.
        arguments: for each of its tensors the number of the call's argument, and the bytes by which
            an address moves; ``WORKSPACE`` counts from the start of the call's workspace.
    """

    function: Callable[..., Any]
    layout: array[int]
    arguments: tuple[tuple[int, int], ...]


WORKSPACE = -1
"""Number of the argument that is no tensor of the caller's."""


class Launches:
    """Several launches, one behind the other, called with the arguments of a compiled function."""

    def __init__(self, launches: Sequence[Launch], device: torch.device, workspace: int) -> None:
        self.launches, self.device, self.workspace = tuple(launches), device, workspace
        self._layouts = [launch.layout.buffer_info()[0] for launch in launches]

    def __call__(self, *arguments: Any) -> None:
        if not self.workspace:
            self._launch(0, arguments)
            return
        with workspace.lent(self.device, self.workspace) as block:
            self._launch(block.data_ptr(), arguments)

    def _launch(self, start: int, arguments: Sequence[Any]) -> None:
        """Every launch, with the workspace at that address."""
        scalars = arguments[len(self.launches[0].arguments) + 1 :]
        for launch, layout_at in zip(self.launches, self._layouts):
            # By address 0, of what is absent or has no memory, nothing can be moved.
            places = [
                start + by
                if number == WORKSPACE
                else (arguments[number] + by if by and arguments[number] else arguments[number])
                for number, by in launch.arguments
            ]
            launch.function(*places, layout_at, *scalars)


class Launcher:
    """Base of every launcher. Subclasses override what their device does differently.

    Attributes:
        plans: the latest plan of each form of a call (``host/plan.py``).
        recipes: what can plan calls of that form.
    """

    def __init__(self) -> None:
        self.plans: dict[int, Any] = {}
        self.recipes: dict[int, tuple[Any, ...]] = {}

    def expects(self, device: torch.device) -> str:
        """What this launcher takes instead of a tensor on ``device``; "" where it takes that."""
        raise NotImplementedError

    def default_device(self) -> torch.device:
        """Device that ``warm_up`` and ``explain`` mean when the caller names none."""
        raise NotImplementedError

    def arch(self, device: torch.device) -> Arch:
        """Architecture whose kernels serve tensors on ``device``."""
        raise NotImplementedError

    def multiprocessors(self, device: torch.device) -> int:
        """Multiprocessors of ``device``: how many CTAs a persistent grid has."""
        return H200_MULTIPROCESSORS

    def function(self, operator: Operator, arch: Arch, config: Any) -> Callable[..., Any]:
        """Compiled function of one configuration, loaded and ready to be called."""
        raise NotImplementedError

    def capturing(self) -> bool:
        """Whether calls are being recorded into a graph, so that nothing may be compiled."""
        return False

    def guard(self, device: torch.device) -> AbstractContextManager[object] | None:
        """Context that makes ``device`` current, or None where it is so already."""
        return None

    def forget(self) -> None:
        """Drop every plan and recipe."""
        self.plans.clear()
        self.recipes.clear()

    def refuse_cold(
        self, operator: Operator, arch: Arch, config: Any, device: torch.device, public: str
    ) -> None:
        """Raise ``RuntimeError`` while a graph is being captured and the configuration has not been
        launched on the device, which would compile it or load its code."""
        if self.capturing() and not cache.launched(operator, arch.target, config, device):
            raise RuntimeError(
                f"{public}: its first call on {device} would compile or load inside a graph "
                f'capture; call linattn.warm_up("{public}") or the operator itself there once '
                "before the capture"
            )


EMULATION = (
    'kernels run on CPU tensors inside "with linattn.host.launch.use_launcher('
    "ptx_emulator.launcher.EmulatedLauncher('sm90'))\""
)
"""What can be done without a GPU, by its full name."""


def _absence() -> str:
    """Why torch has no CUDA device, as far as it can be told."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "there is no NVIDIA driver or no GPU, or CUDA_VISIBLE_DEVICES hides it"


class CudaLauncher(Launcher):
    """The default: kernels run on the CUDA device of the tensors, on torch's current stream."""

    def __init__(self) -> None:
        super().__init__()
        self._devices = 0

    def expects(self, device: torch.device) -> str:
        return "" if device.type == "cuda" else f"a tensor on a CUDA device ({EMULATION})"

    def default_device(self) -> torch.device:
        if not torch.cuda.is_available():
            raise RuntimeError(f"no CUDA device is available: {_absence()} ({EMULATION})")
        return torch.device("cuda", torch.cuda.current_device())

    def arch(self, device: torch.device) -> Arch:
        return device_arch(torch.cuda.current_device() if device.index is None else device.index)

    def multiprocessors(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count

    def function(self, operator: Operator, arch: Arch, config: Any) -> Callable[..., Any]:
        return cache.get(operator, arch.target, config).function

    def capturing(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    def guard(self, device: torch.device) -> AbstractContextManager[object] | None:
        if self._devices == 0:
            self._devices = torch.cuda.device_count()
        if self._devices == 1 or torch.cuda.current_device() == device.index:
            return None
        return torch.cuda.device(device)


@dataclass(frozen=True)
class Recorded:
    """A launch that ``MetaLauncher`` recorded instead of making."""

    operator: str
    arch: Arch
    config: Any
    arguments: tuple[Any, ...]


class MetaLauncher(Launcher):
    """Takes meta tensors, pretends to be ``arch``, records launches and makes none.

    Everything up to the launch is the real host path: an audit sees each torch call that it makes,
    and a value read on the host raises, because meta tensors hold none.
    """

    def __init__(self, arch: ArchLike) -> None:
        super().__init__()
        self._arch = Arch.parse(arch)
        self.launches: list[Recorded] = []

    def expects(self, device: torch.device) -> str:
        return "" if device.type == "meta" else "a tensor on the meta device"

    def default_device(self) -> torch.device:
        return torch.device("meta")

    def arch(self, device: torch.device) -> Arch:
        return self._arch

    def function(self, operator: Operator, arch: Arch, config: Any) -> Callable[..., Any]:
        def record(*arguments: Any) -> None:
            self.launches.append(Recorded(operator.name, arch, config, arguments))

        return record


_current: Launcher = CudaLauncher()


def current() -> Launcher:
    """The launcher that operators use."""
    return _current


@contextmanager
def use_launcher(launcher: Launcher) -> Iterator[Launcher]:
    """Make ``launcher`` the current one inside a ``with`` block (see the rule at the top)."""
    global _current
    previous, _current = _current, launcher
    try:
        yield launcher
    finally:
        _current = previous
