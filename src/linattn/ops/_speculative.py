"""Eager calls of the speculative operators: validation, plans, addresses, launches.

Every function takes ``elsewhere``, which is handed calls whose tensors are not ordinary ones.

A warm call may cost the host a few microseconds, and each line is up to a tenth of one. ``decode``,
``verify`` and ``update`` are therefore written out, in the same steps: find the plan by the tensors
that are there, read the addresses, look closer where these are new, launch. Dictionaries of tensors
are made only where that goes another way. There is no lambda in them, because the variables that it
captures become slower to read everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
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
_LEAST_SCALE = -LARGEST_SCALE


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
    if type(scale) is not float or not _LEAST_SCALE <= scale <= LARGEST_SCALE:
        scale = validate.scalar("scale", scale)
    if type(update_state) is not bool:
        update_state = validate.flag("update_state", update_state)
    launcher = launch.current()
    # The tensors that are there, as in ``decode_tensors``; written out for the usual call, whose
    # form is a string because the hash of a tuple is computed anew each time.
    if intermediate is None and out is not None and state_indices is not None:
        form: Hashable = name if update_state else (name, False)
        given: tuple[Tensor, ...] = (q, k, v, out, decay, state_pool, state_indices)
    else:
        form = (name, update_state, out is None, intermediate is None, state_indices is None)
        given = (q, k, v, decay, state_pool) if out is None else (q, k, v, out, decay, state_pool)
        if intermediate is not None:
            given += (intermediate,)
        if state_indices is not None:
            given += (state_indices,)
    plan: _calls.DraftPlan | None = launcher.plans.get(form)
    if plan is None or not plan.matches(*given):
        plan = _calls.recall(launcher, form, given)
    if plan is None:
        tensors = decode_tensors(q, k, v, state_pool, decay, state_indices, intermediate, out)
        if elsewhere is not None and not _calls.plain(tensors):
            # fmt: off
            return elsewhere(
                name, q, k, v, state_pool, decay, state_indices, scale, update_state, intermediate,
                out,
            )
            # fmt: on
        signature = signature_of(name)
        build = partial(_decode_plan, launcher, name, signature, tensors, update_state)
        plan = _calls.find(launcher, form, signature, tensors, build)
    if plan.grads and is_grad_enabled():
        tensors = decode_tensors(q, k, v, state_pool, decay, state_indices, intermediate, out)
        _calls.refuse_grad(MTP_DECODE, tensors)
    o = torch.empty(plan.out_shape, dtype=_BF16, device=plan.device) if out is None else out
    function = plan.function
    if function is None:
        return o
    q_at, k_at = q.data_ptr(), k.data_ptr()
    v_at, o_at = v.data_ptr(), o.data_ptr()
    decay_at, pool_at = decay.data_ptr(), state_pool.data_ptr()
    steps_at = 0 if intermediate is None else intermediate.data_ptr()
    index_at = 0 if state_indices is None else state_indices.data_ptr()
    places = (q_at, k_at, v_at, o_at, decay_at, pool_at, steps_at, index_at)
    new = places != plan.latest and places not in plan.known
    if new or checked.active:
        tensors = decode_tensors(q, k, v, state_pool, decay, state_indices, intermediate, o)
        _calls.look_closer(name, launcher, plan, tensors, places)
    if plan.detach:
        decay = decay.detach()
    # fmt: off
    arguments = (
        q_at, k_at, v_at, o_at, decay, pool_at, steps_at, index_at, plan.layout_at, scale,
    )
    # fmt: on
    guard = launcher.guard(plan.device)
    if guard is None:
        function(*arguments)
    else:
        with guard:
            function(*arguments)
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
) -> _calls.DraftPlan:
    """Validate a combination seen for the first time, and find what serves it."""
    sizes = _calls.check(signature, tensors, launcher.accepts)
    decay = tensors["decay"]
    assert decay is not None
    function = _calls.function_of(launcher, MTP_DECODE.operator, name, decay.device, sizes)
    flags = {"update_state": int(update_state)}
    out_shape = out_shape_of(name, sizes)
    written = ("o", "intermediate_states", *(("state_pool",) if update_state else ()))
    return _calls.DraftPlan(MTP_DECODE, function, tensors, sizes, flags, out_shape, written)


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
    if type(scale) is not float or not _LEAST_SCALE <= scale <= LARGEST_SCALE:
        scale = validate.scalar("scale", scale)
    launcher = launch.current()
    # fmt: off
    form = (
        VERIFY, state_indices is None, k_buffer is None, v_buffer is None, accepted_len is None,
        out is None,
    )
    # fmt: on
    # The tensors that are there, as in ``verify_tensors``.
    given: tuple[Tensor, ...] = (q, k, v, decay, state_pool)
    if k_buffer is not None:
        given += (k_buffer,)
    if v_buffer is not None:
        given += (v_buffer,)
    if state_indices is not None:
        given += (state_indices,)
    if accepted_len is not None:
        given += (accepted_len,)
    if out is not None:
        given += (out,)
    plan: _calls.DraftPlan | None = launcher.plans.get(form)
    if plan is None or not plan.matches(*given):
        plan = _calls.recall(launcher, form, given)
    if plan is None:
        tensors = verify_tensors(
            q, k, v, state_pool, decay, state_indices, k_buffer, v_buffer, accepted_len, out
        )
        if elsewhere is not None and not _calls.plain(tensors):
            # fmt: off
            return elsewhere(
                q, k, v, state_pool, decay, state_indices, scale, k_buffer, v_buffer, accepted_len,
                out,
            )
            # fmt: on
        build = partial(_verify_plan, launcher, tensors)
        plan = _calls.find(launcher, form, KVBUFFER_VERIFY, tensors, build)
    if plan.grads and is_grad_enabled():
        tensors = verify_tensors(
            q, k, v, state_pool, decay, state_indices, k_buffer, v_buffer, accepted_len, out
        )
        _calls.refuse_grad(KVBUFFER_VERIFY, tensors)
    o = torch.empty(plan.out_shape, dtype=_BF16, device=plan.device) if out is None else out
    function = plan.function
    if function is None:
        return o
    q_at, k_at = q.data_ptr(), k.data_ptr()
    v_at, o_at = v.data_ptr(), o.data_ptr()
    decay_at, pool_at = decay.data_ptr(), state_pool.data_ptr()
    keys_at = 0 if k_buffer is None else k_buffer.data_ptr()
    values_at = 0 if v_buffer is None else v_buffer.data_ptr()
    index_at = 0 if state_indices is None else state_indices.data_ptr()
    length_at = 0 if accepted_len is None else accepted_len.data_ptr()
    # fmt: off
    places = (
        q_at, k_at, v_at, o_at, decay_at, pool_at, keys_at, values_at, index_at, length_at
    )
    # fmt: on
    new = places != plan.latest and places not in plan.known
    if new or checked.active:
        tensors = verify_tensors(
            q, k, v, state_pool, decay, state_indices, k_buffer, v_buffer, accepted_len, o
        )
        _calls.look_closer(VERIFY, launcher, plan, tensors, places)
    if plan.detach:
        decay = decay.detach()
    # fmt: off
    arguments = (
        q_at, k_at, v_at, o_at, decay, pool_at, keys_at, values_at, index_at, length_at,
        plan.layout_at, scale,
    )
    # fmt: on
    guard = launcher.guard(plan.device)
    if guard is None:
        function(*arguments)
    else:
        with guard:
            function(*arguments)
    return o


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


def _verify_plan(launcher: launch.Launcher, tensors: dict[str, Tensor | None]) -> _calls.DraftPlan:
    """Validate a combination seen for the first time, and find what serves it."""
    together(tensors)
    sizes = _calls.check(KVBUFFER_VERIFY, tensors, launcher.accepts)
    decay = tensors["decay"]
    assert decay is not None
    commits = tensors["accepted_len"] is not None
    function = _calls.function_of(
        launcher,
        KVBUFFER_VERIFY.operator,
        VERIFY,
        decay.device,
        sizes,
        commit=int(commits),
    )
    written = ("o", "k_buffer", "v_buffer", *(("state_pool",) if commits else ()))
    out_shape = out_shape_of(VERIFY, sizes)
    return _calls.DraftPlan(KVBUFFER_VERIFY, function, tensors, sizes, {}, out_shape, written)


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
    if state_indices is not None:
        form: Hashable = UPDATE
        # fmt: off
        given: tuple[Tensor, ...] = (
            k_buffer, v_buffer, decay, state_pool, state_indices, accepted_len
        )
        # fmt: on
    else:
        form = (UPDATE, None)
        given = (k_buffer, v_buffer, decay, state_pool, accepted_len)
    plan: _calls.DraftPlan | None = launcher.plans.get(form)
    if plan is None or not plan.matches(*given):
        plan = _calls.recall(launcher, form, given)
    if plan is None:
        tensors = update_tensors(k_buffer, v_buffer, state_pool, decay, state_indices, accepted_len)
        if elsewhere is not None and not _calls.plain(tensors):
            elsewhere(k_buffer, v_buffer, state_pool, decay, state_indices, accepted_len)
            return
        build = partial(_update_plan, launcher, tensors)
        plan = _calls.find(launcher, form, STATE_UPDATE, tensors, build)
    if plan.grads and is_grad_enabled():
        tensors = update_tensors(k_buffer, v_buffer, state_pool, decay, state_indices, accepted_len)
        _calls.refuse_grad(STATE_UPDATE, tensors)
    function = plan.function
    if function is None:
        return
    k_at, v_at = k_buffer.data_ptr(), v_buffer.data_ptr()
    decay_at, pool_at = decay.data_ptr(), state_pool.data_ptr()
    index_at = 0 if state_indices is None else state_indices.data_ptr()
    length_at = accepted_len.data_ptr()
    places = (k_at, v_at, decay_at, pool_at, index_at, length_at)
    new = places != plan.latest and places not in plan.known
    if new or checked.active:
        tensors = update_tensors(k_buffer, v_buffer, state_pool, decay, state_indices, accepted_len)
        _calls.look_closer(UPDATE, launcher, plan, tensors, places)
    if plan.detach:
        decay = decay.detach()
    arguments = (k_at, v_at, decay, pool_at, index_at, length_at, plan.layout_at)
    guard = launcher.guard(plan.device)
    if guard is None:
        function(*arguments)
    else:
        with guard:
            function(*arguments)


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


def _update_plan(launcher: launch.Launcher, tensors: dict[str, Tensor | None]) -> _calls.DraftPlan:
    """Validate a combination seen for the first time, and find what serves it."""
    sizes = _calls.check(STATE_UPDATE, tensors, launcher.accepts)
    decay = tensors["decay"]
    assert decay is not None
    function = _calls.function_of(launcher, STATE_UPDATE.operator, UPDATE, decay.device, sizes)
    return _calls.DraftPlan(STATE_UPDATE, function, tensors, sizes, {}, (), ("state_pool",))
