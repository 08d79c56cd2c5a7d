"""Loads, stores, atomics, matrix loads, and asynchronous copies."""

from __future__ import annotations

from ptx_emulator.emitter import Emitter, numpy_code, unsigned
from ptx_emulator.errors import Unmodelled
from ptx_emulator.isa import SHARED, op
from ptx_emulator.ptx import BITS, Address, Instr, Operand, Reg, Sink, Vector

_EVICTION = r"(?:evict_normal|evict_unchanged|evict_first|evict_last|no_allocate)"
_HINTS = (
    rf"(?:\.(?:ca|cg|cs|lu|cv|wb|wt))?(?:\.nc)?(?:\.L1::{_EVICTION})?(?:\.L2::{_EVICTION})?"
    r"(?:\.L2::cache_hint)?(?:\.L2::(?:64B|128B|256B))?"
)
_TYPE = r"(?:\.v[248])?\.(?:[bsu](?:8|16|32|64)|f32|f64)"
_STRONG = r"\.(?:volatile|(?:relaxed|acquire)\.(?:cta|cluster|gpu|sys))"
_STRONG_STORE = r"\.(?:volatile|(?:relaxed|release)\.(?:cta|cluster|gpu|sys))"
_READABLE = rf"(?:\.param|\.{SHARED}|\.shared::cluster|\.global|\.local|\.const)?"
_WRITABLE = rf"(?:\.{SHARED}|\.shared::cluster|\.global|\.local)?"
_SPACES = ("param", "shared", "global", "local", "const")


def space_of(i: Instr) -> str:
    """State space of an access; 'generic' when the spelling names none."""
    for part in i.parts[1:]:
        name = part.split("::")[0]
        if name in _SPACES:
            return "global" if name == "const" else name
    return "generic"


def _address(e: Emitter, o: Operand, space: str) -> str:
    return e.shared_address(o) if space == "shared" else e.address(o, "b64")


def _load(e: Emitter, i: Instr) -> None:
    ty, space = i.parts[-1], space_of(i)
    width = BITS[ty] // 8
    destinations = e.items(i.ops[0])
    address = _address(e, i.ops[1], space)
    count = len(destinations)
    if i.used is None:
        e.emit(f"t=U.load({space!r},{address},{width},{count},{e.active},{e.full})")
    else:  # the compiler widened a load: what it does not use may hold anything
        e.emit(f"base={address}")
        wanted = [j for j in range(count) if i.used >> j * width & ((1 << width) - 1)]
        rest = f"{width},1,{e.active},{e.full})[0]"
        parts = (f"{j}:U.load({space!r},base+base.dtype.type({j * width}),{rest}" for j in wanted)
        e.emit(f"t={{{','.join(parts)}}}")
        destinations = tuple(d if j in wanted else Sink() for j, d in enumerate(destinations))
    for j, d in enumerate(destinations):
        if not isinstance(d, Sink):
            view = f".view({numpy_code(ty)})" if ty[0] == "s" else ""
            e.put(d, f"t[{j}]{view}", ty if ty[0] == "s" else unsigned(ty))


@op(rf"ld(?:\.weak)?{_READABLE}{_HINTS}{_TYPE}")
def load(e: Emitter, i: Instr) -> None:
    _load(e, i)


@op(rf"ld{_STRONG}{_READABLE}{_HINTS}{_TYPE}", ends=True)
def load_strong(e: Emitter, i: Instr) -> None:
    """A load that may poll: the other warps of the cluster get their turn after it."""
    _load(e, i)
    e.emit(f"return U.pause({e.next})")


@op(rf"st(?:\.weak)?{_WRITABLE}{_HINTS}{_TYPE}", rf"st{_STRONG_STORE}{_WRITABLE}{_HINTS}{_TYPE}")
def store(e: Emitter, i: Instr) -> None:
    ty, space = i.parts[-1], space_of(i)
    address = _address(e, i.ops[0], space)
    values = e.values(i.ops[1], unsigned(ty))
    e.emit(f"U.store({space!r},{address},{BITS[ty] // 8},{values},{e.active},{e.full})")


_ATOMIC_KIND = r"(?:add|min|max|and|or|xor|exch|cas|inc|dec)"
_ATOMIC_TYPE = r"(?:[bsu](?:32|64)|f32|b16)"
_SEMANTICS = r"(?:\.(?:relaxed|acquire|release|acq_rel))?(?:\.(?:cta|cluster|gpu|sys))?"


@op(rf"atom{_SEMANTICS}{_WRITABLE}\.{_ATOMIC_KIND}(?:\.L2::cache_hint)?\.{_ATOMIC_TYPE}", ends=True)
def atomic(e: Emitter, i: Instr) -> None:
    """Lanes are served in order of their number. Ends its block, as an atomic may poll."""
    ty = i.parts[-1]
    _atomic(e, i, i.ops[1], i.ops[2:])
    e.put(i.ops[0], "t", ty)
    e.emit(f"return U.pause({e.next})")


@op(rf"red{_SEMANTICS}{_WRITABLE}\.(?:add|min|max|and|or|xor|inc|dec)\.{_ATOMIC_TYPE}")
def reduction(e: Emitter, i: Instr) -> None:
    _atomic(e, i, i.ops[0], i.ops[1:])


def _atomic(e: Emitter, i: Instr, address: Operand, operands: tuple[Operand, ...]) -> None:
    ty, space = i.parts[-1], space_of(i)
    kind = next(p for p in i.parts[1:] if p in _ATOMIC_NAMES)
    if ty == "b16" and kind != "cas":
        raise Unmodelled("16-bit atomics other than cas")
    values = "[" + ",".join(e.get(o, ty) for o in operands) + "]"
    where = _address(e, address, space)
    e.emit(f"t=U.atomic({space!r},{kind!r},{where},{values},{e.active})")


_ATOMIC_NAMES = frozenset(["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"])


# ---- matrix fragments
@op(rf"ldmatrix\.sync\.aligned\.m8n8\.x[124](?:\.trans)?\.{SHARED}\.b16", leads=True)
def load_matrix(e: Emitter, i: Instr) -> None:
    e.whole(None)
    count = len(e.items(i.ops[0]))
    address = e.shared_address(i.ops[1])
    e.emit(f"t=U.load_matrix({address},{count},{'trans' in i.parts},{e.active})")
    e.spread(i.ops[0])


@op(rf"stmatrix\.sync\.aligned\.m8n8\.x[124](?:\.trans)?\.{SHARED}\.b16", leads=True)
def store_matrix(e: Emitter, i: Instr) -> None:
    e.whole(None)
    address, values = e.shared_address(i.ops[0]), e.values(i.ops[1])
    e.emit(f"U.store_matrix({address},{values},{'trans' in i.parts},{e.active})")


# ---- cp.async (Ampere form)
@op(rf"cp\.async\.(?:ca|cg)\.{SHARED}\.global(?:\.L2::cache_hint)?(?:\.L2::(?:64B|128B|256B))?")
def copy_async(e: Emitter, i: Instr) -> None:
    """[destination], [source], bytes, source bytes?, cache policy?"""
    extra = i.ops[3:-1] if "L2::cache_hint" in i.parts else i.ops[3:]
    live = "None"
    if extra:
        o = extra[0]
        if isinstance(o, Reg) and e.kernel.register_types[o.index] == "pred":
            live = f"where({e.get(o, 'pred')},u4(0),u4({e.integer(i.ops[2])}))"
        else:
            live = e.get(o, "b32")
    target, source = e.shared_address(i.ops[0]), e.address(i.ops[1])
    e.emit(f"U.copy_async({target},{source},{e.integer(i.ops[2])},{live},{e.active})")


@op(r"cp\.async\.commit_group", r"cp\.async\.wait_group", r"cp\.async\.wait_all")
def copy_group(e: Emitter, i: Instr) -> None:
    count = e.integer(i.ops[0]) if i.ops else 0
    e.emit(f"U.copy_group({i.parts[2]!r},{count},{e.active})")


@op(rf"cp\.async\.mbarrier\.arrive(?:\.noinc)?\.{SHARED}\.b64")
def copy_arrive(e: Emitter, i: Instr) -> None:
    """The copies of this thread are complete when they are issued, so the arrival is immediate."""
    address = e.shared_address(i.ops[0])
    e.emit(f"U.copy_arrive({address},{'noinc' in i.parts},{e.active})")


# ---- bulk copies
_CACHE = r"(?:\.L2::cache_hint)?"
_LOAD = r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::(?:cta|cluster)\.global(?:\.tile)?"
_STORE = r"\.[1-5]d\.global\.shared::cta(?:\.tile)?\.bulk_group"


@op(
    _LOAD + r"\.mbarrier::complete_tx::bytes(?:\.multicast::cluster)?"
    r"(?:\.cta_group::[12])?" + _CACHE,
    _LOAD
    + r"\.mbarrier::complete_tx::bytes(?:\.multicast::cluster)?"
    + _CACHE
    + r"(?:\.cta_group::[12])?",
)
def tensor_load(e: Emitter, i: Instr) -> None:
    """[destination], [descriptor, {coordinates}], [mbarrier], CTA mask?, cache policy?"""
    descriptor, coordinates = _tensor(i.ops[1])
    where = ",".join(e.get(c, "s32") for c in coordinates)
    multicast = e.get(i.ops[3], "b16") if "multicast::cluster" in i.parts else "None"
    e.emit(
        f"U.tensor_load({e.shared_address(i.ops[0])},{e.get(descriptor, 'b64')},[{where}],"
        f"{e.shared_address(i.ops[2])},{multicast},{'cta_group::2' in i.parts},{e.active})"
    )


@op(
    r"cp\.async\.bulk\.tensor" + _STORE + _CACHE,
    r"cp\.reduce\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta\.(?:add|min|max|and|or|xor)"
    r"(?:\.tile)?\.bulk_group" + _CACHE,
)
def tensor_store(e: Emitter, i: Instr) -> None:
    """[descriptor, {coordinates}], [source], cache policy?"""
    descriptor, coordinates = _tensor(i.ops[0])
    where = ",".join(e.get(c, "s32") for c in coordinates)
    reduce = (
        next((p for p in i.parts if p in _ATOMIC_NAMES), None) if i.parts[1] == "reduce" else None
    )
    e.emit(
        f"U.tensor_store({e.get(descriptor, 'b64')},[{where}],{e.shared_address(i.ops[1])},"
        f"{reduce!r},{e.active})"
    )


@op(r"cp\.async\.bulk\.prefetch\.tensor\.[1-5]d\.L2\.global(?:\.tile)?" + _CACHE)
def tensor_prefetch(e: Emitter, i: Instr) -> None:
    descriptor, _ = _tensor(i.ops[0])
    e.emit(f"U.check_descriptor({e.get(descriptor, 'b64')},{e.active})")


def _tensor(o: Operand) -> tuple[Operand, tuple[Operand, ...]]:
    if not isinstance(o, Address) or len(o.items) < 2 or not isinstance(o.items[1], Vector):
        raise Unmodelled("a tensor operand is [descriptor, {coordinates}]")
    return o.items[0], o.items[1].items


@op(
    r"cp\.async\.bulk\.shared::(?:cta|cluster)\.global\.mbarrier::complete_tx::bytes"
    r"(?:\.multicast::cluster)?" + _CACHE
)
def bulk_load(e: Emitter, i: Instr) -> None:
    """[destination], [source], bytes, [mbarrier], CTA mask?, cache policy?"""
    multicast = e.get(i.ops[4], "b16") if "multicast::cluster" in i.parts else "None"
    e.emit(
        f"U.bulk_load({e.shared_address(i.ops[0])},{e.address(i.ops[1])},{e.get(i.ops[2], 'b32')},"
        f"{e.shared_address(i.ops[3])},{multicast},{e.active})"
    )


@op(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group" + _CACHE)
def bulk_store(e: Emitter, i: Instr) -> None:
    """[destination], [source], bytes, cache policy?"""
    e.emit(
        f"U.bulk_store({e.address(i.ops[0])},{e.shared_address(i.ops[1])},"
        f"{e.get(i.ops[2], 'b32')},{e.active})"
    )


@op(r"cp\.async\.bulk\.prefetch\.L2\.global" + _CACHE)
def bulk_prefetch(e: Emitter, i: Instr) -> None:
    """[source], bytes, cache policy?"""
    e.emit(f"U.bulk_prefetch({e.address(i.ops[0])},{e.get(i.ops[1], 'b32')},{e.active})")


@op(r"cp\.async\.bulk\.commit_group", r"cp\.async\.bulk\.wait_group(?:\.read)?")
def bulk_group(e: Emitter, i: Instr) -> None:
    kind = "commit" if "commit_group" in i.parts else "read" if "read" in i.parts else "wait"
    e.emit(f"U.bulk_group({kind!r},{e.integer(i.ops[0]) if i.ops else 0},{e.active})")


# ---- descriptors edited by the kernel
@op(
    r"tensormap\.replace\.tile\.(?:global_address|global_dim|global_stride)\.(?:global|shared::cta)"
    r"\.b1024\.b(?:32|64)"
)
def replace_descriptor(e: Emitter, i: Instr) -> None:
    """[descriptor], ordinal?, value"""
    space, field = space_of(i), i.parts[3]
    ordinal = e.integer(i.ops[1]) if field != "global_address" else 0
    value = e.get(i.ops[-1], i.parts[-1])
    address = _address(e, i.ops[0], space)
    e.emit(f"U.replace_descriptor({space!r},{address},{field!r},{ordinal},{value},{e.active})")


@op(
    r"tensormap\.cp_fenceproxy\.global\.shared::cta\.tensormap::generic\.release\.gpu\.sync\.aligned",
    leads=True,
)
def publish_descriptor(e: Emitter, i: Instr) -> None:
    """[destination], [source], bytes: copies a descriptor from shared to global memory."""
    e.whole(None)
    e.emit(
        f"U.publish_descriptor({e.address(i.ops[0])},{e.shared_address(i.ops[1])},"
        f"{e.integer(i.ops[2])},{e.active})"
    )


@op(
    r"prefetch\.tensormap",
    r"prefetch(?:\.global)?\.L[12](?:::evict_last|::evict_normal)?",
    r"(?:applypriority|discard)\.global\.L2::(?:evict_normal|128B)",
)
def hint(e: Emitter, i: Instr) -> None:
    """No effect on results."""
    e.emit("pass")
