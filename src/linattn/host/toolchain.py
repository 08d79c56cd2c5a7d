"""What compiles here: versions of the packages, settings, and the CUDA toolkit.

The DSL brings a compiler of each CUDA major version that is installed. It takes the newest one that
the driver supports, and the newest there is on a machine without a driver; their code differs. This
module says which one that will be without importing the DSL, which takes seconds.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from linattn import env
from linattn.errors import value_error

_PACKAGES = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)
_COMPILER = re.compile(r"_cutlass_ir\.(cu\d+)\..*\.so")


@cache
def _versions() -> str:
    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "absent"

    return ", ".join(f"{package} {version(package)}" for package in _PACKAGES)


def described() -> str:
    """Everything about the toolchain that decides on the code it makes."""
    settings = (f"{name}={value}" for name, value in env.compiler_settings().items())
    return ", ".join((_versions(), toolkit(), *settings))


def toolkits() -> Sequence[str]:
    """Toolkits that are installed, such as ``("cu13", "cu12")``, the newest first."""
    spec = importlib.util.find_spec("cutlass")
    if spec is None or spec.origin is None:
        return ()
    folder = Path(spec.origin).parent / "_mlir" / "_mlir_libs"
    found = (_COMPILER.fullmatch(path.name) for path in folder.glob("*.so"))
    return sorted((match[1] for match in found if match), key=_major, reverse=True)


def toolkit() -> str:
    """The toolkit that this process compiles with, ``"none"`` where the DSL is not installed."""
    if (loaded := _loaded()) is not None:
        return loaded
    driver = _driver()
    fitting = [one for one in toolkits() if driver is None or _major(one) <= driver]
    return fitting[0] if fitting else "none"


def use_toolkit(name: str) -> None:
    """Compile with this toolkit from now on, whatever the driver.

    Raises:
        ValueError: it is not installed.
        RuntimeError: the DSL has another one loaded.
    """
    if name not in toolkits():
        raise value_error("toolkit", repr(name), f"one of {', '.join(toolkits()) or 'none'}")
    if _loaded() is None:
        _import_for(_major(name))
    if _loaded() != name:
        raise RuntimeError(f"toolkit: got {name!r}, expected {_loaded()!r}, which is in use")


def _major(toolkit: str) -> int:
    return int(toolkit.removeprefix("cu"))


def _loaded() -> str | None:
    """The toolkit of a DSL that is imported."""
    version = getattr(sys.modules.get("cutlass"), "CUDA_VERSION", None)
    return None if version is None else f"cu{version.major}"


def _driver() -> int | None:
    """Major CUDA version that the driver supports, None where there is none."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000


def _import_for(major: int) -> None:
    """Import the DSL as on a machine whose driver supports CUDA up to ``major``: it has no other
    switch than the driver that it asks."""

    class Driver:
        def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
            version._obj.value = major * 1000
            return 0

    load = ctypes.CDLL

    def answer(name: Any, *arguments: Any, **options: Any) -> Any:
        return Driver() if name == "libcuda.so.1" else load(name, *arguments, **options)

    ctypes.CDLL = answer  # type: ignore[misc, assignment]
    try:
        importlib.import_module("cutlass")
    finally:
        ctypes.CDLL = load  # type: ignore[misc]
