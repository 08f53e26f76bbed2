// Run's second half: its queues, step by step. The handshake before and the end after are in run.cpp.
#include <algorithm>

#include "move.h"
#include "reduce.h"
#include "run.h"

namespace dovetail {

namespace {
constexpr int64_t kLook = int64_t{1} << 20;  // a long copy looks at the abort word this often
}

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

}  // namespace dovetail
