#include "arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace dovetail {

namespace {
constexpr size_t kPage = 4096;
size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
}  // namespace

Mapping::Mapping(int fd, size_t bytes) : bytes_(bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (p == MAP_FAILED)
    throw OutOfMemory("mmap of " + std::to_string(bytes) + " bytes of heap failed: " + std::strerror(errno));
  base_ = static_cast<char*>(p);
  madvise(base_, bytes, MADV_HUGEPAGE);  // where the system allows it for shared memory
}

Mapping::~Mapping() {
  if (base_) munmap(base_, bytes_);
}

Arena::Arena(int fd, size_t bytes) : Mapping(fd, bytes), fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)), owner_pid_(getpid()) {
  if (fd_ < 0) throw OutOfMemory(std::string("no file descriptor for the heap: ") + std::strerror(errno));
  free_[0] = bytes / kPage * kPage;
  if (alloc(sizeof(Header)) != 0) throw std::logic_error("the header must come first");
  header()->arena_bytes = bytes;
  header()->magic = kMagic;
}

Arena::~Arena() { close(fd_); }

bool Arena::mine() const { return getpid() == owner_pid_; }

void Arena::free_when(uint64_t offset, std::function<bool()> ready) {
  {
    std::lock_guard lock(mutex_);
    later_.push_back({offset, std::move(ready)});
  }
  free_due();
}

void Arena::free_due() {
  if (!mine()) return;
  std::vector<uint64_t> due;
  {
    std::lock_guard lock(mutex_);
    for (auto it = later_.begin(); it != later_.end();) {
      if (!it->ready()) {
        ++it;
        continue;
      }
      due.push_back(it->offset);
      it = later_.erase(it);
    }
  }
  for (const uint64_t offset : due) free(offset);
}

uint64_t Arena::alloc(size_t bytes) {
  if (!mine()) throw OutOfMemory("this heap is that of the parent process; a forked child has none");
  free_due();
  const size_t need = whole_pages(bytes ? bytes : 1);
  std::lock_guard lock(mutex_);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < need) continue;
    const uint64_t offset = it->first;
    int rc;
    while ((rc = fallocate(fd_, 0, static_cast<off_t>(offset), static_cast<off_t>(need))) < 0 && errno == EINTR) {
    }
    if (rc < 0) {
      const int error = errno;
      fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(need));
      throw OutOfMemory("no memory for " + std::to_string(need) + " bytes of heap: " + std::strerror(error));
    }
    const size_t rest = it->second - need;
    free_.erase(it);
    if (rest) free_[offset + need] = rest;
    used_[offset] = need;
#ifdef MADV_POPULATE_WRITE
    madvise(base() + offset, need, MADV_POPULATE_WRITE);  // the first touch should not cost a page fault
#endif
    return offset;
  }
  throw OutOfMemory("the heap of " + std::to_string(this->bytes()) + " bytes has no room for " + std::to_string(need) +
                    "; DOVETAIL_HEAP sets its size");
}

void Arena::free(uint64_t offset) {
  if (!mine()) return;
  std::lock_guard lock(mutex_);
  const auto it = used_.find(offset);
  if (it == used_.end()) return;
  if (const auto held = holds_.find(offset); held != holds_.end()) {
    std::vector<std::function<bool()>> conditions = std::move(held->second);
    holds_.erase(held);
    const auto all = [conditions = std::move(conditions)] {
      for (const auto& ready : conditions)
        if (!ready()) return false;
      return true;
    };
    if (!all()) {
      later_.push_back({offset, all});
      return;
    }
  }
  const size_t bytes = it->second;
  used_.erase(it);
  give_back(offset, bytes);
}

void Arena::give_back(uint64_t offset, size_t bytes) {
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

void Arena::hold(uint64_t inside, std::function<bool()> ready) {
  std::lock_guard lock(mutex_);
  auto it = used_.upper_bound(inside);
  if (it == used_.begin()) return;
  --it;
  if (inside < it->first + it->second) holds_[it->first].push_back(std::move(ready));
}

size_t Arena::used_bytes() const {
  std::lock_guard lock(mutex_);
  size_t sum = 0;
  for (const auto& [offset, bytes] : used_) sum += bytes;
  return sum;
}

}  // namespace dovetail
