"""How Dovetail measures: the record every command writes, the machine it ran on, statistics and sizes.

Owns what is common to all measurements. What is measured, and against which baseline, belongs to `dovetail.bench`.
"""
