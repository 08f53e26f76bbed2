// A stand-in for libamdhip64: the published calls that hip.py makes, on the software device.
//
// VERSION (71400000) decides what batched copies take, as in the real runtime. STREAM_WAIT=0: no stream waits.
// CORES: compute units (304); XCDS: dies that they are on (8). A mask that leaves one of them without a unit hangs the
// real queue; this one refuses it. RANGES=0: the runtime does not tell the range of host memory. More than 8192 entries in a batch are a fault: where
// the real runtime dies, this one returns hipErrorIllegalAddress and records it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device.h"

namespace {

using standin::Result;

constexpr int invalid_value = 1, invalid_context = 201, illegal_address = 700, peer_enabled = 704, not_supported = 801;
constexpr size_t most_batched = 8192;

struct Code {
    int code;
    const char *name, *text;
};

constexpr Code codes[] = {
    {0, "hipSuccess", "no error"},
    {1, "hipErrorInvalidValue", "invalid argument"},
    {2, "hipErrorOutOfMemory", "out of memory"},
    {101, "hipErrorInvalidDevice", "invalid device ordinal"},
    {201, "hipErrorInvalidContext", "invalid device context"},
    {217, "hipErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
    {400, "hipErrorInvalidHandle", "invalid resource handle"},
    {401, "hipErrorIllegalState", "the operation cannot be performed in the present state"},
    {600, "hipErrorNotReady", "device not ready"},
    {700, "hipErrorIllegalAddress", "an illegal memory access was encountered"},
    {704, "hipErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {712, "hipErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {713, "hipErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {801, "hipErrorNotSupported", "operation not supported"},
    {900, "hipErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "hipErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {905, "hipErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
};

const Code& lookup(int code) {
    static constexpr Code unknown = {999, "hipErrorUnknown", "unknown error"};
    for (const Code& known : codes)
        if (known.code == code) return known;
    return unknown;
}

int code_of(Result result) {
    switch (result) {
        case Result::success: return 0;
        case Result::invalid_value: return invalid_value;
        case Result::invalid_handle: return 400;
        case Result::invalid_device: return 101;
        case Result::out_of_memory: return 2;
        case Result::not_ready: return 600;
        case Result::already_registered: return 712;
        case Result::not_registered: return 713;
        case Result::same_process: return invalid_context;
        case Result::peer_unreachable: return 217;
        case Result::capture_unsupported: return 900;
        case Result::capture_invalidated: return 901;
        case Result::capture_isolation: return 905;
        case Result::not_capturing: return 401;
    }
    return 999;
}

thread_local int last_error = 0;  // what a framework would trip over later

int done(int code) {
    if (code) last_error = code;
    return code;
}

int done(Result result) { return done(code_of(result)); }

long version() { return standin::number("VERSION", 71400000); }

bool known(int device) { return device >= 0 && device < standin::num_devices(); }

std::mutex masked_lock;
std::set<standin::Stream*> masked;  // streams that live and have a mask

// An HSA signal as amd_hsa_signal.h lays it out; hsa.cpp knows it by `mark`.
struct alignas(64) Signal {
    int64_t kind, value;
    uint64_t mailbox;
    uint32_t event, reserved1;
    uint64_t start, end, queue;
    uint32_t mark[2];
};
static_assert(sizeof(Signal) == 64);
constexpr uint32_t signal_mark = 0x5167A11;

struct Attributes {
    int order;
    int src_type, src_id, dst_type, dst_id;
    unsigned flags;
};
static_assert(sizeof(Attributes) == 24);

struct Pitched {
    void* address;
    size_t pitch, width, height;
};

struct Copy3D {
    void* src_array;
    size_t src_at[3];
    Pitched src;
    void* dst_array;
    size_t dst_at[3];
    Pitched dst;
    size_t width, height, depth;
    int kind;
};
static_assert(sizeof(Copy3D) == 160);

struct PointerAttributes {
    int type, device;
    void *device_pointer, *host_pointer;
    int managed;
    unsigned flags;
};

struct IpcHandle {
    unsigned char bytes[64];
};

Result swap_all(standin::Stream* stream, void** a, void** b, const size_t* size, size_t count, size_t* failed) {
    std::vector<std::pair<char*, char*>> pairs;
    std::vector<size_t> sizes(size, size + count);
    for (size_t i = 0; i < count; i++) {
        if (standin::check_range(a[i], size[i]) != Result::success ||
            standin::check_range(b[i], size[i]) != Result::success) {
            *failed = i;
            return Result::invalid_value;
        }
        pairs.emplace_back(static_cast<char*>(a[i]), static_cast<char*>(b[i]));
    }
    return standin::stream_push(stream, [pairs, sizes] {
        for (size_t i = 0; i < pairs.size(); i++) {
            standin::delay();
            std::swap_ranges(pairs[i].first, pairs[i].first + sizes[i], pairs[i].second);
        }
    });
}

}  // namespace

#pragma GCC diagnostic ignored "-Wformat-zero-length"  // calls without details
#define ENTER(...) \
    if (int fault = standin::enter(__func__ __VA_OPT__(, ) __VA_ARGS__)) return done(fault)

extern "C" {

using standin::Event;
using standin::Graph;
using standin::Stream;

const char* hipGetErrorName(int code) { return lookup(code).name; }
const char* hipGetErrorString(int code) { return lookup(code).text; }

int hipGetLastError() {
    const int code = last_error;
    last_error = 0;
    return code;
}

int hipPeekAtLastError() { return last_error; }

int hipRuntimeGetVersion(int* out) {
    ENTER();
    *out = static_cast<int>(version());
    return 0;
}

int hipDriverGetVersion(int* out) {
    ENTER();
    *out = static_cast<int>(version());
    return 0;
}

// --- devices

int hipGetDeviceCount(int* out) {
    ENTER();
    *out = standin::num_devices();
    return 0;
}

int hipSetDevice(int device) {
    ENTER("device=%d", device);
    return done(standin::use_device(device));
}

int hipGetDevice(int* out) {
    ENTER();
    *out = standin::current_device();
    return 0;
}

int hipDeviceGetName(char* out, int size, int device) {
    ENTER("device=%d", device);
    if (!known(device)) return done(101);
    snprintf(out, size, "Stand-in MI300X");
    return 0;
}

int hipDeviceGetPCIBusId(char* out, int size, int device) {
    ENTER("device=%d", device);
    if (!known(device)) return done(101);
    snprintf(out, size, "0000:%02x:00.0", 0xc0 + device);
    return 0;
}

int hipDeviceGetUuid(unsigned char* out, int device) {
    ENTER("device=%d", device);
    if (!known(device)) return done(101);
    standin::device_uuid(device, out);
    return 0;
}

int hipDeviceGetAttribute(int* out, int attribute, int device) {
    ENTER("attribute=%d", attribute);
    if (!known(device)) return done(101);
    if (attribute == 63)
        *out = static_cast<int>(standin::number("CORES", 304));
    else if (attribute == 10013)
        *out = static_cast<int>(standin::number("STREAM_WAIT", 1));
    else
        return done(invalid_value);
    return 0;
}

int hipDeviceCanAccessPeer(int* out, int device, int peer) {
    ENTER("device=%d peer=%d", device, peer);
    if (!known(device) || !known(peer)) return done(101);
    *out = standin::can_reach(device, peer);
    return 0;
}

int hipDeviceEnablePeerAccess(int peer, unsigned) {
    ENTER("peer=%d", peer);
    const Result result = standin::enable_peer(standin::current_device(), peer);
    return result == Result::already_registered ? done(peer_enabled) : done(result);
}

// --- streams and events

int hipStreamCreateWithPriority(Stream** out, unsigned flags, int priority) {
    ENTER("flags=%u priority=%d", flags, priority);
    return done(standin::stream_create(out, priority));
}

// Neither flags nor a priority: the real one makes a stream that synchronises with the default one.
int hipExtStreamCreateWithCUMask(Stream** out, uint32_t size, const uint32_t* mask) {
    std::string words;
    for (uint32_t i = 0; i < size; i++) {
        char word[12];
        snprintf(word, sizeof word, "%s%#x", i ? "," : "", mask[i]);
        words += word;
    }
    ENTER("device=%d mask=%s", standin::current_device(), words.c_str());
    const auto units = static_cast<uint32_t>(standin::number("CORES", 304));
    const auto dies = static_cast<uint32_t>(standin::number("XCDS", 8));
    std::set<uint32_t> used;
    for (uint32_t i = 0; i < std::min(units, 32 * size); i++)
        if (mask[i / 32] >> i % 32 & 1) used.insert(i % dies);
    if (used.size() < dies) return done(invalid_value);
    const Result result = standin::stream_create(out);
    std::lock_guard lock(masked_lock);
    if (result == Result::success) masked.insert(*out);
    return done(result);
}

int standin_masked_streams() {
    std::lock_guard lock(masked_lock);
    return static_cast<int>(masked.size());
}

int hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
    ENTER();
    *least = 1, *greatest = -1;
    return 0;
}

int hipStreamDestroy(Stream* stream) {
    ENTER();
    {
        std::lock_guard lock(masked_lock);
        masked.erase(stream);
    }
    return done(standin::stream_destroy(stream));
}

int hipStreamSynchronize(Stream* stream) {
    ENTER();
    return done(standin::stream_synchronize(stream));
}

int hipStreamQuery(Stream* stream) {
    ENTER();
    return done(standin::stream_query(stream));
}

int hipThreadExchangeStreamCaptureMode(int* mode) {
    ENTER();
    thread_local int current = 0;
    std::swap(*mode, current);
    return 0;
}

int hipStreamIsCapturing(Stream* stream, int* out) {
    ENTER();
    if (!standin::stream_known(stream)) return done(400);
    *out = standin::capturing(stream);
    return 0;
}

int hipStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    ENTER();
    return done(standin::stream_wait_event(stream, event));
}

int hipEventCreateWithFlags(Event** out, unsigned flags) {
    ENTER("flags=%u", flags);
    return done(standin::event_create(out));
}

int hipEventDestroy(Event* event) {
    ENTER();
    return done(standin::event_destroy(event));
}

int hipEventRecord(Event* event, Stream* stream) {
    ENTER();
    return done(standin::event_record(event, stream));
}

int hipEventQuery(Event* event) {
    ENTER();
    return done(standin::event_query(event));
}

int hipEventSynchronize(Event* event) {
    ENTER();
    return done(standin::event_synchronize(event));
}

int hipEventElapsedTime(float* out, Event* begin, Event* end) {
    ENTER();
    return done(standin::event_elapsed_ms(begin, end, out));
}

// --- memory

int hipMalloc(void** out, size_t size) {
    ENTER("size=%zu", size);
    return done(standin::device_alloc(out, size));
}

int hipExtMallocWithFlags(void** out, size_t size, unsigned flags) {
    ENTER("size=%zu flags=%u", size, flags);
    if (flags != 2 || size != 8) return done(invalid_value);
    void* base;
    if (Result result = standin::host_alloc(&base, sizeof(Signal)); result != Result::success) return done(result);
    auto* signal = new (base) Signal{};
    signal->kind = 1, signal->value = 1;
    signal->mark[0] = signal->mark[1] = signal_mark;
    *out = &signal->value;
    return 0;
}

int hipFree(void* address) {
    ENTER();
    auto* word = static_cast<char*>(address);
    const standin::Region region = standin::region_at(address);
    const bool is_word = region.base + offsetof(Signal, value) == reinterpret_cast<uintptr_t>(address);
    if (region.kind == standin::Kind::pinned && region.size == sizeof(Signal) && is_word)
        return done(standin::host_free(word - offsetof(Signal, value)));
    return done(standin::device_free(address));
}

int hipHostMalloc(void** out, size_t size, unsigned flags) {
    ENTER("size=%zu flags=%#x", size, flags);
    return done(standin::host_alloc(out, size));
}

int hipHostFree(void* address) {
    ENTER();
    return done(standin::host_free(address));
}

int hipHostRegister(void* address, size_t size, unsigned flags) {
    ENTER("size=%zu flags=%#x", size, flags);
    return done(standin::host_register(address, size));
}

int hipHostUnregister(void* address) {
    ENTER();
    return done(standin::host_unregister(address));
}

int hipHostGetDevicePointer(void** out, void* address, unsigned) {
    ENTER();
    const standin::Kind kind = standin::region_at(address).kind;
    if (kind != standin::Kind::pinned && kind != standin::Kind::registered) return done(invalid_value);
    *out = address;
    return 0;
}

int hipPointerGetAttributes(PointerAttributes* out, void* address) {
    ENTER();
    *out = {};
    const standin::Region region = standin::region_at(address);
    if (region.kind == standin::Kind::unknown) return 0;  // hipMemoryTypeUnregistered
    const bool host = region.kind == standin::Kind::pinned || region.kind == standin::Kind::registered;
    *out = {host ? 1 : 2, region.device, address, host ? address : nullptr, 0, 0};
    return 0;
}

int hipMemGetAddressRange(void** base, size_t* size, void* address) {
    ENTER();
    const standin::Region region = standin::region_at(address);
    if (region.kind == standin::Kind::unknown || !standin::number("RANGES", 1)) return done(invalid_value);
    *base = reinterpret_cast<void*>(region.base), *size = region.size;
    return 0;
}

int hipIpcGetMemHandle(IpcHandle* out, void* address) {
    ENTER();
    return done(standin::ipc_export(address, out->bytes));
}

int hipIpcOpenMemHandle(void** out, IpcHandle handle, unsigned flags) {
    ENTER("flags=%u", flags);
    return done(standin::ipc_open(handle.bytes, out));
}

int hipIpcCloseMemHandle(void* address) {
    ENTER();
    return done(standin::ipc_close(address));
}

// --- copies

int hipMemcpyAsync(void* dst, const void* src, size_t size, int kind, Stream* stream) {
    ENTER("size=%zu kind=%d", size, kind);
    return done(standin::copy(stream, dst, src, size));
}

int hipMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width, size_t rows,
                     int kind, Stream* stream) {
    ENTER("width=%zu rows=%zu kind=%d", width, rows, kind);
    if (dst_pitch > INT32_MAX || src_pitch > INT32_MAX) return done(invalid_value);
    if (width > dst_pitch || width > src_pitch) return done(invalid_value);
    return done(standin::copy_rows(stream, dst, dst_pitch, src, src_pitch, width, rows));
}

int hipMemcpy3DAsync(const Copy3D* copy, Stream* stream) {
    ENTER("pitch=%zu,%zu height=%zu,%zu extent=%zu,%zu,%zu kind=%d", copy->dst.pitch, copy->src.pitch, copy->dst.height,
          copy->src.height, copy->width, copy->height, copy->depth, copy->kind);
    const Pitched &dst = copy->dst, &src = copy->src;
    if (copy->src_array || copy->dst_array || copy->height != 1 || dst.pitch > INT32_MAX || src.pitch > INT32_MAX)
        return done(invalid_value);
    return done(standin::copy_rows(stream, dst.address, dst.pitch * dst.height, src.address, src.pitch * src.height,
                                   copy->width, copy->depth));
}

int hipMemcpyBatchAsync(void** dst, void** src, size_t* size, size_t count, Attributes* attributes, size_t* first,
                        size_t num_attributes, size_t* failed, Stream* stream) {
    ENTER("count=%zu attributes=%zu order=%d flags=%#x", count, num_attributes, num_attributes ? attributes->order : 0,
          num_attributes ? attributes->flags : 0);
    if (count > most_batched) {
        standin::enter("fault", "hipMemcpyBatchAsync count=%zu", count);
        return done(illegal_address);
    }
    if (version() < 70100000 || (num_attributes && version() < 71300000)) return done(not_supported);
    unsigned flags = 0;
    int order = 1;
    if (num_attributes) {
        flags = attributes->flags, order = attributes->order;
        const unsigned allowed = version() < 71400000 ? 0x1 : 0x301;
        if (num_attributes != 1 || *first || flags & ~allowed || order < 1 || order > 3) return done(invalid_value);
    }
    if (standin::capturing(stream)) {
        standin::capture_invalidate(stream);
        return done(Result::capture_unsupported);
    }
    if (flags & 0x200) return done(swap_all(stream, dst, src, size, count, failed));
    return done(standin::copy_batch(stream, dst, src, size, count, static_cast<standin::Order>(order), failed));
}

int hipMemsetAsync(void* address, int byte, size_t size, Stream* stream) {
    ENTER("size=%zu", size);
    return done(standin::fill(stream, address, static_cast<unsigned char>(byte), size));
}

// --- stream memory operations

int hipStreamWaitValue64(Stream* stream, uint64_t* word, uint64_t value, unsigned flags, uint64_t mask) {
    ENTER("value=%lu flags=%u mask=%#lx", value, flags, mask);
    if (flags > 1 || standin::check_range(word, sizeof *word) != Result::success) return done(invalid_value);
    return done(standin::stream_push(stream, [=] {
        standin::park([=] {
            const uint64_t now = __atomic_load_n(word, __ATOMIC_ACQUIRE) & mask;
            return flags ? now == value : now >= value;
        });
    }));
}

int hipStreamWriteValue64(Stream* stream, uint64_t* word, uint64_t value, unsigned flags) {
    ENTER("value=%lu flags=%u", value, flags);
    return flags ? done(invalid_value) : done(standin::write_word(stream, word, value));
}

// --- graphs

int hipStreamBeginCapture(Stream* stream, int mode) {
    ENTER("mode=%d", mode);
    return done(standin::capture_begin(stream));
}

int hipStreamEndCapture(Stream* stream, Graph** out) {
    ENTER();
    return done(standin::capture_end(stream, out));
}

int hipGraphInstantiateWithFlags(Graph** out, Graph* graph, unsigned long long flags) {
    ENTER("flags=%llu", flags);
    return done(standin::graph_copy(graph, out));
}

int hipGraphDestroy(Graph* graph) {
    ENTER();
    return done(standin::graph_destroy(graph));
}

int hipGraphExecDestroy(Graph* graph) {
    ENTER();
    return done(standin::graph_destroy(graph));
}

int hipGraphLaunch(Graph* graph, Stream* stream) {
    ENTER();
    return done(standin::graph_launch(graph, stream));
}
}
