"""Triton kernels of the fused operators, jit code only. Launchers lie in `dovetail.ops.gpu`."""
