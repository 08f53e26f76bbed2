#include "move.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dovetail {

size_t streaming_bytes = size_t{1} << 20;

#if defined(__x86_64__)
namespace {

// Non-temporal stores write whole lines without reading them first. Two destinations share one read of the source.
// dst (and dst2) are 64-byte aligned, n is a multiple of 256. Ends with a fence: non-temporal stores are not ordered
// by the release store of the signal that follows.
template <bool kTwo>
__attribute__((target("avx512f"))) void stream512(char* dst, char* dst2, const char* src, size_t n) {
  for (size_t i = 0; i < n; i += 256) {
    _mm_prefetch(src + i + 1024, _MM_HINT_T0);
    _mm_prefetch(src + i + 1088, _MM_HINT_T0);
    _mm_prefetch(src + i + 1152, _MM_HINT_T0);
    _mm_prefetch(src + i + 1216, _MM_HINT_T0);
    const __m512i a = _mm512_loadu_si512(src + i);
    const __m512i b = _mm512_loadu_si512(src + i + 64);
    const __m512i c = _mm512_loadu_si512(src + i + 128);
    const __m512i d = _mm512_loadu_si512(src + i + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 192), d);
    if (kTwo) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst2 + i), a);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst2 + i + 64), b);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst2 + i + 128), c);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst2 + i + 192), d);
    }
  }
  _mm_sfence();
}

template <bool kTwo>
__attribute__((target("avx2"))) void stream256(char* dst, char* dst2, const char* src, size_t n) {
  for (size_t i = 0; i < n; i += 64) {
    _mm_prefetch(src + i + 512, _MM_HINT_T0);
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 32), b);
    if (kTwo) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(dst2 + i), a);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(dst2 + i + 32), b);
    }
  }
  _mm_sfence();
}

using Stream = void (*)(char*, char*, const char*, size_t);

template <bool kTwo>
Stream pick_stream() {
  if (__builtin_cpu_supports("avx512f")) return stream512<kTwo>;
  if (__builtin_cpu_supports("avx2")) return stream256<kTwo>;
  return nullptr;
}

const Stream stream_one = pick_stream<false>();
const Stream stream_two = pick_stream<true>();

size_t head_of(const char* p, size_t n) { return std::min(n, (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64); }

}  // namespace

void copy_bytes(char* dst, const char* src, size_t n, bool streaming) {
  if (dst == src || n == 0) return;
  if (!streaming || !stream_one || n < 4096) {
    std::memcpy(dst, src, n);
    return;
  }
  const size_t head = head_of(dst, n);
  std::memcpy(dst, src, head);
  const size_t body = (n - head) / 256 * 256;
  stream_one(dst + head, nullptr, src + head, body);
  std::memcpy(dst + head + body, src + head + body, n - head - body);
}

void broadcast_bytes(char* dst, char* dst2, const char* src, size_t n, bool streaming) {
  const bool same_phase = reinterpret_cast<uintptr_t>(dst) % 64 == reinterpret_cast<uintptr_t>(dst2) % 64;
  if (streaming && stream_two && same_phase && n >= 4096 && dst != src && dst2 != src) {
    const size_t head = head_of(dst, n);
    const size_t body = (n - head) / 256 * 256;
    std::memcpy(dst, src, head);
    std::memcpy(dst2, src, head);
    stream_two(dst + head, dst2 + head, src + head, body);
    std::memcpy(dst + head + body, src + head + body, n - head - body);
    std::memcpy(dst2 + head + body, src + head + body, n - head - body);
    return;
  }
  constexpr size_t kBlock = 16 << 10;  // stays in L1 between its two uses
  for (size_t i = 0; i < n; i += kBlock) {
    const size_t m = std::min(kBlock, n - i);
    copy_bytes(dst + i, src + i, m, false);
    copy_bytes(dst2 + i, src + i, m, false);
  }
}
#else
void copy_bytes(char* dst, const char* src, size_t n, bool) {
  if (dst != src) std::memcpy(dst, src, n);
}

void broadcast_bytes(char* dst, char* dst2, const char* src, size_t n, bool) {
  constexpr size_t kBlock = 16 << 10;
  for (size_t i = 0; i < n; i += kBlock) {
    const size_t m = std::min(kBlock, n - i);
    copy_bytes(dst + i, src + i, m, false);
    copy_bytes(dst2 + i, src + i, m, false);
  }
}
#endif

void copy_rows(char* dst, const char* src, size_t rows, size_t row_bytes, size_t dst_pitch) {
  for (size_t r = 0; r < rows; ++r) std::memcpy(dst + r * dst_pitch, src + r * row_bytes, row_bytes);
}

void swap_bytes(char* a, char* b, size_t n) {
  alignas(64) char block[4096];
  for (size_t i = 0; i < n; i += sizeof block) {
    const size_t m = std::min(sizeof block, n - i);
    std::memcpy(block, a + i, m);
    std::memcpy(a + i, b + i, m);
    std::memcpy(b + i, block, m);
  }
}

}  // namespace dovetail
