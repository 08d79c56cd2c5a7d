"""Bad input of every function is refused before a launch, by name: first calls and warm ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import PUBLIC, Lies, bare, call, claims, holders, legal, moved_to, over, refuse, results
from stand_ins import HostLauncher

import linattn
from linattn.host import launch
from linattn.host.arch import Arch

pytestmark = pytest.mark.dispatch

REFUSED = claims(
    ("LA-V01", "bad input is refused before a launch, by name and rule"),
    ("LA-V10", "bad packed input is refused before a launch, by name"),
    ("SD-V1", "bad draft input is refused by name, on a warm call too"),
)
WARM = claims(
    ("LA-V05", "a warm call refuses what a first call refuses"),
    ("LA-V11", "a warm packed call refuses what a first call refuses"),
    ("SD-V1", "bad draft input is refused by name, on a warm call too"),
)
SCALARS = claims(
    ("LA-V04", "no argument is read from the device or guessed at"),
    ("LA-V10", "bad packed input is refused before a launch, by name"),
    ("SD-V1", "bad draft input is refused by name, on a warm call too"),
)
NESTED = claims(
    ("LA-V01", "bad input is refused before a launch, by name and rule"),
    ("LA-V10", "bad packed input is refused before a launch, by name"),
    ("SD-V6", "a nested tensor is refused by name in a first draft call"),
)

LEAVES_NOTHING = pytest.mark.claim(
    "CE-18", "what is refused behind a call of the compiled function leaves no trace"
)

Refusal = tuple[Any, type[Exception], str]
"""What is given instead, the error, and how its message starts."""


def moved(x: torch.Tensor, offset: int) -> torch.Tensor:
    """The same tensor, ``offset`` bytes behind an aligned address."""
    memory = torch.zeros(x.nbytes + 64, dtype=torch.uint8).numpy()
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape)


def spread(x: torch.Tensor) -> torch.Tensor:
    """A tensor of that shape with a gap behind each element."""
    return torch.zeros(*x.shape, 2, dtype=x.dtype)[..., 0]


# ---------------------------------------------------------------------------------------------
# What is wrong with a tensor: rules, of which each gives cases


def no_tensor(name: str, label: str, x: torch.Tensor) -> Iterator[Refusal]:
    argument = PUBLIC[name].tensors[label]
    for value in ([1.0], 3, True, *((None,) if argument.needed else ())):
        got = f"got {type(value).__name__}, expected a tensor {argument.shape}"
        yield value, TypeError, f"{label}: {got}"


def dtype(name: str, label: str, x: torch.Tensor) -> Iterator[Refusal]:
    taken = PUBLIC[name].tensors[label].dtypes
    others = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    others += (torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
    for other in others:
        if other not in taken:
            expected = " or ".join(str(one) for one in taken)
            yield x.to(other), TypeError, f"{label}: got {other}, expected {expected}"


def rank(name: str, label: str, x: torch.Tensor) -> Iterator[Refusal]:
    shape = PUBLIC[name].tensors[label].shape
    for other in (x[0], x[None], x.flatten()[: x.shape[-1]] if x.dim() > 1 else x[None, None]):
        yield other, ValueError, f"{label}: got shape {list(other.shape)}, expected {shape}"


def size(name: str, label: str, x: torch.Tensor) -> Iterator[Refusal]:
    """A fixed size halved or doubled; one with a name doubled, which is at odds with the first
    tensor that has it, or with the next where this is the first."""
    argument = PUBLIC[name].tensors[label]
    for at, dim in enumerate(argument.dims):
        symbol, _, more = dim.partition(" + ")
        several = holders(name, symbol)
        if symbol.isdigit():
            fault, counts = label, (int(symbol) // 2, int(symbol) * 2)
        elif len(several) == 1:
            continue
        else:
            fault = several[1] if label == several[0] else label
            counts = (2 * x.shape[at] - int(more or 0),)
        for count in counts:
            shape = [*x.shape[:at], count, *x.shape[at + 1 :]]
            yield torch.zeros(shape, dtype=x.dtype), ValueError, f"{fault}: got shape ["


def device(name: str, label: str, x: torch.Tensor) -> Iterator[Refusal]:
    first = next(iter(PUBLIC[name].tensors))
    if label != first:
        got = f"{label}: got a tensor on meta, expected the device of {first}, cpu"
        yield x.to("meta"), ValueError, got


def strides(name: str, label: str, x: torch.Tensor) -> Iterator[Refusal]:
    lies = PUBLIC[name].tensors[label].lies
    if lies is Lies.VECTOR:
        return
    packed = "dimensions (V, K)" if lies is Lies.STATES else "dimension"
    packed = f"last {'two ' * (lies is Lies.STATES)}{packed}"
    others = [spread(x)]
    if lies is Lies.STATES:
        others += [x.mT, torch.zeros(*x.shape[:-1], 132)[..., :128]]
    for other in others:
        got = f"{label}: got strides {other.stride()}, expected a contiguous {packed}"
        yield other, ValueError, got


def pitch(name: str, label: str, x: torch.Tensor) -> Iterator[Refusal]:
    """A stride that is no multiple of 16 bytes."""
    lies = PUBLIC[name].tensors[label].lies
    if lies is Lies.ROWS:
        other = torch.zeros(*x.shape[:-1], 132, dtype=x.dtype)[..., :128]
        many = "dimension that are multiples of 8"
    elif lies is Lies.STATES:
        other = torch.zeros(*x.shape[:-2], 128 * 128 + 2)[..., 2:].unflatten(-1, (128, 128))
        many = "dimensions that are multiples of 4"
    else:
        return
    got = f"{label}: got strides {other.stride()}, expected strides outside the last {many}"
    yield other, ValueError, got


def address(name: str, label: str, x: torch.Tensor) -> Iterator[Refusal]:
    """Vectors are read in words of 4 bytes at most."""
    whole = PUBLIC[name].tensors[label].lies in (Lies.ROWS, Lies.STATES)
    unit = 16 if whole else min(4, x.element_size())
    for offset in (1, x.element_size(), 8) if whole else range(1, unit):
        got = f"got an address {offset} bytes past a multiple of {unit}, expected {unit}-byte"
        yield moved(x, offset), ValueError, f"{label}: {got}"


def negative(name: str, label: str, x: torch.Tensor) -> Iterator[Refusal]:
    """Torch negates on reading, so that memory holds other values."""
    if x.dtype is not torch.bool:
        got = "got a negative view, expected a tensor as it is: x.resolve_neg()"
        yield torch._neg_view(x), ValueError, f"{label}: {got}"


def sparse(name: str, label: str, x: torch.Tensor) -> Iterator[Refusal]:
    got = f"{label}: got a sparse_coo tensor, expected a strided one"
    yield x.to_sparse(), TypeError, got


def grad(name: str, label: str, x: torch.Tensor) -> Iterator[Refusal]:
    if x.dtype.is_floating_point and label != "decay":
        for other in (x.clone().requires_grad_(), torch.nn.Parameter(x)):
            yield other, ValueError, f"{label}: got a tensor that requires grad, expected one that"


def expanded(name: str, label: str, x: torch.Tensor) -> Iterator[Refusal]:
    """What is written, with elements that share an address."""
    if PUBLIC[name].tensors[label].written:
        other = x[:, :1].expand(x.shape)
        got = f"got shape {list(x.shape)} with strides {other.stride()}, expected a view in which"
        yield other, ValueError, f"{label}: {got} every element has its own address"


def freed(name: str, label: str, x: torch.Tensor) -> Iterator[Refusal]:
    """Storage that was resized to nothing, as that of offloaded weights is."""
    x.untyped_storage().resize_(0)
    got = f"{label}: got a tensor without memory, expected one whose storage is there"
    yield x, ValueError, got


def groups(name: str, label: str, x: torch.Tensor) -> Iterator[Refusal]:
    """Value heads that query heads cannot share evenly."""
    if label == holders(name, "HV")[0]:
        at, of = PUBLIC[name].tensors[label].dims.index("HV"), holders(name, "H")[0]
        for count in (1, 3):
            other = torch.zeros(*x.shape[:at], count, *x.shape[at + 1 :], dtype=x.dtype)
            got = f"{label}: got HV = {count}, expected a multiple of H = 2 from {of}"
            yield other, ValueError, got


RULES: list[Callable[[str, str, torch.Tensor], Iterator[Refusal]]] = [
    *(no_tensor, dtype, rank, size, groups, device, strides, pitch, address),
    *(negative, sparse, grad, expanded, freed),
]


def refuse_cold_and_warm(
    host: HostLauncher, name: str, bad: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Assert that a call is refused as the first, behind a legal one and behind a bare one, and
    that the legal one is as before."""
    host.forget()
    host.launches.clear()
    refuse(name, legal(name) | bad, error, message)
    assert not host.launches
    for arguments in (legal(name), bare(name, legal(name))):
        call(name, arguments)
        refuse(name, legal(name) | bad, error, message)
    call(name, legal(name))
    assert len(host.launches) == 3


@pytest.mark.parametrize(
    ("name", "rule"), over(REFUSED, [(name, rule) for name in PUBLIC for rule in RULES])
)
def test_every_tensor(name: str, rule: Any, host: HostLauncher) -> None:
    cases = 0
    for label in PUBLIC[name].tensors:
        for bad, error, message in rule(name, label, legal(name)[label]):
            refuse_cold_and_warm(host, name, {label: bad}, error, message)
            cases += 1
    assert cases


@pytest.mark.parametrize("name", over(NESTED))
def test_nested_tensors(name: str, host: HostLauncher) -> None:
    """In a later call torch's own comparison of tensors ends the process."""
    for label in PUBLIC[name].tensors:
        bad = torch.nested.nested_tensor([legal(name)[label][0]])
        refuse(name, legal(name) | {label: bad}, TypeError, f"{label}: got a nested tensor")
    assert not host.launches


@pytest.mark.parametrize("name", over(REFUSED))
def test_devices(name: str) -> None:
    """CPU tensors where those of a GPU are expected, all and one by one; an older GPU."""
    first = next(iter(PUBLIC[name].tensors))
    with pytest.raises(ValueError, match=f"^{first}: got a tensor on cpu, expected a tensor on a"):
        call(name, legal(name))
    with launch.use_launcher(launch.MetaLauncher(PUBLIC[name].targets[0])) as meta:
        given = moved_to("meta", legal(name))
        for label in PUBLIC[name].tensors:
            refuse(
                name,
                given | {label: legal(name)[label]},
                ValueError,
                f"{label}: got a tensor on cpu",
            )
        call(name, given)
    assert len(meta.launches) == 1


@pytest.mark.parametrize("name", over(REFUSED))
def test_architectures(name: str) -> None:
    for arch in ("sm80", *PUBLIC[name].missing):
        error = linattn.UnsupportedArchitecture if arch == "sm80" else NotImplementedError
        with launch.use_launcher(HostLauncher(Arch.parse(arch))) as host:
            assert isinstance(host, HostLauncher)
            with pytest.raises(error, match=arch):
                call(name, legal(name))
            assert not host.launches


@pytest.mark.parametrize("name", over(REFUSED))
def test_grad_matters_in_grad_mode_only_and_slopes_may_be_parameters(
    name: str, host: HostLauncher
) -> None:
    slopes = torch.nn.Parameter(torch.zeros(PUBLIC[name].sizes["HV"]))
    result = call(name, legal(name) | {"decay": slopes})
    assert not any(x.requires_grad for x in (result if isinstance(result, tuple) else ()))
    assert not host.launches[0].found["decay"].spec.output
    assert not any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in host.launches[0].arguments
    )
    with torch.no_grad():
        given = legal(name)
        first = next(iter(PUBLIC[name].tensors))
        call(name, given | {first: given[first].requires_grad_()})
    assert len(host.launches) == 2


# ---------------------------------------------------------------------------------------------
# Rules between arguments

PACKED, MTP, VERIFY, UPDATE = (
    "lightning_attn_fwd_varlen",
    "la_decode_mtp",
    "la_verify_kvbuffer",
    "la_state_update_kvbuffer",
)


def of_size(name: str, **sizes: int) -> dict[str, Any]:
    """The tensors of a call of other sizes."""
    return {label: x for label, x in legal(name, **sizes).items() if x is not None}


BETWEEN: list[tuple[str, dict[str, Any], str]] = [
    ("lightning_attn_fwd", {"q": legal("lightning_attn_fwd")["q"].transpose(1, 2)}, "k: got shape"),
    (PACKED, {"cu_seqlens": torch.zeros(0).int()}, "cu_seqlens: got shape [0], expected [N + 1]"),
    *(
        (
            PACKED,
            {"state_pool": None, other: None},
            f"state_pool: got None, expected a tensor, because {given} is given",
        )
        for given, other in (
            ("initial_state_indices", "has_initial_state"),
            ("has_initial_state", "initial_state_indices"),
        )
    ),
    (
        PACKED,
        {"state_pool": torch.zeros(2, 4, 128, 128), "initial_state_indices": None},
        "state_pool: got P = 2 slots, expected at least N = 3 without initial_state_indices",
    ),
    (
        "la_decode",
        {"state_pool": torch.zeros(1, 4, 128, 128), "state_indices": None},
        "state_pool: got P = 1 slots, expected at least B = 2 without state_indices",
    ),
    (MTP, of_size(MTP, T=9), "q: got T = 9, expected 1 to 8 tokens"),
    (MTP, of_size(MTP, T=0), "q: got T = 0, expected 1 to 8 tokens"),
    (VERIFY, of_size(VERIFY, T=0), "q: got T = 0, expected 1 to 8 tokens"),
    (VERIFY, of_size(VERIFY, T_max=9), "k_buffer: got T_max = 9, expected 1 to 8 tokens"),
    (UPDATE, of_size(UPDATE, T_max=9), "k_buffer: got T_max = 9, expected 1 to 8 tokens"),
    (UPDATE, of_size(UPDATE, T_max=0), "k_buffer: got T_max = 0, expected 1 to 8 tokens"),
    (VERIFY, of_size(VERIFY, T_max=2), "q: got T = 3, expected at most T_max = 2 from k_buffer"),
    *(
        (
            VERIFY,
            {missing: None, "accepted_len": None},
            f"{missing}: got None, expected a tensor, because {given} is given",
        )
        for missing, given in (("v_buffer", "k_buffer"), ("k_buffer", "v_buffer"))
    ),
    (
        VERIFY,
        {"k_buffer": None, "v_buffer": None},
        "k_buffer: got None, expected a tensor, because accepted_len is given",
    ),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        pytest.param(name, changes, message, marks=REFUSED[name], id=f"{name}-{message}")
        for name, changes, message in BETWEEN
    ],
)
def test_rules_between_arguments(
    name: str, changes: dict[str, Any], message: str, host: HostLauncher
) -> None:
    refuse_cold_and_warm(host, name, changes, ValueError, message)


# ---------------------------------------------------------------------------------------------
# Numbers and switches

BAD_SCALES: list[Refusal] = [
    (math.nan, ValueError, "got nan, expected a finite Python number"),
    (math.inf, ValueError, "got inf"),
    (3.5e38, ValueError, "got 3.5e+38, expected a finite Python number, at most 3.403e+38"),
    (10**400, ValueError, "got an int beyond float32"),
    (torch.ones(()), TypeError, "got a tensor, expected a finite Python number (a tensor's value"),
    (True, TypeError, "got True (bool)"),
    ("1", TypeError, "got '1' (str), expected a finite Python number"),
    (None, TypeError, "got None"),
]
BAD_FLAGS: list[Refusal] = [
    (1, TypeError, "got 1 (int), expected True or False"),
    (None, TypeError, "got None (NoneType), expected True or False"),
]
BAD_STEPS: dict[str, list[Refusal]] = {
    "chunk_size": [
        (32, ValueError, "got 32, expected 64 (the only one supported)"),
        (128, ValueError, "got 128"),
        (64.0, TypeError, "got 64.0 (float)"),
    ],
    "segments": [
        (0, ValueError, "got 0"),
        ("all", ValueError, "got 'all'"),
        (True, TypeError, "got True (bool)"),
        (1.0, TypeError, "got 1.0 (float)"),
        (2, NotImplementedError, "got 2, expected 1"),
    ],
}


@pytest.mark.parametrize("name", over(SCALARS))
def test_numbers_and_switches(name: str, host: HostLauncher) -> None:
    public = PUBLIC[name]
    bad = [("scale", case) for case in BAD_SCALES if public.scaled]
    bad += [(flag, case) for flag in public.flags for case in BAD_FLAGS]
    bad += [(step, case) for step in BAD_STEPS for case in BAD_STEPS[step] if public.chunked]
    for label, (value, error, message) in bad:
        refuse_cold_and_warm(host, name, {label: value}, error, f"{label}: {message}")
    assert bad or name == "la_state_update_kvbuffer"


@pytest.mark.parametrize("name", over(SCALARS, [(n,) for n in PUBLIC if PUBLIC[n].scaled]))
def test_a_scale_is_any_finite_number(name: str, host: HostLauncher) -> None:
    numpy = pytest.importorskip("numpy")
    for scale in (1, 0, -2.5, 128**-0.5, numpy.float32(0.125), numpy.int64(3)):
        call(name, legal(name) | {"scale": scale})
        passed = host.launches[-1].values["scale"]
        assert type(passed) is float
        assert passed == float(scale)


# ---------------------------------------------------------------------------------------------
# Behind a call like it


@pytest.mark.parametrize("name", over(WARM))
def test_known_addresses_hide_no_other(name: str, host: HostLauncher) -> None:
    """Calls that differ from a warm one in nothing but one address are looked at, each time."""
    given = legal(name)
    label = next(iter(PUBLIC[name].tensors))
    for _ in range(3):
        for offset in (0, 16, 48):
            tensor = moved(given[label], offset)
            call(name, given | {label: tensor})
            assert host.launches[-1].found[label].address == tensor.data_ptr()
        bad = given | {label: moved(given[label], 2)}
        refuse(name, bad, ValueError, f"{label}: got an address 2 bytes past")
    assert len(host.launches) == 9


@pytest.mark.parametrize("name", over(WARM))
def test_known_addresses_hide_no_negative_view(name: str, host: HostLauncher) -> None:
    """Two views of the same memory, shape and strides, of which torch negates one on reading."""
    numbers = torch.full((PUBLIC[name].sizes["HV"],), 0.5j)
    positive, negated = numbers.imag, numbers.conj().imag
    assert positive.data_ptr() == negated.data_ptr()
    assert positive.stride() == negated.stride()
    for _ in range(3):
        call(name, legal(name) | {"decay": positive})
        refuse(name, legal(name) | {"decay": negated}, ValueError, "decay: got a negative view")
    call(name, legal(name) | {"decay": negated.resolve_neg()})
    assert len(host.launches) == 4


def placed(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor with the same strides, as far behind an aligned address."""
    start = x.data_ptr() % 16 // x.element_size()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    memory = torch.zeros(start + extent, dtype=x.dtype, device=device)
    return memory.as_strided(x.shape, x.stride(), start)


@pytest.mark.parametrize("name", over(dict.fromkeys(PUBLIC, LEAVES_NOTHING), targets=True))
def test_behind_a_call_of_the_compiled_function(
    name: str, device: torch.device, assert_bitwise: Any
) -> None:
    """Refusals leave no trace: the next legal call gives the bits of the first."""

    def run() -> tuple[dict[str, Any], list[torch.Tensor]]:
        given = moved_to(device, legal(name, 0))
        return given, results(name, given, call(name, given))

    given, want = run()
    for label in PUBLIC[name].tensors:
        for rule in (dtype, rank, strides, address):
            for bad, error, message in rule(name, label, legal(name)[label]):
                if bad.data_ptr() % bad.element_size() == 0:
                    refuse(name, given | {label: placed(bad, device)}, error, message)
    _, got = run()
    assert_bitwise(got, want)


@pytest.mark.parametrize("name", over(WARM))
def test_the_launchs_own_error_is_not_lost(name: str, host: HostLauncher) -> None:
    """A fault that no check explains comes through, on a warm call too."""
    call(name, legal(name))

    def broken(*arguments: Any) -> None:
        raise RuntimeError("the launch failed")

    for plan in host.plans.values():
        plan.run = broken
    host.function = lambda operator, arch, config: broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the launch failed"):
        call(name, legal(name))
