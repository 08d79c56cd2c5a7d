"""Calls under a torch that lacks a private name: ``python without_a_name.py NAME ...``.

Each name in a process of its own. Prints those with which something is not as it should be.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._C._dynamo.guards
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

HOMES: dict[str, Any] = {
    "torch._C": torch,
    "torch.Tag": torch,
    "torch.autograd.forward_ad": torch.autograd,
}


class Without:
    """A module without what a path leads to."""

    def __init__(self, whole: Any, path: list[str]) -> None:
        self._whole, (self._first, *self._rest) = whole, path

    def __getattr__(self, name: str) -> Any:
        if name != self._first:
            return getattr(self._whole, name)
        if self._rest:
            return Without(getattr(self._whole, name), self._rest)
        raise AttributeError(name)


def import_without(name: str) -> None:
    """Import linattn. torch itself keeps the name, but for one that nothing here needs."""
    if name.endswith(".TensorGuards"):
        del torch._C._dynamo.guards.TensorGuards
        return
    home = next(home for home in HOMES if name.startswith(home + "."))
    holder, attribute = HOMES[home], home.rpartition(".")[2]
    whole = value = getattr(holder, attribute)
    path = name.removeprefix(home + ".").split(".")
    for part in path:
        value = getattr(value, part)
    setattr(holder, attribute, Without(whole, path))
    import linattn  # noqa: F401

    setattr(holder, attribute, whole)


def refuses(call: Callable[..., Any], *arguments: Any, **named: Any) -> bool:
    try:
        call(*arguments, **named)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return True
    return False


def check(name: str) -> None:
    import_without(name)
    from made_up import scaled_copy
    from stand_ins import HostLauncher

    from linattn.host import launch

    x, gain = torch.ones(2, 3, 128), torch.ones(2)
    with launch.use_launcher(HostLauncher()) as recorder:
        assert isinstance(recorder, HostLauncher)
        for rows in (3, 3, 3, 2):
            assert scaled_copy(x[:, :rows], gain).shape == (2, rows, 128)
        assert len(recorder.launches) == 4
        assert refuses(scaled_copy, x.half(), gain)
        assert refuses(scaled_copy, x, gain, out=x)
        assert refuses(scaled_copy, x.clone().requires_grad_(), gain)
        with forward_ad.dual_level():
            assert refuses(scaled_copy, forward_ad.make_dual(x, x), gain)
        assert refuses(torch.func.grad(lambda x: scaled_copy(x, gain).sum()), x)
        assert len(recorder.launches) == 4
        # Refused, or computed one by one: what torch does with an operator that it cannot map.
        mapped = torch.vmap(lambda x: scaled_copy(x, gain))
        assert refuses(mapped, x[None].clone()) or len(recorder.launches) == 5
        del recorder.launches[:]
        with FakeTensorMode() as mode:
            assert scaled_copy(mode.from_tensor(x), mode.from_tensor(gain)).shape == x.shape
        assert not recorder.launches
        graph = make_fx(lambda x: scaled_copy(x, gain))(x).graph
        assert any("scaled_copy" in str(node.target) for node in graph.nodes)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    make_fx(torch.neg)(torch.ones(1))  # what that imports is there before the processes part
    for one in sys.argv[1:]:
        child = os.fork()
        if child == 0:
            try:
                check(one)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print(one, flush=True)
