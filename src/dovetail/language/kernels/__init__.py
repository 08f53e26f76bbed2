"""Triton device functions, jit code only."""
