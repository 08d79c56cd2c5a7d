"""y = gain * x by rows: the kernel of the operators that ``test_made_up_operator.py`` declares.

| tensor    | shape, dtype    | direction | meaning                                     |
| --------- | --------------- | --------- | ------------------------------------------- |
| x         | [B, T, 128] f32 | in        | strided rows                                |
| gain      | [B] f32         | in        | goes whole                                  |
| y         | [B, T, 128] f32 | out       | by way of ``workspace``, where there is one |
| workspace | [W] f32         | scratch   | a row for each CTA                          |

A CTA a row, a thread an element.
"""

from cutlass import Float32, Int64, cute

from linattn.device import memory
from linattn.device.layout import Layout

WIDTH = 128


class Copy:
    """Builds and launches the kernel."""

    def __init__(self, signature):
        self.signature = signature

    @cute.jit
    def __call__(self, x: Int64, gain: cute.Tensor, y: Int64, layout: Int64, stream):
        self.run(x, gain, y, Int64(0), Layout(self.signature, layout), stream)

    @cute.jit
    def run(self, x: Int64, gain: cute.Tensor, y: Int64, spare: Int64, block, stream):
        """Launch a CTA for each row."""
        rows, towers = block.size("T"), block.size("B")
        self.kernel((x, block.strides("x")), gain, (y, block.strides("y")), spare, rows).launch(
            grid=(rows, towers, 1), block=(WIDTH, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, source, gain: cute.Tensor, target, spare: Int64, rows):
        thread, _, _ = cute.arch.thread_idx()
        row, tower, _ = cute.arch.block_idx()
        one = cute.make_layout(1)
        at = memory.offset_of(source[1], tower, row) + thread
        value = memory.view(Float32, source[0], at, one, 4)[0] * gain[tower]
        if spare != 0:
            own = memory.extended(tower * rows + row) * WIDTH + thread
            memory.view(Float32, spare, own, one, 4)[0] = value
            value = memory.view(Float32, spare, own, one, 4)[0]
        at = memory.offset_of(target[1], tower, row) + thread
        memory.view(Float32, target[0], at, one, 4)[0] = value


class CopyThroughWorkspace(Copy):
    """The same with a workspace."""

    @cute.jit
    def __call__(
        self, x: Int64, gain: cute.Tensor, y: Int64, workspace: Int64, layout: Int64, stream
    ):
        self.run(x, gain, y, workspace, Layout(self.signature, layout), stream)


def KERNEL(config):  # noqa: N802
    """The kernel that a configuration asks for."""
    import made_up

    if config.workspace:
        return CopyThroughWorkspace(made_up.LARGER)
    return Copy(made_up.SIGNATURE)
