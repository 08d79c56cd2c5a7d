"""The emulator behind linattn's operators, and behind `--gpu-arch=emulated`."""

from __future__ import annotations

import importlib.metadata
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import linattn
from linattn.host.launch import use_launcher
from linattn.kernels.lightning_prefill.config import SIGNATURE
from linattn.reference import lightning_chunked
from linattn.spec.signature import Measured
from ptx_emulator import CHECKS, KernelFault
from ptx_emulator import launcher as launcher_module
from ptx_emulator.launcher import EmulatedLauncher, signature_buffers
from ptx_emulator.memory import Buffer
from ptx_emulator.pytest_provider import Provider

pytestmark = pytest.mark.claim("EMU-11", "operators run emulated through the one launch seam")

_ENTRIES = {e.value: e.name for e in importlib.metadata.entry_points(group="pytest11")}
LOAD = [
    argument
    for module in ("pytest_kernel_claims.plugin", "ptx_emulator.pytest_provider")
    for argument in ("-p", _ENTRIES.get(module, module))
]


def inputs(tokens: int = 70) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(1, tokens, 1, 128, generator=g).bfloat16() for _ in range(2))
    v = torch.randn(1, tokens, 2, 128, generator=g).bfloat16()
    return q, k, v, torch.tensor([0.1, 1.0]), torch.randn(1, 2, 128, 128, generator=g)


@pytest.mark.parametrize("seed", [None, 4], ids=str)
def test_operator_on_cpu_tensors(seed: int | None) -> None:
    q, k, v, decay, state = inputs()
    want = lightning_chunked(q, k, v, decay, 0.5, state)
    with use_launcher(EmulatedLauncher("sm90", seed=seed)) as launcher:
        o, final = linattn.lightning_attn_fwd(q, k, v, decay, 0.5, state, True)
        assert linattn.lightning_attn_fwd(q, k, v, decay, 0.5, state)[1] is None
    assert torch.equal(o, want[0])
    assert torch.equal(final, want[1])
    assert isinstance(launcher, EmulatedLauncher)
    assert len(launcher.results) == 2
    assert launcher.results[0].launches[0].cluster == (1, 1, 1)
    assert launcher.results[0].statistics.mma > 0
    assert launcher.results[0].statistics.approximate == set()


def test_outside_the_emulator_cpu_tensors_are_refused() -> None:
    q, k, v, decay, _ = inputs()
    with pytest.raises(ValueError, match="CUDA"):
        linattn.lightning_attn_fwd(q, k, v, decay)
    with (
        use_launcher(EmulatedLauncher("sm90")),
        pytest.raises(ValueError, match=r"CPU tensor \(emulated\)"),
    ):
        linattn.lightning_attn_fwd(*(x.to("meta") for x in (q, k, v, decay)))


def buffers_of(
    tensors: dict[str, torch.Tensor], batch: int, slots: int, sequences: int
) -> dict[str, Buffer]:
    """What a call with these arguments may touch; tensors that are not named are absent."""
    h, hv = tensors["q"].shape[2], tensors["v"].shape[2]
    sizes = {"B": batch, "T": tensors["q"].shape[1], "H": h, "HV": hv}
    sizes |= {"N": sequences, "P": slots, "ctas": 1}
    measured = {
        name: Measured(dict(zip(SIGNATURE[name].dims, x.stride())), x.element_size())
        for name, x in tensors.items()
    }
    layout = array("q", SIGNATURE.layout(measured, sizes, {}))
    places: list[Any] = []
    for spec in SIGNATURE.tensors:
        tensor = tensors.get(spec.name)
        address = 0 if tensor is None else tensor.data_ptr()
        places.append(tensor if spec.whole else address)
    call = (*places, layout.buffer_info()[0], 1.0)
    return {b.name.split()[0]: b for b in signature_buffers(SIGNATURE, call)}


def test_memory_of_a_call_is_that_of_its_signature() -> None:
    """States come by address and strides; inputs are read-only, outputs uninitialised."""
    q, k, v, decay, state = inputs()
    pool = torch.zeros(1, 3, 130, 128)[:, :2, :128]
    tensors = {"q": q, "k": k, "v": v, "o": torch.zeros_like(v), "decay": decay}
    tensors |= {"initial_state": state, "final_state": pool}
    buffers = buffers_of(tensors, batch=1, slots=1, sequences=1)
    assert set(buffers) == set(tensors)
    assert [n for n, b in buffers.items() if not b.readonly] == ["o", "final_state"]
    assert [n for n, b in buffers.items() if not b.initialized] == ["o", "final_state"]
    final = buffers["final_state"]
    assert final.shape == (1, 2, 128, 128)
    assert final.strides == tuple(4 * s for s in pool.stride())
    assert final.span == 4 * (pool.stride(1) + 127 * 128 + 128)
    absent = {n: t for n, t in tensors.items() if not n.endswith("state")}
    assert set(buffers_of(absent, batch=1, slots=1, sequences=1)) == set(absent)
    assert len(absent) == 5


def test_memory_of_a_packed_call() -> None:
    """Index vectors are as long as there are sequences, a pool as its number of slots."""
    q, k, v, decay, _ = inputs()
    pool = torch.zeros(5, 2, 128, 128)
    tensors = {"q": q, "k": k, "v": v, "o": torch.zeros_like(v), "decay": decay}
    tensors |= {"initial_state": pool, "final_state": pool}
    vectors = {
        "cu_seqlens": torch.zeros(4, dtype=torch.int64),
        "slots": torch.zeros(3, dtype=torch.int32),
        "has_initial": torch.zeros(3, dtype=torch.bool),
    }
    buffers = buffers_of(tensors | vectors, batch=1, slots=5, sequences=3)
    assert buffers["final_state"].shape == (5, 2, 128, 128)
    for name, size in (("cu_seqlens", 32), ("slots", 12), ("has_initial", 3)):
        assert (buffers[name].address, buffers[name].span) == (vectors[name].data_ptr(), size)
        assert buffers[name].readonly


def test_a_kernel_that_leaves_its_tensors_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The initial state is one head shorter than the kernel is told."""
    q, k, v, decay, state = inputs()

    def shortened(*call: object) -> list[Buffer]:
        buffers = signature_buffers(*call)  # type: ignore[arg-type]
        return [replace(b, shape=(1, 1, 128, 128)) if "initial" in b.name else b for b in buffers]

    monkeypatch.setattr(launcher_module, "signature_buffers", shortened)
    with (
        use_launcher(EmulatedLauncher("sm90")),
        pytest.raises(KernelFault, match=r"memcheck: .* out of bounds .* past initial_state"),
    ):
        linattn.lightning_attn_fwd(q, k, v, decay, 1.0, state)


def test_provider_names_what_it_can_do() -> None:
    provider = Provider(((9, 0),), "memcheck", 3)
    with provider.open(SimpleNamespace(nodeid="a test"), (9, 0)) as device:  # type: ignore[arg-type]
        from linattn.host.launch import current

        launcher = current()
        assert device.type == "cpu"
        assert isinstance(launcher, EmulatedLauncher)
        assert launcher.options.checks == {"memcheck"}
        assert launcher.options.seed == 3
    assert not isinstance(current(), EmulatedLauncher)


SUITE = """
    import pytest, torch, linattn
    from linattn.host.launch import current

    @pytest.mark.sm90
    @pytest.mark.claim("X-1", "runs emulated")
    def test_hopper(device):
        assert device.type == "cpu"
        q = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16, device=device)
        linattn.lightning_attn_fwd(q, q, q, torch.zeros(1, device=device))
        print("seed", current().options.seed, "checks", sorted(current().options.checks))

    @pytest.mark.sm100
    def test_blackwell(device):
        pass
"""


def test_pytest_option(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess(
        *LOAD, "-p", "no:cacheprovider", "--gpu-arch=emulated-sm90", "-s"
    )
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*seed None checks*initcheck*memcheck*racecheck*synccheck*"])
    result.stdout.fnmatch_lines(["*emulated here: sm90 by ptx_emulator*"])
    seeded = pytester.runpytest_inprocess(
        *LOAD,
        "-p",
        "no:cacheprovider",
        "--gpu-arch=emulated",
        "--emulator-seed=7",
        "-s",
        "-k",
        "hopper",
    )
    seeded.assert_outcomes(passed=1)
    seeded.stdout.fnmatch_lines(["*seed 7 checks*"])
    assert set(CHECKS) == {"initcheck", "memcheck", "racecheck", "synccheck"}


def test_without_the_option_nothing_is_emulated(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess(*LOAD, "-p", "no:cacheprovider", "--gpu-arch=none")
    result.assert_outcomes(skipped=2)
