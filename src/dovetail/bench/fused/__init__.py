"""`dovetail bench fused`: operators fused with the collective that depends on them, against operator then collective.

Owns the shapes, what is measured of each, the rows and what they say. Operators are those of `dovetail.ops`.
"""
