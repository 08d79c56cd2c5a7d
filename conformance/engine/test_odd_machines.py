"""Odd folders, users without a home, file systems without locks, processes that fork."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from linattn import env
from linattn.errors import CacheWarning
from linattn.host import build, cache, compile
from linattn.kernels import OPERATORS
from ptx_emulator import link
from ptx_emulator.errors import NoCompiler

pytestmark = pytest.mark.dispatch

PLACES = pytest.mark.claim("CE-11", "kernels are compiled and kept on odd machines too")
FORKS = pytest.mark.claim(
    "CE-12", "a process forked while another thread compiles can call, or says at once why not"
)

UPDATE = OPERATORS["state_update"]
CONFIG = UPDATE.kernels["sm90"].configs[0]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """Configurations that a stub compiled, into a cache of this test's own."""
    made: list[Any] = []

    def stub(operator: Any, target: str, config: Any) -> build.Artifact:
        made.append(config)
        return build.Artifact(b"object", b"cubin", "ptx", config.name())

    monkeypatch.setattr(build, "build", stub)
    monkeypatch.setenv("LINATTN_CACHE_DIR", str(tmp_path / "cache"))
    env.reset()
    cache.reset()
    yield made
    cache.reset()
    env.reset()


def get() -> cache.Loaded:
    return cache.get(UPDATE, "sm_90a", CONFIG)


# ---------------------------------------------------------------------------------------------
# Folders


@PLACES
@pytest.mark.codegen
@pytest.mark.parametrize("name", ["a b", "it's", 'a "b', "a,b;$HOME", "äöü", "-x"])
def test_folders_with_odd_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler writes into a temporary folder, the linker reads from one."""
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("PTX_EMULATOR_CACHE_DIR", str(folder / "emulator"))
    link._folder.cache_clear()
    made = build.build(UPDATE, "sm_90a", CONFIG)
    assert made.symbol == CONFIG.name()
    assert made.cubin[:4] == b"\x7fELF"
    assert f".visible .entry {made.symbol}" in made.ptx
    assert link.link(made.object).is_file()
    link._folder.cache_clear()


@PLACES
@pytest.mark.parametrize(
    ("text", "words"), [("sh -e", ["-e"]), ("  sh ", []), ("sh -D'a b'", ["-Da b"]), ("", [])]
)
def test_a_compiler_is_a_command(
    text: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in ``CC="ccache gcc"``."""
    monkeypatch.setenv("CC", text)
    program, *rest = link.compiler()
    assert Path(program).name == ("sh" if text else "cc")
    assert rest == words


@PLACES
def test_a_compiler_in_a_folder_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "my tools" / "cc"
    program.parent.mkdir()
    program.symlink_to("/bin/sh")
    monkeypatch.setenv("CC", str(program))
    assert link.compiler() == [str(program)]


@PLACES
@pytest.mark.parametrize(
    ("text", "told"),
    [("no-such-cc -O1", "'no-such-cc' is not on the PATH"), ("sh 'a", "No closing")],
)
def test_what_is_no_compiler(text: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", text)
    with pytest.raises(NoCompiler, match=told):
        link.compiler()


# ---------------------------------------------------------------------------------------------
# Users and file systems


@pytest.fixture
def homeless(builds: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No HOME, and a user id that the machine does not know, as in many containers."""

    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("LINATTN_CACHE_DIR")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    env.reset()


@PLACES
def test_no_home(homeless: None, builds: list[Any]) -> None:
    with pytest.warns(CacheWarning, match=r"~/.cache/linattn: .*home.*LINATTN_CACHE_DIR"):
        entry = get()
    assert (entry.path / "kernel.o").read_bytes() == b"object"
    assert get() is entry
    assert builds == [CONFIG]


@PLACES
def test_no_home_to_compile_ahead_of_time_for(
    homeless: None, builds: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compile.main(["--arch", "sm_90a", "--all"]) == 1
    assert "error: there is no folder for the cache: ~/.cache/linattn: " in capsys.readouterr().err
    assert not builds


@PLACES
def test_no_home_and_a_folder_that_is_named(
    homeless: None, builds: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINATTN_CACHE_DIR", str(tmp_path / "cache"))
    env.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get().path.is_relative_to(tmp_path)


def without_locks(*arguments: Any) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@PLACES
def test_no_locks(builds: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry is kept all the same: it comes into its place as a whole."""
    monkeypatch.setattr("fcntl.flock", without_locks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry = get()
        cache.reset()
        assert get().path == entry.path
    assert entry.path.is_relative_to(tmp_path)
    assert builds == [CONFIG]


@PLACES
def test_no_locks_and_another_process_is_quicker(
    builds: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entry stays, and serves."""
    monkeypatch.setattr("fcntl.flock", without_locks)
    stub, first = build.build, []

    def slow(*arguments: Any) -> Any:
        if not first:
            first.append(None)
            first.append(cache._fetch(UPDATE, cache.key(UPDATE, "sm_90a", CONFIG), CONFIG))
        return stub(*arguments)

    monkeypatch.setattr(build, "build", slow)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry = get()
    assert len(builds) == 2
    assert entry.path == first[1].path
    assert not [path for path in entry.path.parent.iterdir() if ".tmp-" in path.name]


# ---------------------------------------------------------------------------------------------
# Processes that fork

FORKED = """
import os, pathlib, threading, warnings
warnings.simplefilter("ignore")  # Python's own, of threads and forks
from linattn.host import build, cache
from linattn.kernels import OPERATORS
operator = OPERATORS["state_update"]
config = operator.kernels["sm90"].configs[0]
compiling, forking, parent = threading.Event(), threading.Event(), os.getpid()
cache.FORK_WAIT = @WAIT@
known = cache.Loaded(cache.key(operator, "sm_90a", config), pathlib.Path(), "x", {})
loaded = cache.Loaded(known.key, pathlib.Path(), "x", {})
loaded._function = print
known._function = None if @WAIT@ < 1 else print
@COMPILER@
take = threading.Thread(target=lambda: cache.get(operator, "sm_90a", config))
take.start()
compiling.wait(60)
child = os.fork()
if child == 0:
    held = [link for link in pathlib.Path("/proc/self/fd").iterdir() if link.exists()]
    assert not [link for link in held if link.readlink().suffix == ".lock"]
    cache.reset()
    cache.get(operator, "sm_90a", config)  # which the parent is about to write
    try:
        cache.get(operator, "sm_100a", config)
    except RuntimeError as error:
        print(error, flush=True)
    try:
        known.function
    except RuntimeError as error:
        print(error, flush=True)
    assert loaded.function is print  # which was loaded before
    assert cache._compiler_lock.acquire() and cache._compiler_lock.acquire()
    grandchild = os.fork()
    if grandchild == 0:
        os._exit(int(cache._unusable))
    os._exit(int(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) != cache._unusable))
forking.set()
take.join()
print(os.waitpid(child, 0)[1])
"""

STUBBED = """
def compiled(*arguments):
    if os.getpid() == parent:
        compiling.set()
        @DURING@
    import slow_to_import
    return build.Artifact(b"object", b"cubin", "ptx", config.name())

build.build = compiled
"""

COMPILER = """
from cutlass import cute
real = cute.compile

def compiled(*arguments, **named):
    compiling.set()
    return real(*arguments, **named)

cute.compile = compiled
"""

REFUSED = "this process was forked while a thread was compiling a kernel, for more than 0.1 seconds"

FORKS_AT = {
    "the fork waits": (STUBBED.replace("@DURING@", "pass"), "20", 0),
    "it waits no longer": (STUBBED.replace("@DURING@", "forking.wait(60)"), "0.1", 2),
    "the fork waits for the compiler itself": (COMPILER, "20", 0),
    "it waits no longer for the compiler itself": (COMPILER, "0.1", 2),
}


@FORKS
@pytest.mark.parametrize("when", FORKS_AT)
def test_a_fork_while_another_thread_compiles(when: str, tmp_path: Path) -> None:
    """Of what compiles, an import takes locks of the interpreter, too. What the child cannot do, it
    refuses: to compile, and to load what is compiled."""
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.5)\n")
    compiler, wait, refused = FORKS_AT[when]
    script = FORKED.replace("@COMPILER@", compiler).replace("@WAIT@", wait)
    environment = os.environ | {
        "LINATTN_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )
    *told, status = done.stdout.splitlines()
    assert (status, done.stderr, done.returncode) == ("0", "", 0)
    assert len(told) == refused
    assert all(line.startswith(REFUSED) for line in told)
    assert list(tmp_path.glob("cache/*/*/kernel.o"))


@FORKS
def test_every_lock_is_renewed() -> None:
    """Of the cache, of what is loaded, of workspaces and of the emulator: a child that finds one
    taken would wait for ever."""
    from linattn.host import workspace
    from ptx_emulator import launcher

    entry = cache.Loaded(cache.key(UPDATE, "sm_90a", CONFIG), Path(), "x", {})
    before = dict(cache._memory)
    cache._memory["state_update", "sm_90a", CONFIG] = entry
    block = workspace._blocks.setdefault((None, 0), workspace._Block())  # type: ignore[arg-type]
    of_key = cache._key_locks.setdefault(("state_update", "sm_90a", None), threading.Lock())
    held = [cache._memory_lock, of_key, entry._lock, block.lock, launcher._lock]
    for lock in held:
        lock.acquire()
    child = os.fork()
    if child == 0:
        now = [cache._memory_lock, cache._compiler_lock, entry._lock, launcher._lock]
        free = all(lock.acquire(blocking=False) for lock in now)
        os._exit(0 if free and not workspace._blocks and not cache._key_locks else 1)
    for lock in held:
        lock.release()
    assert os.waitpid(child, 0)[1] == 0
    cache._memory.clear()
    cache._memory.update(before)
    workspace.release()


@FORKS
def test_a_child_compiles_into_a_folder_of_its_own() -> None:
    """Where none can be shared; two processes would remove each other's entries."""
    script = (
        "import os\n"
        "from linattn.host import cache\n"
        "ours = cache._private_root()\n"
        "read, write = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.write(write, str(cache._private_root()).encode())\n"
        "    raise SystemExit\n"
        "os.waitpid(child, 0)\n"
        "theirs = os.read(read, 4096).decode()\n"
        "print(ours, theirs, os.path.exists(ours), os.path.exists(theirs))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    ours, theirs, *there = done.stdout.split()
    assert ours != theirs
    assert there == ["True", "False"]  # the child took its own along


@FORKS
def test_forks_of_several_threads_hold_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of which waited too long while another did not."""
    monkeypatch.setattr(cache, "FORK_WAIT", 0.2)
    holding, done = threading.Event(), threading.Event()

    def compiles() -> None:
        with cache._compiler_lock:
            holding.set()
            done.wait(10)

    other = threading.Thread(target=compiles)
    other.start()
    assert holding.wait(10)
    cache._before_fork()  # gives up

    def forks() -> None:
        cache._before_fork()
        cache._after_fork()

    done.set()
    other.join()
    second = threading.Thread(target=forks)
    second.start()
    second.join()
    cache._after_fork()
    assert cache._compiler_lock.acquire(timeout=1)
    cache._compiler_lock.release()


@FORKS
@pytest.mark.parametrize(
    "busy", ["done.wait(30)", "while not done.is_set(): sorted(range(200_000))"], ids=["", "busy"]
)
@pytest.mark.parametrize("hook", ["None", "time.sleep(0.1)"], ids=["", "hook of another library"])
def test_an_interrupt_while_a_fork_waits_is_not_lost(busy: str, hook: str) -> None:
    """The interpreter drops what a function that it calls before or after a fork raises."""
    script = (
        "import os, signal, threading, time, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may ignore\n"
        "from linattn.host import cache\n"
        f"os.register_at_fork(after_in_parent=lambda: {hook})\n"
        "holding, done = threading.Event(), threading.Event()\n"
        "def compiles():\n"
        "    with cache._compiler_lock:\n"
        "        holding.set()\n"
        f"        {busy}\n"
        "threading.Thread(target=compiles).start()\n"
        "holding.wait()\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "begun = time.monotonic()\n"
        "try:\n"
        "    if os.fork() == 0: os._exit(0)\n"
        "    time.sleep(20)\n"
        "except KeyboardInterrupt:\n"
        "    print(time.monotonic() - begun)\n"
        "finally:\n"
        "    done.set()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == ""
    assert float(done.stdout) < 10


@FORKS
def test_what_loads_has_the_compiler_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading is the compiler's work, too."""
    monkeypatch.setattr(cache, "load_function", lambda path, symbol: print)
    entry = cache.Loaded(
        cache.key(UPDATE, "sm_90a", CONFIG), Path(), "x", {cache.OBJECT: b"object"}
    )
    loads = threading.Thread(target=lambda: entry.function)
    with cache._compiler_lock:
        loads.start()
        loads.join(0.2)
        assert loads.is_alive()
    loads.join(30)
    assert entry.function is print
    again: list[Any] = []
    loads = threading.Thread(target=lambda: again.append(entry.function))
    with cache._compiler_lock:  # what is loaded waits for nobody
        loads.start()
        loads.join(30)
    assert again == [print]


@FORKS
def test_a_file_lock_ends_with_the_compilation(
    builds: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a process that was forked meanwhile, without Python's knowledge, has it open."""
    stub, copies = build.build, []

    def forks(*arguments: Any) -> Any:
        copies.extend(os.dup(lock.fileno()) for lock in cache._lock_files)
        return stub(*arguments)

    monkeypatch.setattr(build, "build", forks)
    path = get().path
    assert len(copies) == 1
    with open(path.with_name(path.name + ".lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(copies[0])


@FORKS
def test_a_child_leaves_the_parents_folders(builds: list[Any], tmp_path: Path) -> None:
    """Ending as any process ends, with what is registered for that."""
    script = (
        "import os, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from linattn.host import cache\n"
        "from ptx_emulator import link\n"
        "folders = [cache._private_root(), link._folder()]\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print([folder.is_dir() for folder in folders], *folders, sep='\\n')\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("PTX_EMULATOR_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    there, *folders = done.stdout.splitlines()
    assert there == "[True, True]"
    assert [Path(folder).exists() for folder in folders] == [False, False]
