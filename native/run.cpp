#include "run.h"

#include <algorithm>
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
  program_ = nullptr;
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
  counted_.store(false, std::memory_order_relaxed);
  notified_.store(false, std::memory_order_relaxed);
  failure_ = {};
  ending_.clear();
  gate_.store(!gated, std::memory_order_relaxed);
  deadline_.store(0, std::memory_order_relaxed);  // counts from the first look at the clock without progress
  status_.store(Status::Pending, std::memory_order_relaxed);
  stage_.store(Stage::Ready, std::memory_order_release);
}

bool Run::advance() {
  if (finished()) return false;
  if (group_->abort()) {
    fail(failure(Status::Broken));
    return true;
  }
  if (stage_.load(std::memory_order_acquire) != Stage::Moving) {
    if (!exclusive && stepping_.test_and_set(std::memory_order_acquire)) return false;
    bool progress = false;
    if (stage_.load(std::memory_order_relaxed) == Stage::Ready) progress |= enter();
    if (stage_.load(std::memory_order_relaxed) == Stage::Entering) progress |= gather();
    if (!exclusive) stepping_.clear(std::memory_order_release);
    if (progress) deadline_.store(0, std::memory_order_relaxed);
    if (stage_.load(std::memory_order_acquire) != Stage::Moving) return progress;
  }
  const bool progress = move();
  if (progress) deadline_.store(0, std::memory_order_relaxed);
  return progress;
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
      fail(failure(Status::Memory, group_->rank(), group_->rank()));
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
  counted_.store(true, std::memory_order_release);
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
  fail(failure(Status::Mismatch, r, group_->rank()));
  return false;
}

bool Run::bind() {
  const Program* program = call_->programs[choice_].load(std::memory_order_acquire);
  program_ = program || !call_->planner ? program : call_->planner(choice_);
  if (!program_) {
    fail(failure(Status::Planner, group_->rank(), group_->rank()));
    return false;
  }
  for (const auto& [a, b] : program_->equal)
    if (param_value(a) != param_value(b)) {
      fail({Status::Mismatch, program_->params[b].rank, group_->rank(), -1, -1, a, b, {}});
      return false;
    }
  places_.assign(static_cast<size_t>(group_->size()) * program_->num_buffers(), {});
  for (int r = 0; r < group_->size(); ++r)
    if (!bind_peer(r)) {
      fail(failure(Status::Bounds, r, group_->rank()));
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
      if (finished()) leave();
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
      fail(failure(Status::Broken, -1, -1, q, c.at - program_->queues[q]));
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
    if (done && group_->abort()) return broken_at(q);
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

// The group broke in the middle of a step: what it wrote is not to be used.
bool Run::broken_at(int q) {
  fail(failure(Status::Broken, -1, -1, q, cursors_[q]->at - program_->queues[q]));
  return false;
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
    if (done && group_->abort()) return broken_at(q);
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
    fail(failure(Status::Bounds, rank, group_->rank(), q, cursors_[q]->at - program_->queues[q]));
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
  const Program* program = call_->programs[kDirect].load(std::memory_order_acquire);
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
  if (!claim()) return;
  call_->counter->runs.fetch_add(1, std::memory_order_relaxed);
  if (choice_ == kDirect) call_->counter->direct.fetch_add(1, std::memory_order_relaxed);
  end(Status::Done);
}

void Run::end(Status status) {
  // A call that ranks disagree on ends on all of them before anything moved: the lane goes on.
  if (status == Status::Done || status == Status::Mismatch)
    group_->mine()->finished[lane_].store(run_, std::memory_order_release);
  stage_.store(Stage::Over, std::memory_order_relaxed);
  status_.store(status, std::memory_order_release);
  leave();
}

void Run::leave() {
  if ((exclusive || at_rest()) && counted_.exchange(false, std::memory_order_acq_rel)) group_->left();
}

void Run::notify() {
  if (on_finish && finished() && !notified_.exchange(true, std::memory_order_acq_rel)) on_finish();
}

std::vector<PeerState> Run::look_around() const {
  std::vector<PeerState> found;
  for (int r = 0; r < group_->size(); ++r) {
    Control& c = *group_->control(r);
    const Slot& s = c.slots[slot_];
    PeerState p{s.run.load(std::memory_order_acquire), c.finished[lane_].load(std::memory_order_acquire), 0, s.call,
                s.size_bytes, c.parked[lane_].load(std::memory_order_relaxed), {}};
    for (const Word& lane : c.finished) p.last = std::max(p.last, lane.load(std::memory_order_acquire));
    const int64_t* params = c.params(slot_, group_->max_params());
    p.params.assign(params, params + std::min<int64_t>(s.num_params, group_->max_params()));
    found.push_back(std::move(p));
  }
  return found;
}

void Run::fail(Failure f) {
  if (finished() || !claim()) return;
  if (f.status == Status::Broken) {
    const uint64_t word = group_->abort();
    f.about = static_cast<int16_t>(word >> 8);
    f.reporter = static_cast<int16_t>(word >> 24);
    const Abort code = static_cast<Abort>(word & 0xff);
    if (code == Abort::Dead) f.status = Status::Dead;
    if (code == Abort::Late) f.status = Status::Late;
  }
  f.states = look_around();
  failure_ = std::move(f);
  const Status status = failure_.status;
  if (status == Status::Dead) group_->break_all(Abort::Dead, failure_.about);
  if (status == Status::Late) group_->break_all(Abort::Late, failure_.about);
  if (status == Status::Bounds || status == Status::Memory || status == Status::Planner)
    group_->break_all(Abort::Failed, failure_.about);
  if (group_->abort()) hold_buffers();
  end(status);
}

void Run::hold_buffers() {
  for (int i = 0; i < num_own_; ++i)
    if (group_->arena().contains(own_[i], own_bytes_[i]))
      group_->hold_unsettled(static_cast<uint64_t>(own_[i] - group_->arena().base()));
  const uint64_t ring = group_->mine()->slots[slot_].offset[2];
  if (counted_.load(std::memory_order_acquire) && ring != kNowhere) group_->hold_unsettled(ring);
}

void Run::watch(int64_t now, bool look_for_dead) {
  if (finished()) return;
  if (!gate_.load(std::memory_order_acquire)) return;  // armed: its time has not begun
  const bool entered = stage_.load(std::memory_order_acquire) != Stage::Ready;
  if (look_for_dead && entered) {
    const int dead = group_->dead_member(run_, lane_);
    if (dead >= 0) {
      // What it sent before it died still counts: one more look before giving up.
      if (!advance() && !finished()) fail(failure(Status::Dead, dead, group_->rank()));
      return;
    }
  }
  int64_t deadline = deadline_.load(std::memory_order_relaxed);
  if (!deadline) deadline_.store(deadline = now + group_->timeout_ns, std::memory_order_relaxed);
  if (now < deadline) return;
  Failure f = failure(Status::Late, entered ? -1 : group_->rank(), group_->rank());
  for (int r = 0; r < group_->size() && f.about < 0; ++r)
    if (r != group_->rank() && group_->control(r)->slots[slot_].run.load(std::memory_order_acquire) != run_) f.about = r;
  for (int r = 0; r < group_->size() && f.about < 0; ++r)
    if (r != group_->rank() && group_->control(r)->finished[lane_].load(std::memory_order_acquire) < run_) f.about = r;
  if (program_ && stage_.load(std::memory_order_acquire) == Stage::Moving)
    for (int q = 0; q < program_->num_queues() && f.queue < 0; ++q)
      if (cursors_[q]->at < program_->queues[q + 1]) f.queue = q, f.step = cursors_[q]->at - program_->queues[q];
  fail(std::move(f));
}

}  // namespace dovetail
