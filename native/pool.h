// Pooled rows of tables: the sum (or mean) of the rows of each bag, written where the caller wants it.
#pragma once

#include <cstdint>

#include "reduce.h"

namespace dovetail {

struct Pool {
  DType type;                  // F16, BF16 (added up in fp32, rounded once), F32, F64
  bool wide;                   // values are 64 bits, otherwise 32
  bool mean;
  const char* const* weights;  // a table each, rows of `dim` items
  int tables;
  int64_t dim;
  const char* values;          // row numbers, known to be in range
  const int64_t* offsets;      // tables * batch + 1
  int64_t batch, first, end;   // of these samples, [first, end) are pooled
  const char* scales;          // one per value, or null
  char* out;                   // sample `first`; its tables follow each other
  int64_t out_stride;          // items from one sample to the next
};

void pool_bags(const Pool& p);

// What is wrong with bags, if anything: the first offset, or the first value, that can't be.
struct Wrong {
  enum Kind { Nothing, Offsets, Value } kind;
  int table;
  int64_t value;
};
Wrong check_bags(const char* values, bool wide, int64_t num_values, const int64_t* offsets, int64_t batch,
                 const int64_t* num_rows, int tables);

}  // namespace dovetail
