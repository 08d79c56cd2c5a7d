"""Control flow, warp-level exchange, barriers, mbarriers and fences."""

from __future__ import annotations

from ptx_emulator.emitter import Emitter
from ptx_emulator.errors import Unmodelled
from ptx_emulator.isa import SHARED, op
from ptx_emulator.ptx import Address, Instr, Pair


# ---- control
@op(r"bra(?:\.uni)?", ends=True)
def branch(e: Emitter, i: Instr) -> None:
    raise Unmodelled("branches are written by the emitter")


@op(r"ret(?:\.uni)?", r"exit", ends=True)
def leave(e: Emitter, i: Instr) -> None:
    e.emit("return EXIT")


@op(r"trap", r"brkpt")
def trap(e: Emitter, i: Instr) -> None:
    e.emit(f"U.trap({e.active})")


@op(
    r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32",
    r"griddepcontrol\.launch_dependents",
    r"nanosleep\.u32",
    r"pmevent(?:\.mask)?",
)
def no_effect(e: Emitter, i: Instr) -> None:
    """Register budgets, launch chaining and time are not modelled."""
    e.emit("pass")


@op(r"griddepcontrol\.wait")
def grid_wait(e: Emitter, i: Instr) -> None:
    e.emit(f"U.grid_wait({e.active})")


# ---- warp level
@op(r"shfl\.sync\.(?:idx|up|down|bfly)\.b32", leads=True)
def shuffle(e: Emitter, i: Instr) -> None:
    e.whole(i.ops[4])
    values = ",".join(e.get(o, "b32") for o in i.ops[1:4])
    destinations = e.items(i.ops[0])
    e.emit(f"t=U.shuffle({i.parts[2]!r},{values},{e.active})")
    e.put(destinations[0], "t[0]", "b32")
    if isinstance(i.ops[0], Pair):
        e.put(destinations[1], "t[1]", "pred")


@op(r"elect\.sync", leads=True)
def elect(e: Emitter, i: Instr) -> None:
    e.whole(i.ops[1])
    e.emit(f"t=U.elect({e.active})")
    lane, chosen = e.items(i.ops[0])
    e.put(lane, "t[0]", "b32")
    e.put(chosen, "t[1]", "pred")


@op(r"vote\.sync\.(?:ballot\.b32|(?:any|all|uni)\.pred)", leads=True)
def vote(e: Emitter, i: Instr) -> None:
    e.whole(i.ops[2])
    kind = i.parts[2]
    e.emit(f"t=U.vote({kind!r},{e.get(i.ops[1], 'pred')},{e.active})")
    e.put(i.ops[0], "t", "b32" if kind == "ballot" else "pred")


@op(r"match\.any\.sync\.b32", leads=True)
def match_any(e: Emitter, i: Instr) -> None:
    e.whole(i.ops[2])
    e.emit(f"t=U.match_any({e.get(i.ops[1], 'b32')},{e.active})")
    e.put(i.ops[0], "t", "b32")


@op(r"activemask\.b32")
def active_mask(e: Emitter, i: Instr) -> None:
    e.put(i.ops[0], f"U.vote('ballot',TRUE,{e.active})", "b32")


@op(r"redux\.sync\.(?:add|min|max)\.[su]32", r"redux\.sync\.(?:and|or|xor)\.b32", leads=True)
def reduce_warp(e: Emitter, i: Instr) -> None:
    e.whole(i.ops[2])
    ty = i.parts[-1]
    e.emit(f"t=U.reduce({i.parts[2]!r},{e.get(i.ops[1], ty)},{e.active})")
    e.put(i.ops[0], "t", ty)


@op(r"bar\.warp\.sync", leads=True)
def warp_barrier(e: Emitter, i: Instr) -> None:
    e.whole(i.ops[0])
    e.emit("pass")


# ---- barriers
@op(
    r"bar\.sync", r"bar\.arrive", r"barrier\.sync(?:\.aligned)?", r"barrier\.arrive(?:\.aligned)?",
    r"barrier\.cta\.(?:sync|arrive)(?:\.aligned)?", r"bar\.cta\.(?:sync|arrive)",
    leads=True, ends=True,
)  # fmt: skip
def named_barrier(e: Emitter, i: Instr) -> None:
    e.whole(None)
    count = e.get(i.ops[1], "b32") if len(i.ops) > 1 else "None"
    index, arrive = e.get(i.ops[0], "b32"), "arrive" in i.parts
    e.emit(f"return U.named_barrier({index},{count},{arrive},{e.block},{e.next},{e.active})")


@op(r"barrier\.cluster\.arrive(?:\.relaxed|\.release)?(?:\.aligned)?")
def cluster_arrive(e: Emitter, i: Instr) -> None:
    e.emit(f"U.cluster_arrive({e.active})")


@op(r"barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?", ends=True)
def cluster_wait(e: Emitter, i: Instr) -> None:
    e.emit(f"return U.cluster_wait({e.next},{e.active})")


# ---- mbarriers
_CLUSTER = rf"(?:{SHARED}|shared::cluster)"
_SEM = r"(?:\.(?:release|relaxed)\.(?:cta|cluster))?"
_WAIT_SEM = r"(?:\.(?:acquire|relaxed)\.(?:cta|cluster))?"


@op(rf"mbarrier\.init\.{SHARED}\.b64")
def mbarrier_init(e: Emitter, i: Instr) -> None:
    e.emit(f"U.mbarrier_init({e.shared_address(i.ops[0])},{e.get(i.ops[1], 'b32')},{e.active})")


@op(rf"mbarrier\.inval\.{SHARED}\.b64")
def mbarrier_invalidate(e: Emitter, i: Instr) -> None:
    e.emit(f"U.mbarrier_invalidate({e.shared_address(i.ops[0])},{e.active})")


@op(
    rf"mbarrier\.arrive{_SEM}\.{_CLUSTER}\.b64",
    rf"mbarrier\.arrive\.expect_tx{_SEM}\.{_CLUSTER}\.b64",
    rf"mbarrier\.expect_tx{_SEM}\.{_CLUSTER}\.b64",
    rf"mbarrier\.complete_tx{_SEM}\.{_CLUSTER}\.b64",
)
def mbarrier_arrive(e: Emitter, i: Instr) -> None:
    """[state token,] [address], count or bytes. The token is the parity of the phase that the
    arrival belongs to.
    """
    has_token = not isinstance(i.ops[0], Address)
    operands = i.ops[1:] if has_token else i.ops
    address = e.shared_address(operands[0])
    amount = e.get(operands[1], "b32") if len(operands) > 1 else e.constant(1, "b32")
    arrivals, transactions = amount, "None"
    if "complete_tx" in i.parts:
        arrivals, transactions = "None", f"(-{amount})"
    elif "expect_tx" in i.parts:
        arrivals = e.constant(1, "b32") if "arrive" in i.parts else "None"
        transactions = amount
    e.emit(f"t=U.mbarrier_arrive({address},{arrivals},{transactions},{e.active})")
    if has_token:
        e.put(i.ops[0], "t", "b64")


@op(
    rf"mbarrier\.(?:try|test)_wait(?:\.parity)?{_WAIT_SEM}\.{SHARED}\.b64",
    leads=True,
    ends=True,
)
def mbarrier_wait(e: Emitter, i: Instr) -> None:
    """predicate, [address], parity or state token, time limit?"""
    ty = "b32" if "parity" in i.parts else "b64"
    parity = e.get(i.ops[2], ty) + ("" if ty == "b32" else ".astype(u4)")
    address = e.shared_address(i.ops[1])
    e.emit(f"t=U.mbarrier_wait({address},{parity},{e.block},{e.active})")
    e.emit("if t.__class__ is not bool: return t")
    e.put(i.ops[0], "(TRUE if t else FALSE)", "pred")
    e.emit(f"return {e.next}")


# ---- fences
@op(
    r"fence\.proxy\.async(?:\.(?:shared::cta|shared::cluster|global))?",
    r"fence\.proxy\.alias",
    r"fence\.proxy\.tensormap::generic\.(?:acquire|release)\.(?:cta|cluster|gpu|sys)",
    r"fence\.mbarrier_init\.release\.cluster",
    r"fence\.(?:acq_rel|sc|acquire|release)\.(?:cta|cluster|gpu|sys)",
    r"membar\.(?:cta|gl|sys)",
)
def fence(e: Emitter, i: Instr) -> None:
    e.emit(f"U.fence({i.op!r},{e.active})")
