"""Links the exported host code of a kernel with the launch shim, and loads it.

Needs the system's C compiler (`cc`, or `$CC`), once per object: libraries are kept by the digest of
the object in a folder of this process, or in `$PTX_EMULATOR_CACHE_DIR` when that is set.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from ptx_emulator.errors import NoCompiler

SHIM = Path(__file__).with_name("shim.c")
# resolved in the real libtvm_ffi, not in the shim
FROM_TVM_FFI = frozenset(
    ("TVMFFIEnvGetStream", "TVMFFIErrorSetRaisedFromCStr", "TVMFFIErrorSetRaisedFromCStrParts")
)


class LaunchRecord(ctypes.Structure):
    """Mirror of launch_t in shim.c."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint * 3),
        ("cooperative", ctypes.c_uint),
        ("programmatic_serialization", ctypes.c_uint),
        ("dynamic_shared", ctypes.c_uint64),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("max_dynamic_shared", ctypes.c_int),
    )


LAUNCH_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(LaunchRecord))


@lru_cache(maxsize=1)
def _folder() -> Path:
    chosen = os.environ.get("PTX_EMULATOR_CACHE_DIR")
    if chosen:
        folder = Path(chosen)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder
    folder = Path(tempfile.mkdtemp(prefix="ptx_emulator_"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a process that was forked ends without taking it along
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def compiler() -> list[str]:
    """The C compiler as a command, `$CC` with its words; raises `NoCompiler` when there is none."""
    text = os.environ.get("CC", "").strip() or "cc"
    try:
        # "ccache gcc" is two words, the path of a program in a folder with a space is one.
        name, *words = [text] if shutil.which(text) else shlex.split(text)
    except ValueError as error:
        raise NoCompiler(f"CC: got {text!r}, expected a command: {error}") from error
    found = shutil.which(name)
    if found is None:
        raise NoCompiler(
            f"the emulator needs a C compiler to link a kernel's host code: {name!r} is not on the "
            "PATH. Install one (for example gcc) or set CC"
        )
    return [found, *words]


def _compile(arguments: list[str | Path], output: Path) -> None:
    """Run the compiler into a temporary name, then rename, so that a half-written file is never
    used.
    """
    temporary = output.with_name(f"{output.name}.{os.getpid()}")
    program = compiler()
    command = [*program, *map(str, arguments), "-o", str(temporary)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCompiler(
            f"{shlex.join(program)} failed with exit code {done.returncode}:\n{done.stderr}"
        )
    os.replace(temporary, output)


def shim_object() -> Path:
    """The compiled shim."""
    digest = hashlib.sha256(SHIM.read_bytes()).hexdigest()[:16]
    out = _folder() / f"shim-{digest}.o"
    if not out.exists():
        _compile(["-c", "-O1", "-fPIC", "-fvisibility=hidden", SHIM], out)
    return out


def _tvm_ffi_folder() -> Path:
    import tvm_ffi

    return Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent


def link(host_object: bytes) -> Path:
    """Shared library of an exported object and the shim."""
    shim = shim_object()
    digest = hashlib.sha256(host_object + shim.name.encode()).hexdigest()[:32]
    out = _folder() / f"kernel-{digest}.so"
    if not out.exists():
        tvm = _tvm_ffi_folder()
        with tempfile.NamedTemporaryFile(suffix=".o", dir=_folder()) as f:
            f.write(host_object)
            f.flush()
            # -Bsymbolic: another library of this process may define the same names
            path = ["-Xlinker", "-rpath", "-Xlinker", str(tvm)]  # which may hold a comma
            libraries = ["-Wl,-Bsymbolic", f"-L{tvm}", "-ltvm_ffi", *path]
            _compile(["-shared", "-fPIC", shim, f.name, *libraries], out)
    return out


def load(path: Path, symbol: str) -> tuple[Any, ctypes.CDLL, Any]:
    """(callable of the exported function, the library's shim, the module that keeps it loaded)."""
    import tvm_ffi

    module = tvm_ffi.load_module(str(path))
    shim = ctypes.CDLL(str(path))
    shim.ptx_emulator_set_launch.argtypes = [LAUNCH_CALLBACK]
    shim.ptx_emulator_set_launch.restype = None
    return module[symbol], shim, module


def undefined_symbols(host_object: bytes) -> frozenset[str]:
    """What an exported object expects from its surroundings."""
    with tempfile.NamedTemporaryFile(suffix=".o") as f:
        f.write(host_object)
        f.flush()
        return _nm("-u", f.name)


def shim_symbols() -> frozenset[str]:
    """What the shim provides."""
    return _nm("--defined-only", str(shim_object()))


def _nm(flag: str, path: str) -> frozenset[str]:
    text = subprocess.run(["nm", flag, path], capture_output=True, text=True, check=True).stdout
    return frozenset(line.split()[-1] for line in text.splitlines() if line.split())
