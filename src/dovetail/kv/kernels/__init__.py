"""Triton kernels of `dovetail.kv`: device code only."""
