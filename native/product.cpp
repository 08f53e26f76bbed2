#include "product.h"

#include <algorithm>
#include <limits>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace dovetail {

#define DECLARE_ISA(isa)           \
  namespace isa {                  \
  void multiply(const Product& p); \
  }
DECLARE_ISA(base)
#if defined(__x86_64__)
DECLARE_ISA(avx2)
DECLARE_ISA(avx512)
#if defined(DV_HAVE_AVX512BF16)
DECLARE_ISA(avx512bf16)
#endif
#endif

namespace {

constexpr int64_t kMostStep = 32;  // items of a row that a kernel takes at once
constexpr int64_t kLeastRows = 16, kMostRows = 128, kBlockItems = 1 << 18;  // of x: they stay in a cache while all of w goes by

Isa best() {
#if defined(DV_HAVE_AVX512BF16)
  return best_isa();
#else
  return std::min(best_isa(), Isa::Avx512);
#endif
}

#if defined(__x86_64__)
bool is_intel() { return __builtin_cpu_is("intel"); }
bool has_half_floats() {  // AVX512-FP16, which GCC knows by name from 12 on
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 23 & 1;
}
#else
bool is_intel() { return false; }
bool has_half_floats() { return true; }
#endif

auto kernel_of(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
#if defined(DV_HAVE_AVX512BF16)
    case Isa::Avx512Bf16: return avx512bf16::multiply;
#endif
    case Isa::Avx512: return avx512::multiply;
    case Isa::Avx2: return avx2::multiply;
#endif
    default: return base::multiply;
  }
}

}  // namespace

bool multiplies(DType type) { return type == DType::F16 || type == DType::BF16 || type == DType::F32; }

void multiply(Product p, Isa isa) {
  thread_local std::vector<float> scratch;  // not the kernels': what they make of std's templates, others could be linked to
  const int64_t size = p.type == DType::F32 ? 4 : 2, rows = p.m;
  const int64_t block = std::clamp(kBlockItems / std::max<int64_t>(p.k, 1), kLeastRows, kMostRows);
  const auto needed = static_cast<size_t>(std::min(rows, block) * ((p.k + kMostStep - 1) / kMostStep * kMostStep));
  if ((p.type != DType::F32 || p.k % kMostStep) && scratch.size() < needed) scratch.resize(needed);
  p.scratch = scratch.data();
  const auto kernel = kernel_of(std::min(isa, best()));
  for (int64_t done = 0; done < rows; done += p.m, p.x += p.m * p.k * size, p.out += p.m * p.n * size) {
    p.m = std::min(rows - done, block);
    kernel(p);
  }
}

// Measured on a Zen 5 core, each instruction set against what torch's libraries have for it. MKL uses AVX-512 on Intel's CPUs only,
// and nothing multiplies fp16 without instructions for it: there products of ours are faster, unless rows are so short, or so few
// of w, that adding up lanes, or making x longer, is the work. Elsewhere few rows are, as long as reading w is the work: libraries
// pack it first, which pays for more rows.
int64_t most_rows(DType type, int64_t n, int64_t k) {
  constexpr int64_t kAll = std::numeric_limits<int64_t>::max(), kWide = 2048;
  const Isa isa = best();
  if (isa == Isa::Base || k < 1) return 0;
  if (isa == Isa::Avx2 && k % kMostStep) return 0;  // the rest of a row goes by way of the stack there
  const bool wider = isa >= Isa::Avx512 && !is_intel(), is_wide = n >= 8;
  const bool is_long = k >= 64 || (k >= 32 && k % 16 == 0);
  switch (type) {
    case DType::F32: return wider && is_wide && is_long ? kAll : 4;
    case DType::F16: return has_half_floats() || !is_wide ? 4 : wider && k >= 64 ? kAll : 15;
    case DType::BF16: return isa != Isa::Avx512Bf16 ? 15 : is_intel() || n > kWide || k < 32 ? 8 : 16;
    default: return 0;
  }
}

}  // namespace dovetail
