// Reduction kernels; compiled once per instruction set (DV_ISA names the namespace), chosen at start-up by reduce.cpp.
// Same source, same order of operations, -ffp-contract=off: all instruction sets give the same bits.
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "items.h"
#include "reduce.h"

namespace dovetail::DV_ISA {
namespace {

constexpr size_t kBlock = 1024;  // elements: the accumulators stay in L1

// 8-bit floats by their definition: E exponent bits, M mantissa bits. FNUZ: no infinity, no -0, NaN is 0x80, bias one
// larger. FN (e4m3): no infinity, NaN is 0x7f. e5m2 is IEEE-like. Values out of range become what torch 2.13 makes of
// them: NaN for FNUZ, infinity for e5m2, the largest number for e4m3fn.
template <int E, int M, bool kFnuz, bool kInf>
struct Tiny {
  using Store = uint8_t;
  using Value = float;
  static constexpr int kBias = (1 << (E - 1)) - (kFnuz ? 0 : 1);
  static Value load(Store s) {
    if (kFnuz && s == 0x80) return std::numeric_limits<float>::quiet_NaN();
    const int exponent = (s >> M) & ((1 << E) - 1);
    const int mantissa = s & ((1 << M) - 1);
    const bool top = exponent == (1 << E) - 1;
    float magnitude;
    if (!kFnuz && kInf && top)
      magnitude = mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    else if (!kFnuz && !kInf && top && mantissa == (1 << M) - 1)
      magnitude = std::numeric_limits<float>::quiet_NaN();
    else if (exponent == 0)
      magnitude = std::ldexp(static_cast<float>(mantissa), 1 - kBias - M);
    else
      magnitude = std::ldexp(static_cast<float>(mantissa + (1 << M)), exponent - kBias - M);
    return s & 0x80 ? -magnitude : magnitude;
  }
  static Store save(Value v) {
    const Store sign = std::signbit(v) ? 0x80 : 0;
    const Store nan = kFnuz ? 0x80 : static_cast<Store>(sign | 0x7f);
    if (std::isnan(v)) return nan;
    const Store overflow = kFnuz  ? nan
                           : kInf ? static_cast<Store>(sign | (((1 << E) - 1) << M))
                                  : static_cast<Store>(sign | 0x7e);
    const float a = std::fabs(v);
    if (std::isinf(a)) return overflow;
    int exponent;
    std::frexp(a, &exponent);                                // a = f * 2^exponent, f in [0.5, 1)
    const int scale = exponent - 1 < 1 - kBias ? 1 - kBias : exponent - 1;
    const float units = std::nearbyint(std::ldexp(a, M - scale));  // ties to even
    int code = static_cast<int>(units) + ((scale + kBias - 1) << M);
    if (units == 0) code = 0;
    const int largest = kFnuz ? 0x7f : (kInf ? (((1 << E) - 1) << M) - 1 : 0x7e);
    if (code > largest) return overflow;
    return kFnuz && code == 0 ? 0 : static_cast<Store>(sign | code);
  }
};

// --- operations --------------------------------------------------------------------------------------------------------

template <class V>
V wrap_add(V a, V b) {
  if constexpr (std::is_integral_v<V>) {
    using U = std::make_unsigned_t<V>;
    return static_cast<V>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
  }
}

template <class V>
V wrap_mul(V a, V b) {
  if constexpr (std::is_integral_v<V>) {
    using U = std::conditional_t<(sizeof(V) < 4), uint32_t, std::make_unsigned_t<V>>;  // no promotion to int
    return static_cast<V>(static_cast<U>(a) * static_cast<U>(b));
  } else {
    return a * b;
  }
}

template <ReduceOp kOp, class V>
inline V combine(V a, V b) {
  if constexpr (kOp == ReduceOp::Sum || kOp == ReduceOp::Avg) return wrap_add(a, b);
  if constexpr (kOp == ReduceOp::Product) return wrap_mul(a, b);
  // A NaN on either side gives NaN: b < a is false for NaN a, so a stays; b != b catches the other side.
  if constexpr (kOp == ReduceOp::Min) return (b < a || b != b) ? b : a;
  if constexpr (kOp == ReduceOp::Max) return (b > a || b != b) ? b : a;
  if constexpr (kOp == ReduceOp::And) return a & b;
  if constexpr (kOp == ReduceOp::Or) return a | b;
  if constexpr (kOp == ReduceOp::Xor) return a ^ b;
}

template <class T, ReduceOp kOp>
void run(char* dst_bytes, const char* const* sources, int num_sources, size_t n) {
  using S = typename T::Store;
  using V = typename T::Value;
  S* dst = reinterpret_cast<S*>(dst_bytes);
  const auto source = [&](int k) { return reinterpret_cast<const S*>(sources[k]); };
  if (num_sources == 1) {
    if (dst != source(0)) std::memcpy(dst, source(0), n * sizeof(S));
    return;
  }
  if (num_sources == 2 && kOp != ReduceOp::Avg) {
    const S* a = source(0);
    const S* b = source(1);
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) dst[i] = T::save(combine<kOp>(T::load(a[i]), T::load(b[i])));
    return;
  }
  V acc[kBlock];
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t m = n - begin < kBlock ? n - begin : kBlock;
    const S* a = source(0) + begin;
    const S* b = source(1) + begin;
#pragma GCC ivdep
    for (size_t i = 0; i < m; ++i) acc[i] = combine<kOp>(T::load(a[i]), T::load(b[i]));
    for (int k = 2; k < num_sources; ++k) {
      const S* s = source(k) + begin;
#pragma GCC ivdep
      for (size_t i = 0; i < m; ++i) acc[i] = combine<kOp>(acc[i], T::load(s[i]));
    }
    S* out = dst + begin;
    if constexpr (kOp == ReduceOp::Avg) {
      const V divisor = static_cast<V>(num_sources);
#pragma GCC ivdep
      for (size_t i = 0; i < m; ++i) out[i] = T::save(static_cast<V>(acc[i] / divisor));
    } else {
#pragma GCC ivdep
      for (size_t i = 0; i < m; ++i) out[i] = T::save(acc[i]);
    }
  }
}

template <class T>
void by_op(ReduceOp op, char* dst, const char* const* sources, int num_sources, size_t n) {
  switch (op) {
    case ReduceOp::Sum: return run<T, ReduceOp::Sum>(dst, sources, num_sources, n);
    case ReduceOp::Avg: return run<T, ReduceOp::Avg>(dst, sources, num_sources, n);
    case ReduceOp::Product: return run<T, ReduceOp::Product>(dst, sources, num_sources, n);
    case ReduceOp::Min: return run<T, ReduceOp::Min>(dst, sources, num_sources, n);
    case ReduceOp::Max: return run<T, ReduceOp::Max>(dst, sources, num_sources, n);
    default: break;
  }
  if constexpr (std::is_integral_v<typename T::Value>) {
    switch (op) {
      case ReduceOp::And: return run<T, ReduceOp::And>(dst, sources, num_sources, n);
      case ReduceOp::Or: return run<T, ReduceOp::Or>(dst, sources, num_sources, n);
      case ReduceOp::Xor: return run<T, ReduceOp::Xor>(dst, sources, num_sources, n);
      default: break;
    }
  }
}

// bool: sum and max are "or", product and min are "and", as NCCL has it. Stored as 0 or 1.
void bools(ReduceOp op, char* dst, const char* const* sources, int num_sources, size_t n) {
  const bool is_and = op == ReduceOp::Product || op == ReduceOp::Min || op == ReduceOp::And;
  const ReduceOp bitwise = op == ReduceOp::Xor ? op : is_and ? ReduceOp::And : ReduceOp::Or;
  by_op<Plain<uint8_t>>(bitwise, dst, sources, num_sources, n);
}

}  // namespace

void reduce_items(DType type, ReduceOp op, char* dst, const char* const* sources, int num_sources, size_t n) {
  switch (type) {
    case DType::U8: return by_op<Plain<uint8_t>>(op, dst, sources, num_sources, n);
    case DType::I8: return by_op<Plain<int8_t>>(op, dst, sources, num_sources, n);
    case DType::I16: return by_op<Plain<int16_t>>(op, dst, sources, num_sources, n);
    case DType::I32: return by_op<Plain<int32_t>>(op, dst, sources, num_sources, n);
    case DType::I64: return by_op<Plain<int64_t>>(op, dst, sources, num_sources, n);
    case DType::U16: return by_op<Plain<uint16_t>>(op, dst, sources, num_sources, n);
    case DType::U32: return by_op<Plain<uint32_t>>(op, dst, sources, num_sources, n);
    case DType::U64: return by_op<Plain<uint64_t>>(op, dst, sources, num_sources, n);
    case DType::Bool: return bools(op, dst, sources, num_sources, n);
    case DType::F16: return by_op<Half>(op, dst, sources, num_sources, n);
    case DType::BF16: return by_op<BFloat>(op, dst, sources, num_sources, n);
    case DType::F32: return by_op<Plain<float>>(op, dst, sources, num_sources, n);
    case DType::F64: return by_op<Plain<double>>(op, dst, sources, num_sources, n);
    case DType::F8E4M3FN: return by_op<Tiny<4, 3, false, false>>(op, dst, sources, num_sources, n);
    case DType::F8E5M2: return by_op<Tiny<5, 2, false, true>>(op, dst, sources, num_sources, n);
    case DType::F8E4M3FNUZ: return by_op<Tiny<4, 3, true, false>>(op, dst, sources, num_sources, n);
    case DType::F8E5M2FNUZ: return by_op<Tiny<5, 2, true, false>>(op, dst, sources, num_sources, n);
    case DType::Count: return;
  }
}

}  // namespace dovetail::DV_ISA
