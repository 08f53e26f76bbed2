// Who advances runs. A queue is not a thread: a process has one runner thread (or more, if asked), started by the first
// asynchronous call, that advances all queues of all runs; a thread that waits for a ticket takes the runner's place.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "run.h"

namespace dovetail {

// Spin, then yield, then sleep. How long it spins depends on whether ranks outnumber cores.
class Pacer {
 public:
  explicit Pacer(int spins) : spins_(spins) {}
  void reset() { idle_ = 0, nap_ns_ = 20000; }
  void rest();
  bool due(int64_t& now, bool& look);  // time to look at clocks and, less often, at peers

 private:
  int spins_, idle_ = 0;
  long nap_ns_ = 20000;
  int64_t looked_ = 0;
};

class Engine {
 public:
  Engine(int num_runners, int num_spins) : num_runners_(num_runners), spins(num_spins) {}
  ~Engine() { stop(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Runs it in the calling thread. True: finished. False: not within `budget_ns`; call again (budget 0: no limit).
  bool drive(const std::shared_ptr<Run>& run, int64_t budget_ns);
  bool drive_alone(Run& run, int64_t budget_ns);  // one that was not submitted: only this thread knows of it
  void submit(std::shared_ptr<Run> run);  // to be advanced by the runner or by whoever waits
  bool idle() const { return num_active_.load(std::memory_order_acquire) == 0; }
  void stop();    // ends the runners; not with the interpreter held, since they may be waiting for it
  bool in_runner();  // is the calling thread one of them?
  void forked();     // in a child process: threads are gone, and nothing may run
  bool dead() const { return dead_; }

 private:
  using Runs = std::vector<std::shared_ptr<Run>>;
  void loop();
  bool sweep(const Runs& runs);  // advances all, oldest first
  void refresh(Runs& runs, uint64_t& version);

  int num_runners_;
  std::mutex mutex_;
  std::condition_variable wake_;
  Runs active_;
  std::atomic<uint64_t> version_{1};
  std::atomic<int> num_active_{0};
  std::atomic<int> drivers_{0};
  std::vector<std::thread> runners_;
  bool stopping_ = false;
  bool dead_ = false;

 public:
  const int spins;
};

}  // namespace dovetail
