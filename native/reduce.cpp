#include "isa.h"
#include "pool.h"
#include "reduce.h"

namespace dovetail {

struct Kernels {
  void (*reduce)(DType, ReduceOp, char*, const char* const*, int, size_t);
  void (*pool)(const Pool&);
};

#define DECLARE_ISA(isa)                                                                  \
  namespace isa {                                                                         \
  void reduce_items(DType, ReduceOp, char*, const char* const*, int, size_t);             \
  void pool_bags(const Pool&);                                                            \
  }
DECLARE_ISA(base)
#if defined(__x86_64__)
DECLARE_ISA(avx2)
DECLARE_ISA(avx512)
#endif

namespace {
Kernels pick() {
#if defined(__x86_64__)
  if (best_isa() >= Isa::Avx512) return {avx512::reduce_items, avx512::pool_bags};
  if (best_isa() == Isa::Avx2) return {avx2::reduce_items, avx2::pool_bags};
#endif
  return {base::reduce_items, base::pool_bags};
}
const Kernels kernels = pick();
constexpr size_t kItemBytes[] = {1, 1, 2, 4, 8, 2, 4, 8, 1, 2, 2, 4, 8, 1, 1, 1, 1};
static_assert(sizeof kItemBytes / sizeof *kItemBytes == static_cast<size_t>(DType::Count));
}  // namespace

size_t item_bytes(DType type) { return kItemBytes[static_cast<int>(type)]; }

bool reducible(DType type, ReduceOp op) {
  if (op >= ReduceOp::And) return type <= DType::Bool;
  return !(type == DType::Bool && op == ReduceOp::Avg);
}

void reduce_items(DType type, ReduceOp op, char* dst, const char* const* sources, int num_sources, size_t n) {
  kernels.reduce(type, op, dst, sources, num_sources, n);
}

void pool_bags(const Pool& p) { kernels.pool(p); }

namespace {
template <class I>
Wrong check(const I* values, int64_t num_values, const int64_t* offsets, int64_t batch, const int64_t* num_rows, int tables) {
  const int64_t bags = batch * tables;
  int64_t falls = offsets[0] != 0 || offsets[bags] != num_values;
  for (int64_t b = 0; b < bags; ++b) falls |= offsets[b + 1] < offsets[b];
  if (falls) return {Wrong::Offsets, 0, 0};
  for (int t = 0; t < tables; ++t) {
    const auto rows = static_cast<uint64_t>(num_rows[t]);
    const int64_t begin = offsets[t * batch], end = offsets[(t + 1) * batch];
    uint64_t signs = 0;  // of v and of rows - 1 - v: every instruction set has these in vectors, unsigned compares few
    for (int64_t k = begin; k < end; ++k) {
      const auto v = static_cast<uint64_t>(static_cast<int64_t>(values[k]));
      signs |= v | (rows - 1 - v);
    }
    if (!(signs >> 63)) continue;
    for (int64_t k = begin; k < end; ++k)
      if (static_cast<uint64_t>(static_cast<int64_t>(values[k])) >= rows) return {Wrong::Value, t, static_cast<int64_t>(values[k])};
  }
  return {Wrong::Nothing, 0, 0};
}
}  // namespace

Wrong check_bags(const char* values, bool wide, int64_t num_values, const int64_t* offsets, int64_t batch,
                 const int64_t* num_rows, int tables) {
  if (wide) return check(reinterpret_cast<const int64_t*>(values), num_values, offsets, batch, num_rows, tables);
  return check(reinterpret_cast<const int32_t*>(values), num_values, offsets, batch, num_rows, tables);
}

}  // namespace dovetail
