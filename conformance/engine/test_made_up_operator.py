"""An operator that is declared and has a kernel is whole: nothing else names it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_up
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import linattn
from linattn.host import launch, workspace
from linattn.ops._face import FACES, declared
from linattn.spec.operator import Kernel, Operator
from linattn.spec.signature import Kind, Signature, TensorSpec

WHOLE = pytest.mark.claim("CE-01", "an operator declared in 25 lines has all that others have")
WORKSPACE = pytest.mark.claim("CE-02", "memory beside a call's tensors is a stream's, or a graph's")
DECLARED = pytest.mark.claim("CE-03", "a declaration that does not fit is refused, by name")

COPIES = [made_up.scaled_copy, made_up.workspace_copy]


def problem(device: torch.device, towers: int = 3, rows: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(towers * rows)
    x = torch.randn(towers, rows, 128, generator=generator)
    return x.to(device), torch.linspace(-2, 1, towers).to(device)


def expected(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * gain[:, None, None]


@WHOLE
def test_its_declaration_is_short() -> None:
    text = Path(inspect.getfile(made_up)).read_text()
    declaration = text.partition("# begin")[2].partition("# end")[0].splitlines()[1:]
    assert len([line for line in declaration if line.strip()]) <= 25


@WHOLE
def test_its_schema() -> None:
    operator = torch.ops.linattn.scaled_copy
    schemas = [str(overload._schema) for overload in (operator.default, operator.out)]
    assert schemas == [
        "linattn::scaled_copy(Tensor x, Tensor gain) -> Tensor",
        "linattn::scaled_copy.out(Tensor x, Tensor gain, Tensor(z!) out) -> ()",
    ]
    assert made_up.scaled_copy.__doc__ == "Rows of ``x``, multiplied by the gain of their tower."
    assert list(inspect.signature(made_up.scaled_copy).parameters) == ["x", "gain", "out"]


@WHOLE
def test_the_schemas_that_ship() -> None:
    """What exported graphs hold: parameters in the order of the function, the output last."""
    drafts = "Tensor q, Tensor k, Tensor v, {}state_pool, Tensor decay, Tensor? state_indices"
    pool = drafts.format("Tensor(d!) ")
    fixed = (
        "Tensor q, Tensor k, Tensor v, Tensor decay, float scale, Tensor? initial_state, "
        "bool output_final_state"
    )
    packed = (
        "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor cu_seqlens, float scale, "
        "Tensor(f!)? state_pool, Tensor? initial_state_indices, bool persistent, "
        "Tensor? has_initial_state"
    )
    mtp = f"{pool}, float scale, bool update_state, Tensor(g!)? intermediate_states"
    verify = (
        f"{pool}, float scale, Tensor(g!)? k_buffer, Tensor(h!)? v_buffer, Tensor? accepted_len"
    )
    update = (
        "Tensor k_buffer, Tensor v_buffer, Tensor(c!) state_pool, Tensor decay, "
        "Tensor? state_indices, Tensor accepted_len"
    )
    expected = {
        f"lightning_attn_fwd({fixed}) -> (Tensor, Tensor)",
        f"lightning_attn_fwd.out({fixed}, Tensor(z!) out) -> Tensor",
        f"lightning_attn_fwd_varlen({packed}) -> (Tensor, Tensor)",
        f"lightning_attn_fwd_varlen.out({packed}, Tensor(z!) out) -> Tensor",
        f"la_decode({pool}, float scale) -> Tensor",
        f"la_decode.out({pool}, float scale, Tensor(z!) out) -> ()",
        f"la_decode_mtp({mtp}) -> Tensor",
        f"la_decode_mtp.out({mtp}, Tensor(z!) out) -> ()",
        f"la_verify_kvbuffer({verify}) -> Tensor",
        f"la_verify_kvbuffer.out({verify}, Tensor(z!) out) -> ()",
        f"la_state_update_kvbuffer({update}) -> ()",
    }
    found = {
        str(overload._schema).removeprefix("linattn::")
        for face in FACES.values()
        for overload in face.ops.values()
    }
    assert found == expected


@WHOLE
@pytest.mark.dispatch
def test_absent_results_are_as_their_fakes_say(recorder: Any) -> None:
    """Of the device and dtype that torch.compile was told, whatever the default dtype is."""
    q, decay = torch.zeros(1, 4, 2, 128).bfloat16(), torch.zeros(2)
    torch.set_default_dtype(torch.float64)
    try:
        _, absent = torch.ops.linattn.lightning_attn_fwd(q, q, q, decay, 1.0, None, False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (absent.shape, absent.dtype, absent.device) == ((0,), torch.float32, q.device)


@WHOLE
@pytest.mark.bitwise
@pytest.mark.sm90
@pytest.mark.sm100
@pytest.mark.parametrize("copy", COPIES)
def test_it_runs(copy: Any, device: torch.device, assert_bitwise: Any) -> None:
    for towers, rows in ((3, 4), (3, 5), (1, 1), (2, 5)):
        x, gain = problem(device, towers, rows)
        assert_bitwise(copy(x, gain), expected(x, gain))
        out = torch.full((towers, rows, 256), torch.nan, device=device)[..., 64:192]
        assert copy(x.transpose(0, 1).contiguous().transpose(0, 1), gain, out=out) is out
        assert_bitwise(out, expected(x, gain))
    assert copy(x[:, :0], gain).shape == (2, 0, 128)


@WHOLE
@pytest.mark.dispatch
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, g: {"x": [x]}, TypeError, r"x: got list, expected a tensor \[B, T, 128\]"),
        (lambda x, g: {"x": x.double()}, TypeError, "x: got torch.float64, expected torch.float32"),
        (lambda x, g: {"x": x.to_sparse()}, TypeError, "x: got a sparse_coo tensor"),
        (lambda x, g: {"x": x[..., ::2]}, ValueError, r"x: got shape \[3, 4, 64\]"),
        (lambda x, g: {"x": x.mT.contiguous().mT}, ValueError, "x: got shape|x: got strides"),
        (lambda x, g: {"gain": g[:2]}, ValueError, "gain: got shape .* with B = 3 from x"),
        (lambda x, g: {"out": x}, ValueError, "out: got a tensor that overlaps x"),
        (lambda x, g: {"out": x[:1].expand(3, 4, 128)}, ValueError, "out: got shape .* strides"),
        (lambda x, g: {"x": x.clone().requires_grad_()}, ValueError, "x: got a .* requires grad"),
        (lambda x, g: {"x": torch._neg_view(x)}, ValueError, "x: got a negative view"),
        (lambda x, g: {"gain": g.to("meta")}, ValueError, "gain: got a tensor on meta"),
    ],
)
def test_its_refusals(change: Any, error: type[Exception], message: str, recorder: Any) -> None:
    x, gain = problem(torch.device("cpu"))
    call = {"x": x, "gain": gain}
    for _ in range(2):  # the second time next to warm plans
        with pytest.raises(error, match=message):
            made_up.scaled_copy(**call | change(x, gain))
        launches = len(recorder.launches)
        made_up.scaled_copy(**call)
        assert len(recorder.launches) == launches + 1


@WHOLE
@pytest.mark.dispatch
def test_transforms_are_refused(recorder: Any) -> None:
    x, gain = problem(torch.device("cpu"))
    with forward_ad.dual_level(), pytest.raises(ValueError, match="x: got a dual tensor"):
        made_up.scaled_copy(forward_ad.make_dual(x, x), gain)
    with pytest.raises(TypeError, match=r"x: got a tensor that torch\.vmap maps"):
        torch.vmap(made_up.scaled_copy, (0, None))(x[None], gain)
    assert recorder.launches == []


@WHOLE
@pytest.mark.dispatch
def test_its_fake(recorder: Any) -> None:
    with FakeTensorMode():
        x, gain = torch.empty(3, 4, 128, device="cuda"), torch.empty(3, device="cuda")
        y = made_up.scaled_copy(x, gain)
        assert made_up.scaled_copy(x, gain, out=y) is y
        with pytest.raises(ValueError, match="gain: got shape"):
            made_up.scaled_copy(x, torch.empty(1, device="cuda"))
    assert (y.shape, y.dtype, y.device.type) == ((3, 4, 128), torch.float32, "cuda")
    assert recorder.launches == []


@WHOLE
@pytest.mark.sm90
@pytest.mark.sm100
@pytest.mark.parametrize("overload", ["default", "out"])
def test_opcheck(overload: str, device: torch.device) -> None:
    x, gain = problem(device)
    out = (torch.empty_like(x),) if overload == "out" else ()
    operator = getattr(torch.ops.linattn.scaled_copy, overload)
    assert set(torch.library.opcheck(operator, (x, gain, *out)).values()) == {"SUCCESS"}


@WHOLE
@pytest.mark.sm90
@pytest.mark.sm100
@pytest.mark.parametrize("strided", [False, True])
def test_compile(strided: bool, device: torch.device, assert_bitwise: Any) -> None:
    """One graph for all sizes; an output that is a view is as good as any."""
    torch.compiler.reset()
    graphs: list[Any] = []

    def backend(module: Any, example: Any) -> Any:
        graphs.append(module)
        return module.forward

    def model(x: torch.Tensor, gain: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        made_up.scaled_copy(x + 1, gain, out=out)
        return made_up.scaled_copy(out, gain) - 1

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for towers, rows in ((3, 4), (2, 5), (4, 7)):
        x, gain = problem(device, towers, rows)
        outs = [torch.empty(towers, 2, rows, 128, device=device)[:, 1] for _ in range(2)]
        if not strided:
            outs = [out.contiguous() for out in outs]
        assert_bitwise(compiled(x, gain, outs[0]), model(x, gain, outs[1]))
        assert_bitwise(outs[0], expected(x + 1, gain))
    assert len(graphs) == 1


@WHOLE
@pytest.mark.sm90
@pytest.mark.sm100
@pytest.mark.parametrize("copy", COPIES)
def test_graphs(copy: Any, cuda: torch.device, graph_safe: Any, no_host_sync: Any) -> None:
    """Each graph has its own workspace: a replay is right whatever ran in between."""
    x, gain = problem(cuda)
    with made_up.known(), no_host_sync():
        linattn.warm_up(copy)
    contents = [problem(cuda)[0] * scale for scale in (1.0, -3.0)]
    graph_safe(lambda: copy(x, gain), lambda number: x.copy_(contents[number]))
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    results = []
    for number, graph in enumerate(graphs):
        with torch.cuda.graph(graph):
            results.append(copy(x * (number + 1), gain))
    copy(torch.zeros(64, 64, 128, device=cuda), torch.ones(64, device=cuda))
    for _ in range(3):
        for graph in graphs:
            graph.replay()
    for number, result in enumerate(results):
        assert torch.equal(result, expected(x * (number + 1), gain))


@WHOLE
@pytest.mark.sm90
@pytest.mark.sm100
@pytest.mark.parametrize("copy", COPIES)
def test_it_can_be_warmed_and_explained(copy: Any, device: torch.device) -> None:
    with made_up.known():
        linattn.warm_up(copy)
        linattn.warm_up(copy.__name__, device)
        plan = linattn.explain(copy, arch="sm90", B=2, T=70_000)
        assert plan.grid == (70_000, 2, 1)
        assert "nothing is launched: T == 0" in linattn.explain(copy, arch="sm100", B=2, T=0).reason
        with pytest.raises(linattn.UnsupportedArchitecture, match="got sm80"):
            linattn.explain(copy, arch="sm80", B=2, T=1)
        with pytest.raises(TypeError, match="T: got nothing, expected the sizes B, T"):
            linattn.explain(copy, arch="sm90", B=2)
    with pytest.raises(ValueError, match=f"op: got '{copy.__name__}'"):
        linattn.explain(copy, arch="sm90", B=2, T=1)


@WORKSPACE
@pytest.mark.dispatch
def test_one_block_serves_a_stream_and_grows(recorder: Any) -> None:
    workspace.release()
    seen = []
    for rows in (4, 2, 9, 9, 4):
        made_up.workspace_copy(*problem(torch.device("cpu"), 3, rows))
        (access,) = [x for x in recorder.launches[-1].call.accesses if x.spec.name == "workspace"]
        assert access.shape == (3 * rows * 128,)
        assert access.address % 16 == 0
        seen.append(access.address)
    assert seen[0] == seen[1]
    assert len(set(seen[2:])) == 1
    workspace.release()


@WORKSPACE
@pytest.mark.sm90
@pytest.mark.sm100
def test_streams_have_blocks_of_their_own(cuda: torch.device) -> None:
    workspace.release()
    streams = [torch.cuda.Stream() for _ in range(2)]
    starts = []
    for stream in (*streams, *streams):
        with torch.cuda.stream(stream), workspace.lent(cuda, 4096) as block:
            starts.append(block.data_ptr())
    assert starts[:2] == starts[2:]
    assert len(set(starts)) == 2
    workspace.release()


def _declare(signature: Signature, **declaration: Any) -> None:
    operator = Operator("nothing", signature, {})
    rules = {"results": {"y": "out"}, "problem": ("B", "T"), "idle": ("B",)} | declaration

    @declared(operator, signature, **rules)
    def never(
        x: torch.Tensor, gain: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Is not declared in the end."""


@DECLARED
@pytest.mark.dispatch
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"results": {"y": "result"}}, TypeError, r"never: got \['result'\], expected parameters"),
        ({"switches": {"fast": "fast"}}, TypeError, r"never: got \['fast'\]"),
        ({"results": {}}, TypeError, "never: got out that may be None, expected a tensor"),
    ],
)
def test_a_declaration_that_does_not_fit(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _declare(made_up.SIGNATURE, **change)
    assert "never" not in FACES


@DECLARED
@pytest.mark.dispatch
@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ("alpha: float = 1.0", "alpha: got a float, expected a scalar of the signature"),
        ("fast: bool = False", "fast: got a bool, expected a switch or result"),
        ("n: int = 1", "n: got <class 'int'>, expected Tensor, Tensor | None, bool, float, or an"),
        ("n=1", "n: got None, expected Tensor"),
        ("_n: float = 1.0", "never: _n: got positional or keyword, expected a plain name"),
        ("*rest: float", "never: rest: got variadic positional, expected a plain name"),
    ],
)
def test_parameters_that_no_call_can_have(parameter: str, message: str) -> None:
    text = f"def never(x: Tensor, gain: Tensor, {parameter}) -> Tensor: ..."
    made: dict[str, Any] = {}
    exec(text, {"Tensor": torch.Tensor}, made)
    decorate = declared(made_up.OPERATOR, made_up.SIGNATURE, **made_up.RULES | {"results": {}})
    with pytest.raises(TypeError, match=message.replace("|", r"\|")):
        decorate(made["never"])
    assert "never" not in FACES


@DECLARED
@pytest.mark.dispatch
def test_scalars_of_the_signature_are_parameters() -> None:
    scaled = replace(made_up.SIGNATURE, scalars=(("alpha", "f32"),))
    with pytest.raises(TypeError, match=r"never: got no float parameters \['alpha'\]"):
        _declare(scaled)
    with pytest.raises(ValueError, match=r"never: flags: got \['fast'\], expected"):
        _declare(replace(made_up.SIGNATURE, flags=("fast",)))
    with pytest.raises(ValueError, match=r"never: sizes: got \['Z'\], expected"):
        _declare(replace(made_up.SIGNATURE, sizes=("B", "T", "Z")))


@WHOLE
@pytest.mark.bitwise
@pytest.mark.sm90
@pytest.mark.sm100
def test_a_function_of_which_no_size_is_dynamic(device: torch.device, assert_bitwise: Any) -> None:
    rules = {name: rule for name, rule in made_up.RULES.items() if name != "dynamic"}

    @declared(made_up.OPERATOR, made_up.SIGNATURE, **rules)
    def still_copy(
        x: torch.Tensor, gain: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Validates every size."""

    del FACES["still_copy"]
    for towers, rows in ((3, 4), (3, 4), (2, 5), (3, 4)):
        x, gain = problem(device, towers, rows)
        assert_bitwise(still_copy(x, gain), expected(x, gain))


@DECLARED
@pytest.mark.dispatch
@pytest.mark.parametrize(
    "change",
    [
        {"results": {"yy": "out"}},
        {"problem": ("B", "U")},
        {"idle": ("Q",)},
        {"dynamic": ("b",)},
        {"derived": {"U": "V"}},
        {"written": {"yy": "fast"}},
        {"needs": (("x", "nothing"),)},
        {"slots": ("indices", "B")},
        {"starts": {"y": "nothing"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_names_that_the_signature_does_not_know(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"never: {next(iter(change))}: got \['.*expected \["):
        _declare(made_up.SIGNATURE, **change)


@DECLARED
@pytest.mark.dispatch
def test_a_signature_that_no_function_has() -> None:
    x = made_up.X
    for change, message in (
        ({"dtype": "f16"}, r"x: dtype: got \['f16'\], expected"),
        ({"holds": "slot"}, "x: holds: got slot, expected"),
        ({"holds": "lengths"}, "x: holds lengths: got no size called T_max"),
        ({"kind": Kind.INDEX}, r"x: got \[B, T, 128\], expected one dimension"),
    ):
        with pytest.raises(ValueError, match=message):
            Signature((replace(x, **change), made_up.GAIN), ("B", "T"))
    with pytest.raises(ValueError, match="n: got i32, expected f32"):
        Signature((x, made_up.GAIN), ("B", "T"), scalars=(("n", "i32"),))
    with pytest.raises(ValueError, match="tensors: got 0 that go whole"):
        Signature((x,), ("B", "T"))
    with pytest.raises(ValueError, match="tensors: got 2 that go whole"):
        Signature((x, made_up.GAIN, TensorSpec("more", ("B",), "f32", Kind.WHOLE)), ("B", "T"))
    with pytest.raises(ValueError, match=r"arguments: got .* expected different names"):
        Signature((x, x, made_up.GAIN), ("B", "T"))
    split = Kernel("copy_kernel", (), lambda s, _: None, lambda c, s, _: (1, 1, 1), splits="B")
    with pytest.raises(ValueError, match=r"splits: got B, expected a size that gain .* in front"):
        Operator("split", made_up.SIGNATURE, {"sm90": split})


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    """Plans of these operators are nothing that other tests may count."""
    yield
    launch.current().forget()
