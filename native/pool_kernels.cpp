// Pooling kernels; compiled once per instruction set (DV_ISA names the namespace), chosen at start-up by reduce.cpp.
// Rows of a bag are added in their order, so all instruction sets give the same bits.
#include "pool.h"

#include <algorithm>

#include "items.h"

namespace dovetail::DV_ISA {
namespace {

constexpr int64_t kAhead = 32;    // values ahead whose rows are fetched
constexpr int64_t kAheadOut = 8;  // samples ahead whose rows of the output are fetched: they lie apart
constexpr int64_t kItems = 128;   // accumulators at a time: they stay in registers where rows are fp32

template <int kWritten = 0, class V>
void fetch(const V* row, int64_t dim) {
  for (int64_t i = 0; i < std::min<int64_t>(dim * static_cast<int64_t>(sizeof(V)), 512); i += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(row) + i, kWritten);
}

template <class T, class I, bool kScaled, int kFull>
void bag(const typename T::Store* table, int64_t dim, int64_t column, int64_t width, const I* values, int64_t begin, int64_t end,
         int64_t last, const typename T::Store* scales, bool mean, typename T::Store* out) {
  using V = typename T::Value;
  V acc[kFull ? kFull : kItems] = {};
  const int64_t m = kFull ? kFull : width;
  for (int64_t k = begin; k < end; ++k) {
    if (column == 0 && k + kAhead < last) fetch(table + static_cast<int64_t>(values[k + kAhead]) * dim, dim);
    const typename T::Store* row = table + static_cast<int64_t>(values[k]) * dim + column;
    if constexpr (kScaled) {
      const V scale = T::load(scales[k]);
#pragma GCC ivdep
      for (int64_t i = 0; i < m; ++i) acc[i] += T::load(row[i]) * scale;
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < m; ++i) acc[i] += T::load(row[i]);
    }
  }
  if (mean && end - begin > 1) {
    const V count = static_cast<V>(end - begin);
#pragma GCC ivdep
    for (int64_t i = 0; i < m; ++i) acc[i] /= count;
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < m; ++i) out[i] = T::save(acc[i]);
}

template <class T, class I, bool kScaled>
void run(const Pool& p) {
  using S = typename T::Store;
  const auto* values = reinterpret_cast<const I*>(p.values);
  const auto* scales = reinterpret_cast<const S*>(p.scales);
  auto* out = reinterpret_cast<S*>(p.out);
  // Table by table, since its rows stay in a cache; samples lie apart in the output then, so these are fetched too.
  for (int t = 0; t < p.tables; ++t) {
    const auto* table = reinterpret_cast<const S*>(p.weights[t]);
    const int64_t* offsets = p.offsets + t * p.batch;
    const int64_t last = offsets[p.batch];  // of this table
    for (int64_t b = p.first; b < p.end; ++b) {
      S* row = out + (b - p.first) * p.out_stride + t * p.dim;
      if (b + kAheadOut < p.end) fetch<1>(row + kAheadOut * p.out_stride, p.dim);
      int64_t column = 0;
      for (; column + 128 <= p.dim; column += 128)
        bag<T, I, kScaled, 128>(table, p.dim, column, 128, values, offsets[b], offsets[b + 1], last, scales, p.mean, row + column);
      for (; column + 64 <= p.dim; column += 64)
        bag<T, I, kScaled, 64>(table, p.dim, column, 64, values, offsets[b], offsets[b + 1], last, scales, p.mean, row + column);
      for (; column + 32 <= p.dim; column += 32)
        bag<T, I, kScaled, 32>(table, p.dim, column, 32, values, offsets[b], offsets[b + 1], last, scales, p.mean, row + column);
      for (; column + 16 <= p.dim; column += 16)
        bag<T, I, kScaled, 16>(table, p.dim, column, 16, values, offsets[b], offsets[b + 1], last, scales, p.mean, row + column);
      if (column < p.dim)
        bag<T, I, kScaled, 0>(table, p.dim, column, p.dim - column, values, offsets[b], offsets[b + 1], last, scales, p.mean,
                                  row + column);
    }
  }
}

template <class T>
void by_kind(const Pool& p) {
  if (p.wide) return p.scales ? run<T, int64_t, true>(p) : run<T, int64_t, false>(p);
  return p.scales ? run<T, int32_t, true>(p) : run<T, int32_t, false>(p);
}

}  // namespace

void pool_bags(const Pool& p) {
  switch (p.type) {
    case DType::F16: return by_kind<Half>(p);
    case DType::BF16: return by_kind<BFloat>(p);
    case DType::F32: return by_kind<Plain<float>>(p);
    case DType::F64: return by_kind<Plain<double>>(p);
    default: return;  // the caller has refused it
  }
}

}  // namespace dovetail::DV_ISA
