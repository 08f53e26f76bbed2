// Ranks that call collectives together: their memory, their Control blocks, and how the group breaks.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arena.h"

namespace dovetail {

bool in_main_thread();
int64_t now_ns();  // CLOCK_MONOTONIC, the clock of Python's time.monotonic_ns and perf_counter_ns

// A process of the world, seen from here: its arena, and a pidfd that becomes readable when it is gone.
struct Peer {
  std::shared_ptr<Mapping> memory;
  int pidfd = -1;  // owned; -1: this process itself
  Peer() = default;
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  ~Peer();
  bool dead() const;
};

struct Scratch {
  uint64_t offset = kNowhere;
  size_t bytes = 0;
};

class Group;

// A group and its companions, which have the same members. A rank that is in a call of one of them, and waits there for a rank
// that waits for it in another, would wait for ever: their calls have crossed.
struct Kin {
  std::mutex mutex;
  std::vector<Group*> groups;  // the first has no base; one that is closed is not here any more
};

class Group {
 public:
  // `members[i]` is group rank i. Joins by publishing this rank's Control block under `key` and waiting for those of
  // all others; throws std::runtime_error naming the missing ranks after `timeout_ns`.
  // A companion has a `base`, and says there what it is joined for; if members wait elsewhere meanwhile, the error names one.
  // `interrupted` is asked now and then while it waits.
  Group(std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<Peer>> members, int rank, uint64_t key,
        int64_t timeout_ns, int max_params, const std::function<bool()>& interrupted, Group* base = nullptr,
        const std::string& purpose = "");
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  int max_params() const { return max_params_; }
  Control* control(int r) const { return controls_[r]; }
  Control* mine() const { return controls_[rank_]; }
  const Mapping& memory(int r) const { return *members_[r]->memory; }
  Arena& arena() const { return *arena_; }

  uint64_t abort() const { return mine()->abort.word.load(std::memory_order_acquire); }
  void break_all(Abort code, int about);  // marks every member's block; the first word stays
  int dead_member(uint64_t run, int lane) const;  // one that is dead or has closed and had not finished this run, or -1
  bool closed(int r) const;
  // A member that has not entered this run, and waits for this rank in a call of the group's kin; or -1. Not before this rank
  // has waited for some time: threads of a rank may make such calls in any order.
  int crossed(uint64_t run, int slot, int64_t waited_ns, bool in_main) const;
  void break_kin(int about);  // the calls of this rank and another have crossed
  uint64_t newest(int r) const;  // the last run that a member has entered
  const char* purpose(int r) const { return controls_[r]->purpose; }
  void close();  // marks this rank's own block: what peers still do without it goes on, what needs it fails

  uint64_t next_run() {  // with the interpreter held: no other thread does
    last_run_.store(begun() + 1, std::memory_order_relaxed);
    return begun();
  }
  uint64_t begun() const { return last_run_.load(std::memory_order_relaxed); }
  const Scratch& scratch(int lane, size_t bytes);  // grows it; old rings stay until the group is gone
  void hold_unsettled(uint64_t inside);   // once freed, this block waits until no peer can write to it any more
  void entered() { running_.fetch_add(1, std::memory_order_relaxed); }
  void left();

  int64_t timeout_ns;
  int64_t delay_ns = 0;  // test hook: up to this long before each step, at random

 private:
  struct Other {  // a member that is not this rank: what closures may keep alive without a cycle through the arena
    std::shared_ptr<Peer> peer;
    Control* control;
  };
  std::string join(const std::function<bool()>& interrupted, Group* base);
  std::vector<Other> others() const;
  static bool settled(const Other& other);
  static bool gone(const Other& other);
  int member_elsewhere(const std::function<bool(int)>& is_missing, int64_t waited_ns, bool in_main) const;
  void leave_kin();

  std::shared_ptr<Arena> arena_;
  std::vector<std::shared_ptr<Peer>> members_;
  std::vector<Control*> controls_;
  int rank_, max_params_;
  uint64_t block_ = kNowhere;
  uint64_t entry_ = 0;  // in the directory
  uint64_t key_;
  std::shared_ptr<Kin> kin_;
  std::atomic<uint64_t> last_run_{0};
  std::atomic<int> running_{0};
  std::mutex mutex_;
  Scratch scratch_[kLanes];
  std::vector<uint64_t> retired_;
};

}  // namespace dovetail
