"""The fused operators on GPUs: launchers of the kernels, a module per transport."""
