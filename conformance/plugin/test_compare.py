"""Comparisons find every planted difference, name its place, and pass what is equal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_kernel_claims import compare

if TYPE_CHECKING:
    from .conftest import Suite

pytestmark = pytest.mark.claim("PLUGIN-COMPARE", "a wrong element or a stray write is found")

NAN, INF = math.nan, math.inf
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=[1 << 24, 7], ids=["whole", "slabs"])
def slab(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with the tensor in one piece and cut into pieces of at most 7 elements."""
    monkeypatch.setattr(compare, "SLAB_ELEMENTS", request.param)


# --- bits -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("slab")
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.uint8, torch.bool, torch.complex64])
def test_bitwise_accepts_equal_and_finds_one_element(dtype: torch.dtype) -> None:
    want = (normal(2, 3, 5) > 0).to(dtype)
    got = want.clone()
    compare.assert_bitwise(got, want)
    got[1, 2, 3] = 0 if want[1, 2, 3] else 1
    with pytest.raises(AssertionError, match=r"1 of 30 elements[\s\S]*first at \(1, 2, 3\)"):
        compare.assert_bitwise(got, want)


@pytest.mark.usefixtures("slab")
def test_bitwise_names_the_first_of_many_and_counts() -> None:
    want = normal(4, 5, 6)
    got = want.clone()
    for index in [(3, 4, 5), (1, 0, 2), (2, 2, 2)]:
        got[index] += 1
    with pytest.raises(AssertionError, match=r"3 of 120 elements[\s\S]*first at \(1, 0, 2\)"):
        compare.assert_bitwise(got, want)


@pytest.mark.usefixtures("slab")
def test_bitwise_on_views() -> None:
    base = normal(6, 8, 4)
    view = base[::2].transpose(0, 2)
    compare.assert_bitwise(view, view.contiguous())
    with pytest.raises(AssertionError, match="elements differ"):
        compare.assert_bitwise(view, -view.contiguous())


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_ulp_and_signed_zero_differ_and_nan_equals_nan(dtype: torch.dtype) -> None:
    want = torch.tensor([1.0, 0.0, NAN, INF], dtype=dtype)
    bits = want.clone().view(compare._bits(want).dtype)
    bits[2] += 1  # another payload
    payload = bits.view(dtype)
    assert torch.isnan(payload[2])
    compare.assert_bitwise(payload, want)
    bits[0] += 1
    with pytest.raises(AssertionError, match=r"1 of 4 .*\n.*first at \(0,\)[\s\S]*ulp 1\b"):
        compare.assert_bitwise(payload, want)
    with pytest.raises(AssertionError, match=r"got -0.0 \(bits 0x80*\), expected 0.0 \(bits 0x0\)"):
        compare.assert_bitwise(torch.tensor([-0.0], dtype=dtype), torch.zeros(1, dtype=dtype))


@pytest.mark.parametrize(
    ("got", "want", "told"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), r"shape \(2, 3\), expected shape \(3, 2\)"),
        (torch.zeros(2), torch.zeros(1), "shape"),
        (torch.zeros(2), torch.zeros(2).half(), "dtype torch.float32, expected dtype"),
        (torch.zeros(2), torch.zeros(2, device="meta"), "device cpu, expected device meta"),
        ((torch.zeros(2),), (torch.zeros(2), None), "got 1 results, expected 2"),
        ((torch.zeros(2), None), (torch.zeros(2), torch.zeros(1)), "got None, expected a Tensor"),
        ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}, "keys"),
        (torch.zeros(2), 0.0, "got a Tensor, expected a float"),
    ],
)
def test_bitwise_refuses_other_structures(got: Any, want: Any, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        compare.assert_bitwise(got, want)


def test_bitwise_names_the_results() -> None:
    one, other = normal(3), normal(3, seed=1)
    compare.assert_bitwise((one, None), (one, None), names="o state")
    compare.assert_bitwise(one, one, names="o")
    with pytest.raises(AssertionError, match=r"^state: 3 of 3 [^:]*\n") as told:
        compare.assert_bitwise((one, other), (one, one), names=["o", "state"])
    assert "\no:" not in str(told.value)
    with pytest.raises(AssertionError, match=r"result\['x'\]\[0\]: 3 of 3"):
        compare.assert_bitwise({"x": [one]}, {"x": [other]})
    with pytest.raises(AssertionError, match="names for 1"):
        compare.assert_bitwise((one, other), (one, other), names="o")


# --- numbers --------------------------------------------------------------------------------


@pytest.mark.usefixtures("slab")
@pytest.mark.parametrize("dtype", FLOATS)
def test_metrics_against_plain_formulas(dtype: torch.dtype) -> None:
    got, want = normal(3, 5, 2, dtype=dtype), normal(3, 5, 2, dtype=torch.float64, seed=1)
    want[2, 1, 0] = got[2, 1, 0].double()
    found = compare.measure(got, want, rtol=0.5, atol=0.1)
    g, w = got.double(), want
    assert found.max_abs == (g - w).abs().max().item()
    assert found.rel_rms == pytest.approx(((g - w).norm() / w.norm()).item(), rel=1e-12)
    cosine = torch.nn.functional.cosine_similarity(g.flatten(), w.flatten(), dim=0).item()
    assert found.cosine == pytest.approx(cosine, rel=1e-12)
    inside = (g - w).abs() <= 0.1 + 0.5 * w.abs()
    assert found.pass_rate == pytest.approx(inside.double().mean().item())
    assert found.first_bad == tuple((~inside).nonzero()[0].tolist())
    assert found.worst == tuple((g - w).abs().eq(found.max_abs).nonzero()[0].tolist())
    assert found.agreement == pytest.approx(1 / 30)
    assert found.nonfinite == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulp_distance(dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    low = torch.finfo(dtype).tiny

    def ulp(one: float, other: float) -> int | None:
        pair = [torch.tensor([x], dtype=dtype) for x in (one, other)]
        assert compare.measure(*reversed(pair)).ulp == compare.measure(*pair).ulp
        return compare.measure(*pair).ulp

    assert ulp(1.0, 1.0 + 3 * step) == 3
    assert ulp(1.0, 1.0 - step / 2) == 1
    assert ulp(0.0, -0.0) == 0
    assert ulp(-low, low) == 2 * round(1 / step)
    assert ulp(NAN, 1.0) == 0
    largest = torch.finfo(dtype).max
    assert ulp(-largest, largest) == min(2 * _ordinal(largest, dtype), (1 << 63) - 1)


def _ordinal(value: float, dtype: torch.dtype) -> int:
    return int(compare._bits(torch.tensor([value], dtype=dtype)).item())


def test_ulp_of_types_without_an_order() -> None:
    assert compare.measure(torch.tensor([1, 2]), torch.tensor([1, 3])).ulp is None


LIMITS = [
    {"rel_rms": 1e-3},
    {"max_abs": 1e-2},
    {"rtol": 1e-2},
    {"atol": 1e-2},
    {"atol": 1e-2, "pass_rate": 0.99},
    {"ulp": 2},
    {"cosine": 0.9999},
]


@pytest.mark.usefixtures("slab")
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_every_limit_can_fail_and_pass(limits: dict[str, Any]) -> None:
    want = normal(10, 10)
    assert compare.assert_numeric(want.clone(), want, **limits).agreement == 1.0
    got = want.clone()
    got[4, 5:8] += 3.0
    with pytest.raises(AssertionError, match=r"violated: [\s\S]*largest difference at \(4, "):
        compare.assert_numeric(got, want, **limits)


def test_pass_rate_lets_through_what_it_says() -> None:
    want = normal(10, 10)
    got = want.clone()
    got[4, 5] += 3.0
    assert compare.assert_numeric(got, want, atol=1e-2, pass_rate=0.99).first_bad == (4, 5)
    got[4, 6] += 3.0
    with pytest.raises(AssertionError, match=r"pass_rate 0.98 \(limit 0.99\)"):
        compare.assert_numeric(got, want, atol=1e-2, pass_rate=0.99)


@pytest.mark.usefixtures("slab")
@pytest.mark.parametrize(
    ("got", "want"),
    [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, INF), (INF, -INF), (NAN, INF)],
)
def test_a_value_that_is_not_finite_alike_fails_any_limit(got: float, want: float) -> None:
    mine, theirs = normal(4, 4), normal(4, 4)
    mine[2, 1], theirs[2, 1] = got, want
    told = r"1 elements are not finite alike[\s\S]*first outside at \(2, 1\)"
    with pytest.raises(AssertionError, match=told):
        compare.assert_numeric(mine, theirs, rel_rms=INF, atol=INF)
    mine[2, 1] = theirs[2, 1]
    compare.assert_numeric(mine, theirs, rel_rms=0.0, atol=0.0)


def test_zero_and_empty_references() -> None:
    zero = torch.zeros(3)
    assert compare.assert_numeric(zero, zero, rel_rms=0.0).cosine == 1.0
    with pytest.raises(AssertionError, match="rel_rms inf"):
        compare.assert_numeric(zero + 1e-9, zero, rel_rms=1e9)
    assert compare.assert_numeric(torch.zeros(0, 4), torch.zeros(0, 4), rel_rms=0.0).count == 0


def test_three_way() -> None:
    reference = normal(64, 64, dtype=torch.float64)
    ours, peer = reference.float() * (1 + 1e-3), reference.float() * (1 + 1e-2)
    found = compare.assert_numeric(ours, peer, reference=reference, times_peer=0.11)
    assert found.peer is not None
    assert found.apart is not None
    assert found.rel_rms == pytest.approx(1e-3, rel=1e-3)
    assert found.peer.rel_rms == pytest.approx(1e-2, rel=1e-3)
    assert found.apart.rel_rms == pytest.approx(9e-3, rel=2e-2)
    assert compare.assert_numeric(ours, reference, peer=peer, times_peer=0.11) == found
    with pytest.raises(AssertionError, match=r"violated: rel_rms[\s\S]*ours/peer: max_abs"):
        compare.assert_numeric(ours, peer, reference=reference, times_peer=0.09)
    peer[0, 0] = NAN
    with pytest.raises(AssertionError, match="the peer is not finite"):
        compare.assert_numeric(ours, peer, reference=reference, times_peer=1.1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, ValueError),
        ({"times_peer": 1.1}, ValueError),
        ({"peer": torch.ones(2), "reference": torch.ones(2), "rel_rms": 1}, ValueError),
        ({"pass_rate": 0.5}, ValueError),
    ],
)
def test_a_comparison_that_cannot_fail_is_refused(
    arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        compare.assert_numeric(torch.ones(2), torch.ones(2), **arguments)


def test_numeric_refuses_other_shapes_devices_and_complex() -> None:
    with pytest.raises(AssertionError, match="shape"):
        compare.assert_numeric(torch.ones(2), torch.ones(2, 1), rel_rms=1)
    with pytest.raises(AssertionError, match="device"):
        compare.assert_numeric(torch.ones(2), torch.ones(2, device="meta"), rel_rms=1)
    with pytest.raises(TypeError, match="real tensors"):
        compare.assert_numeric(torch.ones(2) * 1j, torch.ones(2), rel_rms=1)


def test_slabs_cover_every_element_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "SLAB_ELEMENTS", 4)
    tensor = torch.arange(3 * 1 * 5 * 2).reshape(3, 1, 5, 2)
    seen = []
    for offset, (part,) in compare._slabs([tensor]):
        assert part.numel() <= 4
        assert part.flatten().tolist() == list(range(offset, offset + part.numel()))
        seen += part.flatten().tolist()
    assert seen == list(range(30))


def test_numeric_records_its_figures_with_the_claim(suite: Suite) -> None:
    suite.write("""
        import pytest, torch

        @pytest.mark.claim("A", "text")
        @pytest.mark.parametrize("error", [0.25, 0.75])
        def test_a(assert_numeric, error):
            one = torch.ones(4)
            assert_numeric(one + error, one, max_abs=0.5, cosine=0.9, name="o")
    """)
    claim = suite.claims()["claims"]["A"]
    assert claim["counts"] == {"passed": 1, "failed": 1}
    assert claim["worst"].keys() == {"o rel_rms", "o max_abs", "o cosine"}
    assert (claim["worst"]["o max_abs"]["value"], claim["worst"]["o max_abs"]["limit"]) == (
        0.75,
        0.5,
    )
    assert claim["worst"]["o cosine"]["better"] == "higher"


# --- poison ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64, torch.uint8, torch.bool])
def test_poison_fills_and_tells_what_was_written(dtype: torch.dtype) -> None:
    poison = compare.Poison()
    out = poison(torch.empty(3, 4, dtype=dtype))
    assert out.data_ptr() % 256 == 0
    assert out.shape == (3, 4)
    if dtype.is_floating_point:
        assert bool(out.isnan().all())
    poison.assert_untouched(out)
    with pytest.raises(AssertionError, match=r"12 of 12 elements were never written.*\(0, 0\)"):
        poison.assert_overwritten(out)
    out[:2] = 1
    with pytest.raises(AssertionError, match=r"o: 4 of 12 elements were never.*\(2, 0\)"):
        poison.assert_overwritten(out, "o")
    with pytest.raises(AssertionError, match="8 of 12 elements were written"):
        poison.assert_untouched(out)
    poison.assert_overwritten(out[:2])
    poison.assert_untouched(out[2])
    out[2] = NAN if dtype.is_floating_point else 1
    poison.assert_overwritten(out)
    poison.check()


@pytest.mark.parametrize("at", [-1, -compare.GUARD_BYTES, 24, 24 + compare.GUARD_BYTES - 1])
def test_a_byte_outside_the_tensor_is_found(at: int) -> None:
    poison = compare.Poison()
    out = poison(torch.empty(3, 4, dtype=torch.bfloat16))
    out.fill_(1)
    poison.check()
    band = poison._bands[0]
    band.buffer[band.start + at] ^= 1
    place = f"{-at} bytes before it" if at < 0 else f"at byte {at} of 24"
    with pytest.raises(AssertionError, match=f"1 bytes outside .*{place}"):
        poison.check()


def test_gaps_of_a_strided_tensor_are_guarded() -> None:
    poison = compare.Poison()
    fused = torch.zeros(2, 3, 12)
    out = poison(fused[:, :, 4:8])
    assert out.stride() == (36, 12, 1)
    out.fill_(1)
    poison.check()
    poison.assert_overwritten(out)
    out.as_strided((2, 3, 5), (36, 12, 1)).fill_(1)
    with pytest.raises(AssertionError, match=r"bytes outside a tensor of \(2, 3, 4\).* byte 16 of"):
        poison.check()


def test_poison_keeps_structure() -> None:
    poison = compare.Poison()
    out, state, rest = poison((torch.empty(2), None, {"x": torch.empty(1).expand(4)}))
    assert (out.shape, state, rest["x"].stride()) == ((2,), None, (1,))
    assert poison.empty((0, 4), torch.float32).numel() == 0
    poison.check()
    with pytest.raises(TypeError, match="expected a tensor"):
        poison("text")
    with pytest.raises(TypeError, match="expected one of"):
        poison(torch.empty(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="that this poison made"):
        poison.assert_overwritten(torch.empty(2))


def test_guard_bands_are_checked_after_the_test(suite: Suite) -> None:
    suite.write("""
        import pytest, torch

        @pytest.mark.claim("A", "stays inside")
        def test_a(poison):
            out = poison(torch.empty(4))
            out.as_strided((5,), (1,)).fill_(0)
    """)
    suite.run().assert_outcomes(passed=1, errors=1)
    assert suite.claims()["claims"]["A"]["verdict"] == "failed"
