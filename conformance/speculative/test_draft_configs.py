"""Every shipped configuration on one small problem, whatever the tables would choose for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from draft_cases import Case, build

import linattn
from linattn.kernels import OPERATORS
from linattn.kernels.mtp_decode.config import MtpConfig
from linattn.reference.speculative import lightning_decode, lightning_verify

ROWS = [
    pytest.param(
        family, name, config, id=config.name(), marks=getattr(pytest.mark, family)
    )
    for name, operator in OPERATORS.items()
    if name != "lightning_prefill"
    for family, kernel in operator.kernels.items()
    for config in kernel.configs
]  # fmt: skip


@pytest.fixture
def use(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, plan_anew: Callable[[], None]
) -> Callable[[str, str, Any], None]:
    """``use(family, operator, config)``: every call of the operator gets that configuration."""

    def only(family: str, operator: str, config: Any) -> None:
        kernels: Any = OPERATORS[operator].kernels
        kernel = replace(kernels[family], choose=lambda sizes, _: config)
        monkeypatch.setitem(kernels, family, kernel)
        plan_anew()

    return only


@pytest.mark.claim("SD-14", "every shipped draft configuration gives the bits of the models")
@pytest.mark.bitwise
@pytest.mark.parametrize(("family", "operator", "config"), ROWS)
def test_configuration(
    family: str, operator: str, config: Any, use: Any, device: torch.device, assert_bitwise: Any
) -> None:
    use(family, operator, config)
    check(operator, config, device, assert_bitwise)


@pytest.mark.claim("SD-46", "decode of several batches of rows a warp gives the bits of the model")
@pytest.mark.sm90
@pytest.mark.bitwise
def test_several_batches(use: Any, device: torch.device, assert_bitwise: Any) -> None:
    """As tuning may want it; no shipped configuration has that."""
    config = MtpConfig(tile_v=128, warps=4, ilp=2, stages=4)
    use("sm90", "mtp_decode", config)
    check("mtp_decode", config, device, assert_bitwise)


def check(operator: str, config: Any, device: torch.device, assert_bitwise: Any) -> None:
    """Grouped heads, a padded request, all eight drafts, a request that accepted none of them."""
    problem = build(Case(3, 8, (1, 2), "alibi", "padded", "HV", 0.5), device)
    q, k, v = problem.dense()
    o, states = lightning_decode(q, k, v, problem.decay, problem.scale, problem.states)
    verified = lightning_verify(q, k, v, problem.decay, problem.scale, problem.states)
    arguments = problem.arguments
    pool, decay, indices = arguments[3:6]
    held = [
        torch.zeros(len(problem.pool), 8, x.shape[2], 128).to(x) for x in (problem.k, problem.v)
    ]
    if operator == "mtp_decode":
        got = linattn.la_decode_mtp(*arguments)
        assert_bitwise((got[problem.live], pool[problem.slots]), (o, states[:, -1]))
        return
    accepted = torch.tensor([8, 8, 0], dtype=torch.int32, device=device)
    if operator == "state_update":
        held[0][problem.slots], held[1][problem.slots] = k, v
        linattn.la_state_update_kvbuffer(*held, pool, decay, indices, accepted)
        want = torch.stack((states[0, -1], problem.states[1]))
        assert_bitwise(pool[problem.slots], want, "states")
        return
    named = {"k_buffer": held[0], "v_buffer": held[1]}
    if config.commit:
        named["accepted_len"] = torch.zeros_like(accepted)
    got = linattn.la_verify_kvbuffer(*arguments, **named)
    assert_bitwise((got[problem.live], held[0][problem.slots]), (verified, k), "o k_buffer")
