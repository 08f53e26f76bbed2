// One run of a call: posts this rank's slot, waits for the peers', picks a program, then advances its queues.
//
// Nothing here blocks. `advance` does what can be done now and says whether that was anything; who calls it, and what
// happens in between, is the engine's business (engine.h). A queue has one owner at a time: whoever holds its flag.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "group.h"
#include "program.h"

namespace dovetail {

enum Choice : int { kDirect = 0, kStagedHeap = 1, kStagedOrdinary = 2, kNumChoices = 3 };

// How often a call ran. Outlives the call, so that statistics keep no memory mapped.
struct Counter {
  std::atomic<uint64_t> runs{0}, direct{0};
};

// What all runs of one call share. Programs are made when they are first needed; `planner` makes them.
struct Call {
  std::shared_ptr<Group> group;
  uint64_t word = 0;        // collective, dtype, reduction, variant, root
  uint64_t size_bytes = 0;
  int num_user = 0;         // buffers that the caller gives
  int input = 0;            // which of them peers would read: if it is not on the heap, it is staged
  int output = -1;          // which of them peers would write
  size_t scratch_bytes[2] = {0, 0};  // needed if the tensors are on the heap, and if they are not
  bool has_direct = false;
  std::atomic<const Program*> programs[kNumChoices] = {};
  std::vector<std::shared_ptr<const Program>> owned;  // what `programs` point to; changed by the planner only
  std::function<const Program*(int)> planner;         // makes a program, and keeps it in `owned`
  std::shared_ptr<Counter> counter = std::make_shared<Counter>();
};

enum class Status : int {
  Pending = 0, Done = 1, Dead = 2, Late = 3, Mismatch = 4, Broken = 5, Bounds = 6, Memory = 7, Planner = 8, Crossed = 9
};

// What a peer's slot showed when a run failed: later runs write over it.
struct PeerState {
  uint64_t entered, finished, last, call, size_bytes, parked;
  std::vector<int64_t> params;
  std::vector<uint64_t> bytes;   // of its input and output
  std::vector<bool> symmetric;   // likewise: peers can reach it
};

struct Failure {
  Status status = Status::Pending;
  int about = -1;       // the rank it is about
  int reporter = -1;    // the rank that broke the group
  int queue = -1, step = -1;  // where this rank stood
  int param_a = -1, param_b = -1;  // Mismatch: the parameters that differ
  std::vector<PeerState> states;   // of all ranks
};

inline Failure failure(Status status, int about = -1, int reporter = -1, int queue = -1, int step = -1) {
  return {status, about, reporter, queue, step, -1, -1, {}};
}

class Run {
 public:
  struct Cursor {
    std::atomic_flag busy = ATOMIC_FLAG_INIT;
    int at = 0;
    bool parked = false;
  };

  // `pointers[i]`, `bytes[i]`: the caller's buffers; `params`: what this rank posts.
  void begin(const std::shared_ptr<Call>& call, const uint64_t* pointers, const int64_t* bytes, int num, const int64_t* params,
             int num_params, bool gated);
  bool advance();  // true if anything happened; never blocks
  bool finished() const { return status_.load(std::memory_order_acquire) != Status::Pending; }
  Status status() const { return status_.load(std::memory_order_acquire); }
  void fire() { gate_.store(true, std::memory_order_release); }
  bool raise(int signal, int64_t value);  // an imported signal, from outside; false: not yet possible
  bool at_rest() const;                   // no thread is inside one of its steps
  void watch(int64_t now, bool look_for_dead);  // ends the run if its deadline is over or a peer is gone
  void fail(Failure f);

  bool exclusive = false;  // only the calling thread knows of this run: no flags needed
  bool waited_for_in_main = false;
  const Call& call() const { return *call_; }
  const Failure& why() const { return failure_; }
  uint64_t number() const { return run_; }
  int lane() const { return lane_; }
  int slot_index() const { return slot_; }
  int choice() const { return choice_; }
  const std::vector<int64_t>& stamps() const { return stamps_; }
  int64_t submitted_ns = 0;         // when it was enqueued
  std::function<void()> on_finish;  // called once, through notify()
  void notify();                    // calls it if the run is over; for whoever advances runs, with no flag held

 private:
  enum class Stage { Ready, Entering, Moving, Over };
  struct Place_ {
    char* base = nullptr;
    uint64_t bytes = 0;
    bool staged = false;
  };

  bool enter();    // Ready -> Entering
  bool gather();   // Entering -> Moving, when all peers are there
  bool agree(int r, const Slot& s);
  bool fits() const;
  bool bind();
  bool bind_peer(int r);
  bool move();
  bool advance_queue(int q);
  bool execute(const Step& s, int q);
  bool transfer(const Step& s, int q);
  bool reduce(const Step& s, int64_t length, int q);
  bool broken_at(int q);
  char* locate(int rank, int buffer, int64_t offset, int64_t alt, int param, int64_t extent, int q);
  int64_t param_value(int index) const;
  Word& signal_word(int index);
  void finish();
  bool claim() { return !ending_.test_and_set(std::memory_order_acq_rel); }  // the one who ends the run
  void end(Status status);
  void leave();  // tells the group that nobody is inside the run any more, once that is so
  std::vector<PeerState> look_around() const;
  void hold_buffers();

  std::shared_ptr<Call> call_;
  const Program* program_ = nullptr;
  Group* group_ = nullptr;
  uint64_t run_ = 0, value_base_ = 0;
  int lane_ = 0, slot_ = 0, choice_ = -1;
  std::atomic<Stage> stage_{Stage::Over};
  std::atomic<Status> status_{Status::Done};
  std::atomic<bool> gate_{true};
  std::atomic_flag stepping_ = ATOMIC_FLAG_INIT;  // owner of the stages before Moving
  std::atomic_flag ending_ = ATOMIC_FLAG_INIT;
  std::atomic<int> queues_left_{0};
  std::vector<std::unique_ptr<Cursor>> cursors_;
  std::vector<Place_> places_;  // [rank][buffer]
  char* own_[64] = {};
  uint64_t own_bytes_[64] = {};
  int num_own_ = 0;
  int next_peer_ = 0;
  std::atomic<bool> counted_{false}, notified_{false};
  std::vector<int64_t> params_;
  std::vector<int64_t> stamps_;
  std::atomic<int64_t> deadline_{0};
  Failure failure_;
};

}  // namespace dovetail
