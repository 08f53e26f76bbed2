"""Joining the world: `init()` in a process that something launched, `launch()` to start such processes.

Owns the default world of the process. `init()` attaches to torch.distributed if that is initialised, whatever its
backend; otherwise it takes rank and size from a launcher (`dovetail.launch`, torchrun, mpirun), or is alone.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import operator
import os
import sys
import uuid
from typing import Any

from dovetail import env
from dovetail.coll import choose
from dovetail.coll.recipes import VARIANTS, describe_call
from dovetail.errors import DovetailError, NotSupported
from dovetail.hw.world import Group, World

log = logging.getLogger("dovetail")


class _Session:
    """The default world, and the groups that stand for torch process groups."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.group: Group | None = None  #: that of the world, for the fast path
        self.torch_groups: dict[str, Group] = {}
        self.count = 0


session = _Session()


def init(timeout: Any = None) -> Group:
    """Joins the world and returns its group. All ranks call it; a second call returns the same group.

    Args:
        timeout: seconds or a timedelta that a silent rank is waited for (default: DOVETAIL_TIMEOUT, 5 minutes). In a
            second call, as inside of `dovetail.launch`: from now on, in this group and in groups that are made later.

    Raises:
        Timeout: a rank did not come.
        NotSupported: the native part is missing.
    """
    seconds = None if timeout is None else _seconds(timeout)
    if session.world is not None:
        if seconds is not None:
            session.world.timeout_s = seconds
            session.world.group.set_timeout(seconds)
        return session.world.group
    forced = env.variant()
    known = {name for names in VARIANTS.values() for name in names} | {"torch", "auto"}
    if forced and forced not in known:
        raise ValueError(f"DOVETAIL_VARIANT={forced!r} is no variant; there are {', '.join(sorted(known))}")
    rank, size, token, local = _find_place()
    told = choose.notice()
    token = f"{token}-{session.count + 1}"
    session.world = World(
        rank, size, token=token, notice=told, timeout_s=seconds, local=local, describe=describe_call
    )  # fmt: skip
    session.count += 1
    session.group = session.world.group
    session.torch_groups = {}
    log.setLevel(env.log_level())
    if not local:
        log.warning("the ranks are on several hosts: collectives run on the torch process group")
    return session.world.group


def _seconds(timeout: Any) -> float:
    """Of a number or a timedelta."""
    try:
        seconds = float(getattr(timeout, "total_seconds", lambda: timeout)())
    except (TypeError, ValueError):
        raise TypeError(f"timeout must be seconds or a timedelta, not {timeout!r}") from None
    if not 0 < seconds < float("inf"):
        raise ValueError(f"timeout must be seconds above 0, not {timeout!r}")
    return seconds


def _find_place() -> tuple[int, int, str, bool]:
    """Rank, size, a token that all ranks share, and whether all are on this host."""
    dist = _torch_distributed()
    if dist is not None:
        return _from_torch(dist)
    token = env.rendezvous()
    ours = env.rank(), env.world_size()
    if ours[0] is not None and ours[1] is not None:
        return ours[0], ours[1], token or _launcher_token(), True
    for rank_name, size_name in _LAUNCHERS:
        if rank_name not in os.environ or size_name not in os.environ:
            continue
        rank, size = int(os.environ[rank_name]), int(os.environ[size_name])
        local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or str(size)
        if int(local) != size:
            raise DovetailError(
                "ranks on several hosts: call torch.distributed.init_process_group() before dovetail.init()"
            )
        return rank, size, token or _launcher_token(), True
    return 0, 1, token or uuid.uuid4().hex, True


_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("RANK", "WORLD_SIZE"),
)


def _launcher_token() -> str:
    """A name that all processes of one job have in common and no other job of this user on this host."""
    torchrun = ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]
    names = [*torchrun, "OMPI_MCA_orte_ess_jobid", "PMIX_NAMESPACE"]
    text = repr([os.environ.get(n) for n in names])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _torch_distributed() -> Any:
    import torch.distributed as dist

    return dist if dist.is_available() and dist.is_initialized() else None


def _from_torch(dist: Any) -> tuple[int, int, str, bool]:
    """Through the store of torch.distributed, which works with every backend."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(f"dovetail/{session.count}", dist.distributed_c10d._get_default_store())
    if rank == 0:
        store.set("token", uuid.uuid4().hex)
    store.set(f"host {rank}", _host())
    hosts = {store.get(f"host {r}") for r in range(size)}
    return rank, size, store.get("token").decode(), len(hosts) == 1


def _host() -> str:
    """Names this host and the namespaces that memory and sockets are passed in."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')} {os.readlink('/proc/self/ns/pid')}"


def finalize() -> None:
    """Closes the default world. Tensors over its heap stay valid until they are gone."""
    world, session.world, session.group = session.world, None, None
    session.torch_groups = {}
    if world is not None:
        world.close()


def _at_exit() -> None:
    """Closes the default world; after an error that nobody caught without waiting for late ranks."""
    if session.world is not None and session.world.gpu is not None and getattr(sys, "last_value", None) is not None:
        session.world.gpu.leave()
    finalize()


def world() -> World:
    """The default world; joins it if torch.distributed, or a launcher, says how."""
    if session.world is None:
        init()
    assert session.world is not None
    return session.world


def group_of(group: Any) -> Group:
    """Our group for None, a `Group`, a torch `ProcessGroup` or a one-dimensional `DeviceMesh`."""
    if group is None:
        return world().group
    if isinstance(group, Group):
        return group
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(f"a DeviceMesh must have one dimension, this one has {group.ndim}: pass mesh['name']")
        group = group.get_group()
    name = getattr(group, "group_name", None)
    if name is None:
        raise TypeError(f"group must be a dovetail Group, a ProcessGroup or a DeviceMesh, not {type(group).__name__}")
    if name not in session.torch_groups:
        import torch.distributed as dist

        ours = world().new_group(dist.get_process_group_ranks(group), name=f"torch {name}")
        ours.baseline = group
        session.torch_groups[name] = ours
    return session.torch_groups[name]


def new_group(ranks: Any, *, timeout: Any = None) -> Group:
    """A group of some ranks of the world. Only its members call this, in the same order for equal `ranks`.

    `timeout`: as of `init`; by default the world's.
    """
    seconds = None if timeout is None else _seconds(timeout)
    made = world().new_group(list(ranks))
    if seconds is not None:
        made.set_timeout(seconds)
    return made


def empty(*shape: Any, dtype: Any = None, device: Any = None) -> Any:
    """A symmetric tensor, not initialised: peers reach it without a copy. `shape` as for torch.empty.

    `device`: "cpu" (the default) or a GPU, such as "cuda"; this rank then uses that GPU.
    """
    import torch

    kind = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(kind, torch.dtype):
        raise TypeError(f"dtype must be a dtype of torch, such as torch.float32, not {dtype!r}")
    sizes = _sizes(shape)
    if device is None or torch.device(device).type == "cpu":
        return world().empty(sizes, kind)
    return heap("device", device=device).empty(sizes, kind)


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """Of ints, or of one sequence of them."""
    given = shape[0] if len(shape) == 1 and not hasattr(shape[0], "__index__") else shape
    try:
        if isinstance(given, str):
            raise TypeError
        return tuple(operator.index(n) for n in given)
    except TypeError:
        raise TypeError(f"a shape is made of ints, as empty(2, 3) or empty((2, 3)), not {given!r}") from None


def zeros(*shape: Any, dtype: Any = None, device: Any = None) -> Any:
    """A symmetric tensor of zeros."""
    return empty(*shape, dtype=dtype, device=device).zero_()


def index_of(device: Any) -> int:
    """The number of a GPU; without one in `device` that of torch's current one."""
    import torch

    if device.index is not None:
        return int(device.index)
    try:
        return torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise NotSupported(
            f"device {str(device)!r} needs a GPU, and torch {torch.__version__} finds none: {error}; `dovetail doctor` "
            "says what is missing"
        ) from None


def heap(kind: str = "device", *, device: Any = "cuda") -> Any:
    """This rank's symmetric heap on a GPU (`kind="device"`) or in pinned host memory beside it (`kind="host"`).

    Its `empty(shape, dtype)` makes tensors that the copy engines of all ranks' GPUs reach.
    """
    import torch

    from dovetail.hw.gpu.world import world_of

    if kind not in ("device", "host"):
        raise ValueError(f"a heap is of kind 'device' or 'host', not {kind!r}")
    where = torch.device(device)
    if where.type != "cuda":
        raise ValueError(f"a GPU's heap needs a GPU, such as 'cuda:0', not {where}")
    index = index_of(where)
    side = world_of(world(), "hip" if torch.version.hip else "cuda", index)
    return side.heap if kind == "device" else side.host_heap


def _forget() -> None:
    """A forked child has no world; it may join one of its own."""
    session.world, session.group, session.torch_groups = None, None, {}


os.register_at_fork(after_in_child=_forget)
atexit.register(_at_exit)
