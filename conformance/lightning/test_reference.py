"""The oracles of Lightning prefill: the definition, and the kernels' algorithm held against it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linattn.reference import (
    lightning_chunked,
    lightning_error_bound,
    lightning_recurrent,
    lightning_slopes,
)
from linattn.reference.chunked import CHUNK, Arithmetic

pytestmark = pytest.mark.numeric

DEFINITION = pytest.mark.claim(
    "LA-REF-1", "the float64 reference is the definition, token by token"
)
ALGORITHM = pytest.mark.claim(
    "LA-REF-2", "the chunked reference stays within a bound derived from its rounding points"
)
SAME_BITS = pytest.mark.claim("LA-REF-4", "the chunked reference has the same bits on CPU and GPU")

Result = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Case:
    """Inputs of one prefill; ``[HV]`` slopes unless ``[H]`` are given."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    scale: float = 1.0
    initial_state: torch.Tensor | None = None

    def recurrent(self) -> Result:
        return lightning_recurrent(*self.arguments())

    def chunked(self, arithmetic: Arithmetic = "nearest") -> Result:
        return lightning_chunked(*self.arguments(), arithmetic=arithmetic)

    def bound(self) -> Result:
        return lightning_error_bound(*self.arguments())

    def arguments(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, torch.Tensor | None]:
        return self.q, self.k, self.v, self.decay, self.scale, self.initial_state

    def tokens(self, start: int, stop: int, initial_state: torch.Tensor | None) -> "Case":
        """The same problem on a part of the tokens, continued from a state."""
        q, k, v = (x[:, start:stop] for x in (self.q, self.k, self.v))
        return Case(q, k, v, self.decay, self.scale, initial_state)


def make_case(
    batch: int,
    tokens: int,
    heads: int,
    value_heads: int,
    slopes: list[float],
    *,
    dim: int = 128,
    scale: float = 1.0,
    state: bool = False,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k = (normal(batch, tokens, heads, dim).bfloat16() for _ in range(2))
    v = normal(batch, tokens, value_heads, dim).bfloat16()
    initial = normal(batch, value_heads, dim, dim) if state else None
    return Case(q, k, v, torch.tensor(slopes), scale, initial)


def excess(got: Result, expected: Result, bound: Result) -> float:
    """Largest error over its bound, of output and state; NaN counts as infinite."""
    worst = 0.0
    for x, y, limit in zip(got, expected, bound):
        ratio = (x.double() - y).abs() / limit
        worst = max(worst, ratio.nan_to_num(nan=math.inf).max().item() if ratio.numel() else 0.0)
    return worst


def plain_loops(case: Case) -> tuple[list[float], list[float]]:
    """The recurrence in Python floats, one element at a time, straight from the formula."""
    batch, tokens, heads, key_dim = case.q.shape
    value_heads, value_dim = case.v.shape[2:]
    q, k, v, slopes = (x.double().tolist() for x in (case.q, case.k, case.v, case.decay))
    outputs: dict[tuple[int, int, int, int], float] = {}
    states: list[float] = []
    for b in range(batch):
        for hv in range(value_heads):
            h = hv * heads // value_heads
            factor = math.exp(-slopes[hv if len(slopes) == value_heads else h])
            for row in range(value_dim):
                state = [0.0] * key_dim
                if case.initial_state is not None:
                    state = case.initial_state[b, hv, row].tolist()
                for t in range(tokens):
                    token = v[b][t][hv][row]
                    state = [factor * s + token * key for s, key in zip(state, k[b][t][h])]
                    read = sum(s * query for s, query in zip(state, q[b][t][h]))
                    outputs[b, t, hv, row] = case.scale * read
                states += state
    return [outputs[index] for index in sorted(outputs)], states


@DEFINITION
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("decay", [[0.0, 0.7], [0.3, 0.0, 1.5, 0.9]], ids=["per_qk", "per_value"])
def test_recurrent_follows_the_formula(decay: list[float], state: bool) -> None:
    case = make_case(2, 5, 2, 4, decay, dim=3, scale=0.37, state=state)
    for got, expected in zip(case.recurrent(), plain_loops(case)):
        torch.testing.assert_close(
            got.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=1e-13
        )


@DEFINITION
@pytest.mark.parametrize("cut", [0, 1, 17, 64, 99, 100])
def test_recurrent_continues_from_its_own_state(cut: int) -> None:
    case = make_case(2, 100, 1, 2, [0.05, 0.4], dim=16, state=True)
    first, state = case.tokens(0, cut, case.initial_state).recurrent()
    second, final = case.tokens(cut, 100, state).recurrent()
    o, expected_final = case.recurrent()
    assert torch.equal(torch.cat((first, second), dim=1), o)
    assert torch.equal(final, expected_final)


@DEFINITION
def test_no_token_leaves_the_initial_state() -> None:
    case = make_case(2, 0, 1, 2, [0.5, 8.0], dim=16, state=True)
    for o, state in (case.recurrent(), case.chunked("nearest"), case.chunked("kernel")):
        assert o.shape == (2, 0, 2, 16)
        assert case.initial_state is not None
        assert torch.equal(state.float(), case.initial_state)
        assert state.data_ptr() != case.initial_state.data_ptr()


@DEFINITION
def test_value_head_reads_its_own_query_head() -> None:
    """Value head hv uses query/key head hv // (HV // H), not hv % H."""
    case = make_case(1, 70, 2, 6, [0.1] * 6, dim=16)
    o, state = case.recurrent()
    for mapping, same in (([0, 0, 0, 1, 1, 1], True), ([0, 1, 0, 1, 0, 1], False)):
        spread = Case(case.q[:, :, mapping], case.k[:, :, mapping], case.v, case.decay)
        expected_o, expected_state = spread.recurrent()
        assert torch.equal(o, expected_o) is same
        assert torch.equal(state, expected_state) is same
        chunked, carried = case.chunked()
        expected_chunked, expected_carried = spread.chunked()
        assert torch.equal(chunked, expected_chunked) is same
        assert torch.equal(carried, expected_carried) is same


@DEFINITION
def test_slopes_of_query_heads_are_shared_by_their_group() -> None:
    case = make_case(1, 70, 2, 6, [0.1, 2.0], dim=16)
    spread = Case(case.q, case.k, case.v, torch.tensor([0.1, 0.1, 0.1, 2.0, 2.0, 2.0]))
    for got, expected in (
        (case.recurrent(), spread.recurrent()),
        (case.chunked(), spread.chunked()),
        (case.bound(), spread.bound()),
    ):
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


@DEFINITION
@pytest.mark.parametrize("changed", [0, 63, 64, 99])
def test_outputs_depend_on_the_past_and_the_token_itself(changed: int) -> None:
    case = make_case(1, 100, 1, 1, [0.01], dim=16)
    other = Case(case.q.clone(), case.k.clone(), case.v.clone(), case.decay)
    for x in (other.q, other.k, other.v):
        x[:, changed] = -2 * x[:, changed] + 1
    for before, after in (
        (case.recurrent()[0], other.recurrent()[0]),
        (case.chunked()[0], other.chunked()[0]),
    ):
        assert torch.equal(before[:, :changed], after[:, :changed])
        assert not torch.equal(before[:, changed], after[:, changed])


@DEFINITION
def test_scale_touches_the_output_only() -> None:
    case = make_case(1, 70, 1, 1, [0.1], dim=16, scale=-0.25, state=True)
    plain = Case(case.q, case.k, case.v, case.decay, 1.0, case.initial_state)
    for got, expected in (
        (case.recurrent(), plain.recurrent()),
        (case.chunked(), plain.chunked()),
    ):
        assert torch.equal(got[0], -0.25 * expected[0])
        assert torch.equal(got[1], expected[1])


@st.composite
def cases(draw: st.DrawFn, most_tokens: int) -> Case:
    heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    count = heads * (group if draw(st.booleans()) else 1)
    slope = st.sampled_from([0.0, 8.0, 2.0**-30]) | st.floats(0, 8, width=32)
    return make_case(
        draw(st.integers(1, 2)),
        draw(st.integers(1, most_tokens)),
        heads,
        heads * group,
        draw(st.lists(slope, min_size=count, max_size=count)),
        dim=draw(st.sampled_from([32, 128])),
        scale=draw(st.sampled_from([1.0, 128**-0.5, -3.0, 0.0])),
        state=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@ALGORITHM
@given(case=cases(most_tokens=200))
def test_chunked_is_within_its_bound(case: Case) -> None:
    assert excess(case.chunked("nearest"), case.recurrent(), case.bound()) <= 1


@ALGORITHM
@given(case=cases(most_tokens=70))
def test_chunked_with_kernel_arithmetic_is_within_its_bound(case: Case) -> None:
    assert excess(case.chunked("kernel"), case.recurrent(), case.bound()) <= 1


@ALGORITHM
@pytest.mark.parametrize("tokens", [1, 63, 65, 100, 127])
def test_partial_chunk_decays_by_its_own_length(tokens: int) -> None:
    """Zero tokens up to the chunk's end decay the state as C steps in place of L would."""
    case = make_case(1, tokens, 1, 2, [0.1, 1.0], state=True)
    expected, bound = case.recurrent(), case.bound()
    o, state = case.chunked()
    assert excess((o, state), expected, bound) <= 1

    padding = -tokens % CHUNK
    q, k, v = (
        torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) for x in (case.q, case.k, case.v)
    )
    padded_o, padded_state = Case(q, k, v, case.decay, 1.0, case.initial_state).chunked()
    assert torch.equal(padded_o[:, :tokens], o)
    assert excess((o, padded_state), expected, bound) > 1
    for head, slope in enumerate((0.1, 1.0)):
        ratio = (padded_state[0, head].norm() / state[0, head].norm()).item()
        assert ratio == pytest.approx(math.exp(-slope * padding), rel=0.01)


def other_decay(case: Case) -> Case:
    return Case(case.q, case.k, case.v, case.decay * 1.05, case.scale, case.initial_state)


def other_head(case: Case) -> Case:
    return Case(case.q.flip(2), case.k, case.v, case.decay, case.scale, case.initial_state)


def late_token(case: Case) -> Case:
    return Case(case.q, case.k.roll(1, 1), case.v, case.decay, case.scale, case.initial_state)


def lost_state(case: Case) -> Case:
    return Case(case.q, case.k, case.v, case.decay, case.scale)


@ALGORITHM
@pytest.mark.parametrize("fault", [other_decay, other_head, late_token, lost_state])
def test_the_bound_catches(fault: Callable[[Case], Case]) -> None:
    case = make_case(1, 150, 2, 2, [0.02, 0.2], state=True)
    assert excess(case.chunked(), case.recurrent(), case.bound()) <= 1
    assert excess(fault(case).chunked(), case.recurrent(), case.bound()) > 1


@ALGORITHM
def test_the_bound_catches_a_rounded_state() -> None:
    """At slope 0 nothing but float32 sums touches the state, and the bound knows it."""
    case = make_case(1, 150, 1, 1, [0.0], state=True)
    o, state = case.chunked("kernel")
    assert excess((o, state), case.recurrent(), case.bound()) <= 1
    assert excess((o, state.bfloat16()), case.recurrent(), case.bound()) > 1


@ALGORITHM
@pytest.mark.parametrize("arithmetic", ["nearest", "kernel"])
@pytest.mark.parametrize("slope", [8.0, 88.0, 1e4, 3e38])
def test_huge_slopes_stay_finite(slope: float, arithmetic: Arithmetic) -> None:
    """Only a token itself is left of the sum; no exponent overflows, in dead rows neither."""
    case = make_case(1, 100, 1, 1, [slope], dim=32, state=True)
    o, state = case.chunked(arithmetic)
    assert o.isfinite().all()
    assert state.isfinite().all()
    assert excess((o, state), case.recurrent(), case.bound()) <= 1
    last = case.v[0, -1, 0, :, None].float() * case.k[0, -1, 0].float()
    torch.testing.assert_close(state[0, 0], last, rtol=0, atol=20 * math.exp(-slope))


@ALGORITHM
@pytest.mark.parametrize("arithmetic", ["nearest", "kernel"])
def test_chunked_cut_at_a_chunk_is_bitwise_the_uncut_run(arithmetic: Arithmetic) -> None:
    case = make_case(2, 150, 1, 2, [0.05, 0.4], dim=32, state=True)
    o, state = case.chunked(arithmetic)
    first, middle = case.tokens(0, 64, case.initial_state).chunked(arithmetic)
    second, final = case.tokens(64, 150, middle).chunked(arithmetic)
    assert torch.equal(torch.cat((first, second), dim=1), o)
    assert torch.equal(final, state)


@SAME_BITS
@pytest.mark.gpu
def test_oracles_agree_on_cpu_and_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("compares a GPU with the CPU")
    case = make_case(1, 130, 1, 2, [0.0, 0.3], state=True)
    assert case.initial_state is not None
    on_gpu = Case(
        case.q.cuda(),
        case.k.cuda(),
        case.v.cuda(),
        case.decay.cuda(),
        case.scale,
        case.initial_state.cuda(),
    )
    for got, expected in zip(on_gpu.recurrent(), case.recurrent()):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-12, atol=1e-12)
    for got, expected in zip(on_gpu.chunked("kernel"), case.chunked("kernel")):
        assert torch.equal(got.cpu(), expected)


def test_lightning_slopes() -> None:
    slopes = lightning_slopes(64)
    assert slopes.dtype == torch.float32
    assert slopes.tolist() == [0.0625 * head for head in range(64)]
    assert lightning_slopes(4, layer=0).tolist() == [0.0, 2.0, 4.0, 6.0]
    expected = [8 / 3 * (1 / 24) * head for head in range(3)]
    assert lightning_slopes(3, layer=23).tolist() == torch.tensor(expected).tolist()
    assert not lightning_slopes(8, layer=24).any()
    for arguments in ((0,), (4, 25), (4, -1), (4, 0, 0)):
        with pytest.raises(ValueError, match=r"got .*, expected"):
            lightning_slopes(*arguments)
    for name in ("heads", "layer", "num_layers"):
        for number in (1.5, 4.0, True, None, "4"):
            wrong = {"heads": 4, name: number}
            with pytest.raises(TypeError, match=rf"^{name}: got {number!r}, expected an int"):
                lightning_slopes(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(1, 5, 128)}, ValueError, r"^q: got shape"),
        ({"k": torch.zeros(1, 5, 1, 128)}, ValueError, r"^k: got shape"),
        ({"v": torch.zeros(1, 4, 4, 128)}, ValueError, r"^v: got shape"),
        ({"v": torch.zeros(1, 5, 3, 128)}, ValueError, r"^v: got 3 value heads, expected .* 2$"),
        ({"decay": torch.zeros(3)}, ValueError, r"^decay: got shape .*\[4\] or \[2\]$"),
        ({"initial_state": torch.zeros(1, 2, 128, 128)}, ValueError, r"^initial_state: got shape"),
        ({"q": torch.zeros(1, 5, 2, 128)}, TypeError, r"^q: got torch.float32"),
        (
            {"initial_state": torch.zeros(1, 4, 128, 128).bfloat16()},
            TypeError,
            r"^initial_state: got torch.bfloat16",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, torch.Tensor], error: type[Exception], message: str
) -> None:
    case = make_case(1, 5, 2, 4, [0.0] * 4)
    for name, value in changes.items():
        setattr(case, name, value)
    with pytest.raises(error, match=message):
        case.chunked()
