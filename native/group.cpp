#include "group.h"

#include <poll.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <string>

namespace dovetail {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

bool Peer::dead() const {
  if (pidfd < 0) return false;
  pollfd p{pidfd, POLLIN, 0};
  return poll(&p, 1, 0) > 0 && (p.revents & (POLLIN | POLLHUP | POLLERR | POLLNVAL));
}

namespace {

Control* find_control(const Mapping& memory, uint64_t key) {
  Header* h = memory.header();
  const uint64_t n = std::min<uint64_t>(h->num_groups.load(std::memory_order_acquire), kDirectory);
  for (uint64_t i = 0; i < n; ++i)
    if (h->directory[i].key.load(std::memory_order_acquire) == key)
      return reinterpret_cast<Control*>(memory.base() + h->directory[i].offset);
  return nullptr;
}

void publish(Arena& arena, uint64_t key, uint64_t offset) {
  Header* h = arena.header();
  const uint64_t i = h->num_groups.load(std::memory_order_relaxed);
  if (i >= kDirectory) throw OutOfMemory("this rank has joined " + std::to_string(kDirectory) + " groups, the most it can");
  h->directory[i].offset = offset;
  h->directory[i].key.store(key, std::memory_order_release);
  h->num_groups.store(i + 1, std::memory_order_release);
}

}  // namespace

Group::Group(std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<Peer>> members, int rank, uint64_t key,
             int64_t timeout, int max_params)
    : timeout_ns(timeout), arena_(std::move(arena)), members_(std::move(members)), controls_(members_.size()),
      rank_(rank), max_params_(max_params) {
  block_ = arena_->alloc(Control::bytes(max_params));
  controls_[rank_] = reinterpret_cast<Control*>(arena_->base() + block_);
  publish(*arena_, key, block_);
  const int64_t deadline = now_ns() + timeout;
  for (;;) {
    int missing = -1;
    for (int r = 0; r < size(); ++r) {
      if (!controls_[r]) controls_[r] = find_control(memory(r), key);
      if (!controls_[r]) missing = r;
    }
    if (missing < 0) return;
    const bool dead = members_[missing]->dead();
    if (dead || now_ns() > deadline) {
      arena_->free(block_);
      throw std::runtime_error((dead ? "dead:" : "late:") + std::to_string(missing));
    }
    timespec nap{0, 100000};
    nanosleep(&nap, nullptr);
  }
}

// A peer may read this rank's scratch until it has finished the runs that this rank has finished, so scratch goes when
// all have (or are gone). The Control block stays: peers may poll it until they too have closed the group.
Group::~Group() {
  try_settle();
  uint64_t last[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) last[lane] = mine()->finished[lane].load(std::memory_order_acquire);
  const auto done = [members = members_, controls = controls_, self = rank_, last] {
    for (size_t r = 0; r < members.size(); ++r)
      for (int lane = 0; lane < kLanes && static_cast<int>(r) != self; ++lane)
        if (controls[r]->finished[lane].load(std::memory_order_acquire) < last[lane] && !members[r]->dead()) return false;
    return true;
  };
  for (const Scratch& s : scratch_)
    if (s.offset != kNowhere) arena_->free_when(s.offset, done);
  for (const uint64_t offset : retired_) arena_->free_when(offset, done);
}

void Group::break_all(Abort code, int about) {
  const uint64_t word = abort_word(code, about, rank_);
  uint64_t mine_now = 0;
  if (!mine()->abort.word.compare_exchange_strong(mine_now, word)) return;  // broken already, with a reason
  for (Control* c : controls_) {
    uint64_t none = 0;
    c->abort.word.compare_exchange_strong(none, word);
  }
}

int Group::dead_member(uint64_t run, int lane) const {
  for (int r = 0; r < size(); ++r)
    if ((closed(r) || members_[r]->dead()) && controls_[r]->finished[lane].load(std::memory_order_acquire) < run) return r;
  return -1;
}

void Group::left() {
  if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1 && abort())
    mine()->acknowledged.word.store(1, std::memory_order_release);
}

bool Group::closed(int r) const {
  return static_cast<Abort>(controls_[r]->abort.word.load(std::memory_order_acquire) & 0xff) == Abort::Closed;
}

void Group::close() {
  uint64_t none = 0;
  mine()->abort.word.compare_exchange_strong(none, abort_word(Abort::Closed, rank_, rank_));
  if (running_.load(std::memory_order_acquire) == 0) mine()->acknowledged.word.store(1, std::memory_order_release);
}

const Scratch& Group::scratch(int lane, size_t bytes) {
  Scratch& s = scratch_[lane];
  if (bytes > s.bytes) {
    std::lock_guard lock(mutex_);
    const size_t grown = std::max(bytes, s.bytes * 2);
    const uint64_t offset = arena_->alloc(grown);
    if (s.offset != kNowhere) retired_.push_back(s.offset);
    s = {offset, grown};
  }
  return s;
}

// A peer can still write here only if it has entered a run that it has not finished, is alive, and has not said that
// it stopped.
bool Group::settled(int r) const {
  if (r == rank_ || members_[r]->dead() || controls_[r]->acknowledged.word.load(std::memory_order_acquire)) return true;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint64_t done = controls_[r]->finished[lane].load(std::memory_order_acquire);
    for (int half = 0; half < 2; ++half)
      if (controls_[r]->slots[2 * lane + half].run.load(std::memory_order_acquire) > done) return false;
  }
  return true;
}

void Group::hold_unsettled(uint64_t inside) {
  holding_ = true;
  arena_->hold(inside, this);
}

void Group::try_settle() {
  if (!holding_) return;
  for (int r = 0; r < size(); ++r)
    if (!settled(r)) return;
  arena_->lift(this);
  holding_ = false;
}

}  // namespace dovetail
