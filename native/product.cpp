#include "product.h"

#include <algorithm>
#include <vector>

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

Isa best() {
#if defined(DV_HAVE_AVX512BF16)
  return best_isa();
#else
  return std::min(best_isa(), Isa::Avx512);
#endif
}

#if defined(__x86_64__)
bool is_intel() { return __builtin_cpu_is("intel"); }
bool has_half_floats() { return __builtin_cpu_supports("avx512fp16"); }
#else
bool is_intel() { return false; }
bool has_half_floats() { return true; }
#endif

}  // namespace

bool multiplies(DType type) { return type == DType::F16 || type == DType::BF16 || type == DType::F32; }

void multiply(Product p, Isa isa) {
  thread_local std::vector<float> scratch;  // not the kernels': what they make of std's templates, others could be linked to
  const auto needed = static_cast<size_t>(p.m * ((p.k + kMostStep - 1) / kMostStep * kMostStep));
  if ((p.type != DType::F32 || p.k % kMostStep) && scratch.size() < needed) scratch.resize(needed);
  p.scratch = scratch.data();
  switch (std::min(isa, best())) {
#if defined(__x86_64__)
#if defined(DV_HAVE_AVX512BF16)
    case Isa::Avx512Bf16: return avx512bf16::multiply(p);
#endif
    case Isa::Avx512: return avx512::multiply(p);
    case Isa::Avx2: return avx2::multiply(p);
#endif
    default: return base::multiply(p);
  }
}

// Measured on a Zen 5 core, each instruction set against what torch's libraries have for it: MKL uses AVX-512 on Intel's CPUs
// only, and where a library has instructions for 16-bit floats it packs w for more rows.
int64_t most_rows(DType type) {
  const Isa isa = best();
  if (isa == Isa::Base) return 0;
  const bool wider = isa >= Isa::Avx512 && !is_intel();
  switch (type) {
    case DType::F32: return wider ? 64 : 4;
    case DType::F16: return has_half_floats() ? 4 : wider ? 64 : 15;
    case DType::BF16: return isa == Isa::Avx512Bf16 ? 8 : 15;
    default: return 0;
  }
}

}  // namespace dovetail
