#include "run.h"

#include <cstring>

#include "move.h"
#include "reduce.h"

namespace dovetail {

namespace {
constexpr size_t kLook = size_t{1} << 20;  // a long copy looks at the abort word this often
}

void Run::begin(const std::shared_ptr<Call>& call, const uint64_t* pointers, const int64_t* bytes, int num,
                const int64_t* params, int num_params, bool gated) {
  call_ = call;
  group_ = call_->group.get();
  program_.reset();
  run_ = group_->next_run();
  lane_ = static_cast<int>(run_ % kLanes);
  slot_ = static_cast<int>(2 * lane_ + run_ / kLanes % 2);
  value_base_ = run_ << kValueBits;
  choice_ = -1;
  num_own_ = num;
  for (int i = 0; i < num; ++i) {
    own_[i] = reinterpret_cast<char*>(pointers[i]);
    own_bytes_[i] = static_cast<uint64_t>(bytes[i]);
  }
  params_.assign(params, params + num_params);
  next_peer_ = 0;
  counted_ = false;
  failure_ = {};
  ending_.clear();
  gate_.store(!gated, std::memory_order_relaxed);
  deadline_ = 0;  // counts from the first time that somebody looks at the clock
  status_.store(Status::Pending, std::memory_order_relaxed);
  stage_.store(Stage::Ready, std::memory_order_release);
}

bool Run::advance() {
  if (finished()) return false;
  if (group_->abort()) {
    fail({Status::Broken, -1, -1, -1, -1, -1, -1});
    return true;
  }
  if (stage_.load(std::memory_order_acquire) != Stage::Moving) {
    if (!exclusive && stepping_.test_and_set(std::memory_order_acquire)) return false;
    bool progress = false;
    if (stage_.load(std::memory_order_relaxed) == Stage::Ready) progress |= enter();
    if (stage_.load(std::memory_order_relaxed) == Stage::Entering) progress |= gather();
    if (!exclusive) stepping_.clear(std::memory_order_release);
    if (stage_.load(std::memory_order_acquire) != Stage::Moving) return progress;
  }
  return move();
}

// --- the handshake ----------------------------------------------------------------------------------------------------

bool Run::enter() {
  if (!gate_.load(std::memory_order_acquire)) return false;
  Control& mine = *group_->mine();
  if (run_ > kLanes && mine.finished[lane_].load(std::memory_order_acquire) < run_ - kLanes) return false;
  Slot& slot = mine.slots[slot_];
  bool heap = true;
  for (int i = 0; i < num_own_; ++i) heap = heap && (own_bytes_[i] == 0 || group_->arena().contains(own_[i], own_bytes_[i]));
  const int in = call_->input;
  const bool staged = num_own_ > 0 && own_bytes_[in] > 0 && !group_->arena().contains(own_[in], own_bytes_[in]);
  const auto post = [&](int k, int user) {
    const bool here = user >= 0 && user < num_own_ && group_->arena().contains(own_[user], own_bytes_[user]);
    slot.offset[k] = here ? static_cast<uint64_t>(own_[user] - group_->arena().base()) : kNowhere;
    mine.sizes[slot_][k] = user >= 0 && user < num_own_ ? own_bytes_[user] : 0;
  };
  post(0, call_->input);
  post(1, call_->output);
  size_t scratch = call_->scratch_bytes[heap ? 0 : 1];
  if (scratch == ~size_t{0}) scratch = staged ? own_bytes_[call_->input] : 0;  // as large as the input
  slot.offset[2] = kNowhere;
  if (scratch) {
    try {
      slot.offset[2] = group_->scratch(lane_, scratch).offset;
    } catch (const OutOfMemory&) {
      fail({Status::Memory, group_->rank(), group_->rank(), -1, -1, -1, -1});
      return true;
    }
  }
  mine.sizes[slot_][2] = scratch;
  slot.call = call_->word;
  slot.size_bytes = call_->size_bytes;
  slot.flags = (heap ? kOnHeap : 0) | (staged ? kStaged : 0);
  slot.num_params = static_cast<uint32_t>(params_.size());
  std::memcpy(mine.params(slot_, group_->max_params()), params_.data(), params_.size() * sizeof(int64_t));
  group_->entered();
  counted_ = true;
  slot.run.store(run_, std::memory_order_release);
  stage_.store(Stage::Entering, std::memory_order_relaxed);
  return true;
}

bool Run::gather() {
  const int before = next_peer_;
  while (next_peer_ < group_->size()) {
    if (group_->control(next_peer_)->slots[slot_].run.load(std::memory_order_acquire) != run_) return next_peer_ > before;
    ++next_peer_;
  }
  // Everybody is here, so everybody sees the same slots and comes to the same verdict; nothing has moved yet.
  bool direct = call_->has_direct;
  for (int r = 0; r < group_->size(); ++r) {
    const Slot& s = group_->control(r)->slots[slot_];
    if (!agree(r, s)) return true;
    direct = direct && (s.flags & kOnHeap);
  }
  const bool staged = group_->mine()->slots[slot_].flags & kStaged;
  choice_ = direct ? kDirect : staged ? kStagedOrdinary : kStagedHeap;
  if (!bind()) return true;
  stage_.store(Stage::Moving, std::memory_order_release);
  return true;
}

bool Run::agree(int r, const Slot& s) {
  const Slot& mine = group_->mine()->slots[slot_];
  if (s.call == mine.call && s.size_bytes == mine.size_bytes && s.num_params == mine.num_params) return true;
  fail({Status::Mismatch, r, group_->rank(), -1, -1, -1, -1});
  return false;
}

bool Run::bind() {
  if (!call_->programs[choice_] && call_->planner) call_->programs[choice_] = call_->planner(choice_);
  program_ = call_->programs[choice_];
  if (!program_) {
    fail({Status::Planner, group_->rank(), group_->rank(), -1, -1, -1, -1});
    return false;
  }
  for (const auto& [a, b] : program_->equal)
    if (param_value(a) != param_value(b)) {
      fail({Status::Mismatch, program_->params[b].rank, group_->rank(), -1, -1, a, b});
      return false;
    }
  places_.assign(static_cast<size_t>(group_->size()) * program_->num_buffers(), {});
  for (int r = 0; r < group_->size(); ++r)
    if (!bind_peer(r)) {
      fail({Status::Bounds, r, group_->rank(), -1, -1, -1, -1});
      return false;
    }
  stamps_.assign(program_->num_stamps, 0);
  while (static_cast<int>(cursors_.size()) < program_->num_queues()) cursors_.push_back(std::make_unique<Cursor>());
  for (int q = 0; q < program_->num_queues(); ++q) {
    cursors_[q]->at = program_->queues[q];
    cursors_[q]->parked = false;
    cursors_[q]->busy.clear();
  }
  int left = 0;
  for (int q = 0; q < program_->num_queues(); ++q) left += program_->queues[q] < program_->queues[q + 1];
  queues_left_.store(left, std::memory_order_relaxed);
  return true;
}

// Where the buffers of rank r are, from its slot (or, for this rank's own, from the caller's pointers).
bool Run::bind_peer(int r) {
  const Control& control = *group_->control(r);
  const Slot& slot = control.slots[slot_];
  const Mapping& memory = group_->memory(r);
  const bool self = r == group_->rank();
  for (int b = 0; b < program_->num_buffers(); ++b) {
    const BufferInfo& info = program_->buffers[b];
    Place_& place = places_[static_cast<size_t>(r) * program_->num_buffers() + b];
    const int64_t size = program_->size_of(r, b);
    const bool ring = info.place == Place::Scratch || (info.place == Place::View && (slot.flags & kStaged));
    if (size == kAbsent) continue;
    if (ring) {
      const uint64_t bytes = size == kAtRun ? control.sizes[slot_][2] : static_cast<uint64_t>(size);
      if (bytes == 0) continue;
      if (slot.offset[2] == kNowhere || info.scratch_offset + bytes > control.sizes[slot_][2]) return false;
      place = {memory.base() + slot.offset[2] + info.scratch_offset, bytes, info.place == Place::View};
    } else if (self) {
      const int64_t shown = info.place == Place::View ? program_->size_of(r, info.of) : size;
      if (info.user < 0 || info.user >= num_own_) return false;
      place = {own_[info.user], own_bytes_[info.user], false};
      if (shown >= 0 && static_cast<uint64_t>(shown) > place.bytes) return false;
      if (shown >= 0) place.bytes = static_cast<uint64_t>(shown);
    } else if (info.posted >= 0) {
      const int64_t shown = info.place == Place::View ? program_->size_of(r, info.of) : size;
      const uint64_t bytes = shown == kAtRun ? control.sizes[slot_][info.posted] : static_cast<uint64_t>(shown);
      const uint64_t offset = slot.offset[info.posted];
      if (offset == kNowhere) continue;  // locate() refuses it if a step wants it
      if (offset > memory.bytes() || bytes > memory.bytes() - offset) return false;
      place = {memory.base() + offset, bytes, false};
    }
    if (place.base && !self && !memory.contains(place.base, place.bytes)) return false;
  }
  return true;
}

// --- the steps ----------------------------------------------------------------------------------------------------------

bool Run::move() {
  bool progress = false;
  for (int q = 0; q < program_->num_queues() && !finished(); ++q) {
    Cursor& c = *cursors_[q];
    if (exclusive) {
      progress |= advance_queue(q);
    } else if (!c.busy.test_and_set(std::memory_order_acquire)) {
      progress |= advance_queue(q);
      c.busy.clear(std::memory_order_release);
    }
  }
  if (queues_left_.load(std::memory_order_acquire) == 0) finish();  // no-op if the last queue has done so
  return progress;
}

bool Run::advance_queue(int q) {
  Cursor& c = *cursors_[q];
  const int end = program_->queues[q + 1];
  if (c.at == end) return false;
  const int begin = c.at;
  while (c.at < end) {
    if (group_->abort()) {
      fail({Status::Broken, -1, -1, q, c.at - program_->queues[q], -1, -1});
      return true;
    }
    if (!execute(program_->steps[c.at], q)) {
      if (finished()) return true;
      const uint64_t step = static_cast<uint64_t>(c.at - program_->queues[q]);
      group_->mine()->parked[lane_].store(run_ << 32 | static_cast<uint64_t>(q) << 20 | step, std::memory_order_relaxed);
      c.parked = true;
      return c.at > begin;
    }
    c.parked = false;
    ++c.at;
  }
  if (queues_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) finish();
  return true;
}

bool Run::execute(const Step& s, int q) {
  if (group_->delay_ns) {
    static thread_local uint64_t state = 0x9e3779b97f4a7c15ull ^ reinterpret_cast<uintptr_t>(&state) ^ static_cast<uint64_t>(now_ns());
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    const int64_t until = now_ns() + static_cast<int64_t>(state % static_cast<uint64_t>(group_->delay_ns));
    while (now_ns() < until) {
    }
  }
  switch (static_cast<Op>(s.op)) {
    case Op::Wait: {
      const uint64_t target = value_base_ + static_cast<uint64_t>(s.value);
      return static_cast<int64_t>(signal_word(s.signal).load(std::memory_order_acquire) - target) >= 0;
    }
    case Op::Signal:
      signal_word(s.signal).store(value_base_ + static_cast<uint64_t>(s.value), std::memory_order_release);
      return true;
    case Op::Stamp:
      stamps_[s.value] = now_ns();
      return true;
    default:
      return transfer(s, q);
  }
}

bool Run::transfer(const Step& s, int q) {
  int64_t length = s.length;
  if (s.length_param >= 0) length = std::min(length, std::max<int64_t>(param_value(s.length_param) - s.skip, 0));
  if (length == 0 || s.rows == 0) return true;
  const Op op = static_cast<Op>(s.op);
  if (op == Op::Reduce) return reduce(s, length, q);
  const int64_t rows = op == Op::Copy2D ? s.rows : 1;
  char* src = locate(s.src_rank, s.src_buffer, s.src_offset, s.src_alt, s.src_param, length + (rows - 1) * s.src_pitch, q);
  char* dst = locate(s.dst_rank, s.dst_buffer, s.dst_offset, s.dst_offset, s.dst_param, length + (rows - 1) * s.dst_pitch, q);
  if (!src || !dst) return false;
  if (op == Op::Copy2D) {
    for (int64_t i = 0; i < rows; ++i) copy_bytes(dst + i * s.dst_pitch, src + i * s.src_pitch, length, false);
    return true;
  }
  char* dst2 = nullptr;
  if (op == Op::Broadcast) {
    dst2 = locate(s.dst2_rank, s.dst2_buffer, s.dst2_offset, s.dst2_offset, s.dst2_param, length, q);
    if (!dst2) return false;
  }
  const bool streaming = static_cast<size_t>(length) >= streaming_bytes;
  for (int64_t done = 0; done < length; done += kLook) {
    if (done && group_->abort()) return true;  // advance_queue sees it before the next step
    const size_t n = std::min<int64_t>(kLook, length - done);
    if (op == Op::Copy)
      copy_bytes(dst + done, src + done, n, streaming);
    else if (op == Op::Broadcast)
      broadcast_bytes(dst + done, dst2 + done, src + done, n, streaming);
    else
      swap_bytes(src + done, dst + done, n);
  }
  return true;
}

bool Run::reduce(const Step& s, int64_t length, int q) {
  char* dst = locate(s.dst_rank, s.dst_buffer, s.dst_offset, s.dst_offset, s.dst_param, length, q);
  const char* few[16];
  std::vector<const char*> many(s.num_sources > 16 ? s.num_sources : 0);
  const char** sources = s.num_sources > 16 ? many.data() : few;
  for (int k = 0; k < s.num_sources; ++k) {
    const Source& from = program_->sources[s.first_source + k];
    sources[k] = locate(from.rank, from.buffer, from.offset, from.alt, from.param, length, q);
    if (!sources[k]) return false;
  }
  if (!dst) return false;
  const DType type = static_cast<DType>(s.dtype);
  const int64_t item = static_cast<int64_t>(item_bytes(type));
  for (int64_t done = 0; done < length; done += kLook) {
    if (done && group_->abort()) return true;
    const int64_t n = std::min<int64_t>(kLook, length - done);
    reduce_items(type, static_cast<ReduceOp>(s.reduce_op), dst + done, sources, s.num_sources, n / item);
    for (int k = 0; k < s.num_sources; ++k) sources[k] += n;
  }
  return true;
}

// The address of an operand, or null with the run failed if it lies outside the memory that its buffer names.
char* Run::locate(int rank, int buffer, int64_t offset, int64_t alt, int param, int64_t extent, int q) {
  const Place_& place = places_[static_cast<size_t>(rank) * program_->num_buffers() + buffer];
  int64_t at = place.staged ? alt : offset;
  if (param >= 0) at += param_value(param);
  if (!place.base || at < 0 || extent < 0 || static_cast<uint64_t>(at) > place.bytes ||
      static_cast<uint64_t>(extent) > place.bytes - static_cast<uint64_t>(at)) {
    fail({Status::Bounds, rank, group_->rank(), q, cursors_[q]->at - program_->queues[q], -1, -1});
    return nullptr;
  }
  return place.base + at;
}

int64_t Run::param_value(int index) const {
  const ParamInfo& p = program_->params[index];
  return group_->control(p.rank)->params(slot_, group_->max_params())[p.index];
}

Word& Run::signal_word(int index) {
  const SignalInfo& s = program_->signals[index];
  return group_->control(s.home)->signals[lane_][s.index].word;
}

bool Run::raise(int signal, int64_t value) {
  // Before the run of the same lane four runs ago has ended, this value would release its waits too.
  if (run_ > kLanes && group_->mine()->finished[lane_].load(std::memory_order_acquire) < run_ - kLanes) return false;
  const Program* program = program_ ? program_.get() : call_->programs[kDirect].get();
  if (!program || signal < 0 || signal >= static_cast<int>(program->signals.size())) return false;
  const SignalInfo& s = program->signals[signal];
  group_->control(s.home)->signals[lane_][s.index].word.store(value_base_ + static_cast<uint64_t>(value),
                                                              std::memory_order_release);
  return true;
}

bool Run::at_rest() const {
  for (const auto& c : cursors_)
    if (c->busy.test(std::memory_order_acquire)) return false;
  return true;
}

// --- the end --------------------------------------------------------------------------------------------------------------

void Run::finish() {
  if (finished()) return;
  call_->counter->runs.fetch_add(1, std::memory_order_relaxed);
  if (choice_ == kDirect) call_->counter->direct.fetch_add(1, std::memory_order_relaxed);
  end(Status::Done);
}

void Run::end(Status status) {
  if (ending_.test_and_set(std::memory_order_acq_rel)) return;
  // A call that ranks disagree on, or could not plan, ends on all of them before anything moved: the lane goes on.
  const bool clean = status == Status::Done || status == Status::Mismatch || status == Status::Planner;
  if (clean) group_->mine()->finished[lane_].store(run_, std::memory_order_release);
  stage_.store(Stage::Over, std::memory_order_relaxed);
  if (counted_) group_->left();
  status_.store(status, std::memory_order_release);
  if (on_finish) on_finish();
}

void Run::fail(Failure f) {
  if (finished()) return;
  if (f.status == Status::Broken) {
    const uint64_t word = group_->abort();
    f.about = static_cast<int16_t>(word >> 8);
    f.reporter = static_cast<int16_t>(word >> 24);
    const Abort code = static_cast<Abort>(word & 0xff);
    if (code == Abort::Dead) f.status = Status::Dead;
    if (code == Abort::Late) f.status = Status::Late;
  }
  failure_ = f;
  if (f.status == Status::Dead) group_->break_all(Abort::Dead, f.about);
  if (f.status == Status::Late) group_->break_all(Abort::Late, f.about);
  if (f.status == Status::Bounds || f.status == Status::Memory) group_->break_all(Abort::Failed, f.about);
  if (group_->abort()) hold_buffers();
  end(f.status);
}

void Run::hold_buffers() {
  for (int i = 0; i < num_own_; ++i)
    if (group_->arena().contains(own_[i], own_bytes_[i]))
      group_->hold_unsettled(static_cast<uint64_t>(own_[i] - group_->arena().base()));
  if (const uint64_t ring = group_->mine()->slots[slot_].offset[2]; counted_ && ring != kNowhere) group_->hold_unsettled(ring);
}

void Run::watch(int64_t now, bool look_for_dead) {
  if (finished()) return;
  if (look_for_dead && stage_.load(std::memory_order_acquire) != Stage::Ready) {
    const int dead = group_->dead_member(run_, lane_);
    if (dead >= 0) {
      // What it sent before it died still counts: one more look before giving up.
      if (!advance() && !finished()) fail({Status::Dead, dead, group_->rank(), -1, -1, -1, -1});
      return;
    }
  }
  if (!deadline_) deadline_ = now + group_->timeout_ns;
  if (now < deadline_ || !gate_.load(std::memory_order_acquire)) return;
  Failure f{Status::Late, -1, group_->rank(), -1, -1, -1, -1};
  for (int r = 0; r < group_->size() && f.about < 0; ++r)
    if (r != group_->rank() && group_->control(r)->slots[slot_].run.load(std::memory_order_acquire) != run_) f.about = r;
  for (int r = 0; r < group_->size() && f.about < 0; ++r)
    if (r != group_->rank() && group_->control(r)->finished[lane_].load(std::memory_order_acquire) < run_) f.about = r;
  if (program_)
    for (int q = 0; q < program_->num_queues() && f.queue < 0; ++q)
      if (cursors_[q]->at < program_->queues[q + 1]) f.queue = q, f.step = cursors_[q]->at - program_->queues[q];
  fail(f);
}

}  // namespace dovetail
