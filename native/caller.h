// The objects that Python holds: a rank of the world, a call that can be made again and again, a submitted run.
// Policy and texts are Python's; what happens per call is here.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#include <fcntl.h>
#include <sched.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "engine.h"

namespace dovetail {

namespace nb = nanobind;

inline constexpr int64_t kSpinWithGil = 30000;         // ns that a short call may keep the interpreter
inline constexpr uint64_t kShortCall = 128 << 10;      // bytes; longer calls let the interpreter go at once
inline constexpr int64_t kSignalLook = 50000000;        // ns between looks for Ctrl-C
inline constexpr int kMostBuffers = 64;

// Whoever drops the last reference may hold the interpreter, and a runner in a callback may be waiting for it.
// If a callback in a runner drops it (nobody closed the world), it is left alone: the process is about to end.
inline void without_interpreter(Engine* engine) {
  if (engine->in_runner()) return;
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  delete engine;
  if (state) PyEval_RestoreThread(state);
}

// A rank of the world: its own memory, its peers, and the engine that serves all of its groups.
class World {
 public:
  World(int rank, const std::vector<int>& fds, const std::vector<int>& pidfds, const std::vector<uint64_t>& bytes,
        int engines, int spins)
      : rank_(rank), engine_(new Engine(engines, spins), without_interpreter) {
    arena_ = std::make_shared<Arena>(fds.at(rank), bytes.at(rank));
    for (size_t r = 0; r < fds.size(); ++r) {
      auto peer = std::make_shared<Peer>();
      const bool self = static_cast<int>(r) == rank;
      peer->memory = self ? std::static_pointer_cast<Mapping>(arena_) : std::make_shared<Mapping>(fds[r], bytes[r]);
      peer->pidfd = self ? -1 : fcntl(pidfds.at(r), F_DUPFD_CLOEXEC, 0);
      peers_.push_back(std::move(peer));
    }
  }

  nb::object alloc(size_t bytes) {
    const uint64_t offset = arena_->alloc(bytes);
    struct Block {
      std::shared_ptr<Arena> arena;
      uint64_t offset;
    };
    auto* block = new Block{arena_, offset};
    nb::capsule owner(block, [](void* p) noexcept {
      auto* b = static_cast<Block*>(p);
      b->arena->free(b->offset);
      delete b;
    });
    return nb::cast(nb::ndarray<nb::pytorch, uint8_t>(arena_->base() + offset, {bytes}, owner));
  }

  std::shared_ptr<Group> group(const std::vector<int>& ranks, int rank, uint64_t key, double timeout_s, int max_params, Group* base,
                               const std::string& purpose) {
    std::vector<std::shared_ptr<Peer>> members;
    for (const int r : ranks) members.push_back(peers_.at(r));
    nb::gil_scoped_release free;
    const auto interrupted = [] {
      nb::gil_scoped_acquire hold;
      return PyErr_CheckSignals() != 0;
    };
    try {
      return std::make_shared<Group>(arena_, members, rank, key, static_cast<int64_t>(timeout_s * 1e9), max_params,
                                     interrupted, base, purpose);
    } catch (const std::runtime_error&) {
      nb::gil_scoped_acquire hold;
      if (PyErr_Occurred()) throw nb::python_error();
      throw;
    }
  }

  void stop() {
    nb::gil_scoped_release free;
    engine_->stop();
  }

  const std::shared_ptr<Engine>& engine() const { return engine_; }
  bool contains(uint64_t p, uint64_t n) const { return arena_->contains(reinterpret_cast<void*>(p), n); }
  size_t used_bytes() const { return arena_->used_bytes(); }
  uint64_t base(int r) const { return reinterpret_cast<uint64_t>(peers_.at(r)->memory->base()); }
  bool peer_dead(int r) const { return peers_.at(r)->dead(); }

 private:
  int rank_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Arena> arena_;
  std::vector<std::shared_ptr<Peer>> peers_;
};

inline void alive(const Engine& engine) {
  if (engine.dead()) throw std::runtime_error("this world belongs to the parent of a forked process");
}

// A submitted run. Keeps the run, and through it the memory of the world, alive.
class Ticket {
 public:
  Ticket(std::shared_ptr<Run> run, std::shared_ptr<Engine> engine) : run_(std::move(run)), engine_(std::move(engine)) {}

  int wait(double timeout_s) {
    alive(*engine_);
    const int64_t end = timeout_s < 0 ? 0 : now_ns() + static_cast<int64_t>(timeout_s * 1e9);
    while (!run_->finished() && (!end || now_ns() < end)) {  // in slices, so that Ctrl-C is seen
      const int64_t slice = end ? std::min(kSignalLook, end - now_ns()) : kSignalLook;
      {
        nb::gil_scoped_release free;
        engine_->drive(run_, std::max<int64_t>(1, slice));
      }
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
    return static_cast<int>(run_->status());
  }
  int status() const { return static_cast<int>(run_->status()); }
  void fire() { run_->fire(); }
  bool raise(int signal, int64_t value) { return run_->raise(signal, value); }
  Run& run() const { return *run_; }

 private:
  std::shared_ptr<Run> run_;
  std::shared_ptr<Engine> engine_;
};

inline nb::dict failure_of(const Run& run) {
  const Failure& f = run.why();
  nb::dict d;
  d["status"] = static_cast<int>(f.status);
  d["about"] = f.about, d["reporter"] = f.reporter, d["queue"] = f.queue, d["step"] = f.step;
  d["param_a"] = f.param_a, d["param_b"] = f.param_b;
  nb::list states;
  for (const PeerState& p : f.states) {
    nb::dict s;
    s["entered"] = p.entered, s["finished"] = p.finished, s["last"] = p.last, s["call"] = p.call;
    s["size_bytes"] = p.size_bytes, s["parked"] = p.parked, s["params"] = p.params;
    s["bytes"] = p.bytes, s["symmetric"] = p.symmetric;
    states.append(s);
  }
  d["states"] = states;
  d["run"] = run.number(), d["lane"] = run.lane(), d["slot"] = run.slot_index(), d["choice"] = run.choice();
  return d;
}

// Programs are added with the interpreter held, read without it.
inline void keep(Call& call, int choice, std::shared_ptr<const Program> program) {
  if (!program) return;
  call.programs[choice].store(program.get(), std::memory_order_release);
  call.owned.push_back(std::move(program));
}

// An error in a callback can't be raised where it happens; a Ctrl-C is passed on to the main thread.
inline void unraisable(nb::python_error& e, const nb::object& where) {
  const bool interrupt = e.matches(PyExc_KeyboardInterrupt);
  e.restore();
  if (interrupt) {
    PyErr_Clear();
    PyErr_SetInterrupt();
  } else {
    PyErr_WriteUnraisable(where.ptr());
  }
}

// A call that can be made again and again: programs, caller's buffers by position, fast path for the blocking case.
class Caller {
 public:
  Caller(std::shared_ptr<World> world, std::shared_ptr<Group> group, uint64_t word, uint64_t size_bytes, int num_user,
         int input, int output, std::vector<int64_t> bytes, uint64_t scratch_heap, uint64_t scratch_ordinary,
         bool has_direct, nb::object planner)
      : engine_(world->engine()), world_(std::move(world)), call_(std::make_shared<Call>()), bytes_(std::move(bytes)),
        planner_(new nb::object(std::move(planner)), [](nb::object* held) {
          nb::gil_scoped_acquire hold;  // a run in the engine may be the last to drop it
          delete held;
        }) {
    call_->group = std::move(group);
    call_->word = word, call_->size_bytes = size_bytes, call_->num_user = num_user;
    call_->input = input, call_->output = output, call_->has_direct = has_direct;
    call_->scratch_bytes[0] = scratch_heap, call_->scratch_bytes[1] = scratch_ordinary;
    call_->planner = [planner = planner_, call = call_.get()](int choice) -> const Program* {
      nb::gil_scoped_acquire hold;
      try {
        keep(*call, choice, nb::cast<std::shared_ptr<Program>>((*planner)(choice)));
      } catch (nb::python_error& e) {
        unraisable(e, *planner);
      } catch (const std::exception&) {
        return nullptr;
      }
      return call->programs[choice].load(std::memory_order_acquire);
    };
    for (const int64_t b : bytes_) total_ += static_cast<uint64_t>(std::max<int64_t>(b, 0));
  }

  void set_program(int choice, std::shared_ptr<Program> p) { keep(*call_, choice, std::move(p)); }

  // The buffers' sizes are those that the caller was made for.
  int run_fixed(const uint64_t* pointers) { return blocking(pointers, bytes_.data(), call_->num_user, nullptr, 0); }
  int run_empty() { return blocking(nullptr, nullptr, 0, nullptr, 0); }
  int run(const std::vector<uint64_t>& pointers, const std::vector<int64_t>& bytes, const std::vector<int64_t>& params) {
    check(pointers, bytes, params);
    return blocking(pointers.data(), bytes.data(), static_cast<int>(pointers.size()), params.data(), static_cast<int>(params.size()));
  }

  std::unique_ptr<Ticket> start(const std::vector<uint64_t>& pointers, const std::vector<int64_t>& bytes,
                                const std::vector<int64_t>& params, bool gated, nb::object on_finish) {
    check(pointers, bytes, params);
    alive(*engine_);
    auto run = std::make_shared<Run>();
    if (!on_finish.is_none()) {
      // Called by whichever thread ends the run. The object is released with the interpreter held.
      auto* held = new nb::object(std::move(on_finish));
      run->on_finish = [held] {
        nb::gil_scoped_acquire hold;
        nb::object call = std::move(*held);
        delete held;
        try {
          call();
        } catch (nb::python_error& e) {
          unraisable(e, call);
        }
      };
    }
    run->begin(call_, pointers.data(), bytes.data(), static_cast<int>(pointers.size()), params.data(),
               static_cast<int>(params.size()), gated);
    engine_->submit(run);
    return std::make_unique<Ticket>(std::move(run), engine_);
  }

  nb::dict failure() const { return failure_of(*failed_); }
  static Failure failure_here() { return dovetail::failure(Status::Broken); }
  std::shared_ptr<Counter> counter() const { return call_->counter; }

 private:
  void check(const std::vector<uint64_t>& pointers, const std::vector<int64_t>& bytes, const std::vector<int64_t>& params) const {
    if (pointers.size() != bytes.size() || pointers.size() > kMostBuffers)
      throw std::invalid_argument("at most 64 buffers, each with its size");
    if (static_cast<int>(params.size()) > call_->group->max_params()) throw std::invalid_argument("too many parameters");
  }

  int blocking(const uint64_t* pointers, const int64_t* bytes, int num, const int64_t* params, int num_params) {
    // One run object serves all blocking calls, unless another thread is in one, or a failed one is still looked at.
    std::shared_ptr<Run> run = std::move(spare_);
    if (!run || run.use_count() > 1) run = std::make_shared<Run>();
    alive(*engine_);
    run->exclusive = engine_->idle();
    run->waited_for_in_main = in_main_thread();
    run->begin(call_, pointers, bytes, num, params, num_params, false);
    if (!run->exclusive) engine_->submit(run);
    bool done = run->exclusive && total_ <= kShortCall && engine_->drive_alone(*run, kSpinWithGil);
    if (!done) {
      nb::gil_scoped_release free;
      // In slices, so that Ctrl-C is seen.
      while (!(run->exclusive ? engine_->drive_alone(*run, kSignalLook) : engine_->drive(run, kSignalLook))) {
        nb::gil_scoped_acquire hold;
        if (PyErr_CheckSignals() != 0) {
          call_->group->break_all(Abort::Failed, call_->group->rank());
          run->fail(failure_here());
          while (!run->at_rest()) sched_yield();
          throw nb::python_error();
        }
      }
    }
    const Status status = run->status();
    if (status != Status::Done) failed_ = run;
    spare_ = std::move(run);
    return static_cast<int>(status);
  }

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<World> world_;
  std::shared_ptr<Call> call_;
  std::vector<int64_t> bytes_;
  uint64_t total_ = 0;
  std::shared_ptr<nb::object> planner_;
  std::shared_ptr<Run> spare_, failed_;
};

}  // namespace dovetail
