// Moving bytes: the software side of a DMA engine. No locks, no waits, no knowledge of plans.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dovetail {

// From this size on a copy goes past the cache: its destination is not read soon and would evict what is.
// Chosen, not yet swept: docs/design/hw-cpu.md says so. Set once at start-up.
extern size_t streaming_bytes;

void copy_bytes(char* dst, const char* src, size_t n, bool streaming);
void broadcast_bytes(char* dst, char* dst2, const char* src, size_t n, bool streaming);  // source read once
void copy_rows(char* dst, const char* src, size_t rows, size_t row_bytes, size_t dst_pitch);  // the source has no gaps
void swap_bytes(char* a, char* b, size_t n);                                             // in place, block by block

}  // namespace dovetail
