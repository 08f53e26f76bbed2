#include "repeat.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "move.h"

namespace dovetail {

namespace {
constexpr int64_t kLongProduct = 1 << 18;  // multiplications: the interpreter is let go meanwhile
constexpr int64_t kLongBags = 1 << 17;     // bytes of rows: likewise
constexpr int64_t kBlock = 32 << 10;       // pooled here, then copied: lines of a peer's memory are written once, as a whole
}  // namespace

int meet(Caller& caller, const std::vector<uint64_t>& pointers, const std::vector<int64_t>& bytes, const nb::bytes& mine,
         const nb::bytes& seen) {
  if (pointers.size() != 2 || bytes.size() != 2 || static_cast<int64_t>(mine.size()) > bytes[0])
    throw std::invalid_argument("two buffers, of which the first has room for what this rank says");
  std::memcpy(reinterpret_cast<char*>(pointers[0]), mine.c_str(), mine.size());
  const int status = caller.run(pointers, bytes, {});
  const bool same = static_cast<int64_t>(seen.size()) == bytes[1] &&
                    std::memcmp(reinterpret_cast<const char*>(pointers[1]), seen.c_str(), seen.size()) == 0;
  return status == static_cast<int>(Status::Done) && same ? kAsSeen : status;
}

void product(DType type, uint64_t x, uint64_t w, uint64_t out, int64_t rows, int64_t n, int64_t k, Isa isa) {
  const Product p{type, reinterpret_cast<const char*>(x), reinterpret_cast<const char*>(w), reinterpret_cast<char*>(out), rows, n, k};
  if (!multiplies(type) || rows < 0 || n < 0 || k < 0) throw std::invalid_argument("no such product");
  if (rows * n * k < kLongProduct) return multiply(p, isa);
  nb::gil_scoped_release free;
  multiply(p, isa);
}

// --- parts of a result ------------------------------------------------------------------------------------------------

int Repeat::send(uint64_t source, int half) {
  const int rank = stages_.rank;
  for (int d = 0; source && d < stages_.world(); ++d)
    if (!sums_ || d != rank)
      std::memcpy(stages_.at(half, d) + rank * part_, reinterpret_cast<const char*>(source + d * step_), part_);
  return meets_();
}

int Repeat::run(uint64_t source, uint64_t out, uint64_t own, int half) {
  const int status = send(source, half);
  if (status == kAsSeen) finish(out, own, half);
  return status;
}

int Repeat::multiply(uint64_t x, uint64_t w, uint64_t whole, int64_t rows, int64_t n, int64_t k, uint64_t out, uint64_t own, int half) {
  product(dtype_, x, w, whole, rows, n, k);
  return run(whole, out, own, half);
}

void Repeat::finish(uint64_t out, uint64_t own, int half) const {
  const char* stage = stages_.at(half, stages_.rank);
  const int world = stages_.world();
  if (!sums_) {
    std::memcpy(reinterpret_cast<char*>(out), stage, part_ * world);
    return;
  }
  std::vector<const char*> sources;
  for (int s = 0; s < world; ++s) sources.push_back(s == stages_.rank ? reinterpret_cast<const char*>(own) : stage + s * part_);
  reduce_items(dtype_, ReduceOp::Sum, reinterpret_cast<char*>(out), sources.data(), world, part_ / item_bytes(dtype_));
}

// --- bags -------------------------------------------------------------------------------------------------------------

Lookup::Lookup(Meets meets, Stages stages, std::vector<int64_t> tables, int64_t batch, int64_t dim, int dtype, bool mean)
    : meets_(std::move(meets)), stages_(std::move(stages)), tables_(std::move(tables)), batch_(batch),
      local_(batch / static_cast<int64_t>(tables_.size())), dim_(dim), type_(static_cast<DType>(dtype)),
      row_(dim * static_cast<int64_t>(item_bytes(type_))), mean_(mean) {
  for (const int64_t n : tables_) begins_.push_back(total_), total_ += n;
}

int Lookup::run(const nb::list& weights, nb::handle values, nb::handle offsets, int64_t most, uint64_t out, int half) const {
  Bags bags;
  if (!out || !read(weights, values, offsets, bags) || bags.num_values >= most) return kUnlike;
  if (bags.num_values * row_ < kLongBags) {
    pool(bags.pool, out, half);
  } else {
    nb::gil_scoped_release free;
    pool(bags.pool, out, half);
  }
  const int status = meets_();
  if (status == kAsSeen) finish(out, half);
  return status;
}

void Lookup::finish(uint64_t out, int half) const {
  const char* stage = stages_.at(half, stages_.rank);
  for (int s = 0; s < stages_.world(); ++s)
    if (s != stages_.rank)
      copy_rows(reinterpret_cast<char*>(out) + begins_[s] * row_, stage + local_ * begins_[s] * row_, local_, tables_[s] * row_,
                total_ * row_);
}

bool Lookup::read(const nb::list& weights, nb::handle values, nb::handle offsets, Bags& bags) const {
  const int64_t mine = tables_[stages_.rank];
  TensorInfo v, o;
  if (static_cast<int64_t>(weights.size()) != mine || !read_tensor(values, v) || !read_tensor(offsets, o)) return false;
  if ((v.type != kInt64 && v.type != kInt32) || o.type != kInt64 || v.ndim != 1 || o.ndim != 1) return false;
  if (o.items != mine * batch_ + 1) return false;
  for (nb::handle w : weights) {
    Matrix m;
    if (!read_matrix(w, m) || m.type != on_cpu(type_) || m.sizes[1] != dim_ || is_negated(w)) return false;
    bags.weights.push_back(m.data), bags.rows.push_back(m.sizes[0]);
  }
  bags.num_values = v.items;
  bags.pool = {type_, v.type == kInt64, mean_, bags.weights.data(), static_cast<int>(mine), dim_,
               reinterpret_cast<const char*>(v.pointer), reinterpret_cast<const int64_t*>(o.pointer), batch_, 0, 0, nullptr, nullptr, 0};
  const Pool& p = bags.pool;
  return check_bags(p.values, p.wide, v.items, p.offsets, batch_, bags.rows.data(), p.tables).kind == Wrong::Nothing;
}

void Lookup::pool(Pool& p, uint64_t out, int half) const {
  const int rank = stages_.rank, world = stages_.world();
  const int64_t sample = tables_[rank] * row_, block = std::max<int64_t>(1, kBlock / std::max<int64_t>(1, sample));
  const auto room = std::make_unique_for_overwrite<char[]>(std::min(block, local_) * sample);
  p.out = room.get(), p.out_stride = tables_[rank] * dim_;
  for (int k = 1; k < world; ++k) {
    const int d = (rank + k) % world;
    char* to = stages_.at(half, d) + local_ * begins_[rank] * row_;
    for (p.first = d * local_; p.first < (d + 1) * local_; p.first = p.end) {
      p.end = std::min(p.first + block, (d + 1) * local_);
      pool_bags(p);
      std::memcpy(to, room.get(), (p.end - p.first) * sample);
      to += (p.end - p.first) * sample;
    }
  }
  p.first = rank * local_, p.end = p.first + local_;
  p.out = reinterpret_cast<char*>(out) + begins_[rank] * row_, p.out_stride = total_ * dim_;
  pool_bags(p);
}

}  // namespace dovetail
