"""Calls of operators whose tensors go to the kernel by address.

A plan holds what one combination of shapes, strides, dtypes and devices needs at every call. The
latest plan of each form of a call (which arguments are there, which flags are set) is tried first,
with a check that torch compiles; a dictionary over the properties of all tensors serves the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from linattn.errors import type_error, value_error
from linattn.host import checked, dispatch, launch, validate
from linattn.host.guards import Matches, matcher, properties
from linattn.host.signature import Signature

MAX_TOKENS = 8
MAX_KNOWN_GAPS = 256

Tensors = Mapping[str, "Tensor | None"]


class Plan:
    """What calls of one kind need.

    Attributes:
        function: the compiled function; None where nothing is launched.
        matches: whether tensors are as those that the plan was made for.
        device: device of every tensor.
        layout: the integers at ``layout_at``, an address.
        spans: bytes from the first element of each tensor to the end of its last, 0 where it is
            absent, in the order of the signature.
        out_shape: shape of the output.
        grads: whether a tensor other than the decay requires grad.
        detach: whether the decay requires grad.
        known_gaps: (tensor, its distance from the output) that were found to share no byte.
    """

    __slots__ = (
        "detach",
        "device",
        "function",
        "grads",
        "known_gaps",
        "layout",
        "layout_at",
        "matches",
        "out_shape",
        "spans",
    )

    def __init__(
        self,
        signature: Signature,
        function: Callable[..., Any] | None,
        tensors: Tensors,
        sizes: Mapping[str, int],
        flags: Mapping[str, int],
        out_shape: tuple[int, ...],
    ) -> None:
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        decay = present["decay"]
        self.function = function
        self.matches: Matches = matcher(list(present.values()))
        self.device = decay.device
        described = dict(present)
        if out_shape and "o" not in present:  # strides of the one that each call makes
            described["o"] = torch.empty(out_shape, dtype=torch.bfloat16, device="meta")
        # The kernel sees every token tensor as [B, T, heads, 128].
        shaped = {
            spec.name: _with_tokens(described[spec.name], len(spec.dims))
            for spec in signature.tensors
            if spec.name in described
        }
        self.layout = signature.layout(shaped, sizes, flags)
        self.layout_at = self.layout.buffer_info()[0]
        self.spans = tuple(
            validate.span(present[spec.name]) if spec.name in present else 0
            for spec in signature.tensors
        )
        self.out_shape = out_shape
        self.grads = any(x.requires_grad for name, x in present.items() if name != "decay")
        self.detach = decay.requires_grad
        self.known_gaps: set[tuple[str, int]] = set()


def _with_tokens(tensor: Tensor, rank: int) -> Tensor:
    return tensor if tensor.dim() == rank else tensor.unsqueeze(1)


def plain(tensors: Tensors) -> bool:
    """Whether every tensor is an ordinary one, so that torch's dispatcher can be left out."""
    return all(
        x is None or type(x) is Tensor or (name == "decay" and type(x) is Parameter)
        for name, x in tensors.items()
    )


def find(
    launcher: launch.Launcher,
    form: tuple[Any, ...],
    signature: Signature,
    tensors: Tensors,
    build: Callable[[], Plan],
) -> Plan:
    """The plan of a call that the latest one of its form does not fit.

    Raises:
        TypeError: a required argument that is no tensor; and whatever ``build`` raises.
    """
    for name, tensor in tensors.items():
        spec = signature[name]
        if not isinstance(tensor, Tensor) and not (tensor is None and spec.optional):
            raise type_error(spec.label, type(tensor).__name__, f"a tensor {spec.shape_text}")
    given = [tensor for tensor in tensors.values() if tensor is not None]
    key = (form, properties(given))
    plan: Plan | None = launcher.plans.get(key)
    if plan is None:
        plan = build()
        launcher.remember(key, plan)
    else:
        plan.matches = matcher(given)
    launcher.remember(form, plan)
    return plan


def check(
    signature: Signature,
    tensors: Tensors,
    accepts: Callable[[str, Tensor], None],
    layout: bool = True,
) -> dict[str, int]:
    """Check the tensors of a call; return the sizes, with ``T = 1`` where there are no tokens.

    Raises:
        TypeError, ValueError: as ``validate.check``; numbers of tokens that no kernel takes; fewer
            slots than requests without indices; an output that shares bytes with itself.
    """
    checked.consult()
    sizes = validate.check(signature, tensors, accepts, layout)
    sizes.setdefault("T", 1)
    for symbol, label in (("T", "q"), ("T_max", "k_buffer")):
        count = sizes.get(symbol, 1)
        if not 1 <= count <= MAX_TOKENS:
            raise value_error(label, f"{symbol} = {count}", f"1 to {MAX_TOKENS} tokens")
    if sizes["T"] > sizes.get("T_max", MAX_TOKENS):
        raise value_error(
            "q", f"T = {sizes['T']}", f"at most T_max = {sizes['T_max']} from k_buffer"
        )
    if tensors.get("state_indices") is None and sizes["P"] < sizes["B"]:
        raise value_error(
            "state_pool", f"{sizes['P']} slots", f"at least B = {sizes['B']} without state_indices"
        )
    for spec in signature.tensors:
        tensor = tensors.get(spec.name)
        if layout and spec.output and tensor is not None:
            validate.writes_once(spec, tensor)
    return sizes


def function_of(
    launcher: launch.Launcher,
    operator: str,
    public: str,
    device: torch.device,
    sizes: Mapping[str, int],
    **switches: int,
) -> Callable[..., Any] | None:
    """The compiled function for these sizes; None where nothing is to be launched."""
    arch = launcher.arch(device)
    processors = launcher.multiprocessors(device)
    shapes = {letter: sizes[letter] for letter in ("B", "T", "H", "HV")}
    shapes.update(switches)
    chosen = dispatch.select(operator, arch, shapes, multiprocessors=processors)
    if chosen.config is None:
        return None
    return launcher.ready(operator, arch, chosen.config, public)


def launch_on(
    launcher: launch.Launcher,
    device: torch.device,
    function: Callable[..., Any],
    *arguments: Any,
) -> None:
    """Launch a compiled function on a device."""
    guard = launcher.guard(device)
    if guard is None:
        function(*arguments)
    else:
        with guard:
            function(*arguments)


def check_contents(public: str, launcher: launch.Launcher, tensors: Tensors) -> None:
    """What checked mode reads before a launch.

    Raises:
        RuntimeError: inside a graph capture.
        ValueError: slopes, indices or lengths that ``linattn.checked`` refuses.
    """
    checked.readable(public, launcher)
    decay, pool = tensors["decay"], tensors["state_pool"]
    assert decay is not None
    assert pool is not None
    checked.slopes("decay", decay)
    slots, accepted = tensors["state_indices"], tensors.get("accepted_len")
    if slots is not None:
        checked.indices("state_indices", slots, pool.shape[0])
    if accepted is not None:
        buffer = tensors["k_buffer"]
        assert buffer is not None
        checked.lengths("accepted_len", accepted, buffer.shape[1])


def refuse_grad(signature: Signature, tensors: Tensors) -> None:
    """Raise for the tensor that requires grad; call it while grad mode is on."""
    named = [(signature[name].label, x) for name, x in tensors.items() if name != "decay"]
    validate.no_grad(named)


def refuse_unusable(signature: Signature, tensors: Tensors) -> None:
    """Raise for the tensor whose address is not aligned or that is a negative view."""
    for name, tensor in tensors.items():
        if tensor is not None:
            validate.aligned(signature[name], tensor)
            validate.resolved(signature[name], tensor)


def refuse_overlap(plan: Plan, signature: Signature, out: Tensor, tensors: Tensors) -> None:
    """Raise if ``out`` shares a byte with another tensor; remember distances that were fine."""
    for name, tensor in tensors.items():
        if tensor is None or name == "o":
            continue
        gap = (name, tensor.data_ptr() - out.data_ptr())
        if gap in plan.known_gaps:
            continue
        if not validate.disjoint(out, tensor):
            label = signature[name].label
            raise value_error("out", f"a tensor that overlaps {label}", "memory of its own")
        if len(plan.known_gaps) >= MAX_KNOWN_GAPS:
            plan.known_gaps.clear()
        plan.known_gaps.add(gap)
