// What torch asks of a kind of device: guard, streams, events, generators, hooks.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "memory.hpp"

namespace simulated {
// --- generators: a seed and a counter for each card, as Philox has them
// ---------------------------------------------------
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit Generator(c10::DeviceIndex card) : GeneratorImpl(c10::Device(kCard, card), c10::DispatchKeySet(kKey)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() && state.device().is_cpu(),
                "RNG state is wrong size (simulated: 16 bytes)");
    memcpy(&seed_, state.data(), 8);
    memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte, std::nullopt, at::kCPU, false, std::nullopt);
    memcpy(state.mutable_data_ptr(), &seed_, 8);
    memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    auto* from = static_cast<Generator*>(other.get());
    seed_ = from->seed_, offset_ = from->offset_;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::intrusive_ptr<c10::GeneratorImpl>::reclaim(clone_impl());
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->seed_ = seed_, made->offset_ = offset_;
    return made;
  }
  // A CPU generator for one operator.
  at::Generator next() {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t x = seed_ * 0x9E3779B97F4A7C15ull + offset_ * 0xBF58476D1CE4E5B9ull + 1;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    offset_ += 4;
    return at::make_generator<at::CPUGeneratorImpl>(x ^ x >> 31);
  }
};
inline at::Generator& default_generator(int card) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kMostCards; i++) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all.at(or_current(card));
}

// --- events
// -----------------------------------------------------------------------------------------------------------------
struct Event {
  Clock clock;
  Waited after;
  double time = 0;  // ms
  void record(Stream stream) {
    after = waited_by(stream);
    Lock lock(mutex);
    counts["events"]++;
    launch(stream);
    clock = streams[stream];
    time = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void block(Stream stream) const {
    Lock lock(mutex);
    counts["waits"]++;
    join(streams[stream], clock);
    auto& all = waited[stream];
    all.insert(all.end(), after.begin(), after.end());
  }
  bool query() const {  // true once, as of a card that is fast: then the host knows of it
    if (!are_over(after)) return false;
    Lock lock(mutex);
    join(host, clock);
    return true;
  }
  void synchronize() const {
    for (auto& each : after) each->end();
    host_waits("sync.event", clock);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int card_of(c10::Device device) { return or_current(device.index()); }
  static Stream of(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }
  static c10::Stream made(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kCard, card_of(device)), id);
  }
  c10::DeviceType type() const override { return kCard; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = current;
    setDevice(device);
    return {kCard, old};
  }
  c10::Device getDevice() const override { return {kCard, current}; }
  void setDevice(c10::Device device) const override {
    if (device.index() < 0 || device.index() == current) return;
    check_process();
    check_card(device.index());
    current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(card_count()); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  c10::Stream getStream(c10::Device device) const override { return made(device, current_streams[card_of(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return made(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    check_card(card_of(device));
    Lock lock(mutex);
    return made(device, next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  bool queryStream(const c10::Stream& stream) const override { return are_over(waited_by(of(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits_for_stream("sync.stream", of(stream));
  }
  void synchronizeDevice(c10::DeviceIndex card) const override { host_waits_for_card(card); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator().recordStream(pointer, stream);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->record(of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) static_cast<Event*>(event)->block(of(stream));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->query(); }
  void synchronizeEvent(void* event) const override {
    if (event) static_cast<Event*>(event)->synchronize();
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end, "Both events must be recorded before calculating elapsed time.");
    return static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time;
  }
};

#ifdef SIMULATED_NPU
struct Hooks final : at::PrivateUse1HooksInterface {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage.unsafeGetStorageImpl(), size);
  }
#else
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  long versionCUDART() const override { return 12060; }
  std::string showConfig() const override { return "simulated CUDA"; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator(); }
  c10::DeviceIndex current_device() const override { return current; }
  int getNumGPUs() const override { return card_count(); }
  void deviceSynchronize(c10::DeviceIndex card) const override { host_waits_for_card(or_current(card)); }
#endif
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return card_count() > 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex card) const override { return default_generator(card); }
  at::Generator getNewGenerator(c10::DeviceIndex card) const override {
    return at::make_generator<Generator>(or_current(card));
  }
  c10::Device getDeviceFromPtr(void*) const override { return {kCard, current}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  bool hasPrimaryContext(c10::DeviceIndex card) const override { return statistics[card].allocated > 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(card_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex card) const override { Guard().setDevice({kCard, card}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex card) const override {
    return Guard().exchangeDevice({kCard, card}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex card) const override { return exchangeDevice(card); }
};
}  // namespace simulated
