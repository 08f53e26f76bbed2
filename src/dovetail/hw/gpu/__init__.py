"""GPUs: the same plans on copy engines. One code over two driver tables (CUDA's driver API; HIP with a little ROCr)."""
