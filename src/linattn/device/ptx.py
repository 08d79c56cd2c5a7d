"""Every inline PTX instruction of the project.

Each wrapper exists because the operation must be exactly that instruction: the compiler may
contract or reorder ordinary float expressions, and a bitwise contract cannot depend on that.
"""

from cutlass import Float32, Int32, Int64, cute


def fma_rn(a: Float32, b: Float32, c: Float32) -> Float32:
    """``a * b + c`` with one rounding to nearest even."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def mul_rn(a: Float32, b: Float32) -> Float32:
    """``a * b`` rounded to nearest even, never contracted into an FMA."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def add_rn(a: Float32, b: Float32) -> Float32:
    """``a + b`` rounded to nearest even, never contracted into an FMA."""
    return cute.arch.inline_ptx(
        "add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def bits_of(value: Float32) -> Int32:
    """The bit pattern of a float."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def float_of(bits: Int32) -> Float32:
    """The float with this bit pattern."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
    )


def bulk_load(target: Int32, source: Int64, size: int, barrier: Int32) -> None:
    """Copy ``size`` bytes from global to shared memory; completes on the mbarrier at ``barrier``.

    ``target`` and ``barrier`` are addresses in shared memory; all but the latter are multiples of
    16. One thread issues it.
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, Int32(size), barrier],
    )


def low_half(pair: Int32) -> Float32:
    """The bf16 number in the lower half of a word, as FP32."""
    return float_of(pair << 16)


def high_half(pair: Int32) -> Float32:
    """The bf16 number in the upper half of a word, as FP32."""
    return float_of(pair & -65536)


def upper_halves(low: Float32, high: Float32) -> Int32:
    """The upper 16 bits of two floats in one word: two numbers truncated to bf16."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, 30258;",
        write_only_types=[Int32],
        read_only_args=[bits_of(low), bits_of(high)],
    )


def mma_bf16(acc: tuple, a: tuple, b: tuple) -> tuple:
    """``acc + a * b`` on a warp: m16n8k16, bf16 operands two to a word, FP32 accumulator."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *acc],
    )
