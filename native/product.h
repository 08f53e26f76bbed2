// Products of x [m, k] and w [n, k], transposed, by one thread.
#pragma once

#include <cstdint>

#include "isa.h"
#include "reduce.h"

namespace dovetail {

struct Product {
  DType type;  // F16, BF16 (multiplied and added up in fp32, rounded once; instructions for bf16 take subnormals for 0), F32
  const char* x;
  const char* w;
  char* out;  // [m, n]; all three without gaps, and none over another
  int64_t m, n, k;
  float* scratch = nullptr;  // [m, k], rows rounded up: the kernel's
};

bool multiplies(DType type);

// By the best instruction set that there is, or an older one.
void multiply(Product p, Isa isa = Isa::Avx512Bf16);

// Up to how many rows of x `multiply` is faster than torch's product on such a CPU, with n rows of w, all k long.
int64_t most_rows(DType type, int64_t n, int64_t k);

}  // namespace dovetail
