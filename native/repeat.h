// Calls of operators whose like was made before: each is one call from Python. What ranks found out about each other then still
// holds, or the meeting that is a part of it says that it does not.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "caller.h"
#include "move.h"
#include "pool.h"
#include "product.h"
#include "tensors.h"

namespace dovetail {

// A run over two buffers: this rank's bytes, which begin with `mine`, and everybody's. kAsSeen if those are `seen`, otherwise
// the status of the run.
constexpr int kAsSeen = -1;
inline int meet(Caller& caller, const std::vector<uint64_t>& pointers, const std::vector<int64_t>& bytes, const nb::bytes& mine,
         const nb::bytes& seen) {
  if (pointers.size() != 2 || bytes.size() != 2 || static_cast<int64_t>(mine.size()) > bytes[0])
    throw std::invalid_argument("two buffers, of which the first has room for what this rank says");
  std::memcpy(reinterpret_cast<char*>(pointers[0]), mine.c_str(), mine.size());
  const int status = caller.run(pointers, bytes, {});
  const bool same = static_cast<int64_t>(seen.size()) == bytes[1] &&
                    std::memcmp(reinterpret_cast<const char*>(pointers[1]), seen.c_str(), seen.size()) == 0;
  return status == static_cast<int>(Status::Done) && same ? kAsSeen : status;
}

constexpr int64_t kLongProduct = 1 << 18;  // multiplications: the interpreter is let go meanwhile
inline void product(DType type, uint64_t x, uint64_t w, uint64_t out, int64_t rows, int64_t n, int64_t k, Isa isa = Isa::Avx512Bf16) {
  const Product p{type, reinterpret_cast<const char*>(x), reinterpret_cast<const char*>(w), reinterpret_cast<char*>(out), rows, n, k};
  if (!multiplies(type) || rows < 0 || n < 0 || k < 0) throw std::invalid_argument("no such product");
  if (rows * n * k < kLongProduct) return multiply(p, isa);
  nb::gil_scoped_release free;
  multiply(p, isa);
}

// A call whose like was made before: this rank's parts to the peers' stages, then ranks meet; and what comes of the parts: their
// sum, or one behind the other. A stage has two halves, used in turn.
class Repeat {
 public:
  Repeat(nb::object caller, std::vector<uint64_t> pointers, std::vector<int64_t> bytes, nb::bytes mine, nb::bytes seen, int rank,
         std::vector<uint64_t> first, std::vector<uint64_t> second, uint64_t part, uint64_t step, bool sums, int dtype)
      : owner_(std::move(caller)), caller_(nb::inst_ptr<Caller>(owner_)), pointers_(std::move(pointers)), bytes_(std::move(bytes)),
        mine_(std::move(mine)), seen_(std::move(seen)), rank_(rank), halves_{std::move(first), std::move(second)}, part_(part),
        step_(step), sums_(sums), dtype_(static_cast<DType>(dtype)) {}

  // The d-th part begins `step` bytes after the one before it; that of this rank stays where it is if parts are added up.
  // Without a source all of them are there already. Returns what `meet` does.
  int send(uint64_t source, int half) {
    const auto& stages = halves_[half & 1];
    for (size_t d = 0; source && d < stages.size(); ++d)
      if (!sums_ || static_cast<int>(d) != rank_)
        std::memcpy(reinterpret_cast<char*>(stages[d] + rank_ * part_), reinterpret_cast<const char*>(source + d * step_), part_);
    return meet(*caller_, pointers_, bytes_, mine_, seen_);
  }

  // `send`, and if that was as seen, `finish`.
  int run(uint64_t source, uint64_t out, uint64_t own, int half) {
    const int status = send(source, half);
    if (status == kAsSeen) finish(out, own, half);
    return status;
  }

  // The product of x [rows, k] and w [n, k] goes to `whole`, which is the source; then `run`.
  int multiply(uint64_t x, uint64_t w, uint64_t whole, int64_t rows, int64_t n, int64_t k, uint64_t out, uint64_t own, int half) {
    product(dtype_, x, w, whole, rows, n, k);
    return run(whole, out, own, half);
  }

  // All parts, added up in the order of ranks, this rank's being at `own`; or one behind the other.
  void finish(uint64_t out, uint64_t own, int half) const {
    const uint64_t stage = halves_[half & 1][rank_];
    const size_t world = halves_[0].size();
    if (!sums_) {
      std::memcpy(reinterpret_cast<char*>(out), reinterpret_cast<const char*>(stage), part_ * world);
      return;
    }
    std::vector<const char*> sources;
    for (size_t s = 0; s < world; ++s)
      sources.push_back(reinterpret_cast<const char*>(static_cast<int>(s) == rank_ ? own : stage + s * part_));
    reduce_items(dtype_, ReduceOp::Sum, reinterpret_cast<char*>(out), sources.data(), static_cast<int>(world),
                 part_ / item_bytes(dtype_));
  }

 private:
  nb::object owner_;
  Caller* caller_;
  std::vector<uint64_t> pointers_;
  std::vector<int64_t> bytes_;
  nb::bytes mine_, seen_;
  int rank_;
  std::vector<uint64_t> halves_[2];
  uint64_t part_, step_;
  bool sums_;
  DType dtype_;
};

// Bags of a batch like one that was pooled before. Those of a peer's samples are sent to its stage, where each source has a part
// [samples, its tables], this rank's own go straight to the output [samples, all tables]; then ranks meet, and the parts that came
// are put beside them.
class Lookup {
 public:
  // `tables`: of each rank.
  Lookup(nb::object caller, std::vector<uint64_t> pointers, std::vector<int64_t> bytes, nb::bytes mine, nb::bytes seen, int rank,
         std::vector<uint64_t> first, std::vector<uint64_t> second, std::vector<int64_t> tables, int64_t batch, int64_t dim,
         int dtype, bool mean)
      : owner_(std::move(caller)), caller_(nb::inst_ptr<Caller>(owner_)), pointers_(std::move(pointers)), bytes_(std::move(bytes)),
        mine_(std::move(mine)), seen_(std::move(seen)), rank_(rank), halves_{std::move(first), std::move(second)},
        tables_(std::move(tables)), batch_(batch), local_(batch / static_cast<int64_t>(tables_.size())), dim_(dim),
        type_(static_cast<DType>(dtype)), row_(dim * static_cast<int64_t>(item_bytes(type_))), mean_(mean) {
    for (const int64_t n : tables_) begins_.push_back(total_), total_ += n;
    const int64_t sample = tables_.at(rank) * row_;
    block_ = std::max<int64_t>(1, kBlock / std::max<int64_t>(1, sample));
    room_.resize(std::min(block_, local_) * sample);
  }

  // What `meet` does; or kUnlike, and nothing was done: these are no plain tensors of that batch, or name what is not there.
  static constexpr int kUnlike = -2;
  int run(const nb::list& weights, nb::handle values, nb::handle offsets, uint64_t out, int half) {
    Pool p{type_, false, mean_, nullptr, static_cast<int>(tables_[rank_]), dim_, nullptr, nullptr, batch_, 0, 0, nullptr, nullptr, 0};
    int64_t num_values = 0;
    if (!read(weights, values, offsets, p, num_values)) return kUnlike;
    if (num_values * row_ < kLong) {
      pool(p, out, half);
    } else {
      nb::gil_scoped_release free;
      pool(p, out, half);
    }
    const int status = meet(*caller_, pointers_, bytes_, mine_, seen_);
    if (status == kAsSeen) finish(out, half);
    return status;
  }

  // What came from the others, beside this rank's own.
  void finish(uint64_t out, int half) const {
    const auto* stage = reinterpret_cast<const char*>(halves_[half & 1][rank_]);
    for (int s = 0; s < static_cast<int>(tables_.size()); ++s)
      if (s != rank_)
        copy_rows(reinterpret_cast<char*>(out) + begins_[s] * row_, stage + local_ * begins_[s] * row_, local_, tables_[s] * row_,
                  total_ * row_);
  }

 private:
  static constexpr int64_t kBlock = 32 << 10;  // pooled here, then copied: lines of a peer's memory are written once, as a whole
  static constexpr int64_t kLong = 1 << 17;    // bytes of rows: the interpreter is let go meanwhile

  bool read(const nb::list& weights, nb::handle values, nb::handle offsets, Pool& p, int64_t& num_values) {
    TensorInfo v, o;
    if (static_cast<int64_t>(weights.size()) != tables_[rank_] || !read_tensor(values, v) || !read_tensor(offsets, o)) return false;
    p.wide = v.type == kInt64;
    if ((!p.wide && v.type != kInt32) || o.type != kInt64 || v.ndim != 1 || o.ndim != 1) return false;
    if (o.items != tables_[rank_] * batch_ + 1) return false;
    given_.clear(), rows_.clear();
    for (nb::handle w : weights) {
      Matrix m;
      if (!read_matrix(w, m) || m.type != on_cpu(type_) || m.sizes[1] != dim_ || is_negated(w)) return false;
      given_.push_back(m.data), rows_.push_back(m.sizes[0]);
    }
    p.weights = given_.data();
    p.values = reinterpret_cast<const char*>(v.pointer), p.offsets = reinterpret_cast<const int64_t*>(o.pointer);
    num_values = v.items;
    return check_bags(p.values, p.wide, v.items, p.offsets, batch_, rows_.data(), p.tables).kind == Wrong::Nothing;
  }

  void pool(Pool& p, uint64_t out, int half) {
    const int world = static_cast<int>(tables_.size());
    const int64_t sample = tables_[rank_] * row_;
    p.out = room_.data(), p.out_stride = tables_[rank_] * dim_;
    for (int k = 1; k < world; ++k) {
      const int d = (rank_ + k) % world;
      char* to = reinterpret_cast<char*>(halves_[half & 1][d]) + local_ * begins_[rank_] * row_;
      for (p.first = d * local_; p.first < (d + 1) * local_; p.first = p.end) {
        p.end = std::min(p.first + block_, (d + 1) * local_);
        pool_bags(p);
        std::memcpy(to, room_.data(), (p.end - p.first) * sample);
        to += (p.end - p.first) * sample;
      }
    }
    p.first = rank_ * local_, p.end = p.first + local_;
    p.out = reinterpret_cast<char*>(out) + begins_[rank_] * row_, p.out_stride = total_ * dim_;
    pool_bags(p);
  }

  nb::object owner_;
  Caller* caller_;
  std::vector<uint64_t> pointers_;
  std::vector<int64_t> bytes_;
  nb::bytes mine_, seen_;
  int rank_;
  std::vector<uint64_t> halves_[2];
  std::vector<int64_t> tables_, begins_;
  int64_t total_ = 0, batch_, local_, dim_;
  DType type_;
  int64_t row_, block_;
  bool mean_;
  std::vector<char> room_;
  std::vector<const char*> given_;  // of the call that is being made
  std::vector<int64_t> rows_;
};

}  // namespace dovetail
