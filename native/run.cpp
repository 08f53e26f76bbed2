#include "run.h"

#include <algorithm>
#include <cstring>

namespace dovetail {

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
  slot.flags = (heap ? kOnHeap : 0) | (staged ? kStaged : 0) | (waited_for_in_main ? kMain : 0) | (fits() ? 0 : kShort);
  slot.num_params = static_cast<uint32_t>(params_.size());
  std::copy(params_.begin(), params_.end(), mine.params(slot_, group_->max_params()));
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
  const bool same = s.call == mine.call && s.size_bytes == mine.size_bytes && s.num_params == mine.num_params;
  if (same && !(s.flags & kShort)) return true;
  fail(failure(same ? Status::Bounds : Status::Mismatch, r, group_->rank()));
  return false;
}

// Are this rank's posted buffers as large as the plan takes them to be? Said in the slot, since peers would have to get another
// line of its memory to compare. Collectives have looked at their tensors before.
bool Run::fits() const {
  if ((call_->word & 0xff) != kPlanCall) return true;
  const Program* program = call_->programs[kDirect].load(std::memory_order_acquire);
  for (int b = 0; program && b < program->num_buffers(); ++b) {
    const BufferInfo& info = program->buffers[b];
    if (info.posted < 0 || info.place == Place::Scratch || info.user < 0 || info.user >= num_own_) continue;
    const int64_t shown = program->size_of(group_->rank(), info.place == Place::View ? info.of : b);
    if (shown > 0 && own_bytes_[info.user] < static_cast<uint64_t>(shown)) return false;
  }
  return true;
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
      if (info.posted >= 0 && slot.offset[info.posted] == kNowhere && program_->is_reached(r, b)) return false;
      if (shown >= 0 && static_cast<uint64_t>(shown) > place.bytes) return false;
      if (shown >= 0) place.bytes = static_cast<uint64_t>(shown);
    } else if (info.posted >= 0) {
      const int64_t shown = info.place == Place::View ? program_->size_of(r, info.of) : size;
      const uint64_t bytes = shown == kAtRun ? control.sizes[slot_][info.posted] : static_cast<uint64_t>(shown);
      const uint64_t offset = slot.offset[info.posted];
      if (offset == kNowhere && program_->is_reached(r, b)) return false;
      if (offset == kNowhere) continue;  // locate() refuses it if a step wants it
      if (offset > memory.bytes() || bytes > memory.bytes() - offset) return false;
      place = {memory.base() + offset, bytes, false};
    }
    if (place.base && !self && !memory.contains(place.base, place.bytes)) return false;
  }
  return true;
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
                s.size_bytes, c.parked[lane_].load(std::memory_order_relaxed), {}, {}, {}};
    for (const Word& lane : c.finished) p.last = std::max(p.last, lane.load(std::memory_order_acquire));
    const int64_t* params = c.params(slot_, group_->max_params());
    p.params.assign(params, params + std::min<int64_t>(s.num_params, group_->max_params()));
    for (int k = 0; k < 2; ++k) {
      p.bytes.push_back(c.sizes[slot_][k]);
      p.symmetric.push_back(s.offset[k] != kNowhere);
    }
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
    if (code == Abort::Crossed) {
      f.status = Status::Crossed;
      if (f.about == group_->rank()) f.about = f.reporter;
    }
  }
  f.states = look_around();
  failure_ = std::move(f);
  const Status status = failure_.status;
  if (status == Status::Dead) group_->break_all(Abort::Dead, failure_.about);
  if (status == Status::Late) group_->break_all(Abort::Late, failure_.about);
  if (status == Status::Crossed) group_->break_kin(failure_.about);
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
  if (stage_.load(std::memory_order_acquire) == Stage::Entering) {
    const int elsewhere = group_->crossed(run_, slot_, now - deadline + group_->timeout_ns, waited_for_in_main);
    if (elsewhere >= 0) return fail(failure(Status::Crossed, elsewhere, group_->rank()));
  }
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
