// Calls of operators whose like was made before: each is one call from Python. What ranks found out about each other then still
// holds, or the meeting that is a part of it says that it does not.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>
#include <vector>

#include "caller.h"
#include "pool.h"
#include "product.h"
#include "tensors.h"

namespace dovetail {

inline constexpr int kAsSeen = -1;

// A run over two buffers: this rank's bytes, which begin with `mine`, and everybody's. kAsSeen if those are `seen`, otherwise
// the status of the run.
int meet(Caller& caller, const std::vector<uint64_t>& pointers, const std::vector<int64_t>& bytes, const nb::bytes& mine,
         const nb::bytes& seen);

// x [rows, k] times w [n, k], transposed; the interpreter is let go if it is long.
void product(DType type, uint64_t x, uint64_t w, uint64_t out, int64_t rows, int64_t n, int64_t k, Isa isa = Isa::Avx512Bf16);

// The meeting of a call that is said in the same words each time.
class Meets {
 public:
  Meets(nb::object caller, std::vector<uint64_t> pointers, std::vector<int64_t> bytes, nb::bytes mine, nb::bytes seen)
      : owner_(std::move(caller)), caller_(nb::inst_ptr<Caller>(owner_)), pointers_(std::move(pointers)), bytes_(std::move(bytes)),
        mine_(std::move(mine)), seen_(std::move(seen)) {}
  int operator()() const { return meet(*caller_, pointers_, bytes_, mine_, seen_); }

 private:
  nb::object owner_;
  Caller* caller_;
  std::vector<uint64_t> pointers_;
  std::vector<int64_t> bytes_;
  nb::bytes mine_, seen_;
};

// Where the ranks' stages begin here. Each has two halves, used in turn.
struct Stages {
  int rank;
  std::vector<uint64_t> halves[2];
  int world() const { return static_cast<int>(halves[0].size()); }
  char* at(int half, int r) const { return reinterpret_cast<char*>(halves[half & 1][r]); }
};

// This rank's parts go to the peers' stages, then ranks meet; and what comes of the parts: their sum, or one behind the other.
class Repeat {
 public:
  Repeat(Meets meets, Stages stages, uint64_t part, uint64_t step, bool sums, int dtype)
      : meets_(std::move(meets)), stages_(std::move(stages)), part_(part), step_(step), sums_(sums), dtype_(static_cast<DType>(dtype)) {}

  // The d-th part begins `step` bytes after the one before it; that of this rank stays where it is if parts are added up.
  // Without a source all of them are there already. Returns what `meet` does.
  int send(uint64_t source, int half);
  // `send`, and if that was as seen, `finish`.
  int run(uint64_t source, uint64_t out, uint64_t own, int half);
  // The product of x [rows, k] and w [n, k] goes to `whole`, which is the source; then `run`.
  int multiply(uint64_t x, uint64_t w, uint64_t whole, int64_t rows, int64_t n, int64_t k, uint64_t out, uint64_t own, int half);
  // All parts, added up in the order of ranks, this rank's being at `own`; or one behind the other.
  void finish(uint64_t out, uint64_t own, int half) const;

 private:
  Meets meets_;
  Stages stages_;
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
  Lookup(Meets meets, Stages stages, std::vector<int64_t> tables, int64_t batch, int64_t dim, int dtype, bool mean);

  // What `meet` does; or kUnlike, and nothing was done: these are no plain tensors of that batch, name what is not there, or are
  // as many values as `most` or more.
  static constexpr int kUnlike = -2;
  int run(const nb::list& weights, nb::handle values, nb::handle offsets, int64_t most, uint64_t out, int half) const;

  // What came from the others, beside this rank's own.
  void finish(uint64_t out, int half) const;

 private:
  struct Bags {  // of the call that is being made
    Pool pool;
    int64_t num_values;
    std::vector<const char*> weights;
    std::vector<int64_t> rows;
  };
  bool read(const nb::list& weights, nb::handle values, nb::handle offsets, Bags& bags) const;
  void pool(Pool& p, uint64_t out, int half) const;

  Meets meets_;
  Stages stages_;
  std::vector<int64_t> tables_, begins_;
  int64_t total_ = 0, batch_, local_, dim_;
  DType type_;
  int64_t row_;  // bytes
  bool mean_;
};

}  // namespace dovetail
