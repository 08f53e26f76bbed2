"""Benchmarks: what is measured, against whom, and by which rules.

`spec` says what to run, `runner` starts the ranks, `worker` is one rank, `cases` knows the collectives, `baselines`
those we are compared with, and `verdict` draws the conclusion. The clock is `dovetail.measure.interleave`.
"""
