"""Compiled kernels: in memory, then on disk, then by compiling under a lock.

A disk entry is one folder ``<root>/<operator>-<target>/<configuration>-<hash>/`` with ``kernel.o``,
``kernel.ptx``, ``kernel.cubin`` and ``meta.json`` (the full key and a digest of each file). It is
written beside its final place and renamed into it while a file lock is held, so readers need no
lock and see all of an entry or none; where a file system has no locks, processes may compile the
same kernel at the same time, and the first one's entry stays. An entry that cannot be read or does
not match its digests is a miss: it is moved aside with a warning and built again. ``kernel.o`` is
host code that this process will run: what is loaded are the bytes whose digest was checked.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, cast

from linattn import env
from linattn.errors import CacheWarning
from linattn.host import build, dispatch, toolchain
from linattn.host.arch import Arch
from linattn.spec.operator import Operator

if TYPE_CHECKING:
    import torch

FORMAT = 1
"""Layout of an entry; raised when its files or their meaning change."""

OBJECT, PTX, CUBIN, META = "kernel.o", "kernel.ptx", "kernel.cubin", "meta.json"

_SHARED_SOURCES = ("device", "schedulers", "spec", "host/build.py")
_INSTRUCTION_SETS = ("sse", "ssse", "avx", "amx", "fma", "bmi", "f16c", "lzcnt", "abm", "movbe")


@dataclass(frozen=True)
class CacheKey:
    """Everything that a compiled object depends on.

    Attributes:
        operator: folder of the operator under ``kernels/``.
        target: compile target, such as ``sm_90a``.
        config: ``repr`` of the frozen configuration.
        config_name: its short name, for people.
        sources: digest of the kernel's own sources, of what they import from this package, and of
            the signature.
        toolchain: versions of the packages that compile and load, the CUDA toolkit among them, and
            settings that change code.
        host: instruction set of this machine, because the object holds host code compiled for it.
        format: layout of the entry.
    """

    operator: str
    target: str
    config: str
    config_name: str
    sources: str
    toolchain: str
    host: str
    format: int = FORMAT

    @property
    def digest(self) -> str:
        """Hash of the whole key."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> Path:
        """Folder of the entry, relative to the root of the cache."""
        return Path(f"{self.operator}-{self.target}") / f"{self.config_name}-{self.digest[:12]}"


class Loaded:
    """A verified entry of the cache.

    Attributes:
        key: what it was built for.
        path: folder that holds its files.
        symbol: name of the function in the object.
        files: what its files held when they were verified, by name.
        launched: devices that hold the code, because the function was launched on them.
    """

    def __init__(self, key: CacheKey, path: Path, symbol: str, files: Mapping[str, bytes]) -> None:
        self.key = key
        self.path = path
        self.symbol = symbol
        self.files = files
        self.launched: set[torch.device] = set()
        self._function: Callable[..., Any] | None = None
        self._lock = threading.Lock()

    @property
    def function(self) -> Callable[..., Any]:
        """The compiled function; the object is loaded at the first use."""
        if self._function is not None:  # which needs the compiler no more
            return self._function
        with self._lock, _compiler():
            if self._function is None:
                # From a copy: the entry's own file may no longer be what was verified.
                with tempfile.TemporaryDirectory(prefix="linattn-load-") as folder:
                    path = Path(folder) / OBJECT
                    path.write_bytes(self.files[OBJECT])
                    self._function = load_function(path, self.symbol)
            return self._function

    def renew_lock(self) -> None:
        """Forget who is loading; for a process that was forked."""
        self._lock = threading.Lock()

    def ptx(self) -> str:
        """PTX of the kernel."""
        return self.files[PTX].decode()

    def cubin(self) -> bytes:
        """Machine code of the kernel."""
        return self.files[CUBIN]


def load_function(path: Path, symbol: str) -> Callable[..., Any]:
    """Load an object file and return its function ``symbol``.

    Whoever runs objects in another way (an emulator) takes ``Loaded.files`` and never calls this.
    """
    from cutlass import cute

    module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    function: Callable[..., Any] = module[symbol]
    return function


# ---------------------------------------------------------------------------------------------
# The key


@cache
def _sources(modules: tuple[str, ...], signature: str) -> str:
    """Digest of the packages that hold modules (of a file alone, where none does), of what kernels
    import from here, and of a signature, which may be declared elsewhere."""
    digest = hashlib.sha256(signature.encode())
    root = Path(__file__).resolve().parents[1]
    places = [root / name for name in _SHARED_SOURCES]
    for module in modules:
        found = importlib.util.find_spec(module)
        if found is None or found.origin is None:
            raise ModuleNotFoundError(f"{module}: there is no such kernel module", name=module)
        origin = Path(found.origin)
        places.append(origin.parent if "." in module else origin)
    for place in places:
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            name = path.relative_to(place.parent)
            digest.update(str(name).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def _host() -> str:
    flags: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                flags.update(value.split())
                break
    if platform.machine() in ("x86_64", "AMD64"):
        flags = {flag for flag in flags if flag.startswith(_INSTRUCTION_SETS)}
    return f"{platform.machine()} {hashlib.sha256(' '.join(sorted(flags)).encode()).hexdigest()}"


def key(operator: Operator, target: str, config: Any) -> CacheKey:
    """Key of one configuration of ``operator``, compiled for ``target`` (such as ``sm_90a``)."""
    kernel = dispatch.kernel_of(operator, Arch.parse(target))
    return CacheKey(
        operator=operator.name,
        target=target,
        config=repr(config),
        config_name=config.name(),
        sources=_sources((kernel.module, *kernel.sources), repr(operator.signature)),
        toolchain=toolchain.described(),
        host=_host(),
    )


# ---------------------------------------------------------------------------------------------
# Memory

_Touch = tuple[str, str, Any]

_memory: dict[_Touch, Loaded] = {}
_memory_lock = threading.Lock()
_key_locks: dict[_Touch, threading.Lock] = {}
_compiler_lock = threading.RLock()  # the DSL is not thread-safe
_lock_files: set[IO[str]] = set()


def get(operator: Operator, target: str, config: Any) -> Loaded:
    """The compiled configuration: from memory, from disk, or compiled.

    Concurrent calls for one configuration compile it once, over threads and over processes.
    """
    touch = (operator.name, target, config)
    found = _memory.get(touch)
    if found is not None:
        return found
    with _memory_lock:
        lock = _key_locks.setdefault(touch, threading.Lock())
    with lock:
        found = _memory.get(touch)
        if found is None:
            found = _fetch(operator, key(operator, target, config), config)
            _memory[touch] = found
    return found


def launched(operator: Operator, target: str, config: Any, device: torch.device) -> bool:
    """Whether the configuration has been launched on a device, so that a call there neither
    compiles nor loads."""
    found = _memory.get((operator.name, target, config))
    return found is not None and device in found.launched


def note_launch(operator: Operator, target: str, config: Any, device: torch.device) -> None:
    """Remember a first launch on a device, of what is in memory."""
    found = _memory.get((operator.name, target, config))
    if found is not None:
        found.launched.add(device)


def compile_count() -> int:
    """Distinct configurations that this process has compiled, or loaded from disk, so far."""
    return len(_memory)


def reset() -> None:
    """Forget what is in memory and the count. Disk entries and launchers' plans stay."""
    with _memory_lock:
        _memory.clear()
        _key_locks.clear()


# ---------------------------------------------------------------------------------------------
# Disk


def _fetch(operator: Operator, cache_key: CacheKey, config: Any) -> Loaded:
    try:
        path = env.cache_dir() / cache_key.folder
    except OSError as error:
        return _write_privately(cache_key, _build(operator, cache_key.target, config), error)
    found = _read(cache_key, path)
    if found is not None:
        return found
    with _locked(path):
        found = _read(cache_key, path, quiet=True)
        if found is not None:
            return found
        _move_aside(path)
        artifact = _build(operator, cache_key.target, config)
        try:
            return _write(cache_key, artifact, path)
        except OSError as error:
            found = _read(cache_key, path, quiet=True)  # of a process that was quicker
            return found or _write_privately(cache_key, artifact, error)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from building an entry, where the file system has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(path.with_name(path.name + ".lock"), "a"))
            _lock_files.add(lock)
            stack.callback(_lock_files.discard, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Closing it is not enough where a process was forked meanwhile, which has it open too.
            stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        yield


def _read(cache_key: CacheKey, path: Path, quiet: bool = False) -> Loaded | None:
    """The entry at ``path``, or None; warns of one that is there and unusable. Never raises."""
    try:
        meta = json.loads((path / META).read_text())
        if meta["key"] != asdict(cache_key):
            raise ValueError("it was written for another key")
        files = {name: (path / name).read_bytes() for name in (OBJECT, PTX, CUBIN)}
        for name, data in files.items():
            if hashlib.sha256(data).hexdigest() != meta["sha256"][name]:
                raise ValueError(f"the digest of {name} does not match")
        return Loaded(cache_key, path, str(meta["symbol"]), files)
    except Exception as error:
        if not quiet and os.path.lexists(path):
            warnings.warn(
                f"kernel cache entry {path} is unusable and will be built again: {error}",
                CacheWarning,
                stacklevel=2,
            )
        return None


def _move_aside(path: Path) -> None:
    """Keep a bad entry as ``<name>.bad`` for inspection; an older one there gives way."""
    aside = path.with_name(path.name + ".bad")
    if os.path.lexists(path):
        with contextlib.suppress(OSError):
            _remove(aside)
            os.rename(path, aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write(cache_key: CacheKey, artifact: build.Artifact, path: Path) -> Loaded:
    """Write an entry beside its place and rename it there.

    Raises:
        OSError: it cannot be written, or another process has put one there.
    """
    files = {OBJECT: artifact.object, PTX: artifact.ptx.encode(), CUBIN: artifact.cubin}
    meta = {
        "key": asdict(cache_key),
        "symbol": artifact.symbol,
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=path.name + ".tmp-", dir=path.parent))
    try:
        for name, data in files.items():
            (scratch / name).write_bytes(data)
        (scratch / META).write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n")
        scratch.chmod(0o755)
        os.rename(scratch, path)
    except BaseException:
        _remove(scratch)
        raise
    return Loaded(cache_key, path, artifact.symbol, files)


@cache
def _private_root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="linattn-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a process that was forked ends without taking it along
            shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    return root


def _write_privately(cache_key: CacheKey, artifact: build.Artifact, error: OSError) -> Loaded:
    """Serve this process from a folder of its own when the cache cannot be written."""
    warnings.warn(
        f"the kernel cache cannot be written ({error}); this process compiles for itself. "
        "Point LINATTN_CACHE_DIR at a writable folder",
        CacheWarning,
        stacklevel=2,
    )
    path = _private_root() / cache_key.folder
    _remove(path)
    return _write(cache_key, artifact, path)


def _build(operator: Operator, target: str, config: Any) -> build.Artifact:
    with _compiler():
        return build.build(operator, target, config)


@contextlib.contextmanager
def _compiler() -> Iterator[None]:
    """Have the DSL for oneself.

    Raises:
        RuntimeError: it is unusable, because a fork found it at work.
    """
    if _unusable:
        raise RuntimeError(
            "this process was forked while a thread was compiling a kernel, for more than "
            f"{FORK_WAIT:g} seconds or until it was interrupted: got a compiler that waits for "
            "that thread, expected a process that is spawned, or forked after linattn.warm_up"
        )
    with _compiler_lock:
        yield


FORK_WAIT = 20.0
"""Seconds that ``os.fork`` waits at most for a compilation of another thread, which takes four."""

_fork = threading.local()
"""Of the fork of a thread: whether it has the compiler's lock, and where it was interrupted."""

_unusable = False
"""Whether locks in the DSL or the interpreter belong to a thread that is not in this process."""


def _before_fork() -> None:
    """Let a compilation end: its locks, the interpreter's own for an import among them, would stay
    taken in the new process."""
    _fork.held, _fork.interrupted = False, None
    try:
        _fork.held = _compiler_lock.acquire(timeout=FORK_WAIT)
    except KeyboardInterrupt:  # the interpreter drops what is raised here
        _fork.interrupted = sys._getframe(1)


def _after_fork() -> None:
    if _fork.held:
        _compiler_lock.release()
    if _fork.interrupted is not None:
        forking, _fork.interrupted = _fork.interrupted, None  # a frame keeps its variables alive
        threading.Thread(target=_interrupt_again, args=(forking,), daemon=True).start()


def _interrupt_again(forking: FrameType) -> None:
    """Interrupt the main thread when the fork has returned to a frame of it: no function that is
    called before or after a fork, of whatever library, would pass the interrupt on."""
    at = forking.f_lasti
    while forking.f_lasti == at:
        time.sleep(0.001)
    signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGINT)


def _in_child() -> None:
    """Threads that hold locks are not there, and file locks that they took are the parent's."""
    global _memory_lock, _compiler_lock, _unusable
    _unusable = _unusable or not _fork.held
    _memory_lock, _compiler_lock = threading.Lock(), threading.RLock()
    _key_locks.clear()
    _private_root.cache_clear()  # two processes would remove each other's entries
    for entry in _memory.values():
        entry.renew_lock()
    for file in _lock_files:
        file.close()
    _lock_files.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
