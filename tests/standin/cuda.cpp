// A stand-in for libcuda.so.1: the published entry points that the CUDA table calls, run by device.h. The codes of
// its refusals are those of driver 580 (CUDA 13.0) on an H200. It differs in two places: the real one copies from and
// to host memory that it does not know (see PAGEABLE), and dies of a stream that was destroyed.
//
// Settings of its own: VERSION (13000); NO_DEVICE=1: cuInit finds none; STREAM_WORDS, IPC, VMM: device attributes (1);
// CORES: multiprocessors (4); CAPABILITY: major compute capability (9), which decides how they can be split, unless
// STEP does.
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "device.h"

using namespace standin;

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = void*;
using CUstream = Stream*;
using CUevent = struct TimedEvent*;
using CUgraph = Graph*;

struct TimedEvent {
    Event* event;
    bool timed;
};

struct CUipcMemHandle {
    char reserved[handle_bytes];
};

struct CUmemcpyAttributes {
    int srcAccessOrder;
    struct {
        int type, id;
    } srcLocHint, dstLocHint;
    unsigned int flags;
};
static_assert(sizeof(CUmemcpyAttributes) == 24);

struct CUstreamBatchMemOpParams {
    int operation;
    CUdeviceptr address;
    unsigned long long value64;
    unsigned int flags;
    CUdeviceptr alias;
    unsigned long long pad;
};
static_assert(sizeof(CUstreamBatchMemOpParams) == 48);

struct CUDA_MEMCPY2D {
    size_t srcXInBytes, srcY;
    int srcMemoryType;
    const void* srcHost;
    CUdeviceptr srcDevice;
    void* srcArray;
    size_t srcPitch, dstXInBytes, dstY;
    int dstMemoryType;
    void* dstHost;
    CUdeviceptr dstDevice;
    void* dstArray;
    size_t dstPitch, WidthInBytes, Height;
};
static_assert(sizeof(CUDA_MEMCPY2D) == 128);

struct CUDA_MEMCPY3D {
    size_t srcXInBytes, srcY, srcZ, srcLOD;
    int srcMemoryType;
    const void* srcHost;
    CUdeviceptr srcDevice;
    void *srcArray, *reserved0;
    size_t srcPitch, srcHeight, dstXInBytes, dstY, dstZ, dstLOD;
    int dstMemoryType;
    void* dstHost;
    CUdeviceptr dstDevice;
    void *dstArray, *reserved1;
    size_t dstPitch, dstHeight, WidthInBytes, Height, Depth;
};
static_assert(sizeof(CUDA_MEMCPY3D) == 200);

// `mark`, `device`, `first` and `whole` lie in what the header calls padding. Multiprocessors are counted from 0, so
// that a test can see which ones a context has.
struct CUdevResource {
    int type;
    int mark, device, first, whole;
    unsigned char padding[76];
    unsigned int smCount, minSmPartitionSize, smCoscheduledAlignment;
    unsigned char oversize[36];
};
static_assert(sizeof(CUdevResource) == 144 && offsetof(CUdevResource, smCount) == 96);

struct Green {
    int device;
    unsigned int first, count;
};

using CUgreenCtx = Green*;

namespace {

constexpr int INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_CONTEXT = 201, ILLEGAL_STATE = 401,
              PEER_ALREADY = 704, CONTEXT_DESTROYED = 709, NOT_SUPPORTED = 801, RESOURCE_TYPE = 914,
              RESOURCE_CONFIGURATION = 915;
constexpr int UNIFIED = 4;
constexpr size_t MAX_PITCH = (size_t{1} << 31) - 1;

struct Text {
    int code;
    const char *name, *text;
};

constexpr Text texts[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {914, "CUDA_ERROR_INVALID_RESOURCE_TYPE", "invalid resource type"},
    {915, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", "invalid resource configuration"},
};

CUresult code_of(Result result) {
    switch (result) {
        case Result::success: return 0;
        case Result::invalid_value: return INVALID_VALUE;
        case Result::invalid_handle: return 400;
        case Result::invalid_device: return 101;
        case Result::out_of_memory: return 2;
        case Result::not_ready: return 600;
        case Result::already_registered: return 712;
        case Result::not_registered: return 713;
        case Result::same_process: return INVALID_CONTEXT;
        case Result::peer_unreachable: return 217;
        case Result::capture_unsupported: return 900;
        case Result::capture_invalidated: return 901;
        case Result::capture_isolation: return 905;
        case Result::not_capturing: return ILLEGAL_STATE;
    }
    return 999;
}

bool initialised = false;
thread_local bool has_context = false;

int version() { return static_cast<int>(number("VERSION", 13000)); }

// Records the call; returns an injected code, or the driver's complaint where cuInit or a context is missing.
#define ENTER(...)                                            \
    do {                                                      \
        if (const int code = enter(__VA_ARGS__)) return code; \
        if (!initialised) return NOT_INITIALIZED;             \
    } while (0)
#define ENTER_CONTEXT(...)                        \
    do {                                          \
        ENTER(__VA_ARGS__);                       \
        if (!has_context) return INVALID_CONTEXT; \
    } while (0)

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

bool known(CUdevice device) { return device >= 0 && device < num_devices(); }

// Green contexts that live, and the contexts of streams: those of a destroyed one stay here for good, as they leak.
constexpr int RESOURCE_MARK = 0x5EED, MULTIPROCESSORS = 1;
std::mutex green_lock;
std::set<Green*> greens;
std::map<Stream*, Green*> green_streams;

bool is_resource(const CUdevResource* r) { return r->type == MULTIPROCESSORS && r->mark == RESOURCE_MARK; }

// The fewest multiprocessors that can be cut off, and in which steps.
std::pair<unsigned int, unsigned int> steps() {
    if (const auto step = static_cast<unsigned int>(number("STEP", 0))) return {step, step};
    const long capability = number("CAPABILITY", 9);
    return capability >= 9 ? std::pair{8u, 8u} : capability == 8 ? std::pair{4u, 2u} : std::pair{2u, 2u};
}

CUdevResource resource(int device, unsigned int first, unsigned int count, bool whole) {
    CUdevResource made{};
    made.type = MULTIPROCESSORS, made.mark = RESOURCE_MARK;
    made.device = device, made.first = static_cast<int>(first), made.whole = whole;
    made.smCount = count;
    if (version() >= 13000)
        std::tie(made.minSmPartitionSize, made.smCoscheduledAlignment) = steps();
    else
        made.minSmPartitionSize = made.smCoscheduledAlignment = 77;  // no promise of what older drivers leave there
    return made;
}

}  // namespace

extern "C" {

CUresult cuGetErrorName(CUresult error, const char** out) {
    *out = nullptr;
    for (const Text& text : texts)
        if (text.code == error) *out = text.name;
    return *out ? 0 : INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char** out) {
    *out = nullptr;
    for (const Text& text : texts)
        if (text.code == error) *out = text.text;
    return *out ? 0 : INVALID_VALUE;
}

CUresult cuInit(unsigned int) {
    if (const int code = enter("cuInit")) return code;
    if (number("NO_DEVICE", 0)) return NO_DEVICE;
    initialised = true;
    return 0;
}

CUresult cuDriverGetVersion(int* out) {
    if (const int code = enter("cuDriverGetVersion")) return code;
    *out = version();
    return 0;
}

// --- devices

CUresult cuDeviceGetCount(int* out) {
    ENTER("cuDeviceGetCount");
    *out = num_devices();
    return 0;
}

CUresult cuDeviceGet(CUdevice* out, int ordinal) {
    ENTER("cuDeviceGet", "ordinal=%d", ordinal);
    *out = ordinal;
    return known(ordinal) ? 0 : 101;
}

CUresult cuDeviceGetName(char* out, int size, CUdevice device) {
    ENTER("cuDeviceGetName");
    snprintf(out, static_cast<size_t>(size), "stand-in %d", device);
    return 0;
}

CUresult cuDeviceGetUuid_v2(unsigned char out[16], CUdevice device) {
    ENTER("cuDeviceGetUuid");
    device_uuid(device, out);
    return 0;
}

CUresult cuDeviceGetAttribute(int* out, int attribute, CUdevice device) {
    ENTER("cuDeviceGetAttribute", "attribute=%d", attribute);
    if (!known(device)) return 101;
    switch (attribute) {
        case 11: *out = static_cast<int>(MAX_PITCH); return 0;
        case 16: *out = static_cast<int>(number("CORES", 4)); return 0;
        case 75: *out = static_cast<int>(number("CAPABILITY", 9)); return 0;
        case 102: *out = static_cast<int>(number("VMM", 1)); return 0;
        case 122: *out = static_cast<int>(number("STREAM_WORDS", 1)); return 0;
        case 125: *out = static_cast<int>(number("IPC", 1)); return 0;
        default: return INVALID_VALUE;
    }
}

CUresult cuDeviceCanAccessPeer(int* out, CUdevice device, CUdevice peer) {
    ENTER("cuDeviceCanAccessPeer", "device=%d peer=%d", device, peer);
    if (!known(device) || !known(peer)) return 101;
    *out = can_reach(device, peer);
    return 0;
}

// A context is its device plus one.
CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
    ENTER("cuDevicePrimaryCtxRetain", "device=%d", device);
    *out = reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1);
    return known(device) ? 0 : 101;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER("cuCtxSetCurrent", "context=%p", context);
    if (!context) {
        has_context = false;
        return 0;
    }
    const Result result = use_device(static_cast<int>(reinterpret_cast<intptr_t>(context) - 1));
    has_context = result == Result::success;
    return has_context ? 0 : INVALID_CONTEXT;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int) {
    ENTER_CONTEXT("cuCtxEnablePeerAccess", "context=%p", peer);
    const Result result = enable_peer(current_device(), static_cast<int>(reinterpret_cast<intptr_t>(peer) - 1));
    return result == Result::already_registered ? PEER_ALREADY : code_of(result);
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    ENTER_CONTEXT("cuCtxGetStreamPriorityRange");
    *least = 0, *greatest = -5;
    return 0;
}

// --- streams and events

CUresult cuStreamCreateWithPriority(CUstream* out, unsigned int flags, int priority) {
    ENTER_CONTEXT("cuStreamCreateWithPriority", "flags=%u priority=%d", flags, priority);
    return code_of(stream_create(out, priority));
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    ENTER_CONTEXT("cuStreamDestroy", "stream=%p", static_cast<void*>(stream));
    {
        std::lock_guard lock(green_lock);
        if (const auto found = green_streams.find(stream); found != green_streams.end()) {
            if (!greens.count(found->second)) return CONTEXT_DESTROYED;
            green_streams.erase(found);
        }
    }
    return code_of(stream_destroy(stream));
}

CUresult cuStreamSynchronize(CUstream stream) {
    ENTER_CONTEXT("cuStreamSynchronize", "stream=%p", static_cast<void*>(stream));
    return code_of(stream_synchronize(stream));
}

CUresult cuStreamQuery(CUstream stream) {
    ENTER_CONTEXT("cuStreamQuery", "stream=%p", static_cast<void*>(stream));
    return code_of(stream_query(stream));
}

CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
    ENTER("cuThreadExchangeStreamCaptureMode", "mode=%d", *mode);
    thread_local int current = 0;
    std::swap(*mode, current);
    return 0;
}

CUresult cuStreamIsCapturing(CUstream stream, int* out) {
    ENTER_CONTEXT("cuStreamIsCapturing", "stream=%p", static_cast<void*>(stream));
    if (!stream_known(stream)) return 400;
    *out = capturing(stream);
    return 0;
}

CUresult cuEventCreate(CUevent* out, unsigned int flags) {
    ENTER_CONTEXT("cuEventCreate", "flags=%u", flags);
    *out = new TimedEvent{nullptr, !(flags & 2)};
    return code_of(event_create(&(*out)->event));
}

CUresult cuEventDestroy_v2(CUevent event) {
    ENTER_CONTEXT("cuEventDestroy", "event=%p", static_cast<void*>(event));
    const Result result = event_destroy(event->event);
    delete event;
    return code_of(result);
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER_CONTEXT("cuEventRecord", "event=%p stream=%p", static_cast<void*>(event), static_cast<void*>(stream));
    return code_of(event_record(event->event, stream));
}

CUresult cuEventQuery(CUevent event) {
    ENTER_CONTEXT("cuEventQuery", "event=%p", static_cast<void*>(event));
    return code_of(event_query(event->event));
}

CUresult cuEventSynchronize(CUevent event) {
    ENTER_CONTEXT("cuEventSynchronize", "event=%p", static_cast<void*>(event));
    return code_of(event_synchronize(event->event));
}

CUresult cuEventElapsedTime(float* out, CUevent begin, CUevent end) {
    ENTER_CONTEXT("cuEventElapsedTime");
    if (!begin->timed || !end->timed) return INVALID_VALUE;
    return code_of(event_elapsed_ms(begin->event, end->event, out));
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    ENTER_CONTEXT("cuStreamWaitEvent", "stream=%p event=%p", static_cast<void*>(stream), static_cast<void*>(event));
    return flags ? INVALID_VALUE : code_of(stream_wait_event(stream, event->event));
}

// --- memory

CUresult cuMemAlloc_v2(CUdeviceptr* out, size_t size) {
    ENTER_CONTEXT("cuMemAlloc", "size=%zu", size);
    void* base = nullptr;
    const Result result = device_alloc(&base, size);
    *out = reinterpret_cast<CUdeviceptr>(base);
    return code_of(result);
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER_CONTEXT("cuMemFree", "address=%llx", address);
    return code_of(device_free(pointer(address)));
}

CUresult cuMemHostAlloc(void** out, size_t size, unsigned int flags) {
    ENTER_CONTEXT("cuMemHostAlloc", "size=%zu flags=%u", size, flags);
    return code_of(host_alloc(out, size));
}

CUresult cuMemFreeHost(void* address) {
    ENTER_CONTEXT("cuMemFreeHost", "address=%p", address);
    return code_of(host_free(address));
}

CUresult cuMemHostRegister_v2(void* address, size_t size, unsigned int flags) {
    ENTER_CONTEXT("cuMemHostRegister", "address=%p size=%zu flags=%u", address, size, flags);
    return code_of(host_register(address, size));
}

CUresult cuMemHostUnregister(void* address) {
    ENTER_CONTEXT("cuMemHostUnregister", "address=%p", address);
    return code_of(host_unregister(address));
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* address, unsigned int) {
    ENTER_CONTEXT("cuMemHostGetDevicePointer", "address=%p", address);
    const Kind kind = region_at(address).kind;
    *out = reinterpret_cast<CUdeviceptr>(address);
    return kind == Kind::pinned || kind == Kind::registered ? 0 : INVALID_VALUE;
}

// Unknown memory is no error: its attributes are 0, or -2 for the ordinal.
CUresult cuPointerGetAttributes(unsigned int count, const int* attributes, void** data, CUdeviceptr address) {
    ENTER_CONTEXT("cuPointerGetAttributes", "address=%llx", address);
    const Region region = region_at(pointer(address));
    const bool found = region.kind != Kind::unknown;
    const bool on_device = region.kind == Kind::device || region.kind == Kind::imported;
    for (unsigned int i = 0; i < count; i++) switch (attributes[i]) {
            case 2: *static_cast<unsigned int*>(data[i]) = !found ? 0 : on_device ? 2 : 1; break;
            case 9: *static_cast<int*>(data[i]) = found ? region.device : -2; break;
            case 11: *static_cast<CUdeviceptr*>(data[i]) = region.base; break;
            case 12: *static_cast<size_t*>(data[i]) = region.size; break;
            default: return INVALID_VALUE;
        }
    return 0;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr address) {
    ENTER_CONTEXT("cuIpcGetMemHandle", "address=%llx", address);
    return code_of(ipc_export(pointer(address), reinterpret_cast<unsigned char*>(out->reserved)));
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* out, CUipcMemHandle handle, unsigned int flags) {
    ENTER_CONTEXT("cuIpcOpenMemHandle", "flags=%u", flags);
    void* base = nullptr;
    if (flags != 1) return INVALID_VALUE;
    const Result result = ipc_open(reinterpret_cast<unsigned char*>(handle.reserved), &base);
    *out = reinterpret_cast<CUdeviceptr>(base);
    return code_of(result);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER_CONTEXT("cuIpcCloseMemHandle", "address=%llx", address);
    return code_of(ipc_close(pointer(address)));
}

// --- copies

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream) {
    ENTER_CONTEXT("cuMemcpyAsync", "size=%zu stream=%p", size, static_cast<void*>(stream));
    return code_of(copy(stream, pointer(dst), pointer(src), size));
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* c, CUstream stream) {
    ENTER_CONTEXT("cuMemcpy2DAsync", "width=%zu rows=%zu stream=%p", c->WidthInBytes, c->Height,
                  static_cast<void*>(stream));
    const bool plain = !(c->srcXInBytes | c->srcY | c->dstXInBytes | c->dstY) && !c->srcArray && !c->dstArray;
    if (!plain || c->srcMemoryType != UNIFIED || c->dstMemoryType != UNIFIED) return INVALID_VALUE;
    if (c->srcPitch > MAX_PITCH || c->dstPitch > MAX_PITCH) return INVALID_VALUE;
    return code_of(copy_rows(stream, pointer(c->dstDevice), c->dstPitch, pointer(c->srcDevice), c->srcPitch,
                             c->WidthInBytes, c->Height));
}

CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* c, CUstream stream) {
    ENTER_CONTEXT("cuMemcpy3DAsync", "width=%zu height=%zu depth=%zu stream=%p", c->WidthInBytes, c->Height, c->Depth,
                  static_cast<void*>(stream));
    const size_t offsets = c->srcXInBytes | c->srcY | c->srcZ | c->dstXInBytes | c->dstY | c->dstZ;
    const bool plain = !offsets && !c->srcLOD && !c->dstLOD && !c->srcArray && !c->dstArray;
    if (!plain || c->srcMemoryType != UNIFIED || c->dstMemoryType != UNIFIED || c->Height != 1) return INVALID_VALUE;
    if (c->srcPitch > MAX_PITCH || c->dstPitch > MAX_PITCH || !c->srcHeight || !c->dstHeight) return INVALID_VALUE;
    if (c->srcPitch < c->WidthInBytes || c->dstPitch < c->WidthInBytes) return INVALID_VALUE;
    return code_of(copy_rows(stream, pointer(c->dstDevice), c->dstPitch * c->dstHeight, pointer(c->srcDevice),
                             c->srcPitch * c->srcHeight, c->WidthInBytes, c->Depth));
}

static CUresult batch(const char* form, const CUdeviceptr* dsts, const CUdeviceptr* srcs, const size_t* sizes,
                      size_t count, const CUmemcpyAttributes* attrs, const size_t* idxs, size_t num_attrs,
                      size_t* failed, CUstream stream) {
    ENTER_CONTEXT("cuMemcpyBatchAsync", "form=%s count=%zu order=%d flags=%u stream=%p", form, count,
                  attrs->srcAccessOrder, attrs->flags, static_cast<void*>(stream));
    if (failed) *failed = SIZE_MAX;
    if (reinterpret_cast<uintptr_t>(stream) <= 1 ||  // the legacy default stream has two names
        !count || num_attrs != 1 || idxs[0] != 0) return INVALID_VALUE;
    if (attrs->srcAccessOrder < 1 || attrs->srcAccessOrder > 3 || attrs->flags > 1) return INVALID_VALUE;
    if (attrs->srcLocHint.type || attrs->dstLocHint.type) return INVALID_VALUE;
    if (capturing(stream)) return 900;  // and the capture stays valid, without this copy
    return code_of(copy_batch(stream, reinterpret_cast<void* const*>(dsts), reinterpret_cast<void* const*>(srcs), sizes,
                              count, static_cast<Order>(attrs->srcAccessOrder), failed));
}

static CUresult batch_12080(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
                            CUmemcpyAttributes* attrs, size_t* idxs, size_t num_attrs, size_t* failed,
                            CUstream stream) {
    return batch("12080", dsts, srcs, sizes, count, attrs, idxs, num_attrs, failed, stream);
}

static CUresult batch_13000(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
                            CUmemcpyAttributes* attrs, size_t* idxs, size_t num_attrs, CUstream stream) {
    return batch("13000", dsts, srcs, sizes, count, attrs, idxs, num_attrs, nullptr, stream);
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char byte, size_t size, CUstream stream) {
    ENTER_CONTEXT("cuMemsetD8Async", "size=%zu stream=%p", size, static_cast<void*>(stream));
    return code_of(fill(stream, pointer(address), byte, size));
}

CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned int count, CUstreamBatchMemOpParams* ops, unsigned int flags) {
    ENTER_CONTEXT("cuStreamBatchMemOp", "count=%u stream=%p", count, static_cast<void*>(stream));
    if (count >= 256 || flags) return INVALID_VALUE;
    int device = 0;
    if (const Result result = stream_device(stream, &device); result != Result::success) return code_of(result);
    for (unsigned int i = 0; i < count; i++) {
        auto* word = static_cast<uint64_t*>(pointer(ops[i].address));
        if (ops[i].flags || (ops[i].operation != 4 && ops[i].operation != 5)) return INVALID_VALUE;
        const Region region = region_at(word);
        // Writes to the memory of a peer went away with CUDA 13.1.
        const bool on_device = region.kind == Kind::device || region.kind == Kind::imported;
        if (ops[i].operation == 5 && version() >= 13010 && on_device && region.device != device) return NOT_SUPPORTED;
        const Result result = ops[i].operation == 4 ? wait_word(stream, word, ops[i].value64)
                                                    : write_word(stream, word, ops[i].value64);
        if (result != Result::success) return code_of(result);
    }
    return 0;
}

// --- graphs

CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
    ENTER_CONTEXT("cuStreamBeginCapture", "mode=%d stream=%p", mode, static_cast<void*>(stream));
    const Result result = capture_begin(stream);
    return result == Result::already_registered ? ILLEGAL_STATE : code_of(result);
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* out) {
    ENTER_CONTEXT("cuStreamEndCapture", "stream=%p", static_cast<void*>(stream));
    return code_of(capture_end(stream, out));
}

CUresult cuGraphInstantiateWithFlags(CUgraph* out, CUgraph graph, unsigned long long flags) {
    ENTER_CONTEXT("cuGraphInstantiateWithFlags", "flags=%llu", flags);
    return code_of(graph_copy(graph, out));
}

CUresult cuGraphDestroy(CUgraph graph) {
    ENTER_CONTEXT("cuGraphDestroy");
    return code_of(graph_destroy(graph));
}

CUresult cuGraphExecDestroy(CUgraph graph) {
    ENTER_CONTEXT("cuGraphExecDestroy");
    return code_of(graph_destroy(graph));
}

CUresult cuGraphLaunch(CUgraph graph, CUstream stream) {
    ENTER_CONTEXT("cuGraphLaunch", "stream=%p", static_cast<void*>(stream));
    return code_of(graph_launch(graph, stream));
}

// --- green contexts

CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource* out, int type) {
    ENTER("cuDeviceGetDevResource", "device=%d type=%d", device, type);
    if (!known(device)) return 101;
    if (type != MULTIPROCESSORS) return RESOURCE_TYPE;
    *out = resource(device, 0, static_cast<unsigned int>(number("CORES", 4)), true);
    return 0;
}

CUresult cuDevSmResourceSplitByCount(CUdevResource* result, unsigned int* groups, const CUdevResource* input,
                                     CUdevResource* remaining, unsigned int flags, unsigned int least) {
    ENTER("cuDevSmResourceSplitByCount", "groups=%u flags=%u least=%u", *groups, flags, least);
    if (!is_resource(input)) return RESOURCE_TYPE;
    // 1: IGNORE_SM_COSCHEDULING. 4: a flag that is taken and not heeded, for tests.
    if ((flags && flags != 1 && flags != 4) || *groups != 1 || least > input->smCount) return INVALID_VALUE;
    const auto [fewest, step] = flags == 1 ? std::pair{2u, 2u} : steps();
    const unsigned int count = std::max(fewest, (least + step - 1) / step * step);
    if (!input->whole || count > input->smCount) return RESOURCE_CONFIGURATION;
    const auto first = static_cast<unsigned int>(input->first);
    *result = resource(input->device, first, count, false);
    *remaining = count < input->smCount ? resource(input->device, first + count, input->smCount - count, false)
                                        : CUdevResource{};
    return 0;
}

// A descriptor is never given back to the driver: there is no call for it.
CUresult cuDevResourceGenerateDesc(CUgreenCtx* out, CUdevResource* resources, unsigned int count) {
    ENTER("cuDevResourceGenerateDesc", "count=%u", count);
    if (count != 1) return INVALID_VALUE;
    if (!is_resource(resources)) return RESOURCE_TYPE;
    static std::vector<std::unique_ptr<Green>> made;
    std::lock_guard lock(green_lock);
    const auto first = static_cast<unsigned int>(resources->first);
    made.push_back(std::make_unique<Green>(Green{resources->device, first, resources->smCount}));
    *out = made.back().get();
    return 0;
}

CUresult cuGreenCtxCreate(CUgreenCtx* out, CUgreenCtx described, CUdevice device, unsigned int flags) {
    ENTER("cuGreenCtxCreate", "device=%d first=%u count=%u flags=%u", device, described->first, described->count,
          flags);
    if (flags != 1 || described->device != device) return INVALID_VALUE;
    std::lock_guard lock(green_lock);
    *out = *greens.insert(new Green(*described)).first;
    return 0;
}

// Whatever context is current, the stream is on the device of this one.
CUresult cuGreenCtxStreamCreate(CUstream* out, CUgreenCtx context, unsigned int flags, int priority) {
    ENTER("cuGreenCtxStreamCreate", "first=%u flags=%u priority=%d", context->first, flags, priority);
    std::lock_guard lock(green_lock);
    if (!greens.count(context)) return CONTEXT_DESTROYED;
    if (flags != 1) return INVALID_VALUE;
    const int before = current_device();
    use_device(context->device);
    const Result result = stream_create(out, priority);
    use_device(before);
    if (result == Result::success) green_streams[*out] = context;
    return code_of(result);
}

// Its memory stays: a stream of it may still name it.
CUresult cuGreenCtxDestroy(CUgreenCtx context) {
    ENTER("cuGreenCtxDestroy", "context=%p", static_cast<void*>(context));
    std::lock_guard lock(green_lock);
    return greens.erase(context) ? 0 : CONTEXT_DESTROYED;
}

int standin_green_contexts() {
    std::lock_guard lock(green_lock);
    return static_cast<int>(greens.size());
}

int standin_green_streams() {
    std::lock_guard lock(green_lock);
    return static_cast<int>(green_streams.size());
}

// For tests that lose streams on purpose: forgets those whose context is gone.
void standin_forget() {
    std::lock_guard lock(green_lock);
    for (auto at = green_streams.begin(); at != green_streams.end();)
        at = greens.count(at->second) ? std::next(at) : green_streams.erase(at);
}

// --- what is only looked for, never called

static CUresult never() { return 999; }

// --- entry points by version: the newest form that is not newer than what was asked for

CUresult cuGetProcAddress_v2(const char* symbol, void** out, int asked, unsigned long long flags, int* status) {
    struct Entry {
        const char* name;
        int version;
        void* function;
    };
#define ENTRY(name, version, function) {#name, version, reinterpret_cast<void*>(function)}
    static const Entry table[] = {
        ENTRY(cuInit, 2000, cuInit),
        ENTRY(cuDriverGetVersion, 2020, cuDriverGetVersion),
        ENTRY(cuDeviceGetCount, 2000, cuDeviceGetCount),
        ENTRY(cuDeviceGet, 2000, cuDeviceGet),
        ENTRY(cuDeviceGetName, 2000, cuDeviceGetName),
        ENTRY(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2),
        ENTRY(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute),
        ENTRY(cuDeviceCanAccessPeer, 4000, cuDeviceCanAccessPeer),
        ENTRY(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain),
        ENTRY(cuCtxSetCurrent, 4000, cuCtxSetCurrent),
        ENTRY(cuCtxEnablePeerAccess, 4000, cuCtxEnablePeerAccess),
        ENTRY(cuCtxGetStreamPriorityRange, 5050, cuCtxGetStreamPriorityRange),
        ENTRY(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority),
        ENTRY(cuStreamDestroy, 4000, cuStreamDestroy_v2),
        ENTRY(cuStreamSynchronize, 2000, cuStreamSynchronize),
        ENTRY(cuStreamQuery, 2000, cuStreamQuery),
        ENTRY(cuStreamIsCapturing, 10000, cuStreamIsCapturing),
        ENTRY(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode),
        ENTRY(cuStreamWaitEvent, 3020, cuStreamWaitEvent),
        ENTRY(cuEventCreate, 2000, cuEventCreate),
        ENTRY(cuEventDestroy, 4000, cuEventDestroy_v2),
        ENTRY(cuEventRecord, 2000, cuEventRecord),
        ENTRY(cuEventQuery, 2000, cuEventQuery),
        ENTRY(cuEventSynchronize, 2000, cuEventSynchronize),
        ENTRY(cuEventElapsedTime, 2000, cuEventElapsedTime),
        ENTRY(cuMemAlloc, 3020, cuMemAlloc_v2),
        ENTRY(cuMemFree, 3020, cuMemFree_v2),
        ENTRY(cuMemHostAlloc, 2020, cuMemHostAlloc),
        ENTRY(cuMemFreeHost, 2000, cuMemFreeHost),
        ENTRY(cuMemHostRegister, 6050, cuMemHostRegister_v2),
        ENTRY(cuMemHostUnregister, 4000, cuMemHostUnregister),
        ENTRY(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2),
        ENTRY(cuPointerGetAttributes, 7000, cuPointerGetAttributes),
        ENTRY(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle),
        ENTRY(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2),
        ENTRY(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle),
        ENTRY(cuMemcpyAsync, 4000, cuMemcpyAsync),
        ENTRY(cuMemcpy2DAsync, 3020, cuMemcpy2DAsync_v2),
        ENTRY(cuMemcpy3DAsync, 3020, cuMemcpy3DAsync_v2),
        ENTRY(cuMemcpyBatchAsync, 12080, batch_12080),
        ENTRY(cuMemcpyBatchAsync, 13000, batch_13000),
        ENTRY(cuMemcpy3DBatchAsync, 12080, never),
        ENTRY(cuMemcpy3DBatchAsync, 13000, never),
        ENTRY(cuMemsetD8Async, 3020, cuMemsetD8Async),
        ENTRY(cuStreamBatchMemOp, 11070, cuStreamBatchMemOp_v2),
        ENTRY(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2),
        ENTRY(cuStreamEndCapture, 10000, cuStreamEndCapture),
        ENTRY(cuGraphInstantiateWithFlags, 11040, cuGraphInstantiateWithFlags),
        ENTRY(cuGraphDestroy, 10000, cuGraphDestroy),
        ENTRY(cuGraphExecDestroy, 10000, cuGraphExecDestroy),
        ENTRY(cuGraphLaunch, 10000, cuGraphLaunch),
        ENTRY(cuDeviceGetDevResource, 12040, cuDeviceGetDevResource),
        ENTRY(cuDevSmResourceSplitByCount, 12040, cuDevSmResourceSplitByCount),
        ENTRY(cuDevResourceGenerateDesc, 12040, cuDevResourceGenerateDesc),
        ENTRY(cuGreenCtxCreate, 12040, cuGreenCtxCreate),
        ENTRY(cuGreenCtxDestroy, 12040, cuGreenCtxDestroy),
        ENTRY(cuGreenCtxStreamCreate, 12050, cuGreenCtxStreamCreate),
    };
    *out = nullptr, *status = 1;
    if (flags || asked > version()) return INVALID_VALUE;
    for (const Entry& entry : table) {
        if (strcmp(entry.name, symbol) || entry.version > version()) continue;
        if (entry.version > asked) {
            if (!*out) *status = 2;
            continue;
        }
        *out = entry.function, *status = 0;
    }
    return 0;
}

}  // extern "C"
