"""Benchmarks of a GPU's copy engines in this process: rank 0 is the GPU, its peers are pinned host memory.

`session` opens the GPU and keeps the bounds, `collectives`, `copies`, `beside`, `energy` and `phases` measure, and
`verdict` draws the conclusions. The rules are those of `dovetail.bench`: checked, interleaved, medians.
"""
