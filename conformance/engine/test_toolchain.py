"""A cached kernel is one of the settings and the CUDA toolkit that made it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from linattn import env
from linattn.host import cache, toolchain
from linattn.kernels import OPERATORS

pytestmark = [
    pytest.mark.dispatch,
    pytest.mark.claim("CE-10", "a kernel is cached for the settings and toolkit that made it"),
]

UPDATE = OPERATORS["state_update"]
CONFIG = UPDATE.kernels["sm90"].configs[0]


@pytest.fixture(autouse=True)
def _afresh() -> None:
    env.reset()


def folder(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Path:
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        env.reset()
        found = cache.key(UPDATE, "sm_90a", CONFIG).folder
    env.reset()
    return found


def test_what_the_compiler_calls_code_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own list decides, so that a later version cannot bring a variable that is missed."""
    from linattn.device import compat

    own = set(compat.settings())
    assert {f"{env.COMPILER}{name}" for name in ("DEBUG", "LINEINFO", "COMPILER_OPT")} < own
    usual = folder(monkeypatch)
    others = {name: folder(monkeypatch, **{name: "7"}) for name in own}
    same = {name.removeprefix(env.COMPILER) for name, other in others.items() if other == usual}
    assert same == {"ARCH", "ENABLE_TVM_FFI"}
    distinct = set(others.values())
    assert len(distinct) == 1 + len(own) - len(same)


def test_settings_that_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A debug build has line information unless that is off; in another one it is the other way."""
    words = ("", "0", "off", "1", "TRUE")
    found = {
        (debug, lines): folder(monkeypatch, CUTE_DSL_DEBUG=debug, CUTE_DSL_LINEINFO=lines)
        for debug in words
        for lines in words
    }
    meaning: dict[Path, set[tuple[bool, bool]]] = {}
    for (debug, lines), path in found.items():
        on = debug in ("1", "TRUE")
        meaning.setdefault(path, set()).add((on, on if lines == "" else lines in ("1", "TRUE")))
    assert sorted(map(sorted, meaning.values())) == [
        [(debug, lines)] for debug in (False, True) for lines in (False, True)
    ]


def test_what_changes_no_code_changes_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from linattn.device import compat

    usual = folder(monkeypatch)
    harmless = compat.settings(affecting=False)
    assert len(harmless) > 10
    kept = [f"CUTE_DSL_KEEP{what}" for what in ("", "_CUBIN", "_IR", "_PTX", "_SASS")]
    for name in (
        *harmless,
        *kept,
        "CUTE_DSL_LIBS",
        "CUTE_DSL_LOG_AUTOTUNE",
        "LINATTN_CHECKED",
        "TMPDIR",
    ):
        assert folder(monkeypatch, **{name: "7"}) == usual, name
    assert folder(monkeypatch, CUTE_DSL_OF_A_LATER_VERSION="7") != usual


@pytest.mark.parametrize(
    ("name", "spellings"),
    [("COMPILER_BACKEND", ("legacy", "", " legacy")), ("LOC_TRACEBACKS", ("1", "01", "+1", "on"))],
)
def test_one_value_has_one_entry(
    name: str, spellings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {folder(monkeypatch, **{f"CUTE_DSL_{name}": text}) for text in spellings}
    assert len(found) == 1
    assert folder(monkeypatch, **{f"CUTE_DSL_{name}": "7"}) not in found
    assert (folder(monkeypatch) in found) == ("" in spellings)


@pytest.mark.parametrize("name", ["LINEINFO", "DEBUG", "TOLERATE_M2M"])
def test_one_setting_has_one_entry_however_it_is_spelt(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = {folder(monkeypatch, **{f"CUTE_DSL_{name}": text}) for text in ("1", "True", " on", "YES")}
    off = {
        folder(monkeypatch, **{f"CUTE_DSL_{name}": text}) for text in ("0", "false", "No", "off")
    }
    unset = {folder(monkeypatch), folder(monkeypatch, **{f"CUTE_DSL_{name}": ""})}
    assert len(on) == len(off) == len(unset) == 1
    assert on != off
    assert unset == (on if name == "TOLERATE_M2M" else off)


INSTALLED = [("cu13", "cu12"), ("cu12",), ()]


@pytest.mark.parametrize(
    ("installed", "driver", "expected"),
    [
        (INSTALLED[0], None, "cu13"),
        (INSTALLED[0], 12, "cu12"),
        (INSTALLED[0], 13, "cu13"),
        (INSTALLED[0], 14, "cu13"),
        (INSTALLED[0], 11, "none"),
        (INSTALLED[1], None, "cu12"),
        (INSTALLED[1], 13, "cu12"),
        (INSTALLED[2], 13, "none"),
    ],
)
def test_the_driver_decides_on_the_toolkit(
    installed: tuple[str, ...],
    driver: int | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolchain, "toolkits", lambda: installed)
    monkeypatch.setattr(toolchain, "_driver", lambda: driver)
    monkeypatch.setattr(toolchain, "_loaded", lambda: None)
    assert toolchain.toolkit() == expected
    assert expected in cache.key(UPDATE, "sm_90a", CONFIG).toolchain.split(", ")


@pytest.mark.parametrize(
    ("status", "version", "expected"), [(0, 12080, 12), (0, 13000, 13), (100, 0, None)]
)
def test_what_a_driver_supports(
    status: int, version: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        def cuDriverGetVersion(self, found: Any) -> int:  # noqa: N802
            found._obj.value = version
            return status

    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver())
    assert toolchain._driver() == expected


@pytest.mark.parametrize("driver", [None, object()], ids=["absent", "of another kind"])
def test_no_driver_to_ask(driver: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> object:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr("ctypes.CDLL", load)
    assert toolchain._driver() is None


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(env.COMPILER)}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


FILL = ("-m", "linattn.host.compile", "--arch", "sm_90a", "--operator", "state_update")


def keys(root: Path) -> dict[str, str]:
    """Digests of the cubins of a cache, by the toolchain of their keys."""
    found = [json.loads(path.read_text()) for path in sorted(root.glob("*/*/meta.json"))]
    return {meta["key"]["toolchain"]: meta["sha256"]["kernel.cubin"] for meta in found}


@pytest.mark.codegen
def test_ahead_of_time_for_another_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command line calls cu12 is what a machine with a CUDA 12 driver asks for."""
    if len(toolchain.toolkits()) < 2:
        pytest.skip("one toolkit is installed")
    done = python(*FILL, "--toolkit", "cu12", LINATTN_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert len(keys(tmp_path)) == 1
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "_loaded", lambda: None)
        patch.setattr(toolchain, "_driver", lambda: 12)
        wanted = [cache.key(UPDATE, "sm_90a", c).folder for c in UPDATE.kernels["sm90"].configs]
    assert all((tmp_path / folder / "kernel.o").is_file() for folder in wanted)
    ptx = (tmp_path / wanted[0] / "kernel.ptx").read_text()
    assert ".version 8." in ptx  # CUDA 13 writes 9
    done = python(*FILL, "--toolkit", "cu99", LINATTN_CACHE_DIR=str(tmp_path))
    assert done.returncode == 2
    assert "toolkit: got 'cu99', expected one of cu13, cu12" in done.stderr


def test_a_toolkit_that_is_loaded_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "toolkits", lambda: ("cu13", "cu12"))
    monkeypatch.setattr(toolchain, "_loaded", lambda: "cu13")
    toolchain.use_toolkit("cu13")
    with pytest.raises(RuntimeError, match="toolkit: got 'cu12', expected 'cu13', which is in use"):
        toolchain.use_toolkit("cu12")


@pytest.mark.codegen
def test_a_debug_build_is_not_taken_for_another(tmp_path: Path) -> None:
    for debug in ("", "1"):
        done = python(*FILL, LINATTN_CACHE_DIR=str(tmp_path), CUTE_DSL_DEBUG=debug)
        assert done.returncode == 0, done.stderr
    found = keys(tmp_path)
    assert len(found) == len(set(found.values())) == 2
    assert [name.endswith("CUTE_DSL_DEBUG=1") for name in found].count(True) == 1


CHANGED = """
import os, cutlass
os.environ |= {"CUTE_DSL_DEBUG": "@", "CUTE_DSL_COMPILER_OPT": ""}
from linattn.host import cache
from linattn.kernels import OPERATORS
operator = OPERATORS["state_update"]
cache.get(operator, "sm_90a", operator.kernels["sm90"].configs[0])
"""


@pytest.mark.codegen
@pytest.mark.parametrize(
    ("script", "variables", "told"),
    [
        (
            CHANGED.replace("@", "1"),
            {},
            r"\*: got {'CUTE_DSL_DEBUG': '1'} in the environment, expected {}, by which cutlass",
        ),
        (
            CHANGED.replace("@", ""),
            {"CUTE_DSL_COMPILER_OPT": "opt-level=0"},
            r"got {} .*, expected {'CUTE_DSL_COMPILER_OPT': 'opt-level=0'}, by which cutlass",
        ),
        (
            CHANGED.replace("@", "").replace(
                "from linattn",
                "from cutlass.cutlass_dsl import CuTeDSL\n"
                "CuTeDSL._get_dsl().envar.enable_assertions = True\n"
                "from linattn",
                1,
            ),
            {},
            r"got {} .*, expected {'CUTE_DSL_ENABLE_ASSERTIONS': '1'}, by which cutlass",
        ),
        (
            CHANGED.replace("@", "1"),
            {"CUTE_DSL_DRYRUN": "1", "CUTE_DSL_DEBUG": "1"},
            "got no code, expected a kernel",
        ),
    ],
    ids=["set after the import", "unset after the import", "set in cutlass", "no code"],
)
def test_settings_that_cannot_be_followed(
    script: str, variables: dict[str, str], told: str, tmp_path: Path
) -> None:
    done = python("-c", script, LINATTN_CACHE_DIR=str(tmp_path), **variables)
    assert done.returncode == 1
    assert re.search(told, done.stderr), done.stderr
    assert not keys(tmp_path)
