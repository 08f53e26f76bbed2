"""The entry points of the CUDA driver that are called: each with the version whose arguments these are.

Data only. A driver is asked for exactly that version (`cuGetProcAddress`), so a later one can't change the arguments.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any


class IpcHandle(ctypes.Structure):
    _fields_ = (("bytes", c_ubyte * 64),)


P, A = c_void_p, c_uint64  # a pointer or handle; a device address

#: name -> (version whose arguments these are, arguments). Out parameters are pointers.
CALLS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "cuInit": (2000, (c_uint,)),
    "cuDriverGetVersion": (2020, (P,)),
    "cuDeviceGetCount": (2000, (P,)),
    "cuDeviceGet": (2000, (P, c_int)),
    "cuDeviceGetName": (2000, (P, c_int, c_int)),
    "cuDeviceGetUuid": (11040, (P, c_int)),
    "cuDeviceGetAttribute": (2000, (P, c_int, c_int)),
    "cuDeviceCanAccessPeer": (4000, (P, c_int, c_int)),
    "cuDevicePrimaryCtxRetain": (7000, (P, c_int)),
    "cuCtxSetCurrent": (4000, (P,)),
    "cuCtxGetStreamPriorityRange": (5050, (P, P)),
    "cuStreamCreateWithPriority": (5050, (P, c_uint, c_int)),
    "cuStreamDestroy": (4000, (P,)),
    "cuStreamSynchronize": (2000, (P,)),
    "cuStreamIsCapturing": (10000, (P, P)),
    "cuStreamWaitEvent": (3020, (P, P, c_uint)),
    "cuEventCreate": (2000, (P, c_uint)),
    "cuEventDestroy": (4000, (P,)),
    "cuEventRecord": (2000, (P, P)),
    "cuEventSynchronize": (2000, (P,)),
    "cuEventElapsedTime": (2000, (P, P, P)),
    "cuMemAlloc": (3020, (P, c_size_t)),
    "cuMemFree": (3020, (A,)),
    "cuMemHostAlloc": (2020, (P, c_size_t, c_uint)),
    "cuMemFreeHost": (2000, (P,)),
    "cuMemHostRegister": (6050, (P, c_size_t, c_uint)),
    "cuMemHostUnregister": (4000, (P,)),
    "cuMemHostGetDevicePointer": (3020, (P, P, c_uint)),
    "cuIpcGetMemHandle": (4010, (P, A)),
    "cuIpcOpenMemHandle": (11000, (P, IpcHandle, c_uint)),
    "cuIpcCloseMemHandle": (4010, (A,)),
    "cuMemcpyAsync": (4000, (A, A, c_size_t, P)),
    "cuMemcpy2DAsync": (3020, (P, P)),
    "cuMemcpy3DAsync": (3020, (P, P)),
    "cuMemsetD8Async": (3020, (A, c_ubyte, c_size_t, P)),
    "cuStreamBatchMemOp": (11070, (P, c_uint, P, c_uint)),
    "cuStreamBeginCapture": (10010, (P, c_int)),
    "cuStreamEndCapture": (10000, (P, P)),
    "cuGraphInstantiateWithFlags": (11040, (P, P, c_uint64)),
    "cuGraphDestroy": (10000, (P,)),
    "cuGraphExecDestroy": (10000, (P,)),
    "cuGraphLaunch": (10000, (P, P)),
}

#: Green contexts, which older drivers lack; all of them or none are used.
GREEN: dict[str, tuple[int, tuple[Any, ...]]] = {
    "cuDeviceGetDevResource": (12040, (c_int, P, c_int)),
    "cuDevSmResourceSplitByCount": (12040, (P, P, P, P, c_uint, c_uint)),
    "cuDevResourceGenerateDesc": (12040, (P, P, c_uint)),
    "cuGreenCtxCreate": (12040, (P, P, c_int, c_uint)),
    "cuGreenCtxDestroy": (12040, (P,)),
    "cuGreenCtxStreamCreate": (12050, (P, P, c_uint, c_int)),
}

#: Calls that answer with a code: not ready, already enabled, not ours.
ANSWERS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "cuStreamQuery": (2000, (P,)),
    "cuEventQuery": (2000, (P,)),
    "cuCtxEnablePeerAccess": (4000, (P, c_uint)),
    "cuPointerGetAttributes": (7000, (c_uint, P, P, A)),
}
