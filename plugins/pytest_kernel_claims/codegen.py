"""Facts of generated code without a GPU: SASS of cubins, opcodes of PTX, what ptxas has to say.

nvdisasm, cuobjdump and ptxas come from PyPI (``pip install linattn[codegen]``; the programs lie in
``nvidia/cu*/bin`` inside site-packages) or from a CUDA toolkit on PATH. Dynamic shared memory is a
launch attribute and is not found in a cubin.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_kernel_claims.claims.properties import record_cubin

HINT = "pip install linattn[codegen]"
# Warpgroup (sm90), tcgen05 (sm100) and warp-level tensor-core instructions.
TENSOR_CORE = re.compile(r"[HIQB]GMMA|UTC[A-Z]+MMA|[HIQBDO]MMA")
LOCAL_MEMORY = ("LDL", "STL")
_LINE_DIRECTIVES = (".version", ".target", ".address_size", ".file", ".loc")
_PTX_TOKEN = re.compile(
    r"(?P<skip>\s+|[{}]|[\w$%]+:(?!:))|(?P<directive>\.\w+)"
    r"|(?:@!?%?[\w$]+\s+)?(?P<opcode>[a-z]\w*(?:(?:\.|::)\w+)*)"
)
# What follows a token up to the next statement; a directive with an initialiser ends at its ";".
_PTX_REST = {
    "skip": re.compile(""),
    "line": re.compile(r"[^\n]*"),
    "directive": re.compile(r"[^;{=]*(?:;|\{|=[^;]*;)"),
    "opcode": re.compile(r"[^;]*;"),
}
_TOO_OLD = re.compile(
    r"Unsupported \.version .*|(?P<target>Value '[^']*' is not defined for option 'gpu-name')"
)


class MissingToolError(RuntimeError):
    """A program of the CUDA toolchain is not installed, or too old for what it is asked."""


@dataclass(frozen=True)
class KernelFacts:
    """One function of a cubin.

    ``registers`` per thread; ``stack``, ``local`` and ``shared_static`` in bytes; ``opcodes``
    counts SASS instructions by mnemonic without modifiers (``HGMMA``, ``LDL``); ``digest`` is the
    SHA-256 of the whole cubin; ``ptxas_version`` as the assembler signed it ("13.4.59"), empty
    when it did not.
    """

    name: str
    registers: int
    stack: int
    local: int
    shared_static: int
    opcodes: Counter[str]
    digest: str
    ptxas_version: str


# --- tools ----------------------------------------------------------------------------------


def find_tools(name: str) -> list[Path]:
    """Every runnable program of this name, the newest CUDA wheel first, PATH last."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec is not None else None
    found = [path for root in roots or () for path in Path(root).glob(f"*/bin/{name}")]
    found.sort(key=lambda path: path.parts[-3], reverse=True)
    on_path = shutil.which(name)
    if on_path is not None:
        found.append(Path(on_path))
    return [path for path in found if os.access(path, os.X_OK)]


def _run(name: str, *arguments: str) -> str:
    tools = find_tools(name)
    if not tools:
        raise MissingToolError(f"{name} not found: {HINT}")
    done = subprocess.run([str(tools[0]), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} {' '.join(arguments)}: {done.stderr.strip() or done.stdout}")
    return done.stdout


# --- SASS -----------------------------------------------------------------------------------


def cubin_facts(cubin: bytes) -> list[KernelFacts]:
    """Facts of every function in a cubin.

    Raises MissingToolError without nvdisasm or cuobjdump, RuntimeError when they refuse it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        header, functions = json.loads(_run("nvdisasm", "--emit-json", str(path)))
        usage = _resources(_run("cuobjdump", "-res-usage", str(path)))
    version = re.search(
        r"V(\d[\d.]*)", header.get(".note.nv.tkinfo", {}).get("tki_toolVersion", "")
    )
    digest = hashlib.sha256(cubin).hexdigest()
    facts = []
    for function in functions:
        name = function["function-name"]
        used = usage[name]
        opcodes = Counter(one["opcode"].split(".")[0] for one in function["sass-instructions"])
        facts.append(
            KernelFacts(
                name=name,
                registers=used["REG"],
                stack=used["STACK"],
                local=used["LOCAL"],
                shared_static=used["SHARED"],
                opcodes=opcodes,
                digest=digest,
                ptxas_version=version[1] if version else "",
            )
        )
    return facts


def _resources(text: str) -> dict[str, dict[str, int]]:
    entries = re.finditer(r"Function (\S+):\s*\n\s*(\S.*)", text)
    return {
        entry[1]: {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", entry[2])}
        for entry in entries
    }


def tensor_core_count(facts: KernelFacts) -> Counter[str]:
    """Tensor-core instructions by mnemonic: HGMMA on sm90, UTCHMMA and kin on sm100, HMMA."""
    found = {name: n for name, n in facts.opcodes.items() if TENSOR_CORE.fullmatch(name)}
    return Counter(found)


def _each(facts: KernelFacts | Iterable[KernelFacts]) -> list[KernelFacts]:
    listed = [facts] if isinstance(facts, KernelFacts) else list(facts)
    if not listed:
        raise AssertionError("the cubin holds no function: nothing was checked")
    return listed


def assert_no_local_memory(facts: KernelFacts | Iterable[KernelFacts]) -> None:
    """Fail when a function has a stack frame, local memory, or an instruction that uses either:
    register spills and register arrays indexed at run time both end up there."""
    __tracebackhide__ = True
    found = []
    for one in _each(facts):
        used = {"STACK": one.stack, "LOCAL": one.local}
        used.update({name: one.opcodes[name] for name in LOCAL_MEMORY})
        if any(used.values()):
            told = ", ".join(f"{name} {value}" for name, value in used.items())
            found.append(f"{one.name}: uses local memory: {told}; expected 0 of each")
    if found:
        raise AssertionError("\n".join(found))


def assert_tensor_core_count(
    facts: KernelFacts | Iterable[KernelFacts], expected: int, mnemonic: str | None = None
) -> None:
    """Fail unless every function has exactly this many tensor-core instructions, of one mnemonic
    ("HGMMA") or in total. The static count depends on compile options: state it for the defaults.
    """
    __tracebackhide__ = True
    found = []
    for one in _each(facts):
        counts = tensor_core_count(one)
        got = counts[mnemonic] if mnemonic else counts.total()
        if got != expected:
            found.append(
                f"{one.name}: got {got} {mnemonic or 'tensor-core'} instructions, expected "
                f"{expected}; all tensor-core instructions: {dict(counts)}"
            )
    if found:
        raise AssertionError("\n".join(found))


# --- PTX ------------------------------------------------------------------------------------


def ptx_opcodes(ptx: str) -> Counter[str]:
    """Instructions of a PTX text by full opcode (``ld.global.v4.f32``), inline blocks included."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", ptx, flags=re.DOTALL)
    counts: Counter[str] = Counter()
    position = 0
    while position < len(text):
        token = _PTX_TOKEN.match(text, position)
        if token is None:
            raise ValueError(f"not PTX: {text[position : position + 60]!r}")
        if token["opcode"]:
            counts[token["opcode"]] += 1
        rest = _PTX_REST[_part(token)].match(text, token.end())
        position = rest.end() if rest else len(text)
    return counts


def _part(token: re.Match[str]) -> str:
    if token["directive"] in _LINE_DIRECTIVES:
        return "line"
    return token.lastgroup or "skip"


def count_opcodes(opcodes: Mapping[str, int], prefix: str) -> int:
    """How many instructions have this opcode, with any further modifiers:
    ``count_opcodes(ptx_opcodes(ptx), "wgmma.mma_async")``."""
    return sum(n for name, n in opcodes.items() if name == prefix or name.startswith(prefix + "."))


def ptx_launch_bounds(ptx: str) -> list[dict[str, tuple[int, ...]]]:
    """For each kernel, its ``reqntid``, ``maxntid``, ``minnctapersm`` and ``maxnreg`` as far as
    stated: ``[{"reqntid": (384, 1, 1), "minnctapersm": (1,)}]``."""
    bounds = []
    for head in re.findall(r"\.entry\b(.*?)\{", ptx, flags=re.DOTALL):
        stated = re.findall(r"\.(reqntid|maxntid|minnctapersm|maxnreg)\s+([\d, ]+)", head)
        bounds.append({name: tuple(map(int, value.split(","))) for name, value in stated})
    return bounds


def ptxas_advisories(ptx: str, arch: str | None = None) -> list[str]:
    """Warnings and performance advisories (C75xx; spills; local memory) that ptxas has about a PTX
    text; ``arch`` as in "sm_90a", the text's own target when None.

    The installed ptxas speaks, which need not be the one that made the shipped cubin. Raises
    MissingToolError without a ptxas as new as the text and ``arch``, ValueError for a text without
    a kernel and for an architecture that never was, RuntimeError when it does not assemble.
    """
    if not re.search(r"\.(entry|func)\b", ptx):
        raise ValueError("not PTX of a kernel: it has no .entry and no .func, nothing was checked")
    target = arch or _target(ptx)
    refusals: list[str] = []
    unknown: list[Path] = []
    tools = find_tools("ptxas")
    for tool in tools:
        status, log = _assemble(tool, ptx, target)
        too_old = _TOO_OLD.search(log)
        if not status:
            return [line for line in map(_advisory, log.splitlines()) if line]
        if not too_old:
            raise RuntimeError(f"ptxas failed:\n{log}")
        refusals.append(f"ptxas too old ({too_old[0]}): {HINT}")
        if too_old["target"] and not _is_yet_to_come(target, tool):
            unknown.append(tool)
    if tools and unknown == tools:
        raise ValueError(f"arch: got {target!r}, expected one that {tools[0]} knows")
    # Of several the newest, which comes first, says what is missing.
    raise MissingToolError((*refusals, f"ptxas not found: {HINT}")[0])


def _is_yet_to_come(arch: str, tool: Path) -> bool:
    """Whether a name is that of an architecture beyond those that a ptxas lists."""
    done = subprocess.run([str(tool), "--help"], capture_output=True, text=True, check=False)
    known = [int(number) for number in re.findall(r"'sm_(\d+)[af]?'", done.stdout)]
    found = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    return found is not None and int(found[1]) > max(known, default=0)


def _assemble(tool: Path, ptx: str, target: str) -> tuple[int, str]:
    flags = ["-v", "--warn-on-spills", "--warn-on-local-memory-usage", f"-arch={target}"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        command = [str(tool), *flags, str(source), "-o", str(Path(folder, "kernel.cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def _target(ptx: str) -> str:
    found = re.search(r"^\s*\.target\s+([\w]+)", ptx, flags=re.MULTILINE)
    if found is None:
        raise ValueError("not PTX: it states no .target")
    return found[1]


def _advisory(line: str) -> str | None:
    found = re.match(r"ptxas\s+(info|warning)\s*:\s*(.*)", line)
    if found is None or (found[1] == "info" and not re.match(r"\(C\d+\)", found[2])):
        return None
    return found[2]


# --- fixture --------------------------------------------------------------------------------


@contextmanager
def _skip_without_tool() -> Iterator[None]:
    try:
        yield
    except MissingToolError as error:
        pytest.skip(str(error))


class Codegen:
    """The ``codegen`` fixture: this module's functions for one test.

    A missing tool skips the test. Every cubin looked at is recorded, so that its digest stands in
    the claims JSON next to the verdicts.
    """

    def __init__(self, node: pytest.Item) -> None:
        self._node = node

    ptx_opcodes = staticmethod(ptx_opcodes)
    ptx_launch_bounds = staticmethod(ptx_launch_bounds)
    count_opcodes = staticmethod(count_opcodes)
    tensor_core_count = staticmethod(tensor_core_count)
    assert_no_local_memory = staticmethod(assert_no_local_memory)
    assert_tensor_core_count = staticmethod(assert_tensor_core_count)

    def record_cubin(self, name: str, cubin: bytes) -> str:
        """Record the SHA-256 of a cubin under this name in the claims JSON, and return it."""
        digest = hashlib.sha256(cubin).hexdigest()
        record_cubin(self._node, name, digest)
        return digest

    def cubin_facts(self, cubin: bytes, name: str | None = None) -> list[KernelFacts]:
        """``cubin_facts``, recorded under ``name`` (default: its first function's name)."""
        with _skip_without_tool():
            facts = cubin_facts(cubin)
        self.record_cubin(name or _each(facts)[0].name, cubin)
        return facts

    def ptxas_advisories(self, ptx: str, arch: str | None = None) -> list[str]:
        """``ptxas_advisories``."""
        with _skip_without_tool():
            return ptxas_advisories(ptx, arch)

    def assert_no_advisories(self, ptx: str, arch: str | None = None) -> None:
        """Fail when ptxas has a warning or a performance advisory about this PTX."""
        __tracebackhide__ = True
        found = self.ptxas_advisories(ptx, arch)
        if found:
            raise AssertionError("ptxas: " + "; ".join(found))
