// A stand-in for libhsa-runtime64: agents, signals, and copy engines as threads that run their copies in order.
//
// It has a CPU and DEVICES GPUs with ENGINES (6) engines each. Engines 0 and 1 serve the host, the others peers too, as
// on an MI300X. A copy waits for its dependencies, then moves its bytes, then takes 1 from its completion signal.
// Memory is known once standin_own has told whose it is, since HIP's stand-in is a library of its own.
//   TWINS=1   all GPUs have one PCI address, as partitions have
//   BUSY      a mask of engines that are never free (0)
//   BREAK     a mask of engines whose copies fail: they move nothing and leave -1 in the signal (0)
//   LAYOUT=1  the word of a signal is not where it should be
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "device.h"

namespace {

constexpr int invalid_argument = 0x1001, invalid_agent = 0x1004, invalid_signal = 0x1006, out_of_resources = 0x1008;
constexpr int not_initialized = 0x100B;
constexpr uint64_t cpu = 0xC00, first_gpu = 0xC01;
constexpr uint32_t signal_mark = 0x5167A11;
constexpr uint64_t frequency = 100'000'000;

struct alignas(64) Signal {
    int64_t kind, value;
    uint64_t mailbox;
    uint32_t event, reserved1;
    uint64_t start, end, queue;
    uint32_t mark[2];
};

struct PointerInfo {
    uint32_t size;
    int type;
    void *agent_base, *host_base;
    size_t bytes;
    void* user;
    uint64_t owner;
    uint32_t flags;
};

struct Operation {
    uint16_t version, type, num_entries, traffic_class;
    uint64_t completion;
    void* src;
    uint64_t src_agent;
    void* dst_agent;
    void* dst;
    size_t size, dst_size;
    uint64_t rest[8];
};
static_assert(sizeof(Operation) == 128);

struct Engine {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<standin::Job> queue;
    size_t pending = 0;
};

std::mutex guard;
std::map<std::pair<uint64_t, uint32_t>, Engine*> engines;  // (agent, bit); never destroyed, their threads go on
std::map<uintptr_t, std::pair<size_t, uint64_t>> owned;    // base -> size, agent
int opened = 0;

bool is_gpu(uint64_t agent) { return agent >= first_gpu && agent < first_gpu + standin::num_devices(); }
bool is_agent(uint64_t agent) { return agent == cpu || is_gpu(agent); }

Signal* signal_of(uint64_t handle) {
    auto* signal = reinterpret_cast<Signal*>(handle);
    return handle && signal->kind == 1 && signal->mark[0] == signal_mark ? signal : nullptr;
}

int64_t load(const Signal* signal) { return __atomic_load_n(&signal->value, __ATOMIC_ACQUIRE); }

uint32_t mask_between(uint64_t dst, uint64_t src) {
    const uint32_t all = (1u << standin::number("ENGINES", 6)) - 1;
    return is_gpu(dst) && is_gpu(src) && dst != src ? all & ~3u : all;
}

Engine& engine_of(uint64_t agent, uint32_t bit) {
    std::lock_guard lock(guard);
    Engine*& engine = engines[{agent, bit}];
    if (!engine) {
        engine = new Engine;
        std::thread([engine] {
            while (true) {
                std::unique_lock lock(engine->mutex);
                engine->changed.wait(lock, [&] { return !engine->queue.empty(); });
                standin::Job job = std::move(engine->queue.front());
                engine->queue.pop_front();
                lock.unlock();
                job();
                lock.lock();
                engine->pending--;
            }
        }).detach();
    }
    return *engine;
}

bool idle(uint64_t agent, uint32_t bit) {
    Engine& engine = engine_of(agent, bit);
    std::lock_guard lock(engine.mutex);
    return engine.pending == 0;
}

void submit(Engine& engine, std::vector<Signal*> depends, Signal* completion, bool broken, standin::Job move) {
    std::lock_guard lock(engine.mutex);
    engine.pending++;
    engine.queue.push_back([=] {
        for (Signal* signal : depends)
            while (load(signal)) std::this_thread::sleep_for(std::chrono::microseconds(20));
        standin::delay();
        if (broken) {
            __atomic_store_n(&completion->value, int64_t{-1}, __ATOMIC_RELEASE);
            return;
        }
        move();
        __atomic_sub_fetch(&completion->value, 1, __ATOMIC_RELEASE);
    });
    engine.changed.notify_all();
}

int collect(uint32_t num, const uint64_t* handles, std::vector<Signal*>* out) {
    if ((num == 0) != (handles == nullptr)) return invalid_argument;
    for (uint32_t i = 0; i < num; i++) {
        Signal* signal = signal_of(handles[i]);
        if (!signal) return invalid_signal;
        out->push_back(signal);
    }
    return 0;
}

int new_signal(int64_t value, uint64_t* out) {
    auto* signal = new Signal{};
    signal->kind = 1, signal->value = value, signal->mark[0] = signal->mark[1] = signal_mark;
    *out = reinterpret_cast<uint64_t>(signal);
    return 0;
}

}  // namespace

#pragma GCC diagnostic ignored "-Wformat-zero-length"  // calls without details
#define ENTER(...)                                                         \
    if (int fault = standin::enter(__func__ __VA_OPT__(, ) __VA_ARGS__)) return fault; \
    if (!opened) return not_initialized

extern "C" {

void standin_own(void* base, size_t size, int device) {  // -1: the host's
    std::lock_guard lock(guard);
    owned[reinterpret_cast<uintptr_t>(base)] = {size, device < 0 ? cpu : first_gpu + device};
}

int hsa_init() {
    if (int fault = standin::enter(__func__)) return fault;
    opened++;
    return 0;
}

int hsa_shut_down() {
    ENTER();
    opened--;
    return 0;
}

int hsa_status_string(int code, const char** out) {
    static const std::map<int, const char*> texts = {
        {invalid_argument, "HSA_STATUS_ERROR_INVALID_ARGUMENT: One of the arguments does not meet a precondition."},
        {invalid_agent, "HSA_STATUS_ERROR_INVALID_AGENT: The agent is invalid."},
        {invalid_signal, "HSA_STATUS_ERROR_INVALID_SIGNAL: The signal is invalid."},
        {out_of_resources, "HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime could not get what it needs."},
        {not_initialized, "HSA_STATUS_ERROR_NOT_INITIALIZED: An API other than hsa_init was called before."},
    };
    const auto found = texts.find(code);
    if (found == texts.end()) return invalid_argument;
    *out = found->second;
    return 0;
}

int hsa_system_get_info(int attribute, void* out) {
    ENTER();
    if (attribute != 3) return invalid_argument;
    memcpy(out, &frequency, sizeof frequency);
    return 0;
}

int hsa_iterate_agents(int (*callback)(uint64_t, void*), void* data) {
    ENTER();
    for (uint64_t agent = cpu; is_agent(agent); agent++)
        if (int status = callback(agent, data)) return status;
    return 0;
}

int hsa_agent_get_info(uint64_t agent, int attribute, void* out) {
    ENTER();
    if (!is_agent(agent)) return invalid_agent;
    const bool twins = standin::number("TWINS", 0);
    const auto gpu = static_cast<uint32_t>(agent - first_gpu);
    const uint32_t kind = is_gpu(agent), domain = 0, bdf = is_gpu(agent) ? (0xc0 + (twins ? 0 : gpu)) << 8 : 0;
    unsigned char uuid[16];
    switch (attribute) {
        case 17: memcpy(out, &kind, sizeof kind); return 0;
        case 0xA006: memcpy(out, &bdf, sizeof bdf); return 0;
        case 0xA00F: memcpy(out, &domain, sizeof domain); return 0;
        case 0xA011:
            strcpy(static_cast<char*>(out), is_gpu(agent) ? "GPU-" : "CPU-XX");
            if (!is_gpu(agent)) return 0;
            standin::device_uuid(static_cast<int>(gpu), uuid);
            memcpy(static_cast<char*>(out) + 4, uuid, sizeof uuid);
            static_cast<char*>(out)[20] = 0;
            return 0;
        default: return invalid_argument;
    }
}

// --- signals

int hsa_amd_signal_create(int64_t value, uint32_t, const uint64_t*, uint64_t attributes, uint64_t* out) {
    ENTER("value=%ld attributes=%lu", value, attributes);
    return new_signal(value, out);
}

int hsa_signal_destroy(uint64_t handle) {
    ENTER();
    Signal* signal = signal_of(handle);
    if (!signal) return invalid_signal;
    signal->kind = 0;
    delete signal;
    return 0;
}

int hsa_amd_signal_value_pointer(uint64_t handle, int64_t** out) {
    ENTER();
    Signal* signal = signal_of(handle);
    if (!signal) return invalid_signal;
    *out = &signal->value + standin::number("LAYOUT", 0);
    return 0;
}

void hsa_signal_store_screlease(uint64_t handle, int64_t value) {
    standin::enter(__func__, "value=%ld", value);
    __atomic_store_n(&signal_of(handle)->value, value, __ATOMIC_RELEASE);
}

int64_t hsa_signal_load_scacquire(uint64_t handle) { return load(signal_of(handle)); }

int64_t hsa_signal_wait_scacquire(uint64_t handle, int condition, int64_t value, uint64_t timeout, int) {
    using Clock = std::chrono::steady_clock;
    const auto until = Clock::now() + std::chrono::nanoseconds(timeout * (1'000'000'000 / frequency));
    while (true) {
        const int64_t now = hsa_signal_load_scacquire(handle);
        const bool met[] = {now == value, now != value, now < value, now >= value};
        if (met[condition] || Clock::now() >= until) return now;
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
}

// --- memory and engines

int hsa_amd_pointer_info(void* address, PointerInfo* info, void*, void*, void*) {
    ENTER();
    std::lock_guard lock(guard);
    const auto at = reinterpret_cast<uintptr_t>(address);
    auto after = owned.upper_bound(at);
    info->type = 0;
    if (after == owned.begin()) return 0;
    const auto& [base, what] = *std::prev(after);
    if (at >= base + what.first) return 0;
    info->type = 1, info->owner = what.second, info->bytes = what.first;
    return 0;
}

int hsa_amd_memory_copy_engine_status(uint64_t dst, uint64_t src, uint32_t* out) {
    ENTER("dst=%#lx src=%#lx", dst, src);
    if (!is_agent(dst) || !is_agent(src) || dst == src) return invalid_agent;
    const uint64_t agent = is_gpu(src) ? src : dst;
    *out = 0;
    for (uint32_t bit = 1; bit <= mask_between(dst, src); bit <<= 1)
        if (mask_between(dst, src) & bit && !(standin::number("BUSY", 0) & bit) && idle(agent, bit)) *out |= bit;
    return *out ? 0 : out_of_resources;
}

int hsa_amd_memory_get_preferred_copy_engine(uint64_t dst, uint64_t src, uint32_t* out) {
    ENTER();
    if (!is_agent(dst) || !is_agent(src) || dst == src) return invalid_agent;
    *out = is_gpu(dst) && is_gpu(src) ? 4u << ((dst - first_gpu) % std::max(1L, standin::number("ENGINES", 6) - 2)) : 0;
    return 0;
}

int hsa_amd_memory_async_copy_on_engine(void* dst, uint64_t dst_agent, const void* src, uint64_t src_agent, size_t size,
                                        uint32_t num_depends, const uint64_t* depends, uint64_t completion, int engine,
                                        bool force) {
    ENTER("engine=%#x dst=%#lx src=%#lx size=%zu depends=%u force=%d", engine, dst_agent, src_agent, size, num_depends,
          force);
    std::vector<Signal*> waits;
    if (!is_agent(dst_agent) || !is_agent(src_agent)) return invalid_agent;
    const bool one_engine = engine && !(engine & (engine - 1));
    if (!dst || !src || !one_engine || !(mask_between(dst_agent, src_agent) & engine)) return invalid_argument;
    if (int code = collect(num_depends, depends, &waits)) return code;
    Signal* signal = signal_of(completion);
    if (!signal) return invalid_signal;
    if (!size) return 0;
    const bool broken = standin::number("BREAK", 0) & engine;
    Engine& on = engine_of(is_gpu(src_agent) ? src_agent : dst_agent, engine);
    submit(on, waits, signal, broken, [=] { memcpy(dst, src, size); });
    return 0;
}

int hsa_amd_memory_async_batch_copy(const Operation* ops, uint32_t num_ops, uint32_t num_depends,
                                    const uint64_t* depends) {
    ENTER("ops=%u type=%u entries=%u depends=%u", num_ops, ops->type, ops->num_entries, num_depends);
    std::vector<Signal*> waits;
    if (int code = collect(num_depends, depends, &waits)) return code;
    for (uint32_t i = 0; i < num_ops; i++) {
        const Operation op = ops[i];
        Signal* signal = signal_of(op.completion);
        const bool broadcast = op.type == 1;
        if (op.version != 1 || op.type > 2 || !signal) return invalid_argument;
        if (!op.num_entries || op.num_entries > 1024) return invalid_argument;
        if (!is_gpu(op.src_agent) || (broadcast && op.dst_size)) return invalid_argument;
        struct Entry {
            char *dst, *src;
            size_t size;
        };
        std::vector<Entry> entries;
        for (uint16_t k = 0; k < op.num_entries; k++) {
            if (!is_agent(static_cast<uint64_t*>(op.dst_agent)[k])) return invalid_agent;
            if (broadcast)
                entries.push_back({static_cast<char**>(op.dst)[k], static_cast<char*>(op.src), op.size});
            else
                entries.push_back({static_cast<char**>(op.dst)[k], static_cast<char**>(op.src)[k],
                                   reinterpret_cast<size_t*>(op.size)[k]});
        }
        submit(engine_of(op.src_agent, 1), waits, signal, standin::number("BREAK", 0) & 1, [=] {
            for (const Entry& entry : entries)
                if (op.type == 2)
                    std::swap_ranges(entry.dst, entry.dst + entry.size, entry.src);
                else
                    memcpy(entry.dst, entry.src, entry.size);
        });
    }
    return 0;
}
}
