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

struct Half {
  using Store = _Float16;
  using Value = float;
  static Value load(Store s) { return static_cast<float>(s); }
  static Store save(Value v) { return static_cast<_Float16>(v); }
};

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
