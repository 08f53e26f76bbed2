"""The CPU backend: software DMA engines over shared memory. The native module is loaded on first use."""
