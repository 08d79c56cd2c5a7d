"""Which kernel a call gets, on injected architectures, and what is returned without a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from stand_ins import HostLauncher, ReferenceLauncher, StubBuilder

import linattn
from linattn.host import build, cache, launch, plan
from linattn.host.arch import Arch
from linattn.kernels import OPERATORS
from linattn.kernels.lightning_prefill.config import CONFIGS, ONE_CTA_A_HEAD
from linattn.ops._face import FACES
from linattn.spec.operator import Operator

pytestmark = pytest.mark.dispatch

D = 128
TABLE = pytest.mark.claim("LA-D01", "each architecture gets the kernel stated, or a named refusal")
EXPLAIN = pytest.mark.claim("LA-D02", "explain says which kernel runs, and runs without a GPU")
SEGMENTS = pytest.mark.claim("LA-D03", "segments other than 1 are refused, never ignored")
EMPTY = pytest.mark.claim("LA-D04", "empty calls return the initial state without a launch")
COMPILES = pytest.mark.claim("LA-D05", "shapes never recompile: one compile a distinct config")


def call(
    device: str = "meta", batch: int = 1, tokens: int = 70, h: int = 2, hv: int = 4, **extra: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    def make(heads: int) -> torch.Tensor:
        return torch.zeros(batch, tokens, heads, D, dtype=torch.bfloat16, device=device)

    decay = torch.zeros(hv, device=device)
    return linattn.lightning_attn_fwd(make(h), make(h), make(hv), decay, **extra)


@TABLE
def test_hopper_gets_the_sm90_kernel() -> None:
    with launch.use_launcher(launch.MetaLauncher("9.0")) as meta:
        call()
    (made,) = meta.launches
    assert (made.operator, str(made.arch), made.arch.target) == (
        "lightning_prefill",
        "sm90",
        "sm_90a",
    )
    assert made.config in CONFIGS["sm90"]


@TABLE
@pytest.mark.parametrize(
    ("arch", "error", "message"),
    [
        ("8.0", linattn.UnsupportedArchitecture, r"got sm80 .*8\.0\), supported: sm90 .*9\.0\)"),
        ("8.9", linattn.UnsupportedArchitecture, "got sm89"),
        ("10.0", NotImplementedError, "kernels/lightning_prefill/sm100.py does not exist yet"),
        ("10.3", NotImplementedError, "kernels/lightning_prefill/sm100.py does not exist yet"),
        ("10.7", linattn.UnsupportedArchitecture, "got sm107"),
        ("12.0", linattn.UnsupportedArchitecture, "got sm120"),
    ],
)
def test_other_architectures_are_refused_before_a_launch(
    arch: str, error: type[Exception], message: str
) -> None:
    with launch.use_launcher(launch.MetaLauncher(arch)) as meta:
        with pytest.raises(error, match=message):
            call()
        with pytest.raises(error, match=message):
            linattn.warm_up(linattn.lightning_attn_fwd)
    assert meta.launches == []
    with pytest.raises(error, match=message):
        linattn.explain("lightning_attn_fwd", arch=arch, B=1, T=1, H=1)


@TABLE
@pytest.mark.parametrize("text", ["sm90", "sm_90", "sm_90a", "90", "9.0", (9, 0), Arch(9, 0)])
def test_names_of_an_architecture(text: Any) -> None:
    assert Arch.parse(text) == Arch(9, 0)


@TABLE
@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("hopper", ValueError),
        ("sm", ValueError),
        ((9,), ValueError),
        ((9, -1), ValueError),
        (("9", "0"), ValueError),
        (9.0, TypeError),
        (None, TypeError),
    ],
)
def test_what_is_no_architecture(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="arch: got"):
        Arch.parse(value)


@TABLE
def test_targets_and_families() -> None:
    assert [Arch.parse(name).target for name in ("sm100", "sm103")] == ["sm_100a", "sm_103a"]
    assert Arch(10, 3).families == ("sm100", "sm103")
    assert Arch(10, 7).families == ()


@EXPLAIN
def test_explain_is_what_a_call_does() -> None:
    plan = linattn.explain(linattn.lightning_attn_fwd, arch="sm90", B=3, T=70, H=2, HV=4)
    with launch.use_launcher(launch.MetaLauncher("sm90")) as meta:
        call(batch=3)
    assert plan.config == meta.launches[0].config
    assert plan.kernel == "linattn.kernels.lightning_prefill.sm90"
    assert plan.grid == (3 * 4 * D // plan.config.rows, 1, 1)
    assert plan.segments == 1
    assert plan.config.name() in plan.reason


@EXPLAIN
@pytest.mark.parametrize(
    ("batch", "heads", "rows", "ctas"),
    [
        (1, 1, 64, 2),
        (1, 64, 64, 128),
        (1, 66, 64, 132),
        (1, 67, 128, 67),
        (2, 64, 128, 128),
        (3, 64, 128, 132),
        (600, 8, 128, 132),
    ],
)
def test_two_ctas_share_a_head_while_they_fit(batch: int, heads: int, rows: int, ctas: int) -> None:
    """132 multiprocessors: an H200."""
    plan = linattn.explain("lightning_attn_fwd", arch="sm90", B=batch, T=70, H=heads)
    assert (plan.config.rows, plan.grid) == (rows, (ctas, 1, 1))
    small = linattn.explain(
        "lightning_attn_fwd", arch="sm90", multiprocessors=1, B=batch, T=70, H=heads
    )
    assert (small.config.rows, small.grid) == (128, (1, 1, 1))


@EXPLAIN
@pytest.mark.parametrize("processors", [0, -5, 1.5, True])
def test_what_is_no_number_of_multiprocessors(processors: Any) -> None:
    with pytest.raises(ValueError, match="multiprocessors: got"):
        linattn.explain(
            "lightning_attn_fwd", arch="sm90", multiprocessors=processors, B=1, T=1, H=1
        )


@EXPLAIN
def test_more_units_than_32_bits_can_step_over_are_refused() -> None:
    most = 2**30 // 2
    shapes = {"arch": "sm90", "persistent": False, "T": 1, "H": 1, "multiprocessors": 2**31 - 1}
    assert linattn.explain("lightning_attn_fwd_varlen", N=most, **shapes).grid == (2**30, 1, 1)
    with pytest.raises(ValueError, match=r"N \* HV: got N \* HV = .*, expected at most"):
        linattn.explain("lightning_attn_fwd_varlen", N=most + 1, **shapes)


@EXPLAIN
def test_explain_uses_the_architecture_of_the_launcher() -> None:
    with launch.use_launcher(launch.MetaLauncher("sm90")):
        assert linattn.explain("lightning_attn_fwd", B=1, T=1, H=1).arch == Arch(9, 0)


@EXPLAIN
def test_explain_of_an_empty_problem_says_that_nothing_runs() -> None:
    plan = linattn.explain("lightning_attn_fwd", arch="sm90", B=1, T=0, H=4)
    assert plan.config is None
    assert plan.grid == (0, 0, 0)
    assert "T == 0" in plan.reason


@EXPLAIN
def test_explain_without_a_device_asks_for_an_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r'no architecture is known here.*arch="sm90"'):
        linattn.explain("lightning_attn_fwd", B=1, T=1, H=1)


@EXPLAIN
@pytest.mark.parametrize(
    ("built", "told"),
    [(None, r"torch \S+ is built without CUDA"), ("13.0", "no NVIDIA driver or no GPU")],
)
def test_without_a_gpu_emulation_is_named(
    built: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    named = r"use_launcher\(ptx_emulator\.launcher\.EmulatedLauncher\('sm90'\)\)"
    with pytest.raises(RuntimeError, match=f"{told}.*{named}"):
        linattn.warm_up("la_decode")
    with pytest.raises(ValueError, match=rf"got a tensor on cpu, expected .* CUDA device.*{named}"):
        call("cpu")


@EXPLAIN
@pytest.mark.parametrize(
    ("op", "shapes", "error", "message"),
    [
        ("attention", {"B": 1}, ValueError, "one of la_decode, .*lightning_attn_fwd"),
        (7, {"B": 1}, TypeError, "op: got int"),
        (print, {"B": 1}, ValueError, "op: got 'print'"),
        ("lightning_attn_fwd", {"B": 1, "T": 1}, TypeError, "H: got nothing, .* B, T, H, HV"),
        ("lightning_attn_fwd", {"B": 1, "T": 1, "H": 1, "N": 2}, TypeError, "N: got a size"),
        ("lightning_attn_fwd", {"B": 1, "T": 1.0, "H": 1}, TypeError, "T: got 1.0"),
        ("lightning_attn_fwd", {"B": 1, "T": -1, "H": 1}, ValueError, "T: got -1"),
        ("lightning_attn_fwd", {"B": 1, "T": 1, "H": 2, "HV": 3}, ValueError, "HV: got 3"),
    ],
)
def test_explain_refuses_what_is_no_problem(
    op: Any, shapes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        linattn.explain(op, arch="sm90", **shapes)


@SEGMENTS
@pytest.mark.parametrize("segments", [2, 16, "auto"])
def test_segments_are_not_there_yet(segments: Any) -> None:
    refused = pytest.raises(NotImplementedError, match=r"segments: got .*expected 1")
    with launch.use_launcher(launch.MetaLauncher("sm90")) as meta, refused:
        call(segments=segments)
    assert meta.launches == []
    with pytest.raises(NotImplementedError, match="segments"):
        linattn.explain("lightning_attn_fwd", arch="sm90", segments=segments, B=1, T=1, H=1)


@EMPTY
@pytest.mark.parametrize(
    "sizes",
    [{"batch": 0}, {"tokens": 0}, {"hv": 0}, {"h": 0, "hv": 0}, {"batch": 0, "tokens": 0}],
    ids=str,
)
@pytest.mark.parametrize("given", [False, True], ids=["from zeros", "from a state"])
def test_nothing_is_launched_for_nothing(sizes: dict[str, int], given: bool) -> None:
    batch, hv = sizes.get("batch", 1), sizes.get("hv", 4)
    initial = torch.randn(batch, hv, D, D) if given else None
    with launch.use_launcher(HostLauncher()) as host:
        o, final = call("cpu", **sizes, initial_state=initial, output_final_state=True)
        _, absent = call("cpu", **sizes, initial_state=initial)
    assert host.launches == []
    assert o.shape == (batch, sizes.get("tokens", 70), hv, D)
    assert absent is None
    assert final is not None
    assert torch.equal(final, torch.zeros(batch, hv, D, D) if initial is None else initial)
    assert final is not initial


@EMPTY
def test_the_state_of_no_tokens_is_a_copy_and_out_comes_back() -> None:
    pool = torch.randn(2, 4, D * D + 4)[..., 4:].unflatten(-1, (D, D))
    out = torch.empty(2, 0, 4, D, dtype=torch.bfloat16)
    with launch.use_launcher(HostLauncher()):
        o, final = call(
            "cpu", batch=2, tokens=0, initial_state=pool, output_final_state=True, out=out
        )
    assert o is out
    assert final is not None
    assert final.is_contiguous()
    final.zero_()
    assert pool.abs().sum() > 0


@EMPTY
def test_one_token_is_launched() -> None:
    with launch.use_launcher(HostLauncher()) as host:
        call("cpu", tokens=1)
    assert len(host.launches) == 1


@EMPTY
def test_no_heads_for_value_heads_is_an_error() -> None:
    with launch.use_launcher(HostLauncher()), pytest.raises(ValueError, match=r"HV = 4.*H = 0"):
        call("cpu", h=0)


@pytest.mark.claim("LA-D06", "the final state is fresh and the initial state is only read")
def test_the_final_state_is_fresh() -> None:
    initial = torch.randn(2, 4, D, D)
    before = initial.clone()
    with launch.use_launcher(ReferenceLauncher()):
        _, one = call("cpu", batch=2, initial_state=initial, output_final_state=True)
        _, two = call("cpu", batch=2, initial_state=initial, output_final_state=True)
    assert one is not None
    assert two is not None
    assert len({one.data_ptr(), two.data_ptr(), initial.data_ptr()}) == 3
    assert torch.equal(initial, before)
    assert torch.equal(one, initial)  # zero keys and no decay leave the state as it was


class CachedLauncher(HostLauncher):
    """Gets its functions from the cache, as the CUDA launcher does."""

    captures = False

    def function(self, operator: Operator, arch: Arch, config: Any) -> Callable[..., Any]:
        return cache.get(operator, arch.target, config).function

    def capturing(self) -> bool:
        return self.captures


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """A stub compiler behind an empty cache; its functions do nothing."""
    stub = StubBuilder()
    monkeypatch.setattr(build, "build", stub)
    monkeypatch.setattr(cache, "load_function", lambda path, symbol: lambda *arguments: None)
    monkeypatch.setattr(cache.env, "cache_dir", lambda: tmp_path)
    cache.reset()
    yield stub
    cache.reset()


@COMPILES
def test_no_shape_compiles_again(builder: StubBuilder) -> None:
    assert linattn.compile_count() == 0
    shapes = [
        {"batch": batch, "tokens": tokens, "h": h, "hv": hv}
        for batch in (0, 1, 3)
        for tokens in (0, 1, 511, 512, 513)
        for h, hv in ((1, 1), (2, 8), (8, 8))
    ]
    chosen = {
        linattn.explain(
            "lightning_attn_fwd",
            arch="sm90",
            B=s["batch"],
            T=s["tokens"],
            H=s["h"],
            HV=s["hv"],
        ).config
        for s in shapes
    } - {None}
    with launch.use_launcher(CachedLauncher()):
        for sizes in shapes:
            call("cpu", **sizes)
            call("cpu", **sizes, scale=0.5, output_final_state=True)
    assert linattn.compile_count() == len(chosen) == len(builder.builds)


@COMPILES
def test_warm_up_touches_every_config_and_launches_it(builder: StubBuilder) -> None:
    with launch.use_launcher(CachedLauncher()):
        linattn.warm_up("lightning_attn_fwd")
        linattn.warm_up(linattn.lightning_attn_fwd, "cpu")
        call("cpu")
    assert linattn.compile_count() == len(CONFIGS["sm90"]) == len(builder.builds)
    with launch.use_launcher(HostLauncher()) as host:
        linattn.warm_up("lightning_attn_fwd")
    assert len(host.launches) == len(CONFIGS["sm90"])


@pytest.mark.claim("LA-D07", "a first call inside a capture raises and names warm_up")
def test_a_cold_call_inside_a_capture_is_refused(builder: StubBuilder) -> None:
    with launch.use_launcher(CachedLauncher()) as launcher:
        assert isinstance(launcher, CachedLauncher)
        launcher.captures = True
        with pytest.raises(RuntimeError, match=r'linattn\.warm_up\("lightning_attn_fwd"\)'):
            call("cpu")
        with pytest.raises(RuntimeError, match="inside a graph capture"):
            linattn.warm_up("lightning_attn_fwd")
        assert builder.builds == []
        launcher.captures = False
        linattn.warm_up("lightning_attn_fwd")
        launcher.captures = True
        call("cpu")
        call("cpu", tokens=9)


@pytest.mark.claim("LA-D08", "a launch happens with the tensors' device current")
def test_the_cuda_launcher_guards_other_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    launcher = launch.CudaLauncher()
    assert launcher.guard(torch.device("cuda", 0)) is None
    guard = launcher.guard(torch.device("cuda", 1))
    assert isinstance(guard, torch.cuda.device)
    assert guard.idx == 1


@pytest.mark.claim("LA-D09", "the memo of plans is bounded")
def test_plans_are_forgotten_when_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of each form, whose number is that of the sets of arguments: with states and without,
    of other lengths, which one recipe plans, and other heads, which need one each."""
    monkeypatch.setattr(plan, "RECENT", 3)
    monkeypatch.setattr(plan, "RECIPES", 5)
    states = torch.zeros(1, 64, D, D)
    with launch.use_launcher(HostLauncher()) as host:
        for size in range(1, 30):
            for hv in (64, size):
                call("cpu", tokens=size, h=1, hv=hv)
                call("cpu", tokens=size, h=1, hv=hv, initial_state=states[:, :hv])
            assert len(host.plans) == len(host.recipes) == 2
            for form, recipes in host.recipes.items():
                assert len(recipes) <= 5
                assert all(len(recipe.plans) <= 3 for recipe in recipes)
                assert any(host.plans[form] is one for x in recipes for one in x.plans.values())
        assert [len(recipes) for recipes in host.recipes.values()] == [5, 5]
        assert max(len(x.plans) for recipes in host.recipes.values() for x in recipes) > 1
        call("cpu", tokens=1, h=1, hv=1)  # long forgotten
    assert len(host.launches) == 4 * 29 + 1
    assert host.launches[-1].values["HV"] == 1


@TABLE
def test_every_public_function_has_a_kernel_and_can_be_warmed() -> None:
    for name, face in FACES.items():
        assert getattr(linattn, name).__name__ == name == face.function.name
        assert face.function.operator in OPERATORS.values()
        assert face.function.operator.kernels
        with launch.use_launcher(HostLauncher()) as host:
            linattn.warm_up(name)
        assert host.launches


@TABLE
def test_the_operator_and_the_configuration_agree_on_sizes() -> None:
    from linattn.kernels.lightning_prefill import config

    for name in ("lightning_attn_fwd", "lightning_attn_fwd_varlen"):
        face = FACES[name]
        assert face.parameters["chunk_size"].default == config.CHUNK
        assert {spec.dims[-1] for spec in face.tensors.values() if len(spec.dims) > 1} == {
            config.HEAD_DIM
        }


@pytest.mark.claim("LA-D10", "a configuration that no kernel implements cannot be compiled")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 96}, "rows: got 96, expected 64 or 128"),
        ({"stages": 0}, "stages: got 0, expected at least 1"),
        ({"scores": 0}, "scores: got 0, expected at least 1"),
        ({"outputs": 0}, "outputs: got 0, expected at least 1"),
        ({"stages": 1}, "stages: got 1, expected at least 2: an initial state"),
        ({"stages": 4}, "shared memory: got .* bytes, expected at most 232448"),
        ({"registers": (24, 88, 204)}, "registers: got .*, expected multiples of 8"),
        ({"registers": (24, 88, 208)}, "registers: got 67584 a CTA, expected at most 65536"),
    ],
    ids=str,
)
def test_impossible_configurations(change: dict[str, Any], message: str) -> None:
    """There is none to be compiled."""
    with pytest.raises(ValueError, match=message):
        replace(ONE_CTA_A_HEAD, **change)
