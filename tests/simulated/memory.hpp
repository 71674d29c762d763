// Memory of the simulated cards, which is the CPU's: allocator with statistics and a limit, pinned memory, races.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include "process.hpp"

namespace simulated {
struct Statistics {
  int64_t bytes = 0, peak = 0, allocated = 0, freed = 0, blocks = 0, most_blocks = 0, allocations = 0, reserved = 0,
          reserved_peak = 0, out_of_memory = 0;
};
inline Statistics statistics[kMostCards];

inline int64_t total_memory() {
  static int64_t bytes = static_cast<int64_t>(setting("SIMULATED_MEMORY", 16) * (1LL << 30));  // GiB of each card
  return bytes;
}

// One allocation, and who has used it. An access that is not ordered after an earlier one is a race.
struct Block {
  at::DataPtr cpu;
  int64_t size;
  int card;
  Stream stream;  // current at the allocation: memory may be used again there at once when it is freed
  Stream writer = 0;
  uint64_t written = 0;
  std::string last_write;
  std::map<Stream, uint64_t> reads;
  std::set<Stream> recorded;  // by record_stream: the allocator waits for these before it uses the memory again

  void access(const std::string& what, bool writes, Stream on, uint64_t number) {
    auto race = [&](const char* does, const std::string& earlier, Stream other) {
      TORCH_CHECK(false, "simulated race: ", what, " ", writes ? "writes" : "reads", " on ", name_of(on), " what ",
                  earlier, " ", does, " on ", name_of(other), ", without waiting for it");
    };
    if (written && !is_done_for(on, writer, written)) race("writes", last_write, writer);
    if (writes) {
      for (auto& [other, read] : reads)
        if (!is_done_for(on, other, read)) race("reads", "an operator", other);
      writer = on, written = number, last_write = what;
      reads.clear();
    } else {
      reads[on] = number;
    }
  }
  void freed() {  // a destructor cannot raise: the process ends, and says why
    auto is_safe = [&](Stream other, uint64_t number) {
      return recorded.count(other) || is_done_for(stream, other, number);
    };
    bool safe = !written || is_safe(writer, written);
    for (auto& [other, number] : reads) safe = safe && is_safe(other, number);
    if (safe || is_in_bad_fork) return;
    fprintf(stderr, "simulated race: memory of %s is freed while another stream uses it, without record_stream\n",
            name_of(stream).c_str());
    _exit(97);
  }
};

inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    Lock lock(mutex);
    block->freed();
    auto& of_card = statistics[block->card];
    of_card.bytes -= block->size;
    of_card.freed += block->size;
    of_card.blocks--;
  }
  delete block;
}

inline Block* block_of(const c10::StorageImpl* storage) {
  auto& pointer = storage->data_ptr();
  return pointer.get_deleter() == &free_block ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

// Count `cpu` as `size` bytes of a card's memory; raises if they do not fit.
inline at::DataPtr on_card(at::DataPtr cpu, int64_t size, int card) {
  int64_t rounded = (size + 511) / 512 * 512;
  auto& s = statistics[card];
  if (s.bytes + rounded > total_memory()) end_waited_on(card);  // which keep what they send and receive
  Lock lock(mutex);
  if (s.bytes + rounded > total_memory()) {
    s.out_of_memory++;
    auto mib = [](int64_t bytes) { return bytes / 1048576.; };
    TORCH_CHECK_WITH(OutOfMemoryError, false, kRuntime, " out of memory. Tried to allocate ", mib(size), " MiB. GPU ", card,
                     " has a total capacity of ", mib(total_memory()), " MiB of which ",
                     mib(total_memory() - s.bytes), " MiB is free. (simulated)");
  }
  s.bytes += rounded, s.allocated += rounded, s.blocks++, s.allocations++;
  s.peak = std::max(s.peak, s.bytes), s.most_blocks = std::max(s.most_blocks, s.blocks);
  s.reserved = std::max(s.reserved, s.bytes), s.reserved_peak = std::max(s.reserved_peak, s.reserved);
  void* data = cpu.get();
  return {data, new Block{std::move(cpu), rounded, card, current_stream(card)}, free_block, c10::Device(kCard, card)};
}

struct Allocator final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t size) override {
    check_process();
    check_card(current);
    auto& s = statistics[current];
    bool fits =
        static_cast<int64_t>(size) <= total_memory() - s.bytes;  // the CPU's memory may be less than the cards'
    return on_card(size && fits ? c10::GetCPUAllocator()->allocate(size) : at::DataPtr(nullptr, at::kCPU), size,
                   current);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t size) const override { default_copy_data(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (auto& s : statistics) s.reserved = s.bytes;
  }
  void recordStream(const at::DataPtr& pointer, c10::Stream stream) override {
    count("record_stream");
    Lock lock(mutex);
    if (pointer.get_deleter() == &free_block)
      static_cast<Block*>(pointer.get_context())->recorded.insert(stream_of(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex card) override {
    c10::CachingDeviceAllocator::DeviceStats out;
    auto& s = statistics[card];
    auto fill = [](auto& stat, int64_t now, int64_t peak) { stat.current = now, stat.peak = peak; };
    fill(out.allocated_bytes[0], s.bytes, s.peak);
    fill(out.active_bytes[0], s.bytes, s.peak);
    fill(out.reserved_bytes[0], s.reserved, s.reserved_peak);
    out.allocated_bytes[0].allocated = s.allocated, out.allocated_bytes[0].freed = s.freed;
    return out;
  }
  void resetAccumulatedStats(c10::DeviceIndex card) override {
    statistics[card].allocated = statistics[card].freed = 0;
  }
  void resetPeakStats(c10::DeviceIndex card) override {
    auto& s = statistics[card];
    s.peak = s.bytes, s.reserved_peak = s.reserved, s.most_blocks = s.blocks;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex card) override {
    return {total_memory() - statistics[card].reserved, total_memory()};
  }
};
inline Allocator& allocator() {
  static auto* made = new Allocator();
  return *made;
}

// Change the size of a card's storage, and keep what is in it.
inline void resize_storage(c10::StorageImpl* storage, size_t size) {
  at::DataPtr cpu = size ? c10::GetCPUAllocator()->allocate(size) : at::DataPtr(nullptr, at::kCPU);
  if (size && storage->nbytes()) memcpy(cpu.get(), storage->data(), std::min(size, storage->nbytes()));
  storage->set_data_ptr_noswap(on_card(std::move(cpu), size, storage->device().index()));
  storage->set_nbytes(size);
}

// --- pinned memory of the host
// ------------------------------------------------------------------------------------------
inline std::map<const char*, size_t> pinned;
struct PinnedAllocator final : c10::Allocator {
  static void unpin(void* data) {
    {
      Lock lock(mutex);
      pinned.erase(static_cast<char*>(data));
    }
    c10::free_cpu(data);
  }
  at::DataPtr allocate(size_t size) override {
    check_process();
    count("pinned");
    void* data = size ? c10::alloc_cpu(size) : nullptr;
    Lock lock(mutex);
    if (data) pinned[static_cast<char*>(data)] = size;
    return {data, data, unpin, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return unpin; }
  void copy_data(void* to, const void* from, std::size_t size) const override { default_copy_data(to, from, size); }
};
inline PinnedAllocator& pinned_allocator() {
  static auto* made = new PinnedAllocator();
  return *made;
}
inline bool is_pinned(const void* data) {
  Lock lock(mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  auto& [begin, size] = *--after;
  return data < begin + size;
}
}  // namespace simulated
