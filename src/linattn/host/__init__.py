"""Host runtime between the front door and the kernels; imports neither cutlass nor CUDA state."""
