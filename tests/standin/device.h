// A device in software that the stand-in driver libraries run on. It knows no vendor: cuda.cpp, hip.cpp and hsa.cpp
// map these calls and `Result` to the names and codes of theirs.
//
// A stream is one worker thread that runs its jobs in order; nothing else orders two streams but events and memory
// words. Device memory is an mmap of a memfd, so that other processes can open it, and the host can look at it.
// The device is made to show mistakes: a batch runs in random order, with random delays where asked; sources that
// need not be read in stream order are read at the call; unknown memory and ranges that span two allocations are
// refused; too many parked streams stop all others. Fresh device memory is poisoned.
//
// Settings come from the environment (STANDIN_<NAME>), once, and can be changed later by standin_set:
//   DEVICES      number of devices (1)
//   PEERS        0: devices cannot reach each other (1)
//   DELAY_US     the longest random delay before a copy (0)
//   SEED         of the random order (from the system)
//   MOST_PARKED  streams that may wait for a word while the others still run (15, as measured on one H200)
//   PAGEABLE     1: copies may use host memory that the device does not know; they wait for it (0: refused)
//   FAIL         "call:code:n[,...]": the n-th call from now on of that name returns that code; n = 0: every one
//   LOG          a file that gets a line per call
//   VERSION      of the driver; the front end has its own default
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace standin {

enum class Result {
    success,
    invalid_value,        // a bad argument, or memory that the device does not know
    invalid_handle,       // no such stream, event or graph
    invalid_device,
    out_of_memory,
    not_ready,            // a query: work is pending
    already_registered,   // host memory that is registered, or a peer that is enabled
    not_registered,
    same_process,         // a handle opened by the process that exported it
    peer_unreachable,
    capture_unsupported,  // not allowed while capturing; the capture is now invalid
    capture_invalidated,  // the end of such a capture
    capture_isolation,    // a capturing stream waited for an event from outside
    not_capturing,
};

// --- settings, faults and the record of calls

// The value of a setting, such as setting("DEVICES", "1").
std::string setting(const char* name, const char* otherwise);
long number(const char* name, long otherwise);

// To be called first by every entry point: writes `call` and its details (printf style, may be "") into the record.
// Returns the code that FAIL injects here, or 0; an entry point returns it at once if it is not 0.
int enter(const char* call, const char* details = "", ...) __attribute__((format(printf, 2, 3)));

// --- devices

int num_devices();
int current_device();            // of this thread; 0 until use_device
Result use_device(int device);
bool can_reach(int device, int peer);
Result enable_peer(int device, int peer);  // already_registered when it was
void device_uuid(int device, unsigned char out[16]);

// --- streams: a handle is a pointer; nullptr is the legacy default stream, a stream of its own here

using Job = std::function<void()>;

struct Stream;
Result stream_create(Stream** out, int priority = 0);
Result stream_destroy(Stream* stream);  // its queued work still runs
Result stream_synchronize(Stream* stream);
Result stream_query(Stream* stream);    // success or not_ready
Result stream_device(Stream* stream, int* device);
bool stream_known(Stream* stream);
// Puts a job at the end of the stream, or into the capture that the stream is in.
Result stream_push(Stream* stream, Job job);

// --- events

struct Event;
Result event_create(Event** out);
Result event_destroy(Event* event);
Result event_record(Event* event, Stream* stream);
Result event_query(Event* event);
Result event_synchronize(Event* event);
Result event_elapsed_ms(Event* begin, Event* end, float* out);  // not_ready where one is pending
Result stream_wait_event(Stream* stream, Event* event);

// --- capture and graphs: a captured list of jobs, replayed in the order in which it was recorded. A stream that waits
// for an event recorded in a capture joins it.

struct Graph;
Result capture_begin(Stream* stream);
bool capturing(Stream* stream);
void capture_invalidate(Stream* stream);
Result capture_end(Stream* stream, Graph** out);
Result graph_launch(Graph* graph, Stream* stream);
Result graph_destroy(Graph* graph);
Result graph_copy(Graph* graph, Graph** out);  // for front ends whose executable graph is an object of its own

// --- memory

enum class Kind { unknown, pinned, registered, device, imported };

struct Region {
    Kind kind = Kind::unknown;
    int device = -1;
    uintptr_t base = 0;
    size_t size = 0;
};

Result device_alloc(void** out, size_t size);  // on the current device
Result device_free(void* address);             // waits for all streams, as drivers do
Result host_alloc(void** out, size_t size);
Result host_free(void* address);
Result host_register(void* address, size_t size);
Result host_unregister(void* address);
Region region_at(const void* address);         // the one that contains the address
// success if one region contains the whole range.
Result check_range(const void* address, size_t size);

constexpr size_t handle_bytes = 64;
Result ipc_export(void* address, unsigned char out[handle_bytes]);
Result ipc_open(const unsigned char handle[handle_bytes], void** out);  // the same address when opened twice
Result ipc_close(void* address);

// --- work: checked at the call, done in the order of the stream

enum class Order { stream = 1, during_call = 2, any = 3 };

Result copy(Stream* stream, void* dst, const void* src, size_t size);
Result copy_rows(Stream* stream, void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width,
                 size_t rows);
// In random order. Where `failed` is given it gets the index of the first entry that is refused; nothing runs then.
Result copy_batch(Stream* stream, void* const* dst, void* const* src, const size_t* size, size_t count, Order order,
                  size_t* failed = nullptr);
Result fill(Stream* stream, void* address, unsigned char byte, size_t size);
// The stream parks until the signed difference (*address - value) is not negative.
Result wait_word(Stream* stream, uint64_t* address, uint64_t value);
Result write_word(Stream* stream, uint64_t* address, uint64_t value);

// For jobs: returns when `open` does, counting this stream as parked meanwhile.
void park(const std::function<bool()>& open);
// For jobs: sleeps a random time below DELAY_US.
void delay();

}  // namespace standin

extern "C" {
// Moves whole lines of the record into `buffer`, NUL ended; returns their length. "" when there is nothing more.
size_t standin_calls(char* buffer, size_t size);
// Changes a setting: standin_set("FAIL", "cuMemcpyAsync:1:1"). FAIL counts from here.
void standin_set(const char* name, const char* value);
// Streams that are parked now.
int standin_parked(void);
}
