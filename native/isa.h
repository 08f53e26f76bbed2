// The instruction sets that kernels are compiled for, and the best one that this CPU has.
#pragma once

namespace dovetail {

enum class Isa { Base, Avx2, Avx512, Avx512Bf16 };

inline Isa best_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return __builtin_cpu_supports("avx512bf16") ? Isa::Avx512Bf16 : Isa::Avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return Isa::Avx2;
#endif
  return Isa::Base;
}

}  // namespace dovetail
