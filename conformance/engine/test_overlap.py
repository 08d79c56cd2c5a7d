"""What a call writes shares no memory with another of its tensors: as a rule, and exactly."""

from __future__ import annotations

import pytest
import torch
from calls import PUBLIC, call, claims, legal, over, refuse
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import HostLauncher

from linattn.host import validate
from linattn.kernels.lightning_prefill.config import SIGNATURE

pytestmark = pytest.mark.dispatch

OVERLAP = claims(
    ("LA-V03", "an out that shares an element with an input is refused"),
    ("LA-V13", "a pool or an out that shares memory is refused"),
    ("SD-V1", "bad draft input is refused by name, on a warm call too"),
)
EXACT = OVERLAP["lightning_attn_fwd"]


def beside(one: torch.Tensor, other: torch.Tensor, start: int) -> tuple[torch.Tensor, ...]:
    """Both in one buffer, the other ``start`` bytes behind the first's start."""
    memory = torch.zeros(start + one.nbytes + other.nbytes + 64, dtype=torch.uint8).numpy()
    pairs = ((one, 0), (other, start))
    return tuple(
        torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=at).view(x.shape)
        for x, at in pairs
    )


@pytest.mark.parametrize(
    ("name", "label"), over(OVERLAP, [(n, label) for n in PUBLIC for label in PUBLIC[n].written])
)
def test_what_is_written_shares_no_memory(name: str, label: str, host: HostLauncher) -> None:
    """At the start and with the last 16 bytes; twice, for nothing of a refused call may be
    remembered. Right behind it is a place of one's own."""
    call(name, legal(name))
    for other in PUBLIC[name].tensors:
        if other == label:
            continue
        tensors = legal(name)
        size = tensors[label].nbytes
        words = f"({label}: got a tensor that overlaps {other}"
        if other in PUBLIC[name].written:
            words += f"|{other}: got a tensor that overlaps {label}"
        for start in (0, size - 16):
            both = dict(zip((label, other), beside(tensors[label], tensors[other], start)))
            for _ in range(2):
                with pytest.raises(ValueError, match=rf"^{words}), expected memory of its own"):
                    call(name, tensors | both)
        assert len(host.launches) == 1
        call(
            name, tensors | dict(zip((label, other), beside(tensors[label], tensors[other], size)))
        )
        host.launches.pop()


@OVERLAP["la_decode"]
def test_slopes_may_reach_into_out_by_their_stride(host: HostLauncher) -> None:
    tensors = legal("la_decode")
    memory = torch.zeros(256 + tensors["out"].numel() // 2)
    tensors["out"] = memory[256:].view(torch.bfloat16).view(tensors["out"].shape)
    call("la_decode", tensors | {"decay": memory[:4]})
    bad = tensors | {"decay": memory[: 4 * 128 : 128]}
    refuse("la_decode", bad, ValueError, "out: got a tensor that overlaps decay")
    assert len(host.launches) == 1


@pytest.mark.parametrize(
    "name",
    over(OVERLAP, [("lightning_attn_fwd_varlen",), ("la_decode_mtp",), ("la_verify_kvbuffer",)]),
)
def test_what_is_only_read_may_share_memory(name: str, host: HostLauncher) -> None:
    """Inputs that are one; a pool that is not written and k in it; slots of every second layer
    with an input between them; v and out side by side in one buffer."""
    tensors = legal(name)
    layers = torch.zeros(5, 2, 4, 128, 128)
    between = layers[0, 1].view(-1).view(torch.bfloat16)[: tensors["k"].numel()]
    fused = torch.zeros(*tensors["v"].shape[:2], 8, 128, dtype=torch.bfloat16)
    for change in (
        {"k": tensors["q"]},
        {"state_pool": layers[:, 0], "k": between.view(tensors["k"].shape)},
        {"v": fused[:, :, :4], "out": fused[:, :, 4:]},
    ):
        for _ in range(2):
            call(name, tensors | change)
    assert len(host.launches) == 6
    inside = tensors["state_pool"].view(torch.bfloat16).flatten()[: tensors["k"].numel()]
    tensors["k"] = inside.view(tensors["k"].shape)
    refuse(name, tensors, ValueError, "state_pool: got a tensor that overlaps k")
    if name != "lightning_attn_fwd_varlen":
        unwritten = {"update_state": False} if name == "la_decode_mtp" else {"accepted_len": None}
        call(name, tensors | unwritten)


@pytest.mark.parametrize(
    "name", over(OVERLAP, [(n,) for n in PUBLIC if "out" in PUBLIC[n].tensors])
)
def test_known_addresses_hide_no_overlap(name: str, host: HostLauncher) -> None:
    """An output that moves into an input and out again, an input that moves under an output."""
    tensors = legal(name)
    count, shape = tensors["out"].numel(), tensors["out"].shape
    memory = torch.zeros(3 * count, dtype=torch.bfloat16)

    def at(start: int) -> torch.Tensor:
        return memory[start : start + count].view(shape)

    for _ in range(3):
        call(name, tensors | {"v": at(0), "out": at(count)})
        for ours, theirs in ((0, count - 8), (0, 0), (count + 8, count)):
            bad = tensors | {"v": at(ours), "out": at(theirs)}
            refuse(name, bad, ValueError, "out: got a tensor that overlaps v")
        call(name, tensors | {"v": at(2 * count), "out": at(count)})
    assert len(host.launches) == 6


# ---------------------------------------------------------------------------------------------
# Of two views


@st.composite
def pairs_of_views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two strided views of one small buffer; their strides are often shared, as in real code."""
    memory = torch.zeros(512)
    common = [draw(st.integers(0, 24)) for _ in range(3)]
    views = []
    for _ in range(2):
        shape = [draw(st.integers(1, 4)) for _ in range(3)]
        strides = [stride if draw(st.booleans()) else draw(st.integers(0, 24)) for stride in common]
        views.append(memory.as_strided(shape, strides, draw(st.integers(0, 60))))
    return views[0], views[1]


def addresses(tensor: torch.Tensor) -> set[int]:
    index = torch.arange(512).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return set(index.flatten().tolist())


@EXACT
@given(pairs_of_views())
def test_overlap_is_exact_on_small_views(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, b = pair
    assert validate.disjoint(a, b) == addresses(a).isdisjoint(addresses(b))


@EXACT
def test_overlap_knows_bytes_of_different_dtypes() -> None:
    memory = torch.zeros(64)
    halves = memory.view(torch.bfloat16)
    assert validate.disjoint(memory[::2], halves[2::4])
    assert not validate.disjoint(memory[::2], halves[1::4])


@EXACT
def test_an_overlap_that_cannot_be_settled_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.zeros(64, 3, 8)[:, :2].unbind(1)
    assert validate.disjoint(a, b)
    monkeypatch.setattr(validate, "SEARCH_LIMIT", 0)
    assert not validate.disjoint(a, b)


@EXACT
def test_overlap_is_settled_for_slices_of_a_large_fused_buffer() -> None:
    fused = torch.empty(2, 16384, 256, 128, dtype=torch.bfloat16)  # address space, never touched
    q, k, v, out = fused.split(64, dim=2)
    assert all(validate.disjoint(out, given) for given in (q, k, v))
    assert not validate.disjoint(out, fused[1:, 5:, 192:193])
    assert not validate.disjoint(fused[:, :, ::2], v)


@EXACT
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 24)), min_size=3, max_size=3))
def test_no_accepted_output_writes_an_element_twice(dims: list[tuple[int, int]]) -> None:
    shape, strides = zip(*dims)
    tensor = torch.zeros(512).as_strided(shape, strides)
    try:
        validate.writes_once(SIGNATURE["o"], tensor)
    except ValueError:
        return
    assert len(addresses(tensor)) == tensor.numel()
