// What the simulated driver of one process knows: its cards, streams, counts, and whether CUDA still works.
#pragma once
#include <ATen/ATen.h>
#include <pthread.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>

#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

namespace simulated {
#ifdef SIMULATED_NPU  // of a vendor whose devices torch gets from an extension
#define CARD_KEY PrivateUse1
constexpr auto kWord = "npu", kRuntime = "NPU", kVisible = "ASCEND_RT_VISIBLE_DEVICES", kCollectives = "hccl";
#else
#define CARD_KEY CUDA
constexpr auto kWord = "cuda", kRuntime = "CUDA", kVisible = "CUDA_VISIBLE_DEVICES", kCollectives = "nccl";
#endif
constexpr auto kCard = c10::DeviceType::CARD_KEY;
constexpr auto kKey = c10::DispatchKey::CARD_KEY;
constexpr int kMostCards = 16;
inline std::recursive_mutex mutex;  // of all that is here
using Lock = std::lock_guard<std::recursive_mutex>;

// --- counts
// -----------------------------------------------------------------------------------------------------------
inline std::map<std::string, int64_t> counts;
inline PyObject* tracer = nullptr;  // called with the name of what blocks the host, and of collectives

inline void count(const std::string& name) {
  Lock lock(mutex);
  counts[name]++;
}

inline void trace(const std::string& name) {
  if (!tracer) return;
  pybind11::gil_scoped_acquire gil;
  PyObject* result = PyObject_CallFunction(tracer, "s", name.c_str());
  if (!result) PyErr_Clear();
  Py_XDECREF(result);
}

// --- cards
// ------------------------------------------------------------------------------------------------------------
inline thread_local c10::DeviceIndex current = 0;
inline thread_local c10::StreamId current_streams[kMostCards] = {};

inline std::string uuid_of(int card) {
  const char* machine = getenv("SIMULATED_MACHINE");
  char text[64];
  snprintf(text, sizeof text, "%.8s-0000-4000-8000-%012x", machine ? machine : "5eed0000", card);
  return text;
}

inline double setting(const char* name, double otherwise) {
  const char* text = getenv(name);
  return text ? atof(text) : otherwise;
}

// The numbers of the cards that this process may use: the driver reads the variable once, at its first call.
inline const std::vector<int>& cards() {
  static const std::vector<int> visible = [] {
    int total = static_cast<int>(setting("SIMULATED_CARDS", 0));
    std::vector<int> all, chosen;
    for (int card = 0; card < total; card++) all.push_back(card);
    const char* words = getenv(kVisible);
    if (!words) return all;
    std::stringstream stream(words);
    for (std::string word; std::getline(stream, word, ',');) {
      word.erase(0, word.find_first_not_of(' '));
      auto is_named = [&](int card) {
        return ("GPU-" + uuid_of(card)).rfind(word, 0) == 0 || std::to_string(card) == word;
      };
      auto found = word.empty() ? all.end() : std::find_if(all.begin(), all.end(), is_named);
      if (found == all.end()) break;
      if (std::count(chosen.begin(), chosen.end(), *found)) return std::vector<int>{};
      chosen.push_back(*found);
    }
    return chosen;
  }();
  return visible;
}
inline int card_count() { return static_cast<int>(cards().size()); }
inline int or_current(int card) { return card < 0 ? current : card; }

[[noreturn]] inline void raise(int code, const std::string& message) {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code, std::string(kRuntime) + " error: " + message);
}
inline void check_card(int card) {
  if (card >= 0 && card < card_count()) return;
  raise(101, "invalid device ordinal\n(simulated: card " + std::to_string(card) + " of " +
                 std::to_string(card_count()) + ")");
}

// --- forks and asserts, after which CUDA does not work
// ------------------------------------------------------------------
inline bool is_in_bad_fork = false;

inline void poison_forks() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] {
      is_in_bad_fork = true;
      torch::utils::set_requires_device_init(kCard, true);
    });
  });
}

inline std::string
    failed_assert;  // what a kernel said; the next call that waits for the card raises it, and all after that
inline bool is_assert_known = false;

// A card that has failed: the file SIMULATED_FAULT has its number and the error of every call from then on.
inline void check_fault() {
  static const char* path = getenv("SIMULATED_FAULT");
  if (!path) return;
  std::ifstream file(path);
  int card;
  std::string error;
  if (file >> card && std::getline(file >> std::ws, error) && std::count(cards().begin(), cards().end(), card))
    raise(999, error);
}
inline void raise_assert() {
  is_assert_known = true;
  raise(710,
        "device-side assert triggered\nKernel errors might be asynchronously reported at some other API call, "
        "so the "
        "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n");
}
inline void check_process() {
  TORCH_CHECK(!is_in_bad_fork, kRuntime, " error: initialization error (simulated: used before the fork)");
  check_fault();
  if (is_assert_known) raise_assert();
}

// --- order of work
// -------------------------------------------------------------------------------------------------------- Work on a
// stream is ordered after the stream's earlier work only, and after what an event, or the host, has waited for. A
// clock says up to which number the work of each stream is known to be done.
using Stream = int64_t;  // the card and torch's number of the stream; numbers below 0 are of collectives
using Clock = std::map<Stream, uint64_t>;
inline std::map<Stream, Clock> streams;
inline Clock host;  // what the host has waited for
inline int64_t next_stream = 1;

inline Stream stream_of(int card, c10::StreamId id) { return (static_cast<int64_t>(card) << 32) + id; }
inline Stream current_stream(int card) { return stream_of(card, current_streams[card]); }
inline std::string name_of(Stream stream) {
  int64_t card = (stream + (1LL << 31)) >> 32, id = stream - (card << 32);
  return (id < 0 ? "the collectives' stream" : "stream " + std::to_string(id)) + " of " + kWord + ":" + std::to_string(card);
}

inline void join(Clock& into, const Clock& other) {
  for (auto& [stream, number] : other) into[stream] = std::max(into[stream], number);
}
inline uint64_t launch(Stream stream) {
  auto& clock = streams[stream];
  join(clock, host);
  return ++clock[stream];
}
inline bool is_done_for(Stream stream, Stream other, uint64_t number) {
  if (stream == other) return true;
  auto& clock = streams[stream];
  return clock[other] >= number || host[other] >= number;
}

// Collectives that a stream waits for. The host goes on; the next operator in the stream waits for their end, as it
// computes at once, while a real card would only be given it.
struct Pending {
  virtual ~Pending() = default;
  virtual bool is_over() = 0;
  virtual void end() = 0;  // waits
};
using Waited = std::vector<std::shared_ptr<Pending>>;
inline std::map<Stream, Waited> waited;

inline Waited waited_by(Stream stream) {
  Lock lock(mutex);
  auto found = waited.find(stream);
  return found == waited.end() ? Waited{} : found->second;
}
inline bool are_over(const Waited& all) {
  return std::all_of(all.begin(), all.end(), [](auto& each) { return each->is_over(); });
}
inline void end_waited(Stream stream) {  // without the lock: other threads ask meanwhile
  auto all = waited_by(stream);
  for (auto& each : all) each->end();
  Lock lock(mutex);
  auto& left = waited[stream];
  for (auto& each : all) left.erase(std::remove(left.begin(), left.end(), each), left.end());
}
inline bool is_of(Stream stream, int card) { return ((stream + (1LL << 31)) >> 32) == card; }
inline void end_waited_on(int card) {
  std::vector<Stream> those;
  {
    Lock lock(mutex);
    for (auto& [stream, each] : waited)
      if (is_of(stream, card)) those.push_back(stream);
  }
  for (auto stream : those) end_waited(stream);
}

// Copies to pinned memory that did not block arrive when the host has waited for them; earlier there is something
// else.
struct LateCopy {
  at::Tensor to, from;
  Stream stream;
  uint64_t number;
};
inline std::vector<LateCopy> late_copies;

// The host waits for what `clock` says; name: of the count.
inline void host_waits(const std::string& name, const Clock& clock) {
  check_process();
  {
    Lock lock(mutex);
    counts[name]++;
    join(host, clock);
    at::AutoDispatchBelowADInplaceOrView below;
    auto is_late = [](const LateCopy& copy) { return host[copy.stream] < copy.number; };
    auto arrived = std::stable_partition(late_copies.begin(), late_copies.end(), is_late);
    for (auto copy = arrived; copy != late_copies.end(); ++copy) copy->to.copy_(copy->from);
    late_copies.erase(arrived, late_copies.end());
  }
  if (!failed_assert.empty()) raise_assert();
  trace(name);
}
inline void host_waits_for_stream(const std::string& name, Stream stream) {
  end_waited(stream);
  mutex.lock();
  Clock clock = streams[stream];
  mutex.unlock();
  host_waits(name, clock);
}
inline void host_waits_for_card(int card) {
  end_waited_on(card);
  mutex.lock();
  Clock all;
  for (auto& [stream, clock] : streams)
    if (is_of(stream, card)) join(all, clock);
  mutex.unlock();
  host_waits("sync.device", all);
}
}  // namespace simulated
