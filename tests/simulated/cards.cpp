// Simulated cards: tensors whose memory is the CPU's. cards.py puts torch.cuda's Python over them. Compiled twice: for
// cuda, and with SIMULATED_NPU for npu.
#include "nccl.hpp"
#ifdef SIMULATED_NPU
#include <ATen/autocast_mode.h>
#endif

using namespace simulated;
using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;

C10_REGISTER_GUARD_IMPL(CARD_KEY, Guard)
#ifdef SIMULATED_NPU
static const bool has_hooks = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

namespace at::autocast {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the lists are torch's
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SINGLE_IN_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(SINGLE)
  AT_FORALL_FP32_SET_OPT_DTYPE(SINGLE_IN_LOWER)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(WIDEST)
}
}  // namespace at::autocast
#else
namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", simulated::Hooks)
}
#endif
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, kCard, simulated::Timer)
}
static const bool is_allocator_set = [] {
  c10::SetAllocator(kCard, &allocator(), 10);
  return true;
}();

TORCH_LIBRARY_IMPL(_, CARD_KEY, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CARD_KEY, m) {
  m.impl("empty.memory_format", simulated::empty);
  m.impl("empty_strided", simulated::empty_strided);
  m.impl("resize_", simulated::resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_);
  m.impl("set_", set_);
  m.impl("set_.source_Storage", set_source_);
  m.impl("set_.source_Tensor", set_tensor_);
  m.impl("as_strided", simulated::as_strided);
  m.impl("view", simulated::view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", simulated::unfold);
  m.impl("view_as_real", simulated::view_as_real);
  m.impl("view_as_complex", simulated::view_as_complex);
  m.impl("copy_", simulated::copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", simulated::record_stream);
  m.impl("_fused_sdp_choice", attention_by_steps);
  m.impl("native_dropout", simulated::native_dropout);
  m.impl("_thnn_fused_lstm_cell", simulated::lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_backward);
  m.impl("_thnn_fused_gru_cell", simulated::gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_backward);
#ifdef SIMULATED_NPU
  m.impl("_has_compatible_shallow_copy_type", may_take_the_place);
#else  // Ascend's kernels for these have names of their own
  m.impl("batch_norm_stats", norm_stats);
  m.impl("batch_norm_gather_stats_with_counts", norm_gather);
  m.impl("batch_norm_elemt", norm_elements);
  m.impl("batch_norm_backward_reduce", norm_reduce);
  m.impl("batch_norm_backward_elemt", norm_backward);
#endif
  for (const char* name :
       {"convolution", "convolution_backward", "native_batch_norm_backward", "repeat_interleave.Tensor", "equal"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());  // where torch has operators of its own
}

// torch.cuda.FloatTensor(...), which a CPU build refuses to make.
static PyObject* make_legacy = nullptr;
static PyObject* new_legacy(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  py::tuple given(3);
  given[0] = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
  given[1] = py::reinterpret_borrow<py::object>(args);
  given[2] = kwargs ? py::reinterpret_borrow<py::object>(kwargs) : py::object(py::dict());
  return PyObject_CallObject(make_legacy, given.ptr());
}

PYBIND11_MODULE(simulated_cards, m) {
  m.def("card_count", [] { return card_count(); });
  m.def("cards", [] { return cards(); });
  m.def("uuid", &uuid_of);
  m.def("poison_forks", &poison_forks);
  m.def("is_in_bad_fork", [] { return is_in_bad_fork; });
  m.def("current", [] { return static_cast<int>(current); });
  m.def("set_current", [](int card) { Guard().setDevice({kCard, static_cast<c10::DeviceIndex>(card)}); });
  m.def("exchange_current",
        [](int card) { return Guard().exchangeDevice({kCard, static_cast<c10::DeviceIndex>(card)}).index(); });
  m.def("new_stream", [] { return static_cast<int64_t>(Guard().getNewStream({kCard, current}, 0).id()); });
  m.def("current_stream", [](int card) { return current_streams[or_current(card)]; });
  m.def("set_current_stream", [](int64_t id, int card) {
    check_card(card);
    current_streams[card] = id;
    current = card;
  });
  m.def("synchronize", [] { host_waits_for_card(current); }, py::call_guard<py::gil_scoped_release>());
  py::class_<simulated::Event>(m, "Event")
      .def(py::init())
      .def("record",
           [](simulated::Event& e, int card, int64_t id) {
             check_process();
             e.record(stream_of(card, id));
           })
      .def("wait", [](simulated::Event& e, int card, int64_t id) { e.block(stream_of(card, id)); })
      .def("query", &simulated::Event::query)
      .def("synchronize", &simulated::Event::synchronize, py::call_guard<py::gil_scoped_release>())
      .def_readonly("time", &simulated::Event::time);
  m.def("generator", [](int card) { return default_generator(card); });
  m.def("total_memory", &total_memory);
  m.def("memory", [](int card) {
    auto& s = statistics[or_current(card)];
    py::dict out;
    out["bytes"] = s.bytes, out["peak"] = s.peak, out["allocated"] = s.allocated, out["freed"] = s.freed;
    out["blocks"] = s.blocks, out["most_blocks"] = s.most_blocks, out["allocations"] = s.allocations;
    out["reserved"] = s.reserved, out["reserved_peak"] = s.reserved_peak, out["out_of_memory"] = s.out_of_memory;
    return out;
  });
  m.def("reset_peak", [](int card) { allocator().resetPeakStats(or_current(card)); });
  m.def("reset_accumulated", [](int card) { allocator().resetAccumulatedStats(or_current(card)); });
  m.def("empty_cache", [] { allocator().emptyCache({0, 0}); });
  m.def("resize_storage",
        [](const Tensor& t, size_t size) { resize_storage(t.storage().unsafeGetStorageImpl(), size); });
  m.def("counts", [] {
    Lock lock(mutex);
    return counts;
  });
  m.def("set_tracer", [](py::object function) { tracer = function.release().ptr(); });
  m.def("make_legacy_by", [](py::object type, py::object function) {
    make_legacy = function.release().ptr();
    reinterpret_cast<PyTypeObject*>(type.ptr())->tp_new = new_legacy;
  });
  m.def("define_nccl", [](py::module_ target) {
    using Given = Pointer<c10d::Backend::Options>;
    py::class_<NCCL, Pointer<NCCL>, c10d::Backend>(target, "ProcessGroupNCCL")
        .def(py::init([](py::object store, int rank, int size, Given options, py::object gloo) {
          TORCH_CHECK(card_count() > 0, "ProcessGroupNCCL is only supported with GPUs, no GPUs found!");
          return c10::make_intrusive<NCCL>(rank, size, gloo.cast<Pointer<c10d::Backend>>(), options);
        }));
  });
}
