"""Groups by name: torch's operators take strings, and a compiled graph holds one where Python had a group."""

from __future__ import annotations

import weakref
from typing import Any

from dovetail.coll.session import group_of, session
from dovetail.hw.world import Group

_TORCH = "torch "
_ours: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()


def name_of(group: Any) -> str:
    """The name of None (the world), a `Group`, a torch `ProcessGroup` or a one-dimensional `DeviceMesh`."""
    if group is None:
        return ""
    if isinstance(group, str):
        return group
    if isinstance(group, Group):
        name = f"{group.world.token} {group.name} {group.ranks}"
        _ours[name] = group
        return name
    if hasattr(group, "group_name"):
        return f"{_TORCH}{group.group_name}"
    return name_of(group_of(group))


def named(name: str) -> Group:
    """The group of a name."""
    if not name:
        return session.group or group_of(None)
    if (found := _ours.get(name)) is not None:
        return found
    if name.startswith(_TORCH):
        plain = name.removeprefix(_TORCH)
        if (known := session.torch_groups.get(plain)) is not None:
            return known
        from torch.distributed import distributed_c10d as c10d

        resolve: Any = c10d._resolve_process_group  # type: ignore[attr-defined]
        return group_of(resolve(plain))
    raise ValueError(f"no group is named {name!r}: names come from dovetail.ops.name_of(group), while the group lives")
