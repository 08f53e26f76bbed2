"""The checker: proves a plan before it runs.

A module per question: `chains` and `memory` number the steps and the bytes; `signals`, `order` and `resets` say what
happens before what; `flow`, `bounds`, `bind` and `posted` say which bytes a step touches, for every value of its
parameters; `cells` cuts memory so that big buffers cost no more than small ones; `races` and `symbolic` prove that
there is one result and that it is the right one. Nothing here runs anything or knows any hardware.
"""

from dovetail.plan.check.prove import Proof, check

__all__ = ["Proof", "check"]
