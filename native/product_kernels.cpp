// Products; compiled once per instruction set (DV_ISA names the namespace), chosen at start-up by product.cpp. w is read once for
// all rows of x that it is given, and as it lies: for few rows reading it is the work, and to pack it first, as libraries do, would
// not pay.
// A result is a sum of products by lanes of a vector, in their order, and then of the lanes: its bits depend on the instruction
// set, not on m or n.
#include <type_traits>

#include "items.h"
#include "product.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace dovetail::DV_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 4;  // a tile of 4 x 4 results and what it needs is in registers
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRows = 2;
#else
constexpr int kLanes = 4, kRows = 2;
#endif
constexpr int64_t kLineBytes = 64, kNearBytes = 16 << 10;
typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef float Four __attribute__((vector_size(16)));

template <class V>
V read(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The first `count` items, and zeros.
template <class V, class S>
V read_first(const S* p, int64_t count) {
#if defined(__AVX512F__)
  const auto mask = (uint64_t{1} << count) - 1;
  if constexpr (sizeof(S) == 4) return reinterpret_cast<V>(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p));
  if constexpr (sizeof(S) == 2 && sizeof(V) == 64) return reinterpret_cast<V>(_mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask), p));
  if constexpr (sizeof(S) == 2 && sizeof(V) == 32) return reinterpret_cast<V>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), p));
#else
  S rest[sizeof(V) / sizeof(S)] = {};
  std::memcpy(rest, p, count * sizeof(S));
  return read<V>(rest);
#endif
}

// How `kStep` items of a row are multiplied. Rows of x are made ready (`prepare`): floats, in the order in which w is read. They may
// stay as they are if they are such already.

struct Floats {
  using Item = Plain<float>;
  using Input = float;
  using Operand = Vec;
  static constexpr int kStep = kLanes;
  static Operand weights(const float* p) { return read<Vec>(p); }
  static Operand weights(const float* p, int64_t count) { return read_first<Vec>(p, count); }
  static Operand inputs(const float* p) { return read<Vec>(p); }
  static void add(Vec& sum, const Operand& x, const Operand& w) { sum += x * w; }
  static void prepare(const float* from, float* to) { std::memcpy(to, from, kStep * sizeof *to); }
};

#if defined(__AVX512BF16__)
struct BFloats {
  using Item = BFloat;
  using Input = uint16_t;
  using Operand = __m512bh;
  static constexpr int kStep = 2 * kLanes;
  static Operand weights(const uint16_t* p) { return read<Operand>(p); }
  static Operand weights(const uint16_t* p, int64_t count) { return read_first<Operand>(p, count); }
  static Operand inputs(const uint16_t* p) { return read<Operand>(p); }
  static void add(Vec& sum, const Operand& x, const Operand& w) {
    sum = reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), x, w));
  }
  static void prepare(const uint16_t* from, uint16_t* to) { std::memcpy(to, from, kStep * sizeof *to); }
};
#else
// Two items lie in each word: the lower one is a float once it is shifted, the upper one without the lower.
struct BFloats {
  using Item = BFloat;
  using Input = float;
  struct Operand {
    Vec lower, upper;
  };
  static constexpr int kStep = 2 * kLanes;
  static Operand weights(const uint16_t* p) { return apart(read<Words>(p)); }
  static Operand weights(const uint16_t* p, int64_t count) { return apart(read_first<Words>(p, count)); }
  static Operand apart(const Words& both) {
    return {reinterpret_cast<Vec>(both << 16), reinterpret_cast<Vec>(both & 0xffff0000u)};
  }
  static Operand inputs(const float* p) { return {read<Vec>(p), read<Vec>(p + kLanes)}; }
  static void add(Vec& sum, const Operand& x, const Operand& w) {
    sum += x.lower * w.lower;
    sum += x.upper * w.upper;
  }
  static void prepare(const uint16_t* from, float* to) {
    for (int i = 0; i < kLanes; ++i) to[i] = BFloat::load(from[2 * i]), to[kLanes + i] = BFloat::load(from[2 * i + 1]);
  }
};
#endif

struct Halves {
  using Item = Half;
  using Input = float;
  using Operand = Vec;
  static constexpr int kStep = kLanes;
#if defined(__AVX512F__)
  using Packed = __m256i;
  static Operand longer(Packed p) { return reinterpret_cast<Vec>(_mm512_maskz_cvtph_ps(0xffff, p)); }
#elif defined(__F16C__)
  using Packed = __m128i;
  static Operand longer(Packed p) { return reinterpret_cast<Vec>(_mm256_cvtph_ps(p)); }
#else
  struct Packed {
    Half::Store items[kLanes];
  };
  static Operand longer(const Packed& p) {
    Vec v;
    for (int i = 0; i < kLanes; ++i) v[i] = Half::load(p.items[i]);
    return v;
  }
#endif
  static Operand weights(const Half::Store* p) { return longer(read<Packed>(p)); }
  static Operand weights(const Half::Store* p, int64_t count) { return longer(read_first<Packed>(p, count)); }
  static Operand inputs(const float* p) { return read<Vec>(p); }
  static void add(Vec& sum, const Operand& x, const Operand& w) { sum += x * w; }
  static void prepare(const Half::Store* from, float* to) {
    for (int i = 0; i < kStep; ++i) to[i] = Half::load(from[i]);
  }
};

// Lanes I of a and b, which are counted on from a's.
template <int... I, class V>
[[gnu::always_inline]] inline auto lanes(const V& a, const V& b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, I...);
#else
  typedef float Found __attribute__((vector_size(sizeof...(I) * 4)));
  typedef int Places __attribute__((vector_size(sizeof...(I) * 4)));
  constexpr int kMany = sizeof(V) / 4;
  if constexpr (sizeof...(I) == kMany)
    return __builtin_shuffle(a, b, Places{I...});
  else
    return Found{(I < kMany ? a : b)[I % kMany]...};
#endif
}

// Halves added up, until four lanes are left.
Four fold(Vec v) {
#if defined(__AVX512F__)
  typedef float Eight __attribute__((vector_size(32)));
  const Eight h = lanes<0, 1, 2, 3, 4, 5, 6, 7>(v, v) + lanes<8, 9, 10, 11, 12, 13, 14, 15>(v, v);
  return lanes<0, 1, 2, 3>(h, h) + lanes<4, 5, 6, 7>(h, h);
#elif defined(__AVX2__)
  return lanes<0, 1, 2, 3>(v, v) + lanes<4, 5, 6, 7>(v, v);
#else
  return v;
#endif
}

// The sums of four vectors' lanes, side by side.
Four sums(const Four& a, const Four& b, const Four& c, const Four& d) {
  const Four ab = lanes<0, 4, 1, 5>(a, b) + lanes<2, 6, 3, 7>(a, b);
  const Four cd = lanes<0, 4, 1, 5>(c, d) + lanes<2, 6, 3, 7>(c, d);
  return lanes<0, 1, 4, 5>(ab, cd) + lanes<2, 3, 6, 7>(ab, cd);
}

#if defined(__AVX512F__)
// The same of sixteen, which are as many as a vector has: all are added up at once, each in the order of `fold` and `sums`.
[[gnu::always_inline]] inline Vec sums(const Vec* v) {
  const auto halves = [](Vec a, Vec b) {
    return lanes<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(a, b) +
           lanes<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(a, b);
  };
  const auto quarters = [&](const Vec* p) {  // of every fourth
    const Vec a = halves(p[0], p[4]), b = halves(p[8], p[12]);
    return lanes<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(a, b) +
           lanes<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(a, b);
  };
  const auto pairs = [](Vec a, Vec b) {
    return lanes<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(a, b) +
           lanes<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(a, b);
  };
  const Vec a = pairs(quarters(v), quarters(v + 1)), b = pairs(quarters(v + 2), quarters(v + 3));
  return lanes<0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30>(a, b) +
         lanes<1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31>(a, b);
}
#endif

// M rows of x by N rows of w. Rows of x are `pitch` items apart.
template <class T, int M, int N>
void tile(const typename T::Input* x, int64_t pitch, const typename T::Item::Store* w, int64_t k, typename T::Item::Store* out, int64_t n) {
  using S [[maybe_unused]] = typename T::Item::Store;
  Vec sum[M * N];
#pragma GCC unroll 16
  for (int c = 0; c < M * N; ++c) sum[c] = Vec{};
  // `count`: nothing, or how many items are left.
  const auto step = [&](int64_t i, auto... count) __attribute__((always_inline)) {
    typename T::Operand weights[N];
#pragma GCC unroll 16
    for (int b = 0; b < N; ++b) weights[b] = T::weights(w + b * k + i, count...);
#pragma GCC unroll 16
    for (int a = 0; a < M; ++a) {
      const typename T::Operand input = T::inputs(x + a * pitch + i);
#pragma GCC unroll 16
      for (int b = 0; b < N; ++b) T::add(sum[a * N + b], input, weights[b]);
    }
  };
  int64_t i = 0;
  for (; i + T::kStep <= k; i += T::kStep) step(i);
  if (i < k) step(i, k - i);
#if defined(__AVX512F__)
  if constexpr (M * N == kLanes) {
    const Vec all = sums(sum);
    S found[kLanes];
    for (int c = 0; c < kLanes; ++c) found[c] = T::Item::save(all[c]);
    for (int a = 0; a < M; ++a) std::memcpy(out + a * n, found + a * N, N * sizeof(S));
    return;
  }
#endif
  for (int a = 0; a < M; ++a)
    if constexpr (N == 1) {
      const Four one = fold(sum[a]);
      out[a * n] = T::Item::save(sums(one, one, one, one)[0]);
    } else {
      for (int b = 0; b < N; b += 4) {
        const Vec* v = sum + a * N + b;
        const Four found = sums(fold(v[0]), fold(v[1]), fold(v[2]), fold(v[3]));
        for (int c = 0; c < 4; ++c) out[a * n + b + c] = T::Item::save(found[c]);
      }
    }
}

// The first `m` rows, or M of them.
template <class T, int M, int N, class... A>
void rows(int64_t m, const A&... arguments) {
  if constexpr (M > 1)
    if (m < M) return rows<T, M - 1, N>(m, arguments...);
  tile<T, M, N>(arguments...);
}

template <class T, int M, int N>
void columns(const Product& p, const typename T::Input* x, int64_t pitch) {
  using S = typename T::Item::Store;
  const auto* w = reinterpret_cast<const S*>(p.w);
  auto* out = reinterpret_cast<S*>(p.out);
  // Results of a row that share a cache line are made one after the other, if what they need of w is at hand: rows of `out` often
  // are a power of two apart, and so many lines would not stay in a cache.
  int64_t group = N;
  while (group < kLineBytes / static_cast<int64_t>(sizeof(S)) && 2 * group * p.k * static_cast<int64_t>(sizeof(S)) <= kNearBytes) group *= 2;
  const int64_t whole = p.n / N * N;
  int64_t j = 0;
  for (; j < whole; j += group)
    for (int64_t r = 0; r < p.m; r += M)
      for (int64_t c = j; c < j + group && c < whole; c += N)
        rows<T, M, N>(p.m - r, x + r * pitch, pitch, w + c * p.k, p.k, out + r * p.n + c, p.n);
  for (j = whole; j < p.n; ++j)
    for (int64_t r = 0; r < p.m; r += M) rows<T, M, 1>(p.m - r, x + r * pitch, pitch, w + j * p.k, p.k, out + r * p.n + j, p.n);
}

template <class T>
void run(const Product& p) {
  using S = typename T::Item::Store;
  using I = typename T::Input;
  const auto* x = reinterpret_cast<const I*>(p.x);
  int64_t pitch = p.k;
  if (!std::is_same_v<I, S> || p.k % T::kStep) {
    pitch = (p.k + T::kStep - 1) / T::kStep * T::kStep;
    const auto* from = reinterpret_cast<const S*>(p.x);
    auto* to = reinterpret_cast<I*>(p.scratch);
    x = to;
    for (int64_t r = 0; r < p.m; ++r, from += p.k, to += pitch) {
      int64_t i = 0;
      for (; i + T::kStep <= p.k; i += T::kStep) T::prepare(from + i, to + i);
      if (i == p.k) continue;
      S rest[T::kStep] = {};
      std::memcpy(rest, from + i, (p.k - i) * sizeof(S));
      T::prepare(rest, to + i);
    }
  }
  if (p.m == 1) return columns<T, 1, 8>(p, x, pitch);
  if (p.m == 2 && kRows == 4) return columns<T, 2, 8>(p, x, pitch);
  return columns<T, kRows, 4>(p, x, pitch);
}

}  // namespace

void multiply(const Product& p) {
  switch (p.type) {
    case DType::F16: return run<Halves>(p);
    case DType::BF16: return run<BFloats>(p);
    case DType::F32: return run<Floats>(p);
    default: return;  // the caller has refused it
  }
}

}  // namespace dovetail::DV_ISA
