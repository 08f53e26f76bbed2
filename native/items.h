// How an element is kept, and the type it is computed in. Included by sources that are compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef DV_ISA
#define DV_ISA base
#endif

namespace dovetail::DV_ISA {
namespace {

template <class T>
struct Plain {
  using Store = T;
  using Value = T;
  static Value load(Store s) { return s; }
  static Store save(Value v) { return v; }
};

// GCC tells of the type before its C++ has it: from 12 on for x86, 13 elsewhere.
#if defined(__FLT16_MANT_DIG__) && (defined(__clang__) || __GNUC__ >= 13 || (__GNUC__ == 12 && defined(__x86_64__)))
struct Half {
  using Store = _Float16;
  using Value = float;
  static Value load(Store s) { return static_cast<float>(s); }
  static Store save(Value v) { return static_cast<_Float16>(v); }
};
#else
// The same bits from a compiler without the type (GCC below 12, clang below 15).
struct Half {
  using Store = uint16_t;
  using Value = float;
  static Value load(Store s) {
    const uint32_t sign = (s & 0x8000u) << 16, exponent = s & 0x7c00u, rest = s & 0x3ffu;
    uint32_t bits = exponent == 0x7c00 ? 0x7f800000u | rest << 13 | (rest ? 0x400000u : 0u) : (s & 0x7fffu) * 0x2000u + (112u << 23);
    if (exponent == 0) bits = bits_of(static_cast<float>(rest) * 0x1p-24f);
    bits |= sign;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  static Store save(Value v) {
    const uint32_t bits = bits_of(v), magnitude = bits & 0x7fffffff;
    uint32_t half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;  // to nearest, ties to even
    if (magnitude < 0x38800000) half = bits_of(__builtin_fabsf(v) + 0.5f) - bits_of(0.5f);   // below the normal ones: units of 2^-24
    if (magnitude >= 0x477ff000) half = 0x7c00;
    if (magnitude > 0x7f800000) half = 0x7e00 | (magnitude >> 13 & 0x3ff);
    return static_cast<Store>(half | (bits >> 16 & 0x8000));
  }
  static uint32_t bits_of(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bits;
  }
};
#endif

struct BFloat {
  using Store = uint16_t;
  using Value = float;
  static Value load(Store s) {
    const uint32_t bits = static_cast<uint32_t>(s) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  static Store save(Value v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    return static_cast<Store>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
};

}  // namespace
}  // namespace dovetail::DV_ISA
