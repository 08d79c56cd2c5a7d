"""Eager calls of the speculative operators: validation, plans, addresses, launches.

Every function takes ``elsewhere``, which is handed calls whose tensors are not ordinary ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from linattn.errors import value_error
from linattn.host import checked, launch, validate
from linattn.host.signature import KVBUFFER_VERIFY, MTP_DECODE, STATE_UPDATE, Signature
from linattn.host.validate import LARGEST_SCALE
from linattn.ops import _calls

DECODE = "la_decode"
DECODE_MTP = "la_decode_mtp"
VERIFY = "la_verify_kvbuffer"
UPDATE = "la_state_update_kvbuffer"
HEAD_DIM = 128

ONE_TOKEN: Signature = replace(
    MTP_DECODE,
    tensors=tuple(
        replace(spec, dims=tuple(dim for dim in spec.dims if dim != "T"))
        for spec in MTP_DECODE.tensors
    ),
)
"""``la_decode``: the tensors of the decode kernel without the dimension of tokens."""

_BF16 = torch.bfloat16
_ALIGNMENT_MASK = 15


# ---------------------------------------------------------------------------------------------
# Decode


def decode(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    scale: float,
    update_state: Any,
    intermediate: Tensor | None,
    out: Tensor | None,
    elsewhere: Callable[..., Tensor] | None,
) -> Tensor:
    """Both decode functions without torch's dispatcher: the path of every eager call."""
    if type(scale) is not float or not -LARGEST_SCALE <= scale <= LARGEST_SCALE:
        scale = validate.scalar("scale", scale)
    if type(update_state) is not bool:
        update_state = validate.flag("update_state", update_state)
    launcher = launch.current()
    plain_form = intermediate is None and out is not None and state_indices is not None
    if plain_form:
        form: tuple[Any, ...] = (name, update_state)
        given: tuple[Any, ...] = (q, k, v, out, decay, state_pool, state_indices)
    else:
        form = (name, update_state, out is None, intermediate is None, state_indices is None)
        given = (
            *(q, k, v),
            *(() if out is None else (out,)),
            *(decay, state_pool),
            *(x for x in (intermediate, state_indices) if x is not None),
        )
    plan: _calls.Plan | None = launcher.plans.get(form)
    if plan is None or not plan.matches(*given):
        tensors = decode_tensors(q, k, v, state_pool, decay, state_indices, intermediate, out)
        if elsewhere is not None and not _calls.plain(tensors):
            # fmt: off
            return elsewhere(
                name, q, k, v, state_pool, decay, state_indices, scale, update_state, intermediate,
                out,
            )
            # fmt: on
        signature = signature_of(name)
        plan = _calls.find(
            launcher,
            form,
            signature,
            tensors,
            lambda: _decode_plan(launcher, name, signature, tensors, update_state),
        )
    if plan.grads and is_grad_enabled():
        tensors = decode_tensors(q, k, v, state_pool, decay, state_indices, intermediate, out)
        _calls.refuse_grad(MTP_DECODE, tensors)
    o = torch.empty(plan.out_shape, dtype=_BF16, device=plan.device) if out is None else out
    function = plan.function
    if function is None:
        return o
    q_at, k_at, v_at, o_at = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()
    pool_at = state_pool.data_ptr()
    index_at = 0 if state_indices is None else state_indices.data_ptr()
    steps_at = 0 if intermediate is None else intermediate.data_ptr()
    if (q_at | k_at | v_at | o_at | pool_at | steps_at) & _ALIGNMENT_MASK or decay.is_neg():
        tensors = decode_tensors(q, k, v, state_pool, decay, state_indices, intermediate, o)
        _calls.refuse_unusable(MTP_DECODE, tensors)
    if out is not None and o_at:
        q_span, k_span, v_span, o_span, decay_span, pool_span, steps_span, index_span = plan.spans
        end, decay_at = o_at + o_span, decay.data_ptr()
        if (
            (q_at < end and o_at < q_at + q_span)
            or (k_at < end and o_at < k_at + k_span)
            or (v_at < end and o_at < v_at + v_span)
            or (pool_at < end and o_at < pool_at + pool_span)
            or (decay_at < end and o_at < decay_at + decay_span)
            or (index_at < end and o_at < index_at + index_span)
            or (steps_at < end and o_at < steps_at + steps_span)
        ):
            tensors = decode_tensors(q, k, v, state_pool, decay, state_indices, intermediate, out)
            _calls.refuse_overlap(plan, MTP_DECODE, out, tensors)
    if checked.active:
        tensors = decode_tensors(q, k, v, state_pool, decay, state_indices, intermediate, out)
        _calls.check_contents(name, launcher, tensors)
    if plan.detach:
        decay = decay.detach()
    at = plan.layout_at
    guard = launcher.guard(plan.device)
    if guard is None:
        function(q_at, k_at, v_at, o_at, decay, pool_at, steps_at, index_at, at, scale)
    else:
        with guard:
            function(q_at, k_at, v_at, o_at, decay, pool_at, steps_at, index_at, at, scale)
    return o


def signature_of(name: str) -> Signature:
    """The tensors of one of the decode functions."""
    return ONE_TOKEN if name == DECODE else MTP_DECODE


def decode_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    intermediate: Tensor | None,
    out: Tensor | None,
) -> dict[str, Tensor | None]:
    """By name, in the order of the signature."""
    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v}
    if out is not None:
        tensors["o"] = out
    return {
        **tensors,
        "decay": decay,
        "state_pool": state_pool,
        "intermediate_states": intermediate,
        "state_indices": state_indices,
    }


def _decode_plan(
    launcher: launch.Launcher,
    name: str,
    signature: Signature,
    tensors: dict[str, Tensor | None],
    update_state: bool,
) -> _calls.Plan:
    """Validate a combination seen for the first time, and find what serves it."""
    sizes = _calls.check(signature, tensors, launcher.accepts)
    decay = tensors["decay"]
    assert decay is not None
    function = _calls.function_of(launcher, MTP_DECODE.operator, name, decay.device, sizes)
    flags = {"update_state": int(update_state)}
    out_shape = out_shape_of(name, sizes)
    return _calls.Plan(MTP_DECODE, function, tensors, sizes, flags, out_shape)


def out_shape_of(name: str, sizes: dict[str, int]) -> tuple[int, ...]:
    tokens = () if name == DECODE else (sizes["T"],)
    return (sizes["B"], *tokens, sizes["HV"], HEAD_DIM)


# ---------------------------------------------------------------------------------------------
# Verify


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    scale: float,
    k_buffer: Tensor | None,
    v_buffer: Tensor | None,
    accepted_len: Tensor | None,
    out: Tensor | None,
    elsewhere: Callable[..., Tensor] | None,
) -> Tensor:
    """``la_verify_kvbuffer`` without torch's dispatcher: the path of every eager call."""
    if type(scale) is not float or not -LARGEST_SCALE <= scale <= LARGEST_SCALE:
        scale = validate.scalar("scale", scale)
    launcher = launch.current()
    tensors = verify_tensors(
        q, k, v, state_pool, decay, state_indices, k_buffer, v_buffer, accepted_len, out
    )
    form = (VERIFY, *(x is None for x in tensors.values()), out is None)
    plan: _calls.Plan | None = launcher.plans.get(form)
    if plan is None or not plan.matches(*(x for x in tensors.values() if x is not None)):
        if elsewhere is not None and not _calls.plain(tensors):
            # fmt: off
            return elsewhere(
                q, k, v, state_pool, decay, state_indices, scale, k_buffer, v_buffer, accepted_len,
                out,
            )
            # fmt: on
        plan = _calls.find(
            launcher, form, KVBUFFER_VERIFY, tensors, lambda: _verify_plan(launcher, tensors)
        )
    if plan.grads and is_grad_enabled():
        _calls.refuse_grad(KVBUFFER_VERIFY, tensors)
    o = torch.empty(plan.out_shape, dtype=_BF16, device=plan.device) if out is None else out
    if plan.function is None:
        return o
    tensors["o"] = o
    at = {name: 0 if x is None else x.data_ptr() for name, x in tensors.items()}
    index_at, length_at = at["state_indices"], at["accepted_len"]
    views = (at["q"], at["k"], at["v"], at["o"])
    pools = (at["state_pool"], at["k_buffer"], at["v_buffer"])
    if _any_bit(*views, *pools) & _ALIGNMENT_MASK or decay.is_neg():
        _calls.refuse_unusable(KVBUFFER_VERIFY, tensors)
    if out is not None and at["o"]:
        _refuse_overlap(plan, tensors, at, out)
    if checked.active:
        _calls.check_contents(VERIFY, launcher, tensors)
    if plan.detach:
        decay = decay.detach()
    _calls.launch_on(
        launcher,
        plan.device,
        plan.function,
        *views,
        decay,
        *pools,
        index_at,
        length_at,
        plan.layout_at,
        scale,
    )
    return o


def _any_bit(*numbers: int) -> int:
    found = 0
    for number in numbers:
        found |= number
    return found


def _refuse_overlap(
    plan: _calls.Plan, tensors: dict[str, Tensor | None], at: dict[str, int], out: Tensor
) -> None:
    """Look closer at an output whose range of addresses meets that of another tensor."""
    spans = dict(zip((spec.name for spec in KVBUFFER_VERIFY.tensors), plan.spans))
    start = at["o"]
    end = start + spans["o"]
    if any(at[name] < end and start < at[name] + spans[name] for name in at if name != "o"):
        _calls.refuse_overlap(plan, KVBUFFER_VERIFY, out, tensors)


def verify_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    k_buffer: Tensor | None,
    v_buffer: Tensor | None,
    accepted_len: Tensor | None,
    out: Tensor | None,
) -> dict[str, Tensor | None]:
    """By name; the output only where it is there."""
    tensors: dict[str, Tensor | None] = {
        "q": q,
        "k": k,
        "v": v,
        "decay": decay,
        "state_pool": state_pool,
        "k_buffer": k_buffer,
        "v_buffer": v_buffer,
        "state_indices": state_indices,
        "accepted_len": accepted_len,
    }
    if out is not None:
        tensors["o"] = out
    return tensors


def together(tensors: dict[str, Tensor | None]) -> None:
    """Check which of the optional arguments of a verification are there.

    Raises:
        ValueError: one buffer, or lengths without buffers.
    """
    for one, other in (("k_buffer", "v_buffer"), ("v_buffer", "k_buffer")):
        if tensors[one] is not None and tensors[other] is None:
            raise value_error(other, "None", f"a buffer, because {one} is given")
    if tensors["accepted_len"] is not None and tensors["k_buffer"] is None:
        raise value_error("k_buffer", "None", "a buffer, because accepted_len is given")


def _verify_plan(launcher: launch.Launcher, tensors: dict[str, Tensor | None]) -> _calls.Plan:
    """Validate a combination seen for the first time, and find what serves it."""
    together(tensors)
    sizes = _calls.check(KVBUFFER_VERIFY, tensors, launcher.accepts)
    decay = tensors["decay"]
    assert decay is not None
    function = _calls.function_of(
        launcher,
        KVBUFFER_VERIFY.operator,
        VERIFY,
        decay.device,
        sizes,
        commit=int(tensors["accepted_len"] is not None),
    )
    return _calls.Plan(KVBUFFER_VERIFY, function, tensors, sizes, {}, out_shape_of(VERIFY, sizes))


# ---------------------------------------------------------------------------------------------
# Commit


def update(
    k_buffer: Tensor,
    v_buffer: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    accepted_len: Tensor,
    elsewhere: Callable[..., None] | None,
) -> None:
    """``la_state_update_kvbuffer`` without torch's dispatcher: the path of every eager call."""
    launcher = launch.current()
    tensors = update_tensors(k_buffer, v_buffer, state_pool, decay, state_indices, accepted_len)
    form = (UPDATE, state_indices is None)
    plan: _calls.Plan | None = launcher.plans.get(form)
    slots = () if state_indices is None else (state_indices,)
    given = (k_buffer, v_buffer, decay, state_pool, *slots, accepted_len)
    if plan is None or not plan.matches(*given):
        if elsewhere is not None and not _calls.plain(tensors):
            elsewhere(k_buffer, v_buffer, state_pool, decay, state_indices, accepted_len)
            return
        plan = _calls.find(
            launcher, form, STATE_UPDATE, tensors, lambda: _update_plan(launcher, tensors)
        )
    if plan.grads and is_grad_enabled():
        _calls.refuse_grad(STATE_UPDATE, tensors)
    if plan.function is None:
        return
    k_at, v_at, pool_at = k_buffer.data_ptr(), v_buffer.data_ptr(), state_pool.data_ptr()
    if (k_at | v_at | pool_at) & _ALIGNMENT_MASK or decay.is_neg():
        _calls.refuse_unusable(STATE_UPDATE, tensors)
    if checked.active:
        _calls.check_contents(UPDATE, launcher, tensors)
    if plan.detach:
        decay = decay.detach()
    index_at = 0 if state_indices is None else state_indices.data_ptr()
    length_at = accepted_len.data_ptr()
    _calls.launch_on(
        launcher,
        plan.device,
        plan.function,
        k_at,
        v_at,
        decay,
        pool_at,
        index_at,
        length_at,
        plan.layout_at,
    )


def update_tensors(
    k_buffer: Tensor,
    v_buffer: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    accepted_len: Tensor,
) -> dict[str, Tensor | None]:
    """By name, in the order of the signature."""
    return {
        "k_buffer": k_buffer,
        "v_buffer": v_buffer,
        "decay": decay,
        "state_pool": state_pool,
        "state_indices": state_indices,
        "accepted_len": accepted_len,
    }


def _update_plan(launcher: launch.Launcher, tensors: dict[str, Tensor | None]) -> _calls.Plan:
    """Validate a combination seen for the first time, and find what serves it."""
    sizes = _calls.check(STATE_UPDATE, tensors, launcher.accepts)
    decay = tensors["decay"]
    assert decay is not None
    function = _calls.function_of(launcher, STATE_UPDATE.operator, UPDATE, decay.device, sizes)
    return _calls.Plan(STATE_UPDATE, function, tensors, sizes, {}, ())
