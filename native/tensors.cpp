#include "tensors.h"

#include <algorithm>

namespace dovetail {

namespace {

// The public ABI of DLPack 1.2 (dmlc/dlpack): only what is read here.
struct DlDevice {
  int32_t type, id;
};
struct DlType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DlExchange {
  struct {
    uint32_t major, minor;
    void* previous;
  } header;
  void* managed_allocator;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DlTensor* out);
  void* current_stream;
};
constexpr int32_t kCpu = 1;
constexpr uint8_t kFloat = 2, kBFloat = 4, kComplex = 5;
constexpr uint32_t kMajor = 1;

struct Exchange {
  PyTypeObject *type = nullptr, *parameter = nullptr;
  const DlExchange* api = nullptr;
};

const Exchange& exchange() {
  static const Exchange found = [] {
    Exchange e;
    try {
      nb::object tensor = nb::module_::import_("torch").attr("Tensor");
      e.type = reinterpret_cast<PyTypeObject*>(tensor.ptr());
      nb::object parameter = nb::module_::import_("torch.nn").attr("Parameter");
      e.parameter = reinterpret_cast<PyTypeObject*>(parameter.ptr());
      nb::object capsule = tensor.attr("__dlpack_c_exchange_api__");
      auto* api = static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
      if (api && api->header.major == kMajor) e.api = api;
    } catch (nb::python_error&) {
    }
    PyErr_Clear();
    return e;
  }();
  return found;
}

uint32_t matrix_type(DlDevice device, uint8_t code, uint8_t bits) {
  const auto where = static_cast<uint32_t>(device.type) << 8 | static_cast<uint8_t>(device.id);
  return where << 16 | static_cast<uint32_t>(code) << 8 | bits;
}

}  // namespace

bool read_tensor(nb::handle object, TensorInfo& info) {
  const Exchange& e = exchange();
  if (!e.api || Py_TYPE(object.ptr()) != e.type) return false;  // subclasses may mean something else by their data
  DlTensor t;
  if (e.api->tensor_from_object(object.ptr(), &t) != 0) {
    PyErr_Clear();
    return false;
  }
  if (!t.data || t.device.type != kCpu || t.dtype.code == kComplex) return false;  // without memory: a traced one, or it was freed
  int64_t items = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    if (t.strides && t.shape[d] != 1 && t.strides[d] != items) return false;
    items *= t.shape[d];
  }
  if (items < 2) return false;  // nothing to move; or one element, which may be the lazily negated part of a complex
  info.pointer = reinterpret_cast<uint64_t>(t.data) + t.byte_offset;
  info.items = items;
  info.ndim = t.ndim;
  info.type = static_cast<uint32_t>(t.dtype.code) << 8 | t.dtype.bits;
  return true;
}

bool read_matrix(nb::handle object, Matrix& m) {
  const Exchange& e = exchange();
  if (!e.api || (Py_TYPE(object.ptr()) != e.type && Py_TYPE(object.ptr()) != e.parameter)) return false;
  DlTensor t;
  if (e.api->tensor_from_object(object.ptr(), &t) != 0) {
    PyErr_Clear();
    return false;
  }
  if (!t.data || t.dtype.code == kComplex || t.ndim != 2 || t.shape[0] < 1 || t.shape[1] < 2) return false;
  if (t.strides && (t.strides[1] != 1 || (t.shape[0] != 1 && t.strides[0] != t.shape[1]))) return false;
  m.data = static_cast<const char*>(t.data) + t.byte_offset;
  m.sizes[0] = t.shape[0], m.sizes[1] = t.shape[1];
  m.type = matrix_type(t.device, t.dtype.code, t.dtype.bits);
  return true;
}

uint32_t on_cpu(DType type) {
  return matrix_type({kCpu, 0}, type == DType::BF16 ? kBFloat : kFloat, static_cast<uint8_t>(8 * item_bytes(type)));
}

bool is_negated(nb::handle tensor) { return nb::cast<bool>(tensor.attr("is_neg")()); }

bool Shapes::read(nb::handle x, nb::handle w, Entry& e) {
  Matrix a, b;
  if (!read_matrix(x, a) || !read_matrix(w, b) || a.type != b.type) return false;
  e.sizes[0] = a.sizes[0], e.sizes[1] = a.sizes[1], e.sizes[2] = b.sizes[0], e.sizes[3] = b.sizes[1];
  e.type = a.type;
  return true;
}

void Shapes::add(nb::handle x, nb::handle w, nb::object known) {
  Entry e{};
  if (!read(x, w, e)) return;
  if (entries_.size() >= kMost) entries_.pop_back();
  e.known = std::move(known);
  entries_.insert(entries_.begin(), std::move(e));
}

nb::object Shapes::find(nb::handle x, nb::handle w) {
  Entry e{};
  if (!read(x, w, e)) return nb::none();
  for (size_t i = 0; i < entries_.size(); ++i)
    if (entries_[i].type == e.type && std::equal(e.sizes, e.sizes + 4, entries_[i].sizes)) {
      if (i) std::swap(entries_[i], entries_[i / 2]);
      return entries_[i / 2].known;
    }
  return nb::none();
}

void Table::add(nb::handle first, nb::handle second, nb::object bound, nb::object caller) {
  TensorInfo a, b{};
  if (!read_tensor(first, a) || (!one_tensor_ && !read_tensor(second, b))) return;
  const bool same = a.pointer == b.pointer;
  for (Entry& e : entries_)
    if (e.first == a.items && e.second == b.items && e.type == a.type && e.same == same) {
      e.caller = nb::inst_ptr<Caller>(caller);
      e.bound = bound, e.owner = caller;
      return;
    }
  if (entries_.size() >= kMost) entries_.pop_back();
  entries_.push_back({a.items, b.items, a.type, same, nb::inst_ptr<Caller>(caller), bound, caller});
}

bool Table::allowed(const TensorInfo& out, const TensorInfo& in) const {
  const uint64_t item = (out.type & 0xff) / 8, out_bytes = out.items * item, in_bytes = in.items * item;
  if (in.pointer >= out.pointer + out_bytes || out.pointer >= in.pointer + in_bytes) return true;
  if (alias_ == Alias::InputInOutput) return in.pointer == out.pointer + rank_ * in_bytes;
  if (alias_ == Alias::OutputInInput) return out.pointer == in.pointer + rank_ * out_bytes;
  return alias_ == Alias::Same && in.pointer == out.pointer;
}

int Table::call(nb::handle output, nb::handle input) {
  TensorInfo out, in;
  if (!read_tensor(output, out) || !read_tensor(input, in) || out.type != in.type || !allowed(out, in)) return -1;
  const bool same = out.pointer == in.pointer;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& e = entries_[i];
    if (e.first == out.items && e.second == in.items && e.type == out.type && e.same == same) {
      const uint64_t pointers[2] = {in.pointer, out.pointer};
      return run(i, pointers);
    }
  }
  return -1;
}

int Table::call_one(nb::handle tensor) {
  TensorInfo t;
  if (!read_tensor(tensor, t)) return -1;
  for (size_t i = 0; i < entries_.size(); ++i)
    if (entries_[i].first == t.items && entries_[i].type == t.type) {
      const uint64_t pointers[2] = {t.pointer, t.pointer};  // a root's input and the others' output are one tensor
      return run(i, pointers);
    }
  return -1;
}

int Table::run(size_t entry, const uint64_t* pointers) {
  if (entry) std::swap(entries_[entry], entries_[entry / 2]);
  // The call may let the interpreter go, and another thread may change the table: hold what is needed.
  const nb::object bound = entries_[entry / 2].bound, owner = entries_[entry / 2].owner;
  const int status = entries_[entry / 2].caller->run_fixed(pointers);
  if (status != static_cast<int>(Status::Done)) failed_ = bound;
  return status;
}

}  // namespace dovetail
