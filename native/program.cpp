#include "program.h"

#include <stdexcept>

#include "layout.h"
#include "reduce.h"

namespace dovetail {

namespace {

[[noreturn]] void refuse(size_t step, const std::string& what) {
  throw std::invalid_argument("step " + std::to_string(step) + ": " + what);
}

struct Checker {
  const Program& p;
  size_t step;

  void operand(const char* name, int rank, int buffer, int param, int64_t offset, int64_t extent) const {
    if (rank < 0 || rank >= p.world) refuse(step, std::string(name) + " rank out of range");
    if (buffer < 0 || buffer >= p.num_buffers()) refuse(step, std::string(name) + " buffer out of range");
    if (param >= static_cast<int>(p.params.size())) refuse(step, std::string(name) + " parameter out of range");
    if (rank != p.rank && p.buffers[buffer].posted < 0)
      refuse(step, std::string(name) + " is in memory of rank " + std::to_string(rank) + " that only it can reach");
    const int64_t size = p.size_of(rank, buffer);
    const bool view = p.buffers[buffer].place == Place::View;  // which of its offsets counts is known at run: locate()
    if (size == kAbsent) refuse(step, std::string(name) + " buffer does not exist on rank " + std::to_string(rank));
    if (offset < 0 || (!view && size != kAtRun && param < 0 && (extent > size || offset > size - extent)))
      refuse(step, std::string(name) + " lies outside its buffer");
  }
};

}  // namespace

void Program::validate() const {
  if (rank < 0 || rank >= world) throw std::invalid_argument("rank out of range");
  if (reached.size() != sizes.size()) throw std::invalid_argument("what peers touch is needed for each buffer and rank");
  if (sizes.size() != buffers.size() * world) throw std::invalid_argument("a size is needed for each buffer and rank");
  for (const SignalInfo& s : signals)
    if (s.home < 0 || s.home >= world || s.index < 0 || s.index >= kSignals)
      throw std::invalid_argument("more than " + std::to_string(kSignals) + " signals on one rank");
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& s = steps[i];
    const Checker check{*this, i};
    const Op op = static_cast<Op>(s.op);
    if (s.op > static_cast<uint8_t>(Op::Reset)) refuse(i, "unknown op");
    if (op == Op::Reset) refuse(i, "this executor runs no captured plans");
    if (op == Op::Signal || op == Op::Wait) {
      if (s.signal < 0 || s.signal >= static_cast<int>(signals.size())) refuse(i, "signal out of range");
      if (s.value < 0 || s.value >= int64_t{1} << kValueBits) refuse(i, "signal value out of range");
      continue;
    }
    if (op == Op::Stamp) {
      if (s.value < 0 || s.value >= num_stamps) refuse(i, "stamp out of range");
      continue;
    }
    if (s.length < 0 || s.rows < 0 || s.skip < 0) refuse(i, "negative extent");
    if (s.length_param >= static_cast<int>(params.size())) refuse(i, "length parameter out of range");
    const int64_t length = s.length_param >= 0 ? 0 : s.length;
    const bool strided = op == Op::Copy2D && s.rows > 0;
    if (strided && (s.src_pitch < 0 || s.dst_pitch < s.length)) refuse(i, "rows overlap");
    const auto extent = [&](int64_t pitch) {
      int64_t body = 0, sum = 0;
      if (__builtin_mul_overflow(pitch, strided ? s.rows - 1 : 0, &body) || __builtin_add_overflow(body, length, &sum))
        refuse(i, "extent overflows");
      return sum;
    };
    check.operand("destination", s.dst_rank, s.dst_buffer, s.dst_param, s.dst_offset, extent(s.dst_pitch));
    if (op == Op::Broadcast) check.operand("second destination", s.dst2_rank, s.dst2_buffer, s.dst2_param, s.dst2_offset, length);
    if (op != Op::Reduce) {
      check.operand("source", s.src_rank, s.src_buffer, s.src_param, s.src_offset, extent(s.src_pitch));
      continue;
    }
    if (s.num_sources < 1 || s.first_source < 0 || s.first_source + s.num_sources > static_cast<int64_t>(sources.size()))
      refuse(i, "sources out of range");
    if (s.dtype >= static_cast<uint8_t>(DType::Count) || s.reduce_op > static_cast<uint8_t>(ReduceOp::Xor) ||
        !reducible(static_cast<DType>(s.dtype), static_cast<ReduceOp>(s.reduce_op)))
      refuse(i, "no such reduction for this dtype");
    if (s.length % static_cast<int64_t>(item_bytes(static_cast<DType>(s.dtype)))) refuse(i, "length is not whole elements");
    for (int k = 0; k < s.num_sources; ++k) {
      const Source& src = sources[s.first_source + k];
      check.operand("source", src.rank, src.buffer, src.param, src.offset, length);
    }
  }
}

}  // namespace dovetail
