"""Builders: a module per collective, a function per variant. Sizes are what c10d counts: see each function."""

from dovetail.plan.build import all_gather, all_to_all, reduction, rooted

__all__ = ["all_gather", "all_to_all", "reduction", "rooted"]
