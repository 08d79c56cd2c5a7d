"""What a kernel reads of a call, it reads by name."""

from __future__ import annotations

from typing import Any

import copy_kernel
import made_up
import pytest

from linattn.host import build
from linattn.kernels import OPERATORS
from linattn.spec.operator import Operator

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.claim("CE-03", "a declaration that does not fit is refused, by name"),
]


class Swapped(copy_kernel.Copy):
    def __call__(self, y: Any, gain: Any, x: Any, layout: Any, stream: Any) -> None:
        raise AssertionError("it was traced")


def test_parameters_are_the_arguments_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_kernel, "KERNEL", lambda config: Swapped(made_up.SIGNATURE))
    message = r"copy_kernel: got parameters \('y', 'gain', 'x', .*expected \('x', 'gain', 'y', "
    with pytest.raises(TypeError, match=message):
        build.build(made_up.OPERATOR, "sm_90a", made_up.COPY)


def test_fields_are_found_by_name() -> None:
    signature = made_up.SIGNATURE
    words = [signature.at_stride(name, dim) for name in ("x", "y") for dim in ("B", "T")]
    words += [signature.at(name) for name in ("B", "T")]
    assert sorted(words) == list(range(signature.words))
    for wrong in (
        lambda: signature.at("rows"),
        lambda: signature.at("x"),
        lambda: signature.at_stride("z", "B"),
        lambda: signature.at_stride("x", "H"),
        lambda: signature.at_stride("gain", "B"),
        lambda: signature.at_wide("x"),
    ):
        with pytest.raises((KeyError, ValueError)):
            wrong()


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=str)
def test_every_word_of_a_layout_has_one_name(operator: Operator) -> None:
    signature = operator.signature
    words = [
        signature.at_stride(spec.name, dim) for spec in signature.tensors for dim in spec.strided
    ]
    words += [signature.at_wide(spec.name) for spec in signature.tensors if spec.has_wide]
    words += [signature.at(name) for name in (*signature.sizes, *signature.flags)]
    assert sorted(words) == list(range(signature.words))
    assert sum(spec.whole for spec in signature.tensors) == 1
