"""What an operator is: tensors, configurations, kernels and public functions, in plain Python.

Nothing here imports torch, cutlass or a kernel, so that every other layer can.
"""
