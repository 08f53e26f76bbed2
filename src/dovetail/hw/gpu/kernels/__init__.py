"""Triton kernels, jit code only: a reduction, one that holds every multiprocessor, a copy. Launchers lie one up."""
