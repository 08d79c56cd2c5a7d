"""Decode, verify and commit: bad input is refused before a launch, by name, on a warm call too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from host_calls import python_calls
from stand_ins import HostLauncher

import linattn
from linattn.host import guards, launch, plan
from linattn.host.arch import Arch

pytestmark = pytest.mark.dispatch

B, T, H, HV, P, D = 2, 3, 2, 4, 4, 128
REFUSED = pytest.mark.claim("SD-V1", "bad draft input is refused by name, on a warm call too")
PASSED = pytest.mark.claim("SD-V2", "arguments of draft calls reach the kernel as they are")
CHECKED = pytest.mark.claim("SD-V3", "checked mode refuses contents of draft calls by name")
EMPTY = pytest.mark.claim("SD-V4", "empty draft calls launch nothing")
META = pytest.mark.claim("SD-V5", "draft calls read no device value on the host")


@pytest.fixture
def host() -> Iterator[HostLauncher]:
    with launch.use_launcher(HostLauncher()) as launcher:
        assert isinstance(launcher, HostLauncher)
        yield launcher


def tokens(heads: int = H, *shape: int, dim: int = D) -> torch.Tensor:
    return torch.zeros(*(shape or (B, T)), heads, dim, dtype=torch.bfloat16)


def common() -> dict[str, Any]:
    return {
        "q": tokens(),
        "k": tokens(),
        "v": tokens(HV),
        "state_pool": torch.zeros(P, HV, D, D),
        "decay": torch.zeros(HV),
        "state_indices": torch.tensor([2, 0]),
        "out": tokens(HV),
    }


def held() -> dict[str, Any]:
    return {"k_buffer": tokens(H, P, 8), "v_buffer": tokens(HV, P, 8)}


def lengths() -> torch.Tensor:
    return torch.tensor([1, 3], dtype=torch.int32)


def one_token() -> dict[str, Any]:
    return common() | {name: tokens(n, B) for name, n in zip("qkv", (H, H, HV))} | {
        "out": tokens(HV, B)
    }  # fmt: skip


def legal(name: str) -> dict[str, Any]:
    """A legal call with every optional argument."""
    if name == "la_decode":
        return one_token()
    if name == "la_decode_mtp":
        return common() | {"intermediate_states": torch.zeros(B, T, HV, D, D)}
    if name == "la_verify_kvbuffer":
        return common() | held() | {"accepted_len": lengths()}
    rest = {key: common()[key] for key in ("state_pool", "decay", "state_indices")}
    return held() | rest | {"accepted_len": lengths()}


def call(name: str, **changes: Any) -> Any:
    return getattr(linattn, name)(**legal(name) | changes)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype)
    return flat[1 : 1 + tensor.numel()].view(tensor.shape)


MTP, VERIFY, UPDATE, ONE = (
    "la_decode_mtp",
    "la_verify_kvbuffer",
    "la_state_update_kvbuffer",
    "la_decode",
)
BAD: dict[str, tuple[str, Callable[[], dict[str, Any]], type[Exception], str]] = {
    "T 9": (
        MTP,
        lambda: {n: tokens(h, B, 9) for n, h in zip("qkv", (H, H, HV))}
        | {"intermediate_states": None, "out": None},
        ValueError,
        "q: got T = 9, expected 1 to 8 tokens",
    ),
    "T 0": (
        VERIFY,
        lambda: {n: tokens(h, B, 0) for n, h in zip("qkv", (H, H, HV))} | {"out": None},
        ValueError,
        "q: got T = 0",
    ),
    "K 64": (ONE, lambda: {"q": tokens(H, B, dim=64)}, ValueError, r"q: got shape \[2, 2, 64\]"),
    "V 120": (MTP, lambda: {"v": tokens(HV, dim=120)}, ValueError, "v: got shape"),
    "HV": (MTP, lambda: {"v": tokens(3)}, ValueError, "v: got HV = 3, expected a multiple"),
    "k tokens": (MTP, lambda: {"k": tokens(H, B, 2)}, ValueError, "k: got shape"),
    "q rank": (ONE, lambda: {"q": tokens()}, ValueError, "q: got shape"),
    "q type": (MTP, lambda: {"q": tokens().half()}, TypeError, "q: got torch.float16"),
    "q none": (MTP, lambda: {"q": None}, TypeError, "q: got NoneType, expected a tensor"),
    "pool type": (
        ONE,
        lambda: {"state_pool": torch.zeros(P, HV, D, D).bfloat16()},
        TypeError,
        "state_pool: got torch.bfloat16, expected torch.float32",
    ),
    "pool transposed": (
        UPDATE,
        lambda: {"state_pool": torch.zeros(P, HV, D, D).mT},
        ValueError,
        r"state_pool: got strides .*contiguous last two dimensions \(V, K\)",
    ),
    "pool heads": (
        VERIFY, lambda: {"state_pool": torch.zeros(P, 2, D, D)}, ValueError, "state_pool: got shape"
    ),
    "pool expanded": (
        ONE,
        lambda: {"state_pool": torch.zeros(1, HV, D, D).expand(P, HV, D, D)},
        ValueError,
        "state_pool: .*every element has its own address",
    ),
    "slots": (
        ONE,
        lambda: {"state_indices": None, "state_pool": torch.zeros(1, HV, D, D)},
        ValueError,
        "state_pool: got P = 1 slots, expected at least B = 2 without state_indices",
    ),
    "indices float": (
        MTP, lambda: {"state_indices": torch.zeros(B)}, TypeError, "state_indices: got torch.float"
    ),
    "indices count": (
        UPDATE, lambda: {"state_indices": torch.zeros(3).int()}, ValueError, "accepted_len: got|sta"
    ),
    "one buffer": (
        VERIFY,
        lambda: {"v_buffer": None, "accepted_len": None},
        ValueError,
        "v_buffer: got None, expected a tensor, because k_buffer is given",
    ),
    "lengths alone": (
        VERIFY,
        lambda: {"k_buffer": None, "v_buffer": None},
        ValueError,
        "k_buffer: got None, expected a tensor, because accepted_len is given",
    ),
    "buffer short": (
        VERIFY,
        lambda: {"k_buffer": tokens(H, P, 2), "v_buffer": tokens(HV, P, 2)},
        ValueError,
        "q: got T = 3, expected at most T_max = 2 from k_buffer",
    ),
    "buffer long": (
        UPDATE,
        lambda: {"k_buffer": tokens(H, P, 9), "v_buffer": tokens(HV, P, 9)},
        ValueError,
        "k_buffer: got T_max = 9",
    ),
    "buffer slots": (
        UPDATE, lambda: {"k_buffer": tokens(H, 3, 8)}, ValueError, "got shape .*P = 3 from k_buffer"
    ),
    "buffer type": (
        VERIFY,
        lambda: {"k_buffer": torch.zeros(P, 8, H, D)},
        TypeError,
        "k_buffer: got torch.float32",
    ),
    "out shape": (MTP, lambda: {"out": tokens(H)}, ValueError, "out: got shape"),
    "out overlaps": (
        VERIFY,
        lambda: (lambda v: {"v": v, "out": v})(tokens(HV)),
        ValueError,
        "out: got a tensor that overlaps v",
    ),
    "decay": (ONE, lambda: {"decay": torch.zeros(3)}, ValueError, "decay: got shape"),
    "misaligned": (
        ONE, lambda: {"k": misaligned(tokens(H, B))}, ValueError, "k: got an address 2 bytes past"
    ),
    "stride": (
        MTP,
        lambda: {"q": torch.zeros(B, T, H, 132, dtype=torch.bfloat16)[..., :128]},
        ValueError,
        "q: got strides",
    ),
    "k none": (UPDATE, lambda: {"k_buffer": None}, TypeError, "k_buffer: got NoneType"),
    "decay none": (
        VERIFY, lambda: {"decay": None}, TypeError,
        r"decay: got NoneType, expected a tensor \[H\] or \[HV\]",
    ),
    "pool number": (ONE, lambda: {"state_pool": 3}, TypeError, "state_pool: got int"),
    "out is q": (
        ONE,
        lambda: (lambda q: {"q": q, "out": q, "v": tokens(H, B), "decay": torch.zeros(H),
                            "state_pool": torch.zeros(P, H, D, D)})(tokens(H, B)),
        ValueError,
        "out: got a tensor that overlaps q",
    ),
    "scale tensor": (MTP, lambda: {"scale": torch.ones(())}, TypeError, "scale: got a tensor"),
    "scale nan": (VERIFY, lambda: {"scale": float("nan")}, ValueError, "scale: got nan"),
    "update flag": (MTP, lambda: {"update_state": 1}, TypeError, "update_state: got 1"),
    "grad": (
        MTP, lambda: {"q": tokens().requires_grad_()}, ValueError, "q: .*requires grad"
    ),
    "steps shape": (
        MTP,
        lambda: {"intermediate_states": torch.zeros(B, 2, HV, D, D)},
        ValueError,
        "intermediate_states: got shape",
    ),
    "device": (
        ONE, lambda: {"state_indices": torch.zeros(B, device="meta").int()}, ValueError, "meta"
    ),
    **{
        f"{operator}-sparse {name}": (
            operator,
            lambda name=name, operator=operator: {name: legal(operator)[name].to_sparse()},
            TypeError,
            f"{name}: got a sparse_coo tensor, expected a strided one",
        )
        for name, operator in (
            ("q", ONE), ("state_pool", UPDATE), ("decay", MTP), ("decay", UPDATE),
            ("state_indices", VERIFY), ("accepted_len", UPDATE), ("k_buffer", VERIFY), ("out", ONE),
        )
    },
    **{
        f"{name}-negative": (
            name,
            lambda: {"decay": torch.full((HV,), -0.5j).conj().imag},
            ValueError,
            "decay: got a negative view, expected .*resolve_neg",
        )
        for name in ("la_decode", "la_decode_mtp", "la_verify_kvbuffer", "la_state_update_kvbuffer")
    },
}  # fmt: skip


@REFUSED
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, host: HostLauncher) -> None:
    name, change, error, message = BAD[case]
    for warm in (False, True):
        if warm:
            call(name)
        with pytest.raises(error, match=message):
            call(name, **change())
        assert len(host.launches) == warm


@pytest.mark.claim("SD-V6", "a nested tensor is refused by name in a first draft call")
@pytest.mark.parametrize("name", [ONE, MTP, VERIFY, UPDATE])
def test_nested_tensors(name: str, host: HostLauncher) -> None:
    """In a later one, of any shape, torch's own comparison of tensors ends the process."""
    for argument, tensor in legal(name).items():
        nested = torch.nested.nested_tensor([tensor[0]])
        with pytest.raises(TypeError, match=f"^{argument}: got a nested tensor"):
            call(name, **{argument: nested})
    assert not host.launches


def pool_and(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """A pool of states, and a tensor that lies in its memory."""
    pool = torch.zeros(P, HV, D, D)
    count = torch.Size(shape).numel()
    return pool, pool.view(dtype).flatten()[-count:].view(shape)


def within_the_pool(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    pool, inside = pool_and(*shape, dtype=dtype)
    return {"state_pool": pool, name: inside}


def drafts_inside_their_buffer() -> dict[str, Any]:
    buffers = held()
    return {**buffers, "k": buffers["k_buffer"][:B, :T]}


def one_buffer() -> dict[str, Any]:
    buffer = tokens(HV, P, 8)
    return {"q": tokens(HV), "k": tokens(HV), "k_buffer": buffer, "v_buffer": buffer}


LENGTHS = {"accepted_len": torch.tensor([1, 2])}
OVERLAPPING: dict[str, tuple[str, Callable[[], dict[str, Any]], str]] = {
    "one buffer": (VERIFY, one_buffer, "k_buffer: got a tensor that overlaps v_buffer"),
    "drafts in their buffer": (
        VERIFY, drafts_inside_their_buffer, "k_buffer: got a tensor that overlaps k"
    ),
    "buffer in the pool": (
        VERIFY,
        lambda: {**held(), **within_the_pool("k_buffer", P, 8, H, D)},
        "state_pool: got a tensor that overlaps k_buffer",
    ),
    "drafts in a pool that is committed to": (
        VERIFY,
        lambda: {**held(), **LENGTHS, **within_the_pool("k", B, T, H, D)},
        "state_pool: got a tensor that overlaps k",
    ),
    "steps in the pool": (
        MTP,
        lambda: within_the_pool("intermediate_states", 1, 2, HV, D, D, dtype=torch.float32)
        | {"q": tokens(H, 1, 2), "k": tokens(H, 1, 2), "v": tokens(HV, 1, 2),
           "out": tokens(HV, 1, 2), "state_indices": torch.tensor([0])},
        "state_pool: got a tensor that overlaps intermediate_states",
    ),
    "v in the pool": (
        ONE,
        lambda: within_the_pool("v", B, HV, D),
        "state_pool: got a tensor that overlaps v",
    ),
    "buffer in a pool that is stepped": (
        UPDATE,
        lambda: within_the_pool("k_buffer", P, 8, H, D),
        "state_pool: got a tensor that overlaps k_buffer",
    ),
}  # fmt: skip


@REFUSED
@pytest.mark.parametrize("case", OVERLAPPING)
def test_what_is_written_shares_no_memory(case: str, host: HostLauncher) -> None:
    """Twice, for nothing of a refused call may be remembered."""
    name, change, message = OVERLAPPING[case]
    call(name)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{message}, expected memory of its own"):
            call(name, **change())
    assert len(host.launches) == 1


@PASSED
def test_what_is_only_read_may_share_memory(host: HostLauncher) -> None:
    """An input inside a pool that is not written, and pools of all layers side by side."""
    call(MTP, update_state=False, **within_the_pool("k", B, T, H, D))
    call(VERIFY, accepted_len=None, **within_the_pool("k", B, T, H, D))
    layers = torch.zeros(P, 2, HV, D, D)
    call(
        MTP,
        state_pool=layers[:, 0],
        intermediate_states=layers[:B, None, 1].expand(B, 1, HV, D, D),
        q=tokens(H, B, 1),
        k=tokens(H, B, 1),
        v=tokens(HV, B, 1),
        out=tokens(HV, B, 1),
    )
    assert len(host.launches) == 3


@REFUSED
@pytest.mark.parametrize("name", [ONE, MTP, VERIFY, UPDATE])
def test_freed_memory(name: str, host: HostLauncher) -> None:
    """A tensor whose storage was resized to nothing, as offloaded weights are."""
    call(name)
    arguments = legal(name)
    freed = "v_buffer" if name == UPDATE else "v"
    arguments[freed].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"{freed}: got a tensor without memory"):
        call(name, **arguments)
    assert len(host.launches) == 1


@REFUSED
@pytest.mark.parametrize("name", [ONE, MTP, VERIFY, UPDATE])
def test_known_addresses_hide_no_other(name: str, host: HostLauncher) -> None:
    """Calls that differ from a warm one in nothing but one address are looked at, each time."""
    arguments = legal(name)
    moving = "k_buffer" if name == UPDATE else "q"
    tensor = arguments[moving]
    memory = torch.zeros(tensor.numel() + 256, dtype=tensor.dtype)

    def at(start: int) -> torch.Tensor:
        return memory[start : start + tensor.numel()].view(tensor.shape)

    for _ in range(3):
        for start in (0, 8, 128):
            call(name, **arguments | {moving: at(start)})
            assert host.launches[-1].found[moving].address == at(start).data_ptr()
        with pytest.raises(ValueError, match=f"{moving}: got an address 2 bytes past"):
            call(name, **arguments | {moving: at(1)})
    assert len(host.launches) == 9


@REFUSED
@pytest.mark.parametrize("name", [ONE, MTP, VERIFY])
def test_known_addresses_hide_no_overlap(name: str, host: HostLauncher) -> None:
    """An output that moves into an input and out again, an input that moves under an output."""
    arguments = legal(name)
    out, v = arguments["out"], arguments["v"]
    count = out.numel()
    memory = torch.zeros(3 * count, dtype=out.dtype)

    def at(start: int) -> torch.Tensor:
        return memory[start : start + count].view(out.shape)

    for _ in range(3):
        call(name, **arguments | {"v": at(0), "out": at(count)})
        for ours, theirs in ((0, count - 8), (0, 0), (count + 8, count)):
            with pytest.raises(ValueError, match="out: got a tensor that overlaps v"):
                call(name, **arguments | {"v": at(ours), "out": at(theirs)})
        call(name, **arguments | {"v": at(2 * count), "out": at(count)})
    assert v.shape == out.shape
    assert len(host.launches) == 6


@REFUSED
@pytest.mark.parametrize("name", [ONE, MTP, VERIFY, UPDATE])
def test_known_addresses_hide_no_negative_view(name: str, host: HostLauncher) -> None:
    """Two views of the same memory, shape and strides, of which torch negates one on reading."""
    numbers = torch.full((HV,), 0.5j)
    positive, negative = numbers.imag, numbers.conj().imag
    assert positive.data_ptr() == negative.data_ptr()
    assert positive.stride() == negative.stride()
    arguments = legal(name)
    for _ in range(3):
        call(name, **arguments | {"decay": positive})
        with pytest.raises(ValueError, match="decay: got a negative view"):
            call(name, **arguments | {"decay": negative})
    assert len(host.launches) == 3


@REFUSED
@pytest.mark.parametrize("name", [ONE, MTP, VERIFY, UPDATE])
def test_more_addresses_than_are_remembered(
    name: str, host: HostLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MAX_KNOWN", 4)
    arguments = legal(name)
    pools = [torch.zeros(P, HV, D, D) for _ in range(6)]
    for pool in 2 * pools:
        call(name, **arguments | {"state_pool": pool})
        assert host.launches[-1].found["state_pool"].address == pool.data_ptr()
    assert [len(one.known) for one in host.plans.values()] == [4]


def looks(name: str, arguments: dict[str, Any]) -> list[str]:
    """What a call enters on its way to a plan: ``find`` where the latest one does not fit, and
    ``check`` where no earlier one helps."""
    with python_calls() as calls:
        call(name, **arguments)
    return [entered for entered in calls if entered in ("find", "check")]


# One object as several arguments: every set of them that is only read and whose shapes and dtypes
# allow it. H == HV there.
SHARED = [
    *((name, *names) for name in (ONE, MTP, VERIFY) for names in ("qk", "qv", "kv", "qkv")),
    (VERIFY, "state_indices", "accepted_len"),
    (VERIFY, "q", "k", "state_indices", "accepted_len"),
    (UPDATE, "k_buffer", "v_buffer"),
    (UPDATE, "state_indices", "accepted_len"),
    (UPDATE, "k_buffer", "v_buffer", "state_indices", "accepted_len"),
]


def with_shared(name: str, *names: str) -> dict[str, Any]:
    """A legal call with one object for all ``names`` of a shape."""
    arguments = legal(name) | {"state_pool": torch.zeros(P, H, D, D), "decay": torch.zeros(H)}
    if "v" in arguments:
        arguments |= {"v": arguments["q"].clone(), "out": arguments["q"].clone()}
    if "v_buffer" in arguments:
        arguments["v_buffer"] = arguments["k_buffer"].clone()
    if "intermediate_states" in arguments:
        arguments["intermediate_states"] = None
    by_shape: dict[Any, torch.Tensor] = {}
    for shared in names:
        one = arguments[shared]
        arguments[shared] = by_shape.setdefault(one.shape, one)
    return arguments


@PASSED
@pytest.mark.parametrize("private", [True, False], ids=["torch's check", "properties"])
@pytest.mark.parametrize("shared", SHARED, ids="-".join)
def test_one_object_as_several_arguments(
    shared: tuple[str, ...], private: bool, host: HostLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such calls are as warm as others are, and a warm one is refused what others are."""
    if not private:
        monkeypatch.setattr(guards, "_compiled", lambda: None)
    name, *names = shared
    for count in range(4):  # other tensors at other addresses
        arguments = with_shared(*shared)
        looked = looks(name, arguments)
        assert ("check" in looked) == (count == 0)
        assert looked == [] or count < 2
        found = host.launches[-1].found
        for one in names:
            assert found[one].address == arguments[one].data_ptr(), one
    first = names[0]
    bad = arguments[first].double()
    with pytest.raises(TypeError, match=r"got torch\.float64"):
        call(name, **arguments | dict.fromkeys(names[:2], bad))
    if first != "state_indices":
        bad = misaligned(arguments[first])
        with pytest.raises(ValueError, match=f"{first}: got an address 2 bytes past"):
            call(name, **arguments | dict.fromkeys(names[:2], bad))
        with pytest.raises(ValueError, match=f"{first}: got an address 2 bytes past"):
            call(name, **arguments | {first: bad})
    if name != UPDATE and first == "q":
        with pytest.raises(ValueError, match="out: got a tensor that overlaps q"):
            call(name, **arguments | {"out": arguments["q"]})
    assert len(host.launches) == 4
    apart = with_shared(name)
    call(name, **apart)
    found = host.launches[-1].found
    for one in names:
        assert found[one].address == apart[one].data_ptr(), one


@PASSED
def test_tensors_made_in_inference_mode(host: HostLauncher) -> None:
    """They are warm as others are."""
    with torch.inference_mode():
        inference = legal(ONE)
    for arguments in (legal(ONE), inference):
        for _ in range(2):
            call(ONE, **arguments)
        assert looks(ONE, arguments) == []
    assert len(host.launches) == 6


@PASSED
@pytest.mark.parametrize("private", [True, False], ids=["torch's check", "properties"])
def test_what_a_matcher_accepts(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if private and guards._compiled() is None:
        pytest.skip("this torch has no check of its own")
    if not private:
        monkeypatch.setattr(guards, "_compiled", lambda: None)
    a, b, other = torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3, 2)
    apart, together = guards.matcher([a, b, other]), guards.matcher([a, a, other])
    c, d, wrong = torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3).double()
    assert apart(c, d, other)
    assert together(c, c, other)
    assert not together(c, d, other)
    assert not apart(c, c, other)
    for refused in ((wrong, wrong, other), (c, c, c), (None, None, other), (c, c, None)):
        assert not together(*refused)
    assert not apart(c, wrong, other)
    pairs = torch.zeros(2, 1, 2, dtype=torch.complex64)
    plain = guards.matcher([pairs.imag])
    assert plain(pairs.real)
    assert not plain(pairs.conj().imag)
    assert not plain(pairs.imag.as_strided((2, 1, 2), (4, 3, 2)))


@REFUSED
@pytest.mark.parametrize("name", [ONE, MTP, VERIFY, UPDATE])
def test_unsupported_devices(name: str) -> None:
    with pytest.raises(ValueError, match="got a tensor on cpu, expected a tensor on a CUDA device"):
        call(name)
    with launch.use_launcher(HostLauncher()) as launcher:
        launcher.arch = lambda device: Arch(8, 0)  # type: ignore[method-assign]
        with pytest.raises(linattn.UnsupportedArchitecture, match="got sm80"):
            call(name)


@PASSED
def test_strided_arguments(host: HostLauncher) -> None:
    """Slices of one projection, a pool and buffers inside larger ones, a spread index vector."""
    fused = torch.zeros(B, T, 2 * H + HV, D, dtype=torch.bfloat16)
    q, k, v = fused.split((H, H, HV), 2)
    pool = torch.zeros(P, HV + 2, D, D)[:, 1:-1]
    k_buffer, v_buffer = (tokens(h + 1, P, 8)[:, :, 1:] for h in (H, HV))
    indices = torch.arange(2 * B)[::2]
    out = call(
        VERIFY, q=q, k=k, v=v, state_pool=pool, k_buffer=k_buffer, v_buffer=v_buffer,
        state_indices=indices, accepted_len=None, out=None, scale=0.25,
    )  # fmt: skip
    (made,) = host.launches
    found = made.found
    assert made.operator.name == "kvbuffer_verify"
    assert made.arguments[-1] == 0.25
    for name, tensor in (
        ("q", q), ("k", k), ("v", v), ("o", out), ("state_pool", pool), ("k_buffer", k_buffer),
        ("v_buffer", v_buffer), ("state_indices", indices),
    ):  # fmt: skip
        assert found[name].address == tensor.data_ptr(), name
        assert found[name].shape == tuple(tensor.shape), name
        assert found[name].strides == tensor.stride(), name
        assert found[name].itemsize == tensor.element_size(), name
    assert "accepted_len" not in found


@CHECKED
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (ONE, {"state_indices": torch.tensor([1, 1])}, r"state_indices\[1\]: got 1"),
        (MTP, {"state_indices": torch.tensor([4, 1])}, r"state_indices\[0\]: got 4.*0 to 3"),
        (VERIFY, {"accepted_len": torch.tensor([0, 9])}, r"accepted_len\[1\]: got 9.*T_max = 8"),
        (UPDATE, {"accepted_len": torch.tensor([-1, 2])}, r"accepted_len\[0\]: got -1"),
        (UPDATE, {"decay": torch.tensor([0.0, 1.0, -1.0, 0.0])}, r"decay\[2\]: got -1"),
    ],
)
def test_checked_mode(name: str, changes: dict[str, Any], message: str, host: HostLauncher) -> None:
    arguments = legal(name) | changes
    call(name, **arguments)
    with linattn.checked(), pytest.raises(ValueError, match=message):
        call(name, **arguments)  # at addresses that are known
    with linattn.checked():
        call(name, state_indices=torch.tensor([-1, 1]))
    assert len(host.launches) == 2


@CHECKED
def test_checked_mode_cannot_read_in_a_capture(host: HostLauncher) -> None:
    call(ONE)
    host.capturing = lambda: True  # type: ignore[method-assign]
    with linattn.checked(), pytest.raises(RuntimeError, match="la_decode: checked mode"):
        call(ONE)


@EMPTY
def test_empty(host: HostLauncher) -> None:
    nobody = {
        "q": tokens(H, 0, T), "k": tokens(H, 0, T), "v": tokens(HV, 0, T),
        "state_indices": torch.zeros(0).int(), "out": None,
    }  # fmt: skip
    assert call(MTP, **nobody, intermediate_states=None).shape == (0, T, HV, D)
    nothing = {"accepted_len": None, "k_buffer": None, "v_buffer": None}
    assert call(VERIFY, **nobody, **nothing).shape == (0, T, HV, D)
    none = torch.zeros(0).int()
    assert call(UPDATE, state_indices=none, accepted_len=none) is None
    assert not host.launches


@META
@pytest.mark.no_host_sync
@pytest.mark.parametrize("name", [ONE, MTP, VERIFY, UPDATE])
def test_meta_tensors(name: str, no_host_sync: Any) -> None:
    """A value read on the host raises, because meta tensors hold none."""
    arguments = {
        key: x.to("meta") if isinstance(x, torch.Tensor) else x for key, x in legal(name).items()
    }
    with launch.use_launcher(launch.MetaLauncher("sm90")) as launcher:
        with no_host_sync():
            for _ in range(2):
                getattr(linattn, name)(**arguments)
        assert isinstance(launcher, launch.MetaLauncher)
        assert len(launcher.launches) == 2
