"""Edits of compiled PTX that plant one fault each; a mutant runs with unchanged host code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ptx_emulator import launcher

Mutation = Callable[[str], str]


@contextmanager
def planted(mutation: Mutation, kernels: str) -> Iterator[int]:
    """Every loaded kernel whose name starts so is its mutant inside the block, whatever other tests
    have loaded. Gives their number.
    """
    original = dict(launcher._functions)
    mutants = {
        name: f.with_ptx(mutation(f.ptx))
        for name, f in original.items()
        if f".entry {kernels}" in f.ptx
    }
    launcher._functions.update(mutants)
    try:
        yield len(mutants)
    finally:
        launcher._functions.clear()
        launcher._functions.update(original)


def cut(pattern: str, count: int = 1, last: bool = False) -> Mutation:
    """Delete the first (or last) `count` matches of a regular expression."""

    def mutate(ptx: str) -> str:
        hits = list(re.finditer(pattern, ptx))
        assert len(hits) >= count, f"nothing to cut: {pattern}"
        for m in reversed(hits[-count:] if last else hits[:count]):
            ptx = ptx[: m.start()] + ptx[m.end() :]
        return ptx

    return mutate


def swap(pattern: str, new: str, count: int = 1) -> Mutation:
    """Replace the first `count` matches."""

    def mutate(ptx: str) -> str:
        out, n = re.subn(pattern, new, ptx, count=count)
        assert n == count, f"nothing to swap: {pattern}"
        return out

    return mutate


def ignore_wait(before: str) -> Mutation:
    """The last mbarrier wait ahead of `before` asks once and goes on whatever the answer."""

    def mutate(ptx: str) -> str:
        start = ptx.rindex("@P1 bra.uni DONE;", 0, ptx.index(before))
        return ptx[:start] + ptx[start:].replace("@P1 bra.uni DONE;", "bra.uni DONE;", 1)

    return mutate
