#include "engine.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <iterator>

#if defined(__x86_64__)
#include <immintrin.h>
#define DV_PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define DV_PAUSE() asm volatile("yield")
#else
#define DV_PAUSE() ((void)0)
#endif

namespace dovetail {

namespace {
constexpr int kYields = 4000;           // some milliseconds of giving way before the first sleep
constexpr long kLongestNap = 500000;    // ns: what a wake-up may cost after a long wait
constexpr int64_t kPeerLook = 20000000;  // ns between looks at the peers' processes
}  // namespace

void Pacer::rest() {
  ++idle_;
  if (idle_ <= spins_) {
    DV_PAUSE();
  } else if (idle_ <= spins_ + kYields) {
    sched_yield();
  } else {
    timespec nap{0, nap_ns_};
    nanosleep(&nap, nullptr);
    nap_ns_ = std::min(nap_ns_ * 2, kLongestNap);
  }
}

bool Pacer::due(int64_t& now, bool& look) {
  if (idle_ <= spins_ + kYields && idle_ % 256) return false;
  now = now_ns();
  look = now - looked_ > kPeerLook;
  if (look) looked_ = now;
  return true;
}

void Engine::stop() {
  std::vector<std::thread> ending;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    ending.swap(runners_);
  }
  wake_.notify_all();
  for (std::thread& t : ending) t.join();
  // What is still here belongs to groups that are closed by now: it fails, and lets its tensors go.
  Runs runs;
  uint64_t version = 0;
  refresh(runs, version);
  sweep(runs);
}

bool Engine::drive_alone(Run& run, int64_t budget_ns) {
  Pacer pacer(spins);
  int64_t limit = 0;
  while (!run.finished()) {
    if (run.advance()) {
      pacer.reset();
      continue;
    }
    int64_t now = 0;
    bool look = false;
    if (pacer.due(now, look)) {
      if (!limit) limit = now + budget_ns;
      if (now > limit) return false;
      run.watch(now, look);
    }
    if (!run.finished()) pacer.rest();
  }
  return true;
}

bool Engine::drive(const std::shared_ptr<Run>& run, int64_t budget_ns) {
  const int64_t limit = budget_ns ? now_ns() + budget_ns : 0;
  Pacer pacer(spins);
  Runs runs;
  uint64_t version = 0;
  drivers_.fetch_add(1, std::memory_order_acq_rel);
  bool done = false;
  while (!(done = run->finished())) {
    refresh(runs, version);
    if (sweep(runs)) {
      pacer.reset();
      continue;
    }
    int64_t now = 0;
    bool look = false;
    if (pacer.due(now, look)) {
      if (limit && now > limit) break;
      for (const auto& r : runs) r->watch(now, look), r->notify();
    }
    if (!run->finished()) pacer.rest();
  }
  while (done && run->status() != Status::Done && !run->at_rest()) sched_yield();
  {
    std::lock_guard lock(mutex_);  // so that a runner that has just looked is already waiting
    drivers_.fetch_sub(1, std::memory_order_acq_rel);
  }
  if (!idle()) wake_.notify_one();
  for (const auto& r : runs) r->notify();
  run->notify();
  return done;
}

void Engine::submit(std::shared_ptr<Run> run) {
  std::lock_guard lock(mutex_);
  run->submitted_ns = now_ns();
  active_.push_back(std::move(run));
  num_active_.store(static_cast<int>(active_.size()), std::memory_order_release);
  version_.fetch_add(1, std::memory_order_release);
  if (runners_.empty() && !stopping_)
    for (int i = 0; i < num_runners_; ++i) runners_.emplace_back([this] { loop(); });
  wake_.notify_one();
}

void Engine::refresh(Runs& runs, uint64_t& version) {
  if (version_.load(std::memory_order_acquire) == version) return;
  // A run that goes for good takes the interpreter to let its Python objects go, and who holds that may be waiting for
  // this lock: so nothing is destroyed before the lock is released.
  Runs dropped = std::move(runs);
  std::lock_guard lock(mutex_);
  const auto kept = std::stable_partition(active_.begin(), active_.end(),
                                          [](const std::shared_ptr<Run>& r) { return !r->finished(); });
  dropped.insert(dropped.end(), std::make_move_iterator(kept), std::make_move_iterator(active_.end()));
  active_.erase(kept, active_.end());
  num_active_.store(static_cast<int>(active_.size()), std::memory_order_release);
  runs = active_;
  version = version_.load(std::memory_order_relaxed);
}

bool Engine::sweep(const Runs& runs) {
  bool progress = false, ended = false;
  for (const auto& r : runs) {
    progress |= r->advance();
    ended |= r->finished();
    r->notify();
  }
  if (ended) version_.fetch_add(1, std::memory_order_release);  // the next refresh drops it
  return progress;
}

void Engine::loop() {
  Runs runs;
  uint64_t version = 0;
  Pacer pacer(spins);
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      // With one runner a waiting thread has taken its place; further runners go on beside it.
      wake_.wait_for(lock, std::chrono::milliseconds(100), [&] {
        return stopping_ || (!active_.empty() && (num_runners_ > 1 || drivers_.load(std::memory_order_acquire) == 0));
      });
      if (stopping_) return;
    }
    if (idle()) {
      runs.clear();  // without the lock, as in refresh()
      version = 0;   // runs no longer are what that version had
      continue;
    }
    if (num_runners_ == 1 && drivers_.load(std::memory_order_acquire) > 0) continue;
    refresh(runs, version);
    pacer.reset();
    while (!runs.empty() && (num_runners_ > 1 || drivers_.load(std::memory_order_acquire) == 0)) {
      if (sweep(runs)) {
        pacer.reset();
      } else {
        int64_t now = 0;
        bool look = false;
        if (pacer.due(now, look)) {
          for (const auto& r : runs) r->watch(now, look), r->notify();
          std::lock_guard lock(mutex_);
          if (stopping_) return;
        }
        pacer.rest();
      }
      refresh(runs, version);
    }
  }
}

bool Engine::in_runner() {
  std::lock_guard lock(mutex_);
  const auto self = std::this_thread::get_id();
  return std::any_of(runners_.begin(), runners_.end(), [&](const std::thread& t) { return t.get_id() == self; });
}

void Engine::forked() {
  dead_ = true;
  for (std::thread& t : runners_) t.detach();
  runners_.clear();
}

}  // namespace dovetail
