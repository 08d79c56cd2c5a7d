"""Order of a grid with those before and behind it in a stream: programmatic dependent launch.

Every CTA waits for the grid before, ahead of any access to global memory, and lets the next grid
be launched behind its own wait only. So when a grid has ended, so have all before it, and the next
one, which waits for this one alone, is ordered after all of them.
"""

from cutlass import Int64, cute

from linattn.spec.tiling import EARLY_CTAS


@cute.jit
def wait(addresses: tuple):
    """Wait until the grid before has ended; global memory may be its own until then.

    ``addresses`` are what the caller is about to read and write; at least one of them, such as that
    of the slopes, is never null. They are formed before the wait, while the grid before still runs:
    the condition, which always holds, needs them. Without it the assembler moves the wait in front
    of them.
    """
    bits = Int64(0)
    for address in addresses:
        bits = bits | address
    if bits != 0:
        cute.arch.griddepcontrol_wait()


def launch_next() -> None:
    """Let the next grid be launched when every CTA has come here or ended. Behind ``wait`` only."""
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def launch_next_beside():
    """``launch_next`` where this grid has at most one CTA an SM.

    CTAs that are launched beside a fuller grid go where that one happens to be thin, and some SMs
    then work for two.
    """
    x, y, z = cute.arch.grid_dim()
    if x * y * z <= EARLY_CTAS:
        launch_next()
