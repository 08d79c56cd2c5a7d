"""The kernel cache: races, damage, folders that cannot be written, and what importing costs."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins import StubBuilder, StubConfig

import linattn
from linattn import env
from linattn.errors import CacheWarning
from linattn.host import build, cache, compile
from linattn.kernels import OPERATORS
from linattn.spec.operator import Operator

pytestmark = pytest.mark.dispatch

RACE = pytest.mark.claim("LA-H01", "a cold cache is compiled once, by many threads and processes")
DAMAGE = pytest.mark.claim("LA-H02", "a damaged entry is a miss with a warning, and never loaded")
KEY = pytest.mark.claim("LA-H03", "an entry is used only for exactly what it was built from")
UNWRITABLE = pytest.mark.claim("LA-H04", "a cache that cannot be written warns and still serves")
AHEAD = pytest.mark.claim("LA-H15", "kernels compile ahead of time, and what is left out is named")
IMPORT = pytest.mark.claim("LA-H05", "import needs no GPU, no driver and no compiler")
PREFILL = OPERATORS["lightning_prefill"]
FILES = ("kernel.cubin", "kernel.o", "kernel.ptx", "meta.json")


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, read from the environment as users set it."""
    monkeypatch.setenv("LINATTN_CACHE_DIR", str(tmp_path / "cache"))
    env.reset()
    cache.reset()
    yield tmp_path / "cache"
    env.reset()
    cache.reset()


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> StubBuilder:
    stub = StubBuilder()
    monkeypatch.setattr(build, "build", stub)
    return stub


def get(config: Any = StubConfig()) -> cache.Loaded:  # noqa: B008
    return cache.get(PREFILL, "sm_90a", config)


@KEY
def test_memory_then_disk_then_compiler(root: Path, builder: StubBuilder) -> None:
    first = get()
    assert get() is first
    cache.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = get()
    assert again is not first
    assert builder.builds == [("lightning_prefill", "sm_90a", StubConfig())]
    assert again.path.parent == root / "lightning_prefill-sm_90a"
    assert again.path.name == f"stub_0-{again.key.digest[:12]}"
    assert sorted(path.name for path in again.path.iterdir()) == sorted(FILES)
    assert again.ptx().startswith("// ptx of")
    assert again.cubin().startswith(b"cubin of")
    assert again.symbol == "stub_0"


@KEY
def test_the_count_is_of_distinct_configurations(root: Path, builder: StubBuilder) -> None:
    for number in (0, 1, 0, 2, 1, 0):
        get(StubConfig(number))
    assert linattn.compile_count() == 3
    cache.reset()
    assert linattn.compile_count() == 0
    get()
    assert linattn.compile_count() == 1
    assert len(builder.builds) == 3


@KEY
def test_the_function_is_loaded_once_and_only_when_it_is_used(
    root: Path, builder: StubBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[tuple[bytes, str]] = []

    def load(path: Path, symbol: str) -> Callable[..., Any]:
        loads.append((path.read_bytes(), symbol))
        return lambda: None

    monkeypatch.setattr(cache, "load_function", load)
    entry = get()
    assert loads == []
    assert entry.function is entry.function
    assert loads == [((entry.path / "kernel.o").read_bytes(), "stub_0")]


@KEY
@pytest.mark.parametrize("part", ["operator", "target", "config", "sources", "toolchain", "host"])
def test_each_part_of_the_key_has_an_entry_of_its_own(
    root: Path, builder: StubBuilder, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    operator = OPERATORS["mtp_decode"]
    where: dict[str, Any] = {"operator": operator, "target": "sm_90a", "config": StubConfig()}
    one = cache.get(**where)
    cache.reset()
    changes = {
        "operator": replace(operator, name="other"),
        "target": "sm_100a",
        "config": StubConfig(1),
    }
    if part in changes:
        where[part] = changes[part]
    elif part == "toolchain":
        monkeypatch.setattr(cache.toolchain, "described", lambda: "changed")
    else:
        monkeypatch.setattr(cache, f"_{part}", lambda *arguments: "changed")
    two = cache.get(**where)
    assert one.path != two.path
    assert len(builder.builds) == 2


@KEY
def test_the_sources_are_those_of_the_kernel_and_of_what_it_imports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def digest(module: str, *more: str, signature: str = "", **files: str) -> str:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path = path.with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        cache._sources.cache_clear()
        return cache._sources((module, *more), signature)

    monkeypatch.setattr(cache, "__file__", str(tmp_path / "host" / "cache.py"))
    monkeypatch.syspath_prepend(tmp_path)
    kernel, parts = "operators_of_a_test.prefill.sm90", "operators_of_a_test__prefill__"
    shared = ("device__tma", "spec__tiling", "host__build", "schedulers__grid")
    start = digest(kernel, **dict.fromkeys((f"{parts}sm90", *shared), "a"), ops__x="a")
    other = {"operators_of_a_test__decode__sm90": "b", "host__cache": "b", "ops__x": "b"}
    assert digest(kernel, **other) == start
    seen = {start}
    for change in (f"{parts}sm90", f"{parts}config", *shared):
        seen.add(digest(kernel, **{change: "b"}))
    assert len(seen) == 7
    alone = "kernel_of_a_test"  # in no package, as kernels of tools are
    first = digest(alone, kernel_of_a_test="a")
    assert digest(alone, **{f"{parts}sm90": "c"}) == first
    assert len({*seen, first, digest(alone, kernel_of_a_test="b")}) == 9
    assert digest(alone, signature="another") != digest(alone)
    helped = digest(alone, "helper_of_a_test", helper_of_a_test="a")
    assert digest(alone, "helper_of_a_test", helper_of_a_test="b") != helped
    cache._sources.cache_clear()


def damaged_entries() -> dict[str, Callable[[Path], None]]:
    def truncate(entry: Path) -> None:
        os.truncate(entry / "kernel.o", 5)

    def flip(entry: Path) -> None:
        data = bytearray((entry / "kernel.o").read_bytes())
        data[3] ^= 1
        (entry / "kernel.o").write_bytes(data)

    def other_key(entry: Path) -> None:
        meta = json.loads((entry / "meta.json").read_text())
        meta["key"]["toolchain"] = "another"
        (entry / "meta.json").write_text(json.dumps(meta))

    def folder_for_file(entry: Path) -> None:
        (entry / "kernel.o").unlink()
        (entry / "kernel.o").mkdir()

    def file_for_folder(entry: Path) -> None:
        for path in entry.iterdir():
            path.unlink()
        entry.rmdir()
        entry.write_text("no folder")

    def replace(name: str, data: bytes) -> Callable[[Path], None]:
        return lambda entry: (entry / name).write_bytes(data) and None

    return {
        "truncated object": truncate,
        "one bit of the object": flip,
        "object missing": lambda entry: (entry / "kernel.o").unlink(),
        "PTX missing": lambda entry: (entry / "kernel.ptx").unlink(),
        "cubin of another": replace("kernel.cubin", b"x"),
        "no meta": lambda entry: (entry / "meta.json").unlink(),
        "empty meta": replace("meta.json", b""),
        "meta is no text": replace("meta.json", b"\xff\xfe\x00"),
        "meta is a list": replace("meta.json", b"[]"),
        "meta without digests": replace("meta.json", b"{}"),
        "meta is nested": replace("meta.json", b"[" * 100_000),
        "another key": other_key,
        "folder for a file": folder_for_file,
        "file for a folder": file_for_folder,
    }


@DAMAGE
@pytest.mark.parametrize("damage", damaged_entries())
def test_a_damaged_entry_is_built_again(root: Path, builder: StubBuilder, damage: str) -> None:
    entry = get()
    good = (entry.path / "kernel.o").read_bytes()
    damaged_entries()[damage](entry.path)
    cache.reset()
    with pytest.warns(CacheWarning, match="unusable and will be built again"):
        again = get()
    assert again.path == entry.path
    assert (again.path / "kernel.o").read_bytes() == good
    assert len(builder.builds) == 2
    assert os.path.lexists(entry.path.with_name(entry.path.name + ".bad"))
    cache.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get()
    assert len(builder.builds) == 2


@DAMAGE
def test_what_is_loaded_is_what_was_verified(
    root: Path, builder: StubBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever becomes of the files between the check and their use."""
    loads: list[bytes] = []
    monkeypatch.setattr(
        cache, "load_function", lambda path, symbol: loads.append(path.read_bytes()) or print
    )
    good = {name: (get().path / name).read_bytes() for name in FILES}
    cache.reset()
    entry = get()
    for name in FILES:
        (entry.path / name).write_bytes(b"of somebody else")
    assert entry.function is print
    assert loads == [good["kernel.o"]]
    assert (entry.ptx().encode(), entry.cubin()) == (good["kernel.ptx"], good["kernel.cubin"])


@DAMAGE
def test_damage_after_damage_keeps_one_bad_entry(root: Path, builder: StubBuilder) -> None:
    for _ in range(3):
        (get().path / "kernel.o").write_bytes(b"x")
        cache.reset()
        with pytest.warns(CacheWarning):
            get()
        cache.reset()
    assert len(list(root.glob("*/*.bad"))) == 1


@DAMAGE
def test_an_interrupted_write_leaves_no_entry(
    root: Path, builder: StubBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = SimpleNamespace(object=b"o", ptx="p", cubin=None, symbol="s")
    with monkeypatch.context() as patch:
        patch.setattr(build, "build", lambda *arguments: broken)
        with pytest.raises(TypeError):
            get()
    assert linattn.compile_count() == 0
    assert [path.suffix for path in root.glob("*/*")] == [".lock"]
    get()
    assert len(builder.builds) == 1


@DAMAGE
def test_a_failed_build_raises_and_the_next_call_tries_again(
    root: Path, builder: StubBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no such instruction")

    with monkeypatch.context() as patch:
        patch.setattr(build, "build", fail)
        with pytest.raises(RuntimeError, match="no such instruction"):
            get()
    assert get().symbol == "stub_0"


@UNWRITABLE
def test_a_root_that_is_no_folder(
    tmp_path: Path, builder: StubBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(env, "cache_dir", lambda: tmp_path / "file" / "cache")
    cache.reset()
    with pytest.warns(CacheWarning, match="LINATTN_CACHE_DIR"):
        entry = get()
    assert (entry.path / "kernel.o").is_file()
    assert get() is entry
    assert len(builder.builds) == 1
    cache.reset()


@UNWRITABLE
def test_a_full_disk(root: Path, builder: StubBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def refuse(source: Any, target: Any) -> None:
        if Path(target).is_relative_to(root):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.warns(CacheWarning, match="No space left on device"):
        entry = get()
    assert not entry.path.is_relative_to(root)
    assert (entry.path / "kernel.o").is_file()
    assert len(builder.builds) == 1
    assert list(root.glob("*/*.tmp-*")) == []


@RACE
def test_threads_on_a_cold_key_compile_it_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = StubBuilder()
    inside: list[int] = []

    def slow(operator: Operator, target: str, config: Any) -> Any:
        inside.append(1)
        assert len(inside) == 1, "two compilations at once"
        time.sleep(0.05)
        inside.pop()
        return stub(operator, target, config)

    monkeypatch.setattr(build, "build", slow)
    found: list[cache.Loaded] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(get(StubConfig(n % 2)))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 2
    assert sorted(config.number for _, _, config in stub.builds) == [0, 1]


PROCESS = """
import sys, time
from pathlib import Path
from stand_ins import StubBuilder, StubConfig
from linattn.host import build as builder
from linattn.host import cache
from linattn.kernels.lightning_prefill.config import OPERATOR
scratch, stub = Path(sys.argv[1]), StubBuilder()

def build(*arguments):
    with open(scratch / "builds", "a") as log:
        log.write("build\\n")
    time.sleep(0.5)
    return stub(*arguments)

builder.build = build
print("ready", flush=True)
sys.stdin.readline()
entry = cache.get(OPERATOR, "sm_90a", StubConfig())
assert (entry.path / "kernel.o").read_bytes().startswith(b"object of"), "incomplete entry"
print(entry.path, flush=True)
"""


def child(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )


@RACE
def test_processes_on_a_cold_cache_compile_once(tmp_path: Path) -> None:
    root = str(tmp_path / "cache")
    children = [child(PROCESS, str(tmp_path), LINATTN_CACHE_DIR=root) for _ in range(4)]
    for process in children:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    results = []
    for process in children:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in children:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert errors == ""
        results.append(output)
    assert len(set(results)) == 1
    assert (tmp_path / "builds").read_text() == "build\n"


def run(script: str, *arguments: str) -> str:
    process = child(script, *arguments, CUDA_VISIBLE_DEVICES="")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


@IMPORT
def test_import_loads_no_compiler_and_no_gpu() -> None:
    output = run(
        "import sys\n"
        "for name in ('cutlass', 'tvm_ffi', 'cuda'):\n"
        "    sys.modules[name] = None\n"  # an import of any of them now fails
        "import linattn, torch\n"
        "plan = linattn.explain('lightning_attn_fwd', arch='sm90', B=1, T=64, H=4)\n"
        "print(torch.cuda.is_initialized(), plan.kernel)\n"
    )
    assert output == "False linattn.kernels.lightning_prefill.sm90\n"


@IMPORT
@pytest.mark.perf
def test_import_is_fast_once_torch_is_there() -> None:
    output = run(
        "import time, torch\n"
        "start = time.perf_counter()\n"
        "import linattn\n"
        "print(time.perf_counter() - start)\n"
    )
    assert float(output) < 0.5


@IMPORT
def test_the_environment_is_read_once_and_not_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINATTN_CACHE_DIR", "~/one")
    env.reset()
    assert env.cache_dir() == Path.home() / "one"
    monkeypatch.setenv("LINATTN_CACHE_DIR", "/two")
    assert env.cache_dir() == Path.home() / "one"
    env.reset()
    assert env.cache_dir() == Path("/two")
    monkeypatch.setenv("LINATTN_CACHE_DIR", "")
    env.reset()
    assert env.cache_dir() == Path.home() / ".cache" / "linattn"
    env.reset()


@AHEAD
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_ahead_of_time(
    arch: str, root: Path, builder: StubBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every configuration that a call can get; what has no kernel yet is named."""
    assert compile.main(["--arch", arch, "--all"]) == 0
    told = capsys.readouterr()
    expected = [
        (name, arch, config)
        for name, operator in sorted(OPERATORS.items())
        for family, kernel in operator.kernels.items()
        if family == arch.strip("a").replace("_", "")
        for config in kernel.configs
    ]
    assert expected
    assert builder.builds == expected
    for name, target, config in expected:
        assert f"{name} {target} {config.name()} " in told.out
        assert list(root.glob(f"{name}-{target}/{config.name()}-*/kernel.o"))
    missing = [(x, family) for x in OPERATORS.values() for family in x.missing]
    assert missing
    for operator, family in missing:
        named = f"left out: {operator.name}: got" in told.err
        assert named == (family == "sm100" and arch == "sm_100a")
    assert compile.main(["--arch", arch, "--all"]) == 0
    assert len(builder.builds) == len(expected)


@AHEAD
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--arch", "sm_80", "--all"], "error: .*got sm80"),
        (["--arch", "sm_100a", "--operator", "lightning_prefill"], "error: .*does not exist yet"),
        (["--arch", "hopper", "--all"], "error: .*hopper"),
    ],
)
def test_ahead_of_time_for_what_has_no_kernel(
    arguments: list[str],
    told: str,
    root: Path,
    builder: StubBuilder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compile.main(arguments) == 2
    assert re.search(told, capsys.readouterr().err)
    assert not builder.builds


@AHEAD
def test_ahead_of_time_without_a_place(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    builder: StubBuilder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(env, "cache_dir", lambda: tmp_path / "file" / "cache")
    cache.reset()
    with pytest.warns(CacheWarning, match="cannot be written"):
        assert compile.main(["--arch", "sm_90a", "--all"]) == 1
    told = capsys.readouterr()
    assert "error: nothing was kept" in told.err
    assert not told.out
    cache.reset()
