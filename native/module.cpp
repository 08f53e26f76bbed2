// The Python face of the engine: thin, no policy. dovetail/hw/cpu wraps it; texts and choices are made there.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstring>

#include "caller.h"
#include "tensors.h"
#include "move.h"
#include "pool.h"
#include "product.h"
#include "reduce.h"
#include "repeat.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dovetail {
namespace {

template <class T>
std::vector<T> rows_of(const nb::bytes& data) {
  if (data.size() % sizeof(T)) throw std::invalid_argument("table of the wrong layout");
  std::vector<T> rows(data.size() / sizeof(T));
  if (!rows.empty()) std::memcpy(rows.data(), data.c_str(), data.size());
  return rows;
}

// What a rank has posted for the last run that it has entered: the call, and its input if that is on the heap.
nb::dict slot_of(const Group& g, int r) {
  Control& c = *g.control(r);
  const uint64_t run = g.newest(r), lane = run % kLanes;
  const int at = static_cast<int>(2 * lane + run / kLanes % 2);
  const Slot& s = c.slots[at];
  nb::dict d;
  const int64_t* params = c.params(at, g.max_params());
  d["call"] = s.call, d["size_bytes"] = s.size_bytes;
  d["params"] = std::vector<int64_t>(params, params + std::min<int64_t>(s.num_params, g.max_params()));
  const bool there = s.offset[0] != kNowhere && s.offset[0] + c.sizes[at][0] <= g.memory(r).bytes();
  d["input"] = there ? nb::bytes(g.memory(r).base() + s.offset[0], c.sizes[at][0]) : nb::bytes("", 0);
  return d;
}

std::shared_ptr<Program> make_program(int rank, int world, const nb::bytes& steps, const std::vector<int>& queues,
                                      const nb::bytes& sources, const std::vector<std::vector<int64_t>>& buffers,
                                      const std::vector<int64_t>& sizes, const std::vector<bool>& reached,
                                      const std::vector<std::pair<int, int>>& signals,
                                      const std::vector<std::pair<int, int>>& params,
                                      const std::vector<std::pair<int, int>>& equal, int num_stamps) {
  auto p = std::make_shared<Program>();
  p->rank = rank, p->world = world;
  p->steps = rows_of<Step>(steps);
  p->sources = rows_of<Source>(sources);
  p->queues = queues;
  p->sizes = sizes;
  p->reached = reached;
  p->equal = equal;
  p->num_stamps = num_stamps;
  for (const auto& b : buffers)  // place, posted, user, of, scratch_offset
    p->buffers.push_back({static_cast<Place>(b.at(0)), static_cast<int16_t>(b.at(1)), static_cast<int16_t>(b.at(2)),
                          static_cast<int16_t>(b.at(3)), static_cast<uint64_t>(b.at(4))});
  for (const auto& [home, index] : signals) p->signals.push_back({static_cast<int16_t>(home), static_cast<int16_t>(index)});
  for (const auto& [r, index] : params) p->params.push_back({static_cast<int16_t>(r), static_cast<int16_t>(index)});
  if (queues.empty() || queues.front() != 0 || queues.back() != static_cast<int>(p->steps.size()))
    throw std::invalid_argument("queues do not cover the steps");
  p->validate();
  return p;
}

}  // namespace
}  // namespace dovetail

NB_MODULE(_native, m) {
  using namespace dovetail;
  m.doc() = "Software DMA engines over shared memory.";
  nb::set_leak_warnings(false);  // module-level objects may outlive the interpreter's last collection
  nb::exception<OutOfMemory>(m, "OutOfMemory", PyExc_MemoryError);
  nb::class_<Program>(m, "Program").def(nb::new_(&make_program), "rank"_a, "world"_a, "steps"_a, "queues"_a, "sources"_a,
                                        "buffers"_a, "sizes"_a, "reached"_a, "signals"_a, "params"_a, "equal"_a,
                                        "num_stamps"_a);
  nb::class_<Group>(m, "Group")
      .def_prop_ro("abort", [](const Group& g) { return g.abort(); })
      .def_rw("timeout_ns", &Group::timeout_ns)
      .def_rw("delay_ns", &Group::delay_ns)
      .def("break_all", [](Group& g, int about) { g.break_all(Abort::Failed, about); })
      .def("close", &Group::close)
      .def("closed", &Group::closed)
      .def_prop_ro("begun", &Group::begun)
      .def("newest", &Group::newest)
      .def("slot", &slot_of)
      .def("purpose", &Group::purpose);
  nb::class_<World>(m, "World")
      .def(nb::init<int, const std::vector<int>&, const std::vector<int>&, const std::vector<uint64_t>&, int, int>(), "rank"_a,
           "fds"_a, "pidfds"_a, "bytes"_a, "engines"_a, "spins"_a)
      .def("alloc", &World::alloc)
      .def("group", &World::group, "ranks"_a, "rank"_a, "key"_a, "timeout_s"_a, "max_params"_a,
           "base"_a.none() = nb::none(), "purpose"_a = "")
      .def("contains", &World::contains)
      .def("base", &World::base)
      .def("peer_dead", &World::peer_dead)
      .def("stop", &World::stop)
      .def("forked", [](World& w) { w.engine()->forked(); })
      .def_prop_ro("used_bytes", &World::used_bytes);
  nb::class_<Ticket>(m, "Ticket")
      .def("wait", &Ticket::wait, "timeout_s"_a)
      .def("fire", &Ticket::fire)
      .def("raise_signal", &Ticket::raise)
      .def_prop_ro("status", &Ticket::status)
      .def_prop_ro("choice", [](const Ticket& t) { return t.run().choice(); })
      .def_prop_ro("submitted_ns", [](const Ticket& t) { return t.run().submitted_ns; })
      .def_prop_ro("stamps", [](const Ticket& t) { return t.run().stamps(); })
      .def("failure", [](const Ticket& t) { return failure_of(t.run()); });
  nb::class_<Caller>(m, "Caller")
      .def(nb::init<std::shared_ptr<World>, std::shared_ptr<Group>, uint64_t, uint64_t, int, int, int, std::vector<int64_t>, uint64_t,
                    uint64_t, bool, nb::object>(),
           "world"_a, "group"_a, "word"_a, "size_bytes"_a, "num_user"_a, "input"_a, "output"_a, "bytes"_a, "scratch_heap"_a,
           "scratch_ordinary"_a, "has_direct"_a, "planner"_a)
      .def("set_program", &Caller::set_program)
      .def("run_empty", &Caller::run_empty)
      .def("run", &Caller::run, "pointers"_a, "bytes"_a, "params"_a)
      .def("start", &Caller::start, "pointers"_a, "bytes"_a, "params"_a, "gated"_a, "on_finish"_a.none())
      .def("failure", &Caller::failure)
      .def_prop_ro("counter", &Caller::counter);
  nb::class_<Meets>(m, "Meets")
      .def(nb::init<nb::object, std::vector<uint64_t>, std::vector<int64_t>, nb::bytes, nb::bytes>(), "caller"_a, "pointers"_a,
           "bytes"_a, "mine"_a, "seen"_a);
  nb::class_<Stages>(m, "Stages").def(
      "__init__",
      [](Stages* made, int rank, std::vector<uint64_t> first, std::vector<uint64_t> second) {
        new (made) Stages{rank, {std::move(first), std::move(second)}};
      },
      "rank"_a, "first"_a, "second"_a);
  nb::class_<Repeat>(m, "Repeat")
      .def(nb::init<Meets, Stages, uint64_t, uint64_t, bool, int>(), "meets"_a, "stages"_a, "part"_a, "step"_a, "sums"_a, "dtype"_a)
      .def("send", &Repeat::send)
      .def("run", &Repeat::run)
      .def("multiply", &Repeat::multiply)
      .def("finish", &Repeat::finish);
  nb::class_<Lookup>(m, "Lookup")
      .def(nb::init<Meets, Stages, std::vector<int64_t>, int64_t, int64_t, int, bool>(), "meets"_a, "stages"_a, "tables"_a, "batch"_a,
           "dim"_a, "dtype"_a, "mean"_a)
      .def("run", &Lookup::run)
      .def("finish", &Lookup::finish)
      .def_ro_static("UNLIKE", &Lookup::kUnlike);
  nb::class_<Shapes>(m, "Shapes").def(nb::init<>()).def("add", &Shapes::add).def("find", &Shapes::find, "x"_a.none(), "w"_a.none());
  nb::class_<Counter>(m, "Counter")
      .def_prop_ro("runs", [](const Counter& c) { return c.runs.load(); })
      .def_prop_ro("direct", [](const Counter& c) { return c.direct.load(); });
  nb::class_<Table>(m, "Table")
      .def(nb::init<bool, int, int>(), "one_tensor"_a, "alias"_a, "rank"_a)
      .def("add", &Table::add, "first"_a, "second"_a.none(), "bound"_a, "caller"_a)
      .def("two", &Table::call)
      .def("one", &Table::call_one)
      .def("take_failed", &Table::take_failed);
  m.def("reduce", [](int dtype, int op, uint64_t dst, const std::vector<uint64_t>& sources, uint64_t items) {
    std::vector<const char*> from;
    for (const uint64_t s : sources) from.push_back(reinterpret_cast<const char*>(s));
    reduce_items(static_cast<DType>(dtype), static_cast<ReduceOp>(op), reinterpret_cast<char*>(dst), from.data(),
                 static_cast<int>(from.size()), items);
  });
  m.def("copy", [](uint64_t dst, uint64_t src, uint64_t bytes) {
    std::memcpy(reinterpret_cast<char*>(dst), reinterpret_cast<const char*>(src), bytes);
  });
  m.def("copy_rows", [](uint64_t dst, uint64_t src, uint64_t rows, uint64_t row_bytes, uint64_t dst_pitch) {
    copy_rows(reinterpret_cast<char*>(dst), reinterpret_cast<const char*>(src), rows, row_bytes, dst_pitch);
  });
  // Copies (destination, source, bytes, ...), then ranks meet.
  m.def("meet", [](Caller& caller, const std::vector<uint64_t>& pointers, const std::vector<int64_t>& bytes, const nb::bytes& mine,
                   const nb::bytes& seen, const std::vector<uint64_t>& copies) {
    if (copies.size() % 3) throw std::invalid_argument("copies are given by destination, source and bytes");
    for (size_t i = 0; i < copies.size(); i += 3)
      std::memcpy(reinterpret_cast<char*>(copies[i]), reinterpret_cast<const char*>(copies[i + 1]), copies[i + 2]);
    return meet(caller, pointers, bytes, mine, seen);
  });
  m.def("pool", [](int dtype, bool wide, bool mean, const std::vector<uint64_t>& weights, int64_t dim, uint64_t values,
                   uint64_t offsets, int64_t batch, int64_t first, int64_t end, uint64_t scales, uint64_t out, int64_t out_stride) {
    std::vector<const char*> tables;
    for (const uint64_t w : weights) tables.push_back(reinterpret_cast<const char*>(w));
    nb::gil_scoped_release free;
    pool_bags({static_cast<DType>(dtype), wide, mean, tables.data(), static_cast<int>(tables.size()), dim,
               reinterpret_cast<const char*>(values), reinterpret_cast<const int64_t*>(offsets), batch, first, end,
               reinterpret_cast<const char*>(scales), reinterpret_cast<char*>(out), out_stride});
  });
  m.def("check_bags", [](uint64_t values, bool wide, int64_t num_values, uint64_t offsets, int64_t batch,
                         const std::vector<int64_t>& num_rows) {
    const Wrong wrong = check_bags(reinterpret_cast<const char*>(values), wide, num_values,
                                   reinterpret_cast<const int64_t*>(offsets), batch, num_rows.data(),
                                   static_cast<int>(num_rows.size()));
    return nb::make_tuple(static_cast<int>(wrong.kind), wrong.table, wrong.value);
  });
  // x [m, k] times w [n, k], transposed; `isa` 0 to 3: no newer instruction set than base, AVX2, AVX-512, AVX-512 with bf16.
  m.def("multiply", [](int dtype, uint64_t x, uint64_t w, uint64_t out, int64_t rows, int64_t n, int64_t k, int isa) {
    product(static_cast<DType>(dtype), x, w, out, rows, n, k, static_cast<Isa>(isa));
  }, "dtype"_a, "x"_a, "w"_a, "out"_a, "rows"_a, "n"_a, "k"_a, "isa"_a = static_cast<int>(Isa::Avx512Bf16));
  m.def("most_rows", [](int dtype, int64_t n, int64_t k) { return most_rows(static_cast<DType>(dtype), n, k); }, "dtype"_a, "n"_a, "k"_a);
  m.def("set_streaming_bytes", [](uint64_t n) { streaming_bytes = n; });
  m.attr("STEP_BYTES") = sizeof(Step);
  m.attr("SOURCE_BYTES") = sizeof(Source);
  m.attr("LANES") = kLanes;
  m.attr("SIGNALS") = kSignals;
  m.attr("SCRATCH_AS_INPUT") = ~uint64_t{0};
}
