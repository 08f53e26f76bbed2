// Reductions: n sources, read in one pass in the given order, to one destination. The numbers mirror plan/step.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dovetail {

enum class ReduceOp : uint8_t { Sum, Avg, Product, Min, Max, And, Or, Xor };

enum class DType : uint8_t {
  U8, I8, I16, I32, I64, U16, U32, U64, Bool, F16, BF16, F32, F64, F8E4M3FN, F8E5M2, F8E4M3FNUZ, F8E5M2FNUZ, Count
};

size_t item_bytes(DType type);
bool reducible(DType type, ReduceOp op);  // bitwise ops are for integers and bool; avg is not for bool

// dst may be one of the sources exactly; any other overlap is an error the caller has excluded. n counts elements.
void reduce_items(DType type, ReduceOp op, char* dst, const char* const* sources, int num_sources, size_t n);

}  // namespace dovetail
