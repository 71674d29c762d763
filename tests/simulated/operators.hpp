// Operators on cards: each runs the CPU's kernel on CPU tensors over the same memory.
#pragma once
#include <ATen/NativeFunctions.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include "device.hpp"

namespace simulated {
using at::Tensor;
using Below = at::AutoDispatchBelowADInplaceOrView;

inline bool is_on_card(const Tensor& t) { return t.defined() && t.device().type() == kCard; }

// --- one memory, seen as a CPU tensor and as a card's
// ---------------------------------------------------------------------
inline at::DataPtr kept(const c10::Storage& storage) {
  auto drop = [](void* context) { delete static_cast<c10::Storage*>(context); };
  return {const_cast<void*>(storage.data()), new c10::Storage(storage), drop, at::kCPU};
}
inline c10::Storage cpu_storage(const c10::Storage& storage) {
  auto bytes = c10::StorageImpl::use_byte_size_t();
  return c10::Storage(
      c10::make_intrusive<c10::StorageImpl>(bytes, storage.nbytes(), kept(storage), c10::GetCPUAllocator(), true));
}
inline Tensor over(c10::Storage storage, const Tensor& like, c10::DispatchKey key) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) out._set_conj(true);
  if (like.is_neg()) out._set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return out;
}
inline Tensor as_cpu(const Tensor& t) {
  return is_on_card(t) ? over(cpu_storage(t.storage()), t, c10::DispatchKey::CPU) : t;
}

// The card's tensor that takes over the memory of a new CPU tensor.
inline Tensor to_card(const Tensor& t, int card) {
  if (!t.defined() || !t.device().is_cpu()) return t;
  TORCH_CHECK(t.layout() == at::kStrided, "simulated cards have no ", t.layout(), " tensors");
  auto* impl = t.storage().unsafeGetStorageImpl();
  auto size = impl->nbytes();
  bool is_own = t.storage().use_count() == 1 && impl->resizable();
  auto data = is_own ? impl->set_data_ptr(at::DataPtr(nullptr, at::kCPU)) : kept(t.storage());
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size,
                                                       on_card(std::move(data), size, card), &allocator(), true);
  return over(c10::Storage(std::move(storage)), t, kKey);
}

// --- who reads and writes what, on which stream
// ---------------------------------------------------------------------------
inline void access(const std::string& what, bool writes, const Tensor& t, Stream stream, uint64_t number) {
  if (!is_on_card(t) || !t.has_storage()) return;
  if (auto* block = block_of(t.storage().unsafeGetStorageImpl())) block->access(what, writes, stream, number);
}
// One operator on the tensors' card, in its current stream.
inline void run(const std::string& name, const std::vector<Tensor>& read, const std::vector<Tensor>& written,
                int card) {
  check_process();
  auto stream = current_stream(card);
  end_waited(stream);
  Lock lock(mutex);
  counts["kernels"]++;
  auto number = launch(stream);
  for (auto& t : read) access(name, false, t, stream, number);
  for (auto& t : written) access(name, true, t, stream, number);
}

// --- the fallback for all operators
// ---------------------------------------------------------------------------------------- The tensors of one call,
// as the CPU's kernel gets them.
struct Call {
  struct Argument {
    Tensor on_card, cpu;
    void* data;
  };
  c10::SmallVector<Argument, 8> arguments;
  c10::SmallVector<std::pair<c10::StorageImpl*, c10::Storage>, 8> storages;  // a card's -> the CPU's over its memory
  std::vector<Tensor> read, written;
  c10::Device card{kCard, -1}, other{kCard, -1};
  bool has_cpu = false;

  Tensor as_cpu(const Tensor& t, bool is_written) {
    if (!t.defined()) return t;
    if (!is_on_card(t)) {
      has_cpu = has_cpu || (t.device().is_cpu() && t.dim() > 0);
      return t;
    }
    (is_written ? written : read).push_back(t);
    if (card.index() < 0)
      card = t.device();
    else if (t.device() != card)
      other = t.device();
    auto* key = t.storage().unsafeGetStorageImpl();
    auto known = std::find_if(storages.begin(), storages.end(), [&](auto& pair) { return pair.first == key; });
    if (known == storages.end()) known = storages.insert(storages.end(), {key, cpu_storage(t.storage())});
    auto cpu = over(known->second, t, c10::DispatchKey::CPU);
    arguments.push_back({t, cpu, const_cast<void*>(known->second.data())});
    return cpu;
  }
  Tensor back(const Tensor& t) {
    if (!t.defined() || !t.device().is_cpu()) return t;
    for (auto& [key, storage] : storages) {
      if (storage.unsafeGetStorageImpl() != t.storage().unsafeGetStorageImpl()) continue;
      for (auto& argument : arguments)
        if (argument.cpu.is_same(t)) return argument.on_card;
      return over(c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(key)), t, kKey);
    }
    return to_card(t, card.index());
  }
  void take_resized() {  // arguments that the CPU's kernel has resized
    for (auto& [on_card, cpu, data] : arguments) {
      auto* from = cpu.storage().unsafeGetStorageImpl();
      auto* to = on_card.storage().unsafeGetStorageImpl();
      if (from->data() != data && from->data() != to->data()) {
        auto size = from->nbytes();
        auto memory = from->set_data_ptr(at::DataPtr(nullptr, at::kCPU));
        void* where = memory.get();
        to->set_data_ptr_noswap(simulated::on_card(std::move(memory), size, card.index()));
        to->set_nbytes(size);
        from->set_data_ptr(at::DataPtr(where, at::kCPU));
        from->set_nbytes(size);
      }
      if (cpu.sizes() != on_card.sizes() || cpu.strides() != on_card.strides())
        on_card.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }
  void check_devices(const std::string& name) {
    static const std::set<std::string> indexing = {"aten::index",       "aten::index_put",        "aten::index_put_",
                                                   "aten::_unsafe_index", "aten::_index_put_impl_", "aten::_unsafe_index_put"};
    static const char* may_mix[] = {"_foreach", "_fused", "_pack", "_cudnn", "ctc", "_ctc", "set_", "segment"};
    if (indexing.count(name)) return;
    for (auto* prefix : may_mix)
      if (name.rfind(std::string("aten::") + prefix, 0) == 0) return;
    bool mixed = (has_cpu && !arguments.empty()) || other.index() >= 0;
    TORCH_CHECK(!mixed, "Expected all tensors to be on the same device, but found at least two devices, ", card,
                " and ", other.index() >= 0 ? other.str() : "cpu", "! (simulated, in ", name, ")");
  }
};

inline bool needs_a_value(const std::string& name) {  // to know the size of its output
  static const std::set<std::string> exact = {"nonzero", "masked_select", "repeat_interleave", "bincount", "equal"};
  auto word = name.substr(name.find("::") + 2);
  return exact.count(word) || word.rfind("_unique", 0) == 0 || word.rfind("unique_", 0) == 0 ||
         word.rfind("_ctc_loss", 0) == 0;
}

// Run the CPU's kernel. An index that is out of range is an assert on a card: the call returns, and a later one
// raises.
inline void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t nargs) {
  const c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
  std::vector<c10::IValue> given(stack->end() - nargs, stack->end());
  try {
    op.redispatchBoxed(cpu, stack);
  } catch (const c10::IndexError& error) {
    if (strstr(error.what(), "Dimension out of range")) throw;
    failed_assert = error.what_without_backtrace();
    fprintf(stderr, "simulated.cu:1: kernel: block: [0,0,0], thread: [0,0,0] Assertion `%s` failed.\n",
            failed_assert.c_str());
    if (setting("CUDA_LAUNCH_BLOCKING", 0)) raise_assert();
    auto zeros = [](c10::IValue value) -> c10::IValue {
      return value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() == at::kLong
                 ? c10::IValue(at::zeros_like(value.toTensor()))
                 : value;
    };
    stack->resize(stack->size() >= nargs ? stack->size() : nargs);
    stack->erase(stack->end() - nargs, stack->end());
    for (auto& value : given) {
      if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const auto& t : value.toOptionalTensorVector()) list.push_back(t ? zeros(*t).toTensor() : t);
        stack->push_back(list);
      } else {
        stack->push_back(zeros(value));
      }
    }
    op.redispatchBoxed(cpu, stack);
  }
}

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.operator_name().name;
  const auto nargs = schema.arguments().size(), nrets = schema.returns().size();
  const auto first = stack->size() - nargs;
  Below below;
  check_process();
  std::vector<c10::IValue> originals(stack->begin() + first, stack->end());
  Call call;
  std::optional<c10::Device> asked;
  c10::IValue* generator = nullptr;
  for (size_t i = 0; i < nargs; i++) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    bool is_written = alias && alias->isWrite();
    if (value.isTensor()) {
      value = call.as_cpu(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(call.as_cpu(t, is_written));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& t : value.toOptionalTensorVector())
        list.push_back(t ? std::optional<Tensor>(call.as_cpu(*t, is_written)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kCard) {
      asked = c10::Device(kCard, or_current(value.toDevice().index()));
      value = c10::Device(at::kCPU);
    }
    if (schema.arguments()[i].name() == "generator") generator = &value;
  }
  if (call.card.index() < 0) call.card = asked.value_or(c10::Device(kCard, current));
  check_card(call.card.index());
  call.check_devices(name);
  if (generator) {
    auto given = generator->isNone() ? default_generator(call.card.index()) : generator->toGenerator();
    TORCH_CHECK(given.device().type() == kCard, "Expected a '", kWord, "' device type for generator but found '",
                given.device().type(), "'");
    *generator = static_cast<Generator*>(given.unsafeGetGeneratorImpl())->next();
  }
  run(name, call.read, call.written, call.card.index());
  if (needs_a_value(name)) host_waits_for_stream("sync.values", current_stream(call.card.index()));
  run_on_cpu(op, stack, nargs);
  call.take_resized();
  for (size_t i = 0; i < nrets; i++) {
    auto& value = (*stack)[stack->size() - nrets + i];
    const auto* returned = schema.returns()[i].alias_info();
    bool is_argument = false;
    for (size_t j = 0; j < nargs && returned && returned->isWrite() && !is_argument; j++) {
      const auto* alias = schema.arguments()[j].alias_info();
      is_argument = alias && alias->isWrite() && alias->beforeSets() == returned->beforeSets();
      if (is_argument) value = originals[j];
    }
    if (is_argument) continue;
    if (value.isTensor()) {
      value = call.back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(call.back(t));
      value = list;
    }
  }
}

// --- memory and views
// -------------------------------------------------------------------------------------------------------
using Type = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Format = std::optional<at::MemoryFormat>;

inline Tensor empty(at::IntArrayRef size, Type type, Layout, Device device, std::optional<bool>, Format format) {
  check_process();
  c10::DeviceGuard guard(device.value_or(c10::Device(kCard, current)));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(type),
                                   format);
}
inline Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Type type, Layout, Device device,
                            std::optional<bool>) {
  check_process();
  c10::DeviceGuard guard(device.value_or(c10::Device(kCard, current)));
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(kKey),
                                           c10::dtype_or_default(type));
}
inline const Tensor& resize_(const Tensor& self, at::IntArrayRef size, Format format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    size_t need =
        impl->numel() ? at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset()) : 0;
    if (need > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), need);
  }
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}
inline Tensor& set_storage_(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                            at::IntArrayRef stride) {
  at::native::checkSetStorage(self, storage, offset, size, stride, false);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data())
    impl->set_sizes_and_strides(size, stride);
  else
    impl->set_sizes_contiguous(size);
  size_t need = impl->numel() ? at::detail::computeStorageNbytes(size, impl->strides(), self.itemsize(), offset) : 0;
  if (need > storage.nbytes()) resize_storage(storage.unsafeGetStorageImpl(), need);
  return self;
}
inline Tensor& set_(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  auto bytes = c10::StorageImpl::use_byte_size_t();
  auto storage = c10::make_intrusive<c10::StorageImpl>(bytes, 0, allocator().allocate(0), &allocator(), true);
  return set_storage_(self, c10::Storage(std::move(storage)), 0, {0}, {});
}
inline Tensor& set_source_(Tensor& self, at::Storage storage) {
  int64_t count = storage.nbytes() / self.itemsize();
  return set_storage_(self, storage, 0, {count}, {});
}
inline Tensor& set_tensor_(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline Tensor as_strided(const Tensor& t, at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}
inline Tensor view(const Tensor& t, at::IntArrayRef size) { return at::native::view(t, size); }
inline Tensor reshape_alias(const Tensor& t, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(t, size, stride);
}
inline Tensor unfold(const Tensor& t, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(t, dim, size, step);
}
inline Tensor view_as_real(const Tensor& t) { return at::native::view_as_real(t); }
inline Tensor view_as_complex(const Tensor& t) { return at::native::view_as_complex(t); }

// Whether `parameter.data = tensor` is possible, as it is between the CPU and cards.
inline bool may_take_the_place(const Tensor& self, const Tensor& from) {
  auto is_dense = [](const Tensor& t) {
    return t.key_set().has(c10::DispatchKey::CPU) || t.key_set().has(c10::DispatchKey::PrivateUse1);
  };
  return self.key_set() == from.key_set() || (is_dense(self) && is_dense(from));
}

// --- copies, and what waits for the card
// --------------------------------------------------------------------------------------
inline void launch_copy(const Tensor& to, const Tensor& from) {
  int card = (is_on_card(from) ? from : to).device().index();
  auto stream = current_stream(card), other = is_on_card(to) ? current_stream(to.device().index()) : stream;
  end_waited(stream), end_waited(other);
  Lock lock(mutex);
  join(streams[stream], streams[other]);  // two cards wait for each other
  auto number = launch(stream);
  access("copy_", false, from, stream, number);
  access("copy_", true, to, stream, number);
  join(streams[other], streams[stream]);
  if (is_on_card(from)) return;
  for (auto& copy : late_copies)  // pinned memory that an earlier copy of this stream has filled
    if (is_done_for(stream, copy.stream, copy.number)) copy.to.copy_(copy.from);
}
inline Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  check_process();
  Below below;
  if (from.is_meta() || to.is_meta() || !to.numel()) return to;
  auto a = as_cpu(to), b = as_cpu(from);
  launch_copy(to, from);
  if (is_on_card(to) && is_on_card(from)) {
    count(to.device() == from.device() ? "copy.on_card" : "copy.between_cards");
    a.copy_(b);
    return to;
  }
  bool up = is_on_card(to);
  auto stream = current_stream((up ? to : from).device().index());
  bool is_host_pinned = is_pinned((up ? from : to).const_data_ptr());
  std::string name = up ? "copy.to_card" : "copy.to_host";
  if (current_streams[(up ? to : from).device().index()]) count("copy.beside");  // what the default stream computes
  if (!up && non_blocking && is_host_pinned) {
    count(name);
    Lock lock(mutex);
    late_copies.push_back({a.expand_as(a), b.clone().expand_as(a), stream, streams[stream][stream]});
    if (to.is_non_overlapping_and_dense()) memset(to.mutable_data_ptr(), 0x7f, to.nbytes());
    return to;
  }
  bool blocks = !non_blocking || !up;
  if (blocks)
    host_waits_for_stream(name + ".blocking", stream);
  else
    count(is_host_pinned ? name : name + ".unpinned");
  a.copy_(b);
  return to;
}
inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto out = to;
  return copy_(out, from, non_blocking);
}
inline Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
inline at::Scalar local_scalar_dense(const Tensor& t) {
  run("item", {t}, {}, t.device().index());
  host_waits_for_stream("sync.item", current_stream(t.device().index()));
  Below below;
  return at::_local_scalar_dense(as_cpu(t));
}
inline void record_stream(Tensor& t, c10::Stream stream) { allocator().recordStream(t.storage().data_ptr(), stream); }

// --- what has other operators on cards
// ----------------------------------------------------------------------------------------
inline int64_t attention_by_steps(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double,
                                  bool, std::optional<double>, bool) {
  return 0;
}
inline std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  int card = input.device().index();
  run("native_dropout", {input}, {}, card);
  Below below;
  auto x = as_cpu(input);
  auto mask = at::ones_like(x, x.options().dtype(at::kBool));
  if (!train.value_or(true)) return {to_card(x.clone(), card), to_card(mask, card)};
  mask.bernoulli_(1 - p, static_cast<Generator*>(default_generator(card).unsafeGetGeneratorImpl())->next());
  return {to_card(x.mul(mask).mul_(p == 1 ? 0. : 1 / (1 - p)), card), to_card(mask, card)};
}

using Maybe = std::optional<Tensor>;
inline Tensor cpu_or_none(const Maybe& t) { return t && t->defined() ? as_cpu(*t) : Tensor(); }
inline std::vector<Tensor> defined(std::initializer_list<Maybe> all) {
  std::vector<Tensor> out;
  for (auto& t : all)
    if (t && t->defined()) out.push_back(*t);
  return out;
}
inline std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cx,
                                                    const Maybe& bias, const Maybe& hidden_bias) {
  int card = input.device().index();
  run("lstm_cell", defined({input, hidden, cx, bias, hidden_bias}), {}, card);
  Below below;
  auto gates = as_cpu(input) + as_cpu(hidden);
  if (cpu_or_none(bias).defined()) gates = gates + cpu_or_none(bias) + cpu_or_none(hidden_bias);
  auto g = gates.chunk(4, 1);
  auto i = g[0].sigmoid(), f = g[1].sigmoid(), n = g[2].tanh(), o = g[3].sigmoid();
  auto cy = f * as_cpu(cx) + i * n;
  return {to_card(o * cy.tanh(), card), to_card(cy, card), to_card(at::cat({i, f, n, o}, 1), card)};
}
inline std::tuple<Tensor, Tensor, Tensor> lstm_backward(const Maybe& grad_hy, const Maybe& grad_cy, const Tensor& cx,
                                                        const Tensor& cy_, const Tensor& workspace, bool has_bias) {
  int card = cx.device().index();
  auto given = defined({grad_hy, grad_cy});
  if (given.empty()) return {};
  run("lstm_backward", defined({grad_hy, grad_cy, cx, cy_, workspace}), {}, card);
  Below below;
  auto cy = as_cpu(cy_), gh = cpu_or_none(grad_hy), gc = cpu_or_none(grad_cy);
  auto w = as_cpu(workspace).chunk(4, 1);
  auto i = w[0], f = w[1], n = w[2], o = w[3], t = cy.tanh();
  if (!gh.defined()) gh = at::zeros_like(cy);
  auto grad = gh * o * (1 - t * t);
  if (gc.defined()) grad = grad + gc;
  auto gates = at::cat(
      {grad * n * i * (1 - i), grad * as_cpu(cx) * f * (1 - f), grad * i * (1 - n * n), gh * t * o * (1 - o)}, 1);
  auto grad_bias = has_bias ? to_card(gates.sum(0), card) : Tensor();
  return {to_card(gates, card), to_card(grad * f, card), grad_bias};
}
inline std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx_,
                                           const Maybe& bias, const Maybe& hidden_bias) {
  int card = input.device().index();
  run("gru_cell", defined({input, hidden, hx_, bias, hidden_bias}), {}, card);
  Below below;
  auto a = as_cpu(input), b = as_cpu(hidden), hx = as_cpu(hx_);
  if (cpu_or_none(bias).defined()) a = a + cpu_or_none(bias), b = b + cpu_or_none(hidden_bias);
  auto x = a.chunk(3, 1), h = b.chunk(3, 1);
  auto r = (x[0] + h[0]).sigmoid(), z = (x[1] + h[1]).sigmoid(), n = (x[2] + r * h[2]).tanh();
  return {to_card(n + z * (hx - n), card), to_card(at::cat({r, z, n, hx, h[2]}, 1), card)};
}
inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(const Tensor& grad_, const Tensor& workspace,
                                                                       bool has_bias) {
  int card = grad_.device().index();
  run("gru_backward", {grad_, workspace}, {}, card);
  Below below;
  auto grad = as_cpu(grad_);
  auto w = as_cpu(workspace).chunk(5, 1);
  auto r = w[0], z = w[1], n = w[2], hx = w[3], hn = w[4];
  auto gz = grad * (hx - n) * (1 - z) * z, gn = grad * (1 - z) * (1 - n * n), gr = gn * hn * (1 - r) * r;
  auto of_input = at::cat({gr, gz, gn}, 1), of_hidden = at::cat({gr, gz, gn * r}, 1);
  auto bias = has_bias ? to_card(of_input.sum(0), card) : Tensor();
  auto hidden_bias = has_bias ? to_card(of_hidden.sum(0), card) : Tensor();
  return {to_card(of_input, card), to_card(of_hidden, card), to_card(grad * z, card), bias, hidden_bias};
}

// BatchNorm over several cards, in the types that CUDA's kernels check.
inline at::ScalarType type_of_sums(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }
inline void check_type(const Tensor& t, at::ScalarType type) {
  TORCH_CHECK(t.scalar_type() == type, "expected scalar type ", type, " but found ", t.scalar_type());
}
inline std::vector<int64_t> all_but_channels(const Tensor& t) {
  std::vector<int64_t> dims = {0};
  for (int64_t dim = 2; dim < t.dim(); dim++) dims.push_back(dim);
  return dims;
}
inline Tensor by_channel(const Tensor& t, const Tensor& like) {
  std::vector<int64_t> shape(like.dim(), 1);
  shape[1] = -1;
  return t.view(shape);
}
inline std::tuple<Tensor, Tensor> norm_stats(const Tensor& input, double eps) {
  int card = input.device().index();
  run("batch_norm_stats", {input}, {}, card);
  Below below;
  auto x = as_cpu(input).to(type_of_sums(input.scalar_type()));
  auto [var, mean] = at::var_mean(x, all_but_channels(x), at::Scalar(0));
  return {to_card(mean.contiguous(), card), to_card((var + eps).rsqrt().contiguous(), card)};
}
inline std::tuple<Tensor, Tensor> norm_gather(const Tensor& input, const Tensor& means, const Tensor& inverses,
                                              const Maybe& running_mean, const Maybe& running_var, double momentum,
                                              double eps, const Tensor& counts) {
  int card = input.device().index();
  run("batch_norm_gather_stats_with_counts", {input, means, inverses, counts}, defined({running_mean, running_var}),
      card);
  auto type = running_mean ? running_mean->scalar_type() : input.scalar_type();
  check_type(counts, type), check_type(means, type_of_sums(type)), check_type(inverses, type_of_sums(type));
  Below below;
  auto n = as_cpu(counts).to(at::kDouble).unsqueeze(1), m = as_cpu(means).to(at::kDouble);
  auto total = n.sum(), mean = (n * m).sum(0) / total;
  auto var = (n * (as_cpu(inverses).to(at::kDouble).pow(-2) - eps + (m - mean).square())).sum(0) / total;
  if (running_mean) as_cpu(*running_mean).mul_(1 - momentum).add_(momentum * mean);
  if (running_var) as_cpu(*running_var).mul_(1 - momentum).add_(momentum * var * total / (total - 1));
  return {to_card(mean.to(means.scalar_type()), card), to_card((var + eps).rsqrt().to(means.scalar_type()), card)};
}
inline Tensor norm_elements(const Tensor& input, const Maybe& weight, const Maybe& bias, const Tensor& mean,
                            const Tensor& inverse, double) {
  int card = input.device().index();
  run("batch_norm_elemt", defined({input, weight, bias, mean, inverse}), {}, card);
  check_type(mean, type_of_sums(input.scalar_type()));
  Below below;
  auto x = as_cpu(input);
  auto out = (x - by_channel(as_cpu(mean), x)) * by_channel(as_cpu(inverse), x);
  if (weight) out = out * by_channel(as_cpu(*weight), x);
  if (bias) out = out + by_channel(as_cpu(*bias), x);
  return to_card(at::empty_like(x).copy_(out), card);
}
inline std::tuple<Tensor, Tensor, Tensor, Tensor> norm_reduce(const Tensor& grad, const Tensor& input,
                                                              const Tensor& mean, const Tensor& inverse,
                                                              const Maybe& weight, bool, bool weight_g, bool bias_g) {
  int card = input.device().index();
  run("batch_norm_backward_reduce", defined({grad, input, mean, inverse, weight}), {}, card);
  check_type(grad, input.scalar_type()), check_type(mean, type_of_sums(input.scalar_type()));
  Below below;
  auto x = as_cpu(input), g = as_cpu(grad).to(mean.scalar_type()), m = by_channel(as_cpu(mean), x);
  auto sum = g.sum(all_but_channels(x)), product = (g * (x - m)).sum(all_but_channels(x));
  auto of_weight = weight_g ? (product * as_cpu(inverse)).to(weight.value().scalar_type()) : Tensor();
  auto of_bias = bias_g ? sum.to(weight.value().scalar_type(), false, true) : Tensor();
  return {to_card(sum, card), to_card(product, card), to_card(of_weight, card), to_card(of_bias, card)};
}
inline Tensor norm_backward(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& inverse,
                            const Maybe& weight, const Tensor& sum, const Tensor& product, const Tensor& counts) {
  int card = input.device().index();
  run("batch_norm_backward_elemt", defined({grad, input, mean, inverse, weight, sum, product, counts}), {}, card);
  check_type(counts, at::kInt), check_type(sum, type_of_sums(input.scalar_type()));
  if (weight) check_type(*weight, mean.scalar_type());
  Below below;
  auto x = as_cpu(input), total = as_cpu(counts).sum(), inv = as_cpu(inverse);
  auto slope = as_cpu(product) / total * inv * inv;
  auto centred = x - by_channel(as_cpu(mean), x);
  auto out = as_cpu(grad) - by_channel(as_cpu(sum) / total, x) - centred * by_channel(slope, x);
  out = out * by_channel(weight ? inv * as_cpu(*weight) : inv, x);
  return to_card(at::empty_like(x).copy_(out), card);
}
}  // namespace simulated
