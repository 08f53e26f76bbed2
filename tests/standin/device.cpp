#include "device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <thread>

namespace standin {

using Lock = std::lock_guard<std::mutex>;
using Clock = std::chrono::steady_clock;

struct Capture {
    std::vector<Job> jobs;
    Stream* origin = nullptr;
    std::set<Stream*> streams;
    bool invalid = false;
};

struct Graph {
    std::shared_ptr<const std::vector<Job>> jobs;
};

struct Stream {
    int device = 0;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Job> queue;
    bool busy = false, closing = false;
    std::shared_ptr<Capture> capture;  // guarded by World::mutex
};

struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0;
    std::set<uint64_t> pending;  // records that no stream has reached: who waits for one is not let go by a later one
    Clock::time_point time;
    std::shared_ptr<Capture> capture;  // that the last record went into; guarded by World::mutex
};

namespace {

struct Fault {
    std::string call;
    int code;
    long at, seen;
};

struct Mapping : Region {
    int fd = -1;
    uint64_t id = 0;
    long opened = 1;
};

// Everything of the process. Never destroyed: worker threads outlive main.
struct World {
    std::mutex mutex;
    std::map<std::string, std::string> settings;
    std::vector<Fault> faults;
    std::deque<std::string> record;
    std::map<Stream*, std::shared_ptr<Stream>> streams;
    std::map<Event*, std::shared_ptr<Event>> events;
    std::set<Graph*> graphs;
    std::map<uintptr_t, Mapping> memory;
    std::set<std::pair<int, int>> peers;
    std::shared_ptr<Stream> legacy;
    uint64_t next_id = 1;
    std::atomic<int> parked{0};
    std::atomic<long> most_parked{15}, delay_us{0};
    std::mutex random_mutex;
    std::mt19937_64 random;
};

void parse_faults(World& world, const std::string& text) {
    world.faults.clear();
    for (size_t begin = 0; begin < text.size();) {
        size_t end = std::min(text.find(',', begin), text.size());
        const std::string one = text.substr(begin, end - begin);
        const size_t first = one.find(':'), second = one.find(':', first + 1);
        if (second != std::string::npos)
            world.faults.push_back(
                {one.substr(0, first), atoi(one.c_str() + first + 1), atol(one.c_str() + second + 1), 0});
        begin = end + 1;
    }
}

void apply(World& world, const std::string& name, const std::string& value) {
    if (name == "FAIL") parse_faults(world, value);
    if (name == "MOST_PARKED") world.most_parked = atol(value.c_str());
    if (name == "DELAY_US") world.delay_us = atol(value.c_str());
    if (name == "SEED") world.random.seed(strtoull(value.c_str(), nullptr, 10));
}

World& world() {
    static World* const only = [] {
        auto* made = new World;
        made->random.seed(std::random_device{}());
        for (char** entry = environ; *entry; entry++) {
            const std::string text = *entry;
            const size_t equals = text.find('=');
            if (text.rfind("STANDIN_", 0) != 0 || equals == std::string::npos) continue;
            made->settings[text.substr(8, equals - 8)] = text.substr(equals + 1);
        }
        for (auto& [name, value] : made->settings) apply(*made, name, value);
        return made;
    }();
    return *only;
}

uint64_t random_below(uint64_t limit) {
    Lock lock(world().random_mutex);
    return world().random() % limit;
}

thread_local int this_device = 0;

void work(std::shared_ptr<Stream> stream) {
    World& all = world();
    while (true) {
        Job job;
        {
            std::unique_lock lock(stream->mutex);
            stream->changed.wait(lock, [&] { return stream->closing || !stream->queue.empty(); });
            if (stream->queue.empty()) return;
            job = std::move(stream->queue.front());
            stream->queue.pop_front();
            stream->busy = true;
        }
        // Too many parked streams hold the hardware queues: nobody else goes on until one of them is let through.
        while (all.parked > all.most_parked) std::this_thread::sleep_for(std::chrono::microseconds(50));
        job();
        Lock lock(stream->mutex);
        stream->busy = false;
        stream->changed.notify_all();
    }
}

std::shared_ptr<Stream> make_stream(int device) {
    auto stream = std::make_shared<Stream>();
    stream->device = device;
    std::thread(work, stream).detach();
    return stream;
}

// The stream behind a handle, or null; the world is locked.
std::shared_ptr<Stream> find(Stream* handle) {
    World& all = world();
    if (!handle) {
        if (!all.legacy) all.legacy = make_stream(0);
        return all.legacy;
    }
    auto found = all.streams.find(handle);
    return found == all.streams.end() ? nullptr : found->second;
}

std::shared_ptr<Event> find(Event* handle) {
    auto found = world().events.find(handle);
    return found == world().events.end() ? nullptr : found->second;
}

void drain(Stream& stream) {
    std::unique_lock lock(stream.mutex);
    stream.changed.wait(lock, [&] { return stream.queue.empty() && !stream.busy; });
}

void drain_all() {
    std::vector<std::shared_ptr<Stream>> streams;
    {
        Lock lock(world().mutex);
        for (auto& [handle, stream] : world().streams) streams.push_back(stream);
        if (world().legacy) streams.push_back(world().legacy);
    }
    for (auto& stream : streams) drain(*stream);
}

// The mapping that contains an address; the world is locked.
Mapping* find_memory(uintptr_t address) {
    auto& memory = world().memory;
    auto after = memory.upper_bound(address);
    if (after == memory.begin()) return nullptr;
    Mapping& found = std::prev(after)->second;
    return address < found.base + found.size ? &found : nullptr;
}

// success: one region holds the range. not_registered: the device knows none of it. invalid_value: it holds a part.
Result classify(const void* address, size_t size) {
    Lock lock(world().mutex);
    const auto begin = reinterpret_cast<uintptr_t>(address);
    if (Mapping* found = find_memory(begin))
        return begin + size <= found->base + found->size ? Result::success : Result::invalid_value;
    auto next = world().memory.lower_bound(begin);
    return next != world().memory.end() && next->first < begin + size ? Result::invalid_value : Result::not_registered;
}

// May this range take part in a copy? Sets `pageable` for host memory that the device does not know.
Result usable(const void* address, size_t size, bool* pageable) {
    const Result found = classify(address, size);
    if (found != Result::not_registered) return found;
    if (!address || !number("PAGEABLE", 0)) return Result::invalid_value;
    *pageable = true;
    return Result::success;
}

// A range that the caller may free or write when the call returns is not left to the stream.
Result push_copy(Stream* stream, Job job, bool pageable) {
    const Result result = stream_push(stream, std::move(job));
    return result == Result::success && pageable ? stream_synchronize(stream) : result;
}

Mapping* add_memory(void* base, size_t size, Kind kind, int device, int fd = -1) {
    Mapping made;
    made.kind = kind, made.device = device, made.base = reinterpret_cast<uintptr_t>(base), made.size = size;
    made.fd = fd, made.id = world().next_id++;
    return &(world().memory[made.base] = made);
}

Result take_memory(void* address, std::initializer_list<Kind> kinds, Result otherwise, Mapping* out) {
    Lock lock(world().mutex);
    auto found = world().memory.find(reinterpret_cast<uintptr_t>(address));
    if (found == world().memory.end() || std::find(kinds.begin(), kinds.end(), found->second.kind) == kinds.end())
        return otherwise;
    *out = found->second;
    world().memory.erase(found);
    return Result::success;
}

struct Handle {
    char magic[8];
    int64_t pid, fd;
    uint64_t size, id;
    int64_t device;
    char rest[16];
};
static_assert(sizeof(Handle) == handle_bytes);
constexpr char handle_magic[8] = {'s', 't', 'a', 'n', 'd', 'i', 'n', 1};

}  // namespace

// --- settings, faults and the record of calls

std::string setting(const char* name, const char* otherwise) {
    Lock lock(world().mutex);
    auto found = world().settings.find(name);
    return found == world().settings.end() || found->second.empty() ? otherwise : found->second;
}

long number(const char* name, long otherwise) {
    return atol(setting(name, std::to_string(otherwise).c_str()).c_str());
}

int enter(const char* call, const char* details, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, details);
    vsnprintf(text, sizeof text, details, arguments);
    va_end(arguments);
    std::string line = call;
    if (*text) line += std::string(" ") + text;
    line += "\n";
    World& all = world();
    Lock lock(all.mutex);
    all.record.push_back(line);
    if (all.record.size() > 100000) all.record.pop_front();
    auto log = all.settings.find("LOG");
    if (log != all.settings.end() && !log->second.empty()) {
        const int fd = open(log->second.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (fd >= 0 && write(fd, line.data(), line.size()) < 0) perror("STANDIN_LOG");
        close(fd);
    }
    int code = 0;
    for (Fault& fault : all.faults)
        if (fault.call == call && (++fault.seen == fault.at || fault.at == 0)) code = fault.code;
    return code;
}

// --- devices

int num_devices() { return static_cast<int>(number("DEVICES", 1)); }

int current_device() { return this_device; }

Result use_device(int device) {
    if (device < 0 || device >= num_devices()) return Result::invalid_device;
    this_device = device;
    return Result::success;
}

bool can_reach(int device, int peer) {
    const int count = num_devices();
    return device != peer && device >= 0 && peer >= 0 && device < count && peer < count && number("PEERS", 1);
}

Result enable_peer(int device, int peer) {
    if (peer < 0 || peer >= num_devices()) return Result::invalid_device;
    if (!can_reach(device, peer)) return Result::peer_unreachable;
    Lock lock(world().mutex);
    return world().peers.insert({device, peer}).second ? Result::success : Result::already_registered;
}

void device_uuid(int device, unsigned char out[16]) {
    memcpy(out, "standin-device-", 15);
    out[15] = static_cast<unsigned char>('0' + device);
}

// --- streams

Result stream_create(Stream** out, int) {
    auto stream = make_stream(this_device);
    Lock lock(world().mutex);
    world().streams[stream.get()] = stream;
    *out = stream.get();
    return Result::success;
}

Result stream_destroy(Stream* handle) {
    World& all = world();
    std::shared_ptr<Stream> stream;
    {
        Lock lock(all.mutex);
        auto found = all.streams.find(handle);
        if (found == all.streams.end()) return Result::invalid_handle;
        stream = found->second;
        if (stream->capture) stream->capture->invalid = true, stream->capture->streams.erase(handle);
        all.streams.erase(found);
    }
    Lock lock(stream->mutex);
    stream->closing = true;
    stream->changed.notify_all();
    return Result::success;
}

bool stream_known(Stream* handle) {
    Lock lock(world().mutex);
    return find(handle) != nullptr;
}

Result stream_device(Stream* handle, int* device) {
    Lock lock(world().mutex);
    auto stream = find(handle);
    if (!stream) return Result::invalid_handle;
    *device = handle ? stream->device : this_device;
    return Result::success;
}

// The stream, for calls that may not be made on one that is capturing.
static Result quiet(Stream* handle, std::shared_ptr<Stream>* out) {
    Lock lock(world().mutex);
    *out = find(handle);
    if (!*out) return Result::invalid_handle;
    if (!(*out)->capture) return Result::success;
    (*out)->capture->invalid = true;
    return Result::capture_unsupported;
}

Result stream_synchronize(Stream* handle) {
    std::shared_ptr<Stream> stream;
    if (Result result = quiet(handle, &stream); result != Result::success) return result;
    drain(*stream);
    return Result::success;
}

Result stream_query(Stream* handle) {
    std::shared_ptr<Stream> stream;
    if (Result result = quiet(handle, &stream); result != Result::success) return result;
    Lock lock(stream->mutex);
    return stream->queue.empty() && !stream->busy ? Result::success : Result::not_ready;
}

Result stream_push(Stream* handle, Job job) {
    std::shared_ptr<Stream> stream;
    {
        Lock lock(world().mutex);
        stream = find(handle);
        if (!stream) return Result::invalid_handle;
        if (stream->capture) {
            stream->capture->jobs.push_back(std::move(job));
            return Result::success;
        }
    }
    Lock lock(stream->mutex);
    stream->queue.push_back(std::move(job));
    stream->changed.notify_all();
    return Result::success;
}

// --- events

Result event_create(Event** out) {
    auto event = std::make_shared<Event>();
    Lock lock(world().mutex);
    world().events[event.get()] = event;
    *out = event.get();
    return Result::success;
}

Result event_destroy(Event* handle) {
    Lock lock(world().mutex);
    return world().events.erase(handle) ? Result::success : Result::invalid_handle;
}

Result event_record(Event* handle, Stream* on) {
    std::shared_ptr<Event> event;
    {
        Lock lock(world().mutex);
        event = find(handle);
        auto stream = find(on);
        if (!event || !stream) return Result::invalid_handle;
        event->capture = stream->capture;
        if (stream->capture) return Result::success;
    }
    uint64_t mark;
    {
        Lock lock(event->mutex);
        mark = ++event->recorded;
        event->pending.insert(mark);
    }
    return stream_push(on, [event, mark] {
        Lock lock(event->mutex);
        event->pending.erase(mark);
        if (mark == event->recorded) event->time = Clock::now();
        event->changed.notify_all();
    });
}

Result event_query(Event* handle) {
    std::shared_ptr<Event> event;
    {
        Lock lock(world().mutex);
        if (!(event = find(handle))) return Result::invalid_handle;
    }
    Lock lock(event->mutex);
    return event->pending.count(event->recorded) ? Result::not_ready : Result::success;
}

Result event_synchronize(Event* handle) {
    std::shared_ptr<Event> event;
    {
        Lock lock(world().mutex);
        if (!(event = find(handle))) return Result::invalid_handle;
    }
    std::unique_lock lock(event->mutex);
    const uint64_t mark = event->recorded;
    event->changed.wait(lock, [&] { return !event->pending.count(mark); });
    return Result::success;
}

Result event_elapsed_ms(Event* begin, Event* end, float* out) {
    Clock::time_point times[2];
    for (int i = 0; i < 2; i++) {
        std::shared_ptr<Event> event;
        {
            Lock lock(world().mutex);
            if (!(event = find(i ? end : begin))) return Result::invalid_handle;
        }
        Lock lock(event->mutex);
        if (!event->recorded) return Result::invalid_handle;
        if (event->pending.count(event->recorded)) return Result::not_ready;
        times[i] = event->time;
    }
    *out = std::chrono::duration<float, std::milli>(times[1] - times[0]).count();
    return Result::success;
}

Result stream_wait_event(Stream* on, Event* handle) {
    std::shared_ptr<Event> event;
    {
        Lock lock(world().mutex);
        event = find(handle);
        auto stream = find(on);
        if (!event || !stream) return Result::invalid_handle;
        if (event->capture && !event->capture->streams.empty()) {
            if (stream->capture && stream->capture != event->capture) return Result::capture_isolation;
            stream->capture = event->capture;  // a join; the list is replayed in order, so there is nothing to wait for
            stream->capture->streams.insert(on);
            return Result::success;
        }
        if (stream->capture) {
            stream->capture->invalid = true;
            return Result::capture_isolation;
        }
    }
    uint64_t mark;
    {
        Lock lock(event->mutex);
        mark = event->recorded;
    }
    return stream_push(on, [event, mark] {
        std::unique_lock lock(event->mutex);
        event->changed.wait(lock, [&] { return !event->pending.count(mark); });
    });
}

// --- capture and graphs

Result capture_begin(Stream* handle) {
    Lock lock(world().mutex);
    auto stream = find(handle);
    if (!stream) return Result::invalid_handle;
    if (!handle) return Result::capture_unsupported;
    if (stream->capture) return Result::already_registered;
    stream->capture = std::make_shared<Capture>();
    stream->capture->origin = handle;
    stream->capture->streams.insert(handle);
    return Result::success;
}

bool capturing(Stream* handle) {
    Lock lock(world().mutex);
    auto stream = find(handle);
    return stream && stream->capture;
}

void capture_invalidate(Stream* handle) {
    Lock lock(world().mutex);
    auto stream = find(handle);
    if (stream && stream->capture) stream->capture->invalid = true;
}

Result capture_end(Stream* handle, Graph** out) {
    Lock lock(world().mutex);
    auto stream = find(handle);
    *out = nullptr;
    if (!stream) return Result::invalid_handle;
    auto capture = stream->capture;
    if (!capture || capture->origin != handle) return Result::not_capturing;
    for (Stream* joined : capture->streams)
        if (auto other = find(joined)) other->capture = nullptr;
    capture->streams.clear();
    if (capture->invalid) return Result::capture_invalidated;
    *out = new Graph{std::make_shared<const std::vector<Job>>(std::move(capture->jobs))};
    world().graphs.insert(*out);
    return Result::success;
}

Result graph_launch(Graph* graph, Stream* stream) {
    std::shared_ptr<const std::vector<Job>> jobs;
    {
        Lock lock(world().mutex);
        if (!world().graphs.count(graph)) return Result::invalid_handle;
        jobs = graph->jobs;
    }
    Result result = stream_known(stream) ? Result::success : Result::invalid_handle;
    for (size_t i = 0; i < jobs->size() && result == Result::success; i++) result = stream_push(stream, (*jobs)[i]);
    return result;
}

Result graph_destroy(Graph* graph) {
    Lock lock(world().mutex);
    if (!world().graphs.erase(graph)) return Result::invalid_handle;
    delete graph;
    return Result::success;
}

Result graph_copy(Graph* graph, Graph** out) {
    Lock lock(world().mutex);
    if (!world().graphs.count(graph)) return Result::invalid_handle;
    *out = new Graph(*graph);
    world().graphs.insert(*out);
    return Result::success;
}

// --- memory

Result device_alloc(void** out, size_t size) {
    if (!size) return Result::invalid_value;
    const int fd = memfd_create("standin", MFD_CLOEXEC);
    if (fd < 0) return Result::out_of_memory;
    void* base = MAP_FAILED;
    if (!ftruncate(fd, static_cast<off_t>(size)))
        base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED) {
        close(fd);
        return Result::out_of_memory;
    }
    if (size <= 16 << 20) memset(base, 0xCD, size);  // fresh memory has no value; a large one stays unbacked
    Lock lock(world().mutex);
    add_memory(base, size, Kind::device, this_device, fd);
    *out = base;
    return Result::success;
}

Result device_free(void* address) {
    if (!address) return Result::success;
    if (region_at(address).kind == Kind::device) drain_all();
    Mapping taken;
    const Result result = take_memory(address, {Kind::device}, Result::invalid_value, &taken);
    if (result != Result::success) return result;
    munmap(address, taken.size);
    close(taken.fd);
    return Result::success;
}

Result host_alloc(void** out, size_t size) {
    *out = nullptr;
    if (!size) return Result::success;
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return Result::out_of_memory;
    Lock lock(world().mutex);
    add_memory(base, size, Kind::pinned, this_device);
    *out = base;
    return Result::success;
}

Result host_free(void* address) {
    if (region_at(address).kind == Kind::pinned) drain_all();
    Mapping taken;
    const Result result = take_memory(address, {Kind::pinned}, Result::invalid_value, &taken);
    if (result != Result::success) return result;
    munmap(address, taken.size);
    return Result::success;
}

Result host_register(void* address, size_t size) {
    if (!address || !size) return Result::invalid_value;
    if (classify(address, size) != Result::not_registered) return Result::already_registered;
    Lock lock(world().mutex);
    add_memory(address, size, Kind::registered, this_device);
    return Result::success;
}

Result host_unregister(void* address) {
    Mapping taken;
    return take_memory(address, {Kind::registered}, Result::not_registered, &taken);
}

Region region_at(const void* address) {
    Lock lock(world().mutex);
    Mapping* found = find_memory(reinterpret_cast<uintptr_t>(address));
    return found ? *found : Region{};
}

Result check_range(const void* address, size_t size) {
    return classify(address, size) == Result::success ? Result::success : Result::invalid_value;
}

Result ipc_export(void* address, unsigned char out[handle_bytes]) {
    Lock lock(world().mutex);
    Mapping* found = find_memory(reinterpret_cast<uintptr_t>(address));
    if (!found || found->kind != Kind::device) return Result::invalid_value;
    Handle handle = {};
    memcpy(handle.magic, handle_magic, sizeof handle.magic);
    handle.pid = getpid(), handle.fd = found->fd, handle.size = found->size, handle.id = found->id;
    handle.device = found->device;
    memcpy(out, &handle, sizeof handle);
    return Result::success;
}

Result ipc_open(const unsigned char bytes[handle_bytes], void** out) {
    Handle handle;
    memcpy(&handle, bytes, sizeof handle);
    if (memcmp(handle.magic, handle_magic, sizeof handle.magic)) return Result::invalid_value;
    if (handle.pid == getpid()) return Result::same_process;
    const uint64_t id = (static_cast<uint64_t>(handle.pid) << 32) | handle.id;
    Lock lock(world().mutex);
    for (auto& [base, mapping] : world().memory)
        if (mapping.kind == Kind::imported && mapping.id == id) {
            mapping.opened++;
            *out = reinterpret_cast<void*>(base);
            return Result::success;
        }
    const std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return Result::invalid_value;
    void* base = mmap(nullptr, handle.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (base == MAP_FAILED) return Result::out_of_memory;
    add_memory(base, handle.size, Kind::imported, static_cast<int>(handle.device))->id = id;
    *out = base;
    return Result::success;
}

Result ipc_close(void* address) {
    if (region_at(address).kind == Kind::imported) drain_all();
    {
        Lock lock(world().mutex);
        auto found = world().memory.find(reinterpret_cast<uintptr_t>(address));
        if (found == world().memory.end() || found->second.kind != Kind::imported) return Result::invalid_value;
        if (--found->second.opened) return Result::success;
    }
    Mapping taken;
    Result result = take_memory(address, {Kind::imported}, Result::invalid_value, &taken);
    if (result == Result::success) munmap(address, taken.size);
    return result;
}

// --- work

void delay() {
    const long most = world().delay_us;
    if (most > 0) std::this_thread::sleep_for(std::chrono::microseconds(random_below(static_cast<uint64_t>(most) + 1)));
}

void park(const std::function<bool()>& open) {
    if (open()) return;
    world().parked++;
    for (int spins = 0; !open(); spins++) {
        if (spins < 100)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    world().parked--;
}

Result copy(Stream* stream, void* dst, const void* src, size_t size) {
    bool pageable = false;
    if (!size) return stream_known(stream) ? Result::success : Result::invalid_handle;
    if (Result result = usable(dst, size, &pageable); result != Result::success) return result;
    if (Result result = usable(src, size, &pageable); result != Result::success) return result;
    return push_copy(stream, [=] { delay(), memmove(dst, src, size); }, pageable);
}

Result copy_rows(Stream* stream, void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width,
                 size_t rows) {
    if (!width || !rows) return stream_known(stream) ? Result::success : Result::invalid_handle;
    if (rows > 1 && (dst_pitch < width || src_pitch < width)) return Result::invalid_value;
    bool pageable = false;
    const Result to_there = usable(dst, (rows - 1) * dst_pitch + width, &pageable);
    const Result from_there = usable(src, (rows - 1) * src_pitch + width, &pageable);
    if (to_there != Result::success || from_there != Result::success) return Result::invalid_value;
    auto* to = static_cast<char*>(dst);
    auto* from = static_cast<const char*>(src);
    return push_copy(stream, [=] {
        delay();
        for (size_t row = 0; row < rows; row++) memmove(to + row * dst_pitch, from + row * src_pitch, width);
    }, pageable);
}

Result copy_batch(Stream* stream, void* const* dst, void* const* src, const size_t* size, size_t count, Order order,
                  size_t* failed) {
    struct Entry {
        void *dst, *src;
        size_t size;
        std::vector<char> early;  // the source, where it may be read now
    };
    bool pageable = false;
    auto entries = std::make_shared<std::vector<Entry>>();
    for (size_t i = 0; i < count; i++) {
        const bool good = size[i] && usable(dst[i], size[i], &pageable) == Result::success &&
                          usable(src[i], size[i], &pageable) == Result::success;
        if (!good) {
            if (failed) *failed = i;
            return Result::invalid_value;
        }
        Entry entry{dst[i], src[i], size[i], {}};
        if (order != Order::stream) {
            auto* bytes = static_cast<const char*>(src[i]);
            entry.early.assign(bytes, bytes + size[i]);
        }
        entries->push_back(std::move(entry));
    }
    return push_copy(stream, [entries] {
        std::vector<size_t> turn(entries->size());
        std::iota(turn.begin(), turn.end(), size_t{0});
        for (size_t left = turn.size(); left > 1; left--) std::swap(turn[left - 1], turn[random_below(left)]);
        for (size_t i : turn) {
            const Entry& entry = (*entries)[i];
            delay();
            memmove(entry.dst, entry.early.empty() ? entry.src : entry.early.data(), entry.size);
        }
    }, pageable);
}

Result fill(Stream* stream, void* address, unsigned char byte, size_t size) {
    if (size && check_range(address, size) != Result::success) return Result::invalid_value;
    return stream_push(stream, [=] { delay(), memset(address, byte, size); });
}

// success if a stream of `device` can use the word: aligned, known, and on a device that it was told to reach.
static Result word_usable(Stream* stream, const uint64_t* address) {
    int device;
    if (Result result = stream_device(stream, &device); result != Result::success) return result;
    const Region region = region_at(address);
    if (reinterpret_cast<uintptr_t>(address) % sizeof *address) return Result::invalid_value;
    if (check_range(address, sizeof *address) != Result::success) return Result::invalid_value;
    if (region.kind != Kind::device || region.device == device) return Result::success;
    Lock lock(world().mutex);
    return world().peers.count({device, region.device}) ? Result::success : Result::invalid_value;
}

Result wait_word(Stream* stream, uint64_t* address, uint64_t value) {
    if (Result result = word_usable(stream, address); result != Result::success) return result;
    return stream_push(stream, [=] {
        park([=] { return static_cast<int64_t>(__atomic_load_n(address, __ATOMIC_ACQUIRE) - value) >= 0; });
    });
}

Result write_word(Stream* stream, uint64_t* address, uint64_t value) {
    if (Result result = word_usable(stream, address); result != Result::success) return result;
    return stream_push(stream, [=] { __atomic_store_n(address, value, __ATOMIC_RELEASE); });
}

}  // namespace standin

using standin::world;

size_t standin_calls(char* buffer, size_t size) {
    standin::Lock lock(world().mutex);
    size_t used = 0;
    auto& record = world().record;
    while (!record.empty() && used + record.front().size() < size) {
        memcpy(buffer + used, record.front().data(), record.front().size());
        used += record.front().size();
        record.pop_front();
    }
    if (size) buffer[used] = 0;
    return used;
}

void standin_set(const char* name, const char* value) {
    standin::Lock lock(world().mutex);
    world().settings[name] = value;
    standin::apply(world(), name, value);
}

int standin_parked(void) { return world().parked; }
