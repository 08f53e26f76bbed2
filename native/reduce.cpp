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
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return {avx512::reduce_items, avx512::pool_bags};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {avx2::reduce_items, avx2::pool_bags};
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

}  // namespace dovetail
