// Reading tensors without going through Python attributes, by DLPack's C exchange interface (torch >= 2.11 has it), and
// a table from shapes to bound calls: a blocking call on a shape seen before is one native call.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "caller.h"
#include "reduce.h"

namespace dovetail {

struct TensorInfo {
  uint64_t pointer;
  int64_t items;
  uint32_t type;  // DLPack's code and bits
  int ndim;
};
constexpr uint32_t kInt32 = 32, kInt64 = 64;

// False if it is not a plain, contiguous CPU tensor of a non-complex type: the slow path says what is wrong with it.
bool read_tensor(nb::handle object, TensorInfo& info);

// A plain, contiguous matrix in any memory; a parameter is a tensor here.
struct Matrix {
  const char* data;
  int64_t sizes[2];
  uint32_t type;  // and the device
};
bool read_matrix(nb::handle object, Matrix& m);  // false for anything else
uint32_t on_cpu(DType type);                     // the type of a float's matrices in the CPU's memory
bool is_negated(nb::handle tensor);              // lazily: DLPack does not tell

// Which overlap of a call's two tensors is allowed, besides none.
enum class Alias : int { None = 0, InputInOutput = 1, OutputInInput = 2, Same = 3 };

// What is known of products x [rows, k] and w [n, k]: plain, contiguous matrices of one type on one device.
class Shapes {
 public:
  void add(nb::handle x, nb::handle w, nb::object known);
  nb::object find(nb::handle x, nb::handle w);  // None if nothing is

 private:
  struct Entry {
    int64_t sizes[4];
    uint32_t type;
    nb::object known;
  };
  static bool read(nb::handle x, nb::handle w, Entry& e);
  static constexpr size_t kMost = 256;
  std::vector<Entry> entries_;  // what is used moves to the front
};

class Table {
 public:
  Table(bool one_tensor, int alias, int rank) : one_tensor_(one_tensor), alias_(static_cast<Alias>(alias)), rank_(rank) {}

  // Remembers `bound` and its caller for tensors like these (`first` is c10d's first argument, the output).
  void add(nb::handle first, nb::handle second, nb::object bound, nb::object caller);
  int call(nb::handle output, nb::handle input);  // status, or -1: not known
  int call_one(nb::handle tensor);
  nb::object take_failed() { return failed_ ? std::move(failed_) : nb::none(); }  // the bound call whose run went wrong

 private:
  struct Entry {
    int64_t first, second;
    uint32_t type;
    bool same;  // one tensor is both
    Caller* caller;
    nb::object bound, owner;  // `owner` keeps `caller` alive
  };
  static constexpr size_t kMost = 256;
  bool allowed(const TensorInfo& out, const TensorInfo& in) const;
  int run(size_t entry, const uint64_t* pointers);

  bool one_tensor_;
  Alias alias_;
  int rank_;
  std::vector<Entry> entries_;  // what is used moves to the front, so a linear search is faster than a hash
  nb::object failed_;
};

}  // namespace dovetail
