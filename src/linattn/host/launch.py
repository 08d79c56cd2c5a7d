"""The one seam between a plan and the GPU.

Operators ask the current launcher which tensors it takes, which architecture a device has and
which function runs a configuration. The emulator, the meta-tensor audits and injected
architectures each are a launcher; nothing else replaces the GPU.

The current launcher is a plain module global, because a context variable costs a tenth of the host
time of a call. Hence the rule: ``use_launcher`` is for one thread (a test, a tool); threads that
are running operators meanwhile see the replacement too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from linattn.errors import value_error
from linattn.host import cache
from linattn.host.arch import Arch, ArchLike, device_arch

H200_MULTIPROCESSORS = 132
"""Assumed where there is no device to ask."""

MAX_PLANS = 4096
"""Plans that a launcher remembers before it starts afresh; a plan is about a kilobyte, and some
tens of kilobytes where its calls come from many addresses."""


class Launcher:
    """Base of every launcher. Subclasses override what their device does differently.

    Attributes:
        plans: memo of validated calls, by a key that covers everything validation depends on.
    """

    def __init__(self) -> None:
        self.plans: dict[Any, Any] = {}

    def accepts(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ``ValueError`` unless this launcher can pass ``tensor``, argument ``name``."""
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

    def function(self, operator: str, arch: Arch, config: Any) -> Callable[..., Any]:
        """Compiled function of one configuration, loaded and ready to be called."""
        raise NotImplementedError

    def capturing(self) -> bool:
        """Whether calls are being recorded into a graph, so that nothing may be compiled."""
        return False

    def guard(self, device: torch.device) -> AbstractContextManager[object] | None:
        """Context that makes ``device`` current, or None where it is so already."""
        return None

    def remember(self, key: Any, plan: Any) -> None:
        """Store a plan; the memo is emptied when it is full, which costs one validation a key."""
        if len(self.plans) >= MAX_PLANS:
            self.plans.clear()
        self.plans[key] = plan

    def ready(self, operator: str, arch: Arch, config: Any, public: str) -> Callable[..., Any]:
        """``function``, refused inside a capture when the configuration is not loaded yet.

        Raises:
            RuntimeError: the configuration is cold and a graph is being captured.
        """
        if self.capturing() and not cache.loaded(operator, arch.target, config):
            raise RuntimeError(
                f"{public}: its first call would compile inside a graph capture; call "
                f'linattn.warm_up("{public}") or the operator itself once before the capture'
            )
        return self.function(operator, arch, config)


class CudaLauncher(Launcher):
    """The default: kernels run on the CUDA device of the tensors, on torch's current stream."""

    def __init__(self) -> None:
        super().__init__()
        self._devices = 0

    def accepts(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cuda":
            raise value_error(name, f"a tensor on {tensor.device}", "a tensor on a CUDA device")

    def default_device(self) -> torch.device:
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA device is available")
        return torch.device("cuda", torch.cuda.current_device())

    def arch(self, device: torch.device) -> Arch:
        return device_arch(torch.cuda.current_device() if device.index is None else device.index)

    def multiprocessors(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count

    def function(self, operator: str, arch: Arch, config: Any) -> Callable[..., Any]:
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
class Launch:
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
        self.launches: list[Launch] = []

    def accepts(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device.type != "meta":
            raise value_error(name, f"a tensor on {tensor.device}", "a tensor on the meta device")

    def default_device(self) -> torch.device:
        return torch.device("meta")

    def arch(self, device: torch.device) -> Arch:
        return self._arch

    def function(self, operator: str, arch: Arch, config: Any) -> Callable[..., Any]:
        def record(*arguments: Any) -> None:
            self.launches.append(Launch(operator, arch, config, arguments))

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
