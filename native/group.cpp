#include "group.h"

#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace dovetail {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

bool in_main_thread() {
  static thread_local signed char found = -1;  // asked in every call
  if (found < 0) found = syscall(SYS_gettid) == getpid();
  return found;
}

Peer::~Peer() {
  if (pidfd >= 0) close(pidfd);
}

bool Peer::dead() const {
  if (pidfd < 0) return false;
  pollfd p{pidfd, POLLIN, 0};
  return poll(&p, 1, 0) > 0 && (p.revents & (POLLIN | POLLHUP | POLLERR | POLLNVAL));
}

namespace {

// How long calls may look crossed, a quarter of the time limit at most.
constexpr int64_t kSurelyCrossed = 2'000'000'000, kPerhapsCrossed = 30'000'000'000;

Control* find_control(const Mapping& memory, uint64_t key) {
  Header* h = memory.header();
  const uint64_t n = std::min<uint64_t>(h->num_groups.load(std::memory_order_acquire), kDirectory);
  for (uint64_t i = 0; i < n; ++i)
    if (h->directory[i].key.load(std::memory_order_acquire) == key) {
      auto* control = reinterpret_cast<Control*>(memory.base() + h->directory[i].offset);
      if (!control->abort.word.load(std::memory_order_acquire)) return control;  // not one that was given up
    }
  return nullptr;
}

uint64_t publish(Arena& arena, uint64_t key, uint64_t offset) {
  Header* h = arena.header();
  const uint64_t n = h->num_groups.load(std::memory_order_relaxed);
  uint64_t i = 0;
  while (i < n && h->directory[i].key.load(std::memory_order_relaxed) != 0) ++i;  // one that was given up, if any
  if (i >= kDirectory) throw OutOfMemory("this rank is in " + std::to_string(kDirectory) + " groups, the most it can");
  h->directory[i].offset = offset;
  h->directory[i].key.store(key, std::memory_order_release);
  if (i == n) h->num_groups.store(n + 1, std::memory_order_release);
  return i;
}

void withdraw(Arena& arena, uint64_t entry) { arena.header()->directory[entry].key.store(0, std::memory_order_release); }

}  // namespace

Group::Group(std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<Peer>> members, int rank, uint64_t key,
             int64_t timeout, int max_params, const std::function<bool()>& interrupted, Group* base, const std::string& purpose)
    : timeout_ns(timeout), arena_(std::move(arena)), members_(std::move(members)), controls_(members_.size()),
      rank_(rank), max_params_(max_params), key_(key), kin_(base ? base->kin_ : std::make_shared<Kin>()) {
  block_ = arena_->alloc(Control::bytes(max_params));
  controls_[rank_] = reinterpret_cast<Control*>(arena_->base() + block_);
  entry_ = publish(*arena_, key, block_);
  if (base) {
    std::string text = purpose;
    text.resize(kPurpose - 1);
    std::memcpy(base->mine()->purpose, text.c_str(), kPurpose);
    base->mine()->joins_in_main.store(in_main_thread(), std::memory_order_relaxed);
    base->mine()->joining.word.store(key, std::memory_order_release);
  }
  const std::string why = join(interrupted, base);
  if (base) base->mine()->joining.word.store(0, std::memory_order_release);
  if (why.empty()) {
    if (base) base->mine()->purpose[0] = 0;  // otherwise it stays, for the errors of others
    std::lock_guard lock(kin_->mutex);
    kin_->groups.push_back(this);
    return;
  }
  // A peer may have found the block already: it stays, marked, so that what the peer does with it harms nobody.
  mine()->abort.word.store(abort_word(Abort::Late, rank_, rank_), std::memory_order_release);
  withdraw(*arena_, entry_);
  throw std::runtime_error(why);
}

// Until all members have joined. Returns why that can't be, or nothing.
std::string Group::join(const std::function<bool()>& interrupted, Group* base) {
  const int64_t begin = now_ns();
  bool found = false;
  // A rank that has found all others may not go on, and end, before all of them have found it.
  for (int look = 0;; ++look) {
    std::string missing;
    const int64_t waited = now_ns() - begin;
    for (int r = 0; r < size(); ++r) {
      if (!controls_[r]) controls_[r] = find_control(memory(r), key_);
      if (controls_[r] && (!found || controls_[r]->met.word.load(std::memory_order_acquire))) continue;
      if (!missing.empty()) missing.push_back(',');
      missing.append(std::to_string(r));
      if (members_[r]->dead()) return "dead:" + std::to_string(r);
    }
    if (missing.empty() && found) return {};
    if (missing.empty()) {
      found = true;
      mine()->met.word.store(1, std::memory_order_release);
      continue;
    }
    if (base && base->abort()) return "broken:";
    const int r = base ? member_elsewhere([this](int m) { return !controls_[m]; }, waited, in_main_thread()) : -1;
    if (r >= 0) {
      base->break_kin(r);
      return "crossed:" + std::to_string(r);
    }
    if (waited > timeout_ns) return "late:" + missing;
    if (look % 100 == 99 && interrupted()) return "interrupted";
    timespec nap{0, 100000};
    nanosleep(&nap, nullptr);
  }
}

std::vector<Group::Other> Group::others() const {
  std::vector<Other> found;
  for (int r = 0; r < size(); ++r)
    if (r != rank_) found.push_back({members_[r], controls_[r]});
  return found;
}

// A peer may read this rank's scratch until it has finished the runs that this rank has finished, and poll its Control
// block until it has closed the group too; each is freed when all peers are that far, or gone.
Group::~Group() {
  leave_kin();
  withdraw(*arena_, entry_);
  uint64_t last[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) last[lane] = mine()->finished[lane].load(std::memory_order_acquire);
  const auto read = [others = others(), last] {
    for (const Other& o : others)
      for (int lane = 0; lane < kLanes && !gone(o); ++lane)
        if (o.control->finished[lane].load(std::memory_order_acquire) < last[lane]) return false;
    return true;
  };
  const auto all_gone = [others = others()] { return std::all_of(others.begin(), others.end(), gone); };
  for (const Scratch& s : scratch_)
    if (s.offset != kNowhere) arena_->free_when(s.offset, read);
  for (const uint64_t offset : retired_) arena_->free_when(offset, read);
  arena_->free_when(block_, all_gone);
}

bool Group::gone(const Other& o) {
  const bool closed = static_cast<Abort>(o.control->abort.word.load(std::memory_order_acquire) & 0xff) == Abort::Closed;
  return (closed && o.control->acknowledged.word.load(std::memory_order_acquire)) || o.peer->dead();
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

// --- calls that have crossed ---------------------------------------------------------------------------------------------

uint64_t Group::newest(int r) const {
  uint64_t found = 0;
  for (const Slot& s : controls_[r]->slots) found = std::max(found, s.run.load(std::memory_order_acquire));
  return found;
}

// A member waits for this rank where it has entered a run that this rank has not begun, or joins what this rank does not. If the
// main threads of both wait, neither comes to where the other is; other threads of theirs may.
int Group::member_elsewhere(const std::function<bool(int)>& is_missing, int64_t waited_ns, bool in_main) const {
  const int64_t most = timeout_ns / 4, if_main = std::min(kSurelyCrossed, most), otherwise = std::min(kPerhapsCrossed, most);
  if (waited_ns <= if_main) return -1;
  std::lock_guard lock(kin_->mutex);
  for (int r = 0; r < size(); ++r) {
    if (r == rank_ || !is_missing(r)) continue;
    for (const Group* g : kin_->groups) {
      const uint64_t run = g->newest(r), lane = run % kLanes;
      if (g == this || run <= g->begun()) continue;
      const bool too = g->control(r)->slots[2 * lane + run / kLanes % 2].flags & kMain;
      if ((in_main && too) || waited_ns > otherwise) return r;
    }
    if (kin_->groups.empty()) continue;
    const Control& base = *kin_->groups.front()->control(r);
    const uint64_t key = base.joining.word.load(std::memory_order_acquire);
    const auto is_joined = [key](const Group* g) { return g->key_ == key; };
    if (!key || key == key_ || std::any_of(kin_->groups.begin(), kin_->groups.end(), is_joined)) continue;
    if ((in_main && base.joins_in_main.load(std::memory_order_relaxed)) || waited_ns > otherwise) return r;
  }
  return -1;
}

int Group::crossed(uint64_t run, int slot, int64_t waited_ns, bool in_main) const {
  const auto is_missing = [&](int r) { return controls_[r]->slots[slot].run.load(std::memory_order_acquire) != run; };
  return member_elsewhere(is_missing, waited_ns, in_main);
}

void Group::break_kin(int about) {
  std::lock_guard lock(kin_->mutex);
  for (Group* g : kin_->groups) g->break_all(Abort::Crossed, about);
}

void Group::leave_kin() {
  std::lock_guard lock(kin_->mutex);
  std::erase(kin_->groups, this);
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
  leave_kin();
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
bool Group::settled(const Other& o) {
  if (o.peer->dead() || o.control->acknowledged.word.load(std::memory_order_acquire)) return true;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint64_t done = o.control->finished[lane].load(std::memory_order_acquire);
    for (int half = 0; half < 2; ++half)
      if (o.control->slots[2 * lane + half].run.load(std::memory_order_acquire) > done) return false;
  }
  return true;
}

void Group::hold_unsettled(uint64_t inside) {
  arena_->hold(inside, [others = others()] { return std::all_of(others.begin(), others.end(), settled); });
}

}  // namespace dovetail
