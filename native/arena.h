// The memory of this process's rank: one memfd that its peers map too, and an allocator over it.
//
// Blocks are whole pages, reserved in the file when they are handed out (a full machine is an error here, not a
// SIGBUS later) and given back to the system when they are freed. A block that a stalled peer may still write to is
// held back until the hold is lifted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "layout.h"

namespace dovetail {

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A shared mapping of somebody's arena. Unmapped when the last user is gone.
class Mapping {
 public:
  Mapping(int fd, size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* base() const { return base_; }
  size_t bytes() const { return bytes_; }
  Header* header() const { return reinterpret_cast<Header*>(base_); }
  bool contains(const void* p, size_t n) const {
    const auto at = reinterpret_cast<uintptr_t>(p), begin = reinterpret_cast<uintptr_t>(base_);
    return at >= begin && at - begin <= bytes_ && n <= bytes_ - (at - begin);
  }

 private:
  char* base_ = nullptr;
  size_t bytes_ = 0;
};

class Arena : public Mapping {
 public:
  Arena(int fd, size_t bytes);  // takes its own duplicate of fd
  ~Arena();

  uint64_t alloc(size_t bytes);  // offset of a zeroed block; throws OutOfMemory
  void free(uint64_t offset);
  void free_when(uint64_t offset, std::function<bool()> ready);  // looked at when memory is next asked for
  void hold(uint64_t inside, std::function<bool()> ready);  // once freed, the block around `inside` waits for this
  size_t used_bytes() const;

 private:
  struct Later {
    uint64_t offset;
    std::function<bool()> ready;
  };
  void free_due();
  void give_back(uint64_t offset, size_t bytes);

  bool mine() const;  // false in a forked child: the memory is its parent's, and a hole punched here is one there

  int fd_;
  int owner_pid_;
  mutable std::mutex mutex_;
  std::map<uint64_t, size_t> free_;  // offset -> bytes, neighbours joined
  std::map<uint64_t, size_t> used_;
  std::map<uint64_t, std::vector<std::function<bool()>>> holds_;
  std::vector<Later> later_;
};

}  // namespace dovetail
