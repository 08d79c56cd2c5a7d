"""Shared device vocabulary: one topic a file, imported by kernels only."""
