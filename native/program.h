// A program: one rank's part of a plan, checked and laid out for execution. Immutable once made.
//
// Step and Source mirror the NumPy dtypes STEP and SOURCE of dovetail/plan/step.py byte for byte.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace dovetail {

enum class Op : uint8_t { Copy, Copy2D, Broadcast, Swap, Signal, Wait, Stamp, Reduce, Reset };

struct Step {
  uint8_t op, dtype, reduce_op, flags;
  int32_t signal;
  int64_t value;
  int16_t src_rank, dst_rank, dst2_rank, src_buffer, dst_buffer, dst2_buffer;
  int32_t num_sources;
  int64_t src_offset, src_alt, dst_offset, dst2_offset;
  int32_t src_param, dst_param, dst2_param, length_param;
  int64_t length, skip, rows, src_pitch, dst_pitch, first_source;
};
static_assert(sizeof(Step) == 128);

struct Source {
  int16_t rank, buffer;
  int32_t param;
  int64_t offset, alt;
};
static_assert(sizeof(Source) == 24);

inline constexpr int64_t kAtRun = -1, kAbsent = -2;

// How a buffer is found: the caller's (given at each run), the rank's scratch, or the input as peers may read it.
enum class Place : uint8_t { User, Scratch, View };

struct BufferInfo {
  Place place;
  int16_t posted;          // which of the slot's offsets names it for peers; -1: peers never touch it
  int16_t user;            // User: which of the caller's pointers; View: that of the buffer it shows
  int16_t of;              // View: the buffer it shows
  uint64_t scratch_offset;  // Scratch, View: where in the rank's scratch
};

struct SignalInfo {
  int16_t home;   // rank in whose memory it lives
  int16_t index;  // there
};

struct ParamInfo {
  int16_t rank;
  int16_t index;  // among those that the rank posts
};

struct Program {
  int rank, world;
  std::vector<Step> steps;
  std::vector<int> queues;  // queue q is steps[queues[q] .. queues[q+1])
  std::vector<Source> sources;
  std::vector<BufferInfo> buffers;
  std::vector<int64_t> sizes;  // [rank][buffer]
  std::vector<bool> reached;   // [rank][buffer]: peers touch it, whatever the parameters are
  std::vector<SignalInfo> signals;
  std::vector<ParamInfo> params;
  std::vector<std::pair<int, int>> equal;  // parameters that must agree
  int num_stamps = 0;

  int num_buffers() const { return static_cast<int>(buffers.size()); }
  int num_queues() const { return static_cast<int>(queues.size()) - 1; }
  int64_t size_of(int r, int b) const { return sizes[static_cast<size_t>(r) * buffers.size() + b]; }
  bool is_reached(int r, int b) const { return reached[static_cast<size_t>(r) * buffers.size() + b]; }

  // Throws std::invalid_argument naming the step if anything is out of range or lies outside its buffer.
  void validate() const;
};

}  // namespace dovetail
