// NCCL: collectives of cards' tensors, by gloo over the same memory, in a stream of their own.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "operators.hpp"

namespace simulated {
using Tensors = std::vector<Tensor>;
template <class T>
using Pointer = c10::intrusive_ptr<T>;

// NCCL's time limit: a thread of torch ends the process, whatever that does.
[[noreturn]] inline void end_by_watchdog() {
  fprintf(stderr,
          "[rank?]:[E] Process group watchdog thread terminated with exception: Watchdog caught collective operation "
          "timeout: WorkNCCL(SeqNum=?, OpType=?) ran for ? milliseconds before timing out. (simulated)\n"
          "terminate called after throwing an instance of 'c10::DistBackendError'\n");
  abort();
}

struct Running final : Pending {
  Pointer<c10d::Work> inner;  // null when it is over
  Tensors inputs, outputs;    // gloo reads and writes their memory until then
  std::function<void()> after;
  std::mutex one_at_a_time;

  bool is_over() override {
    std::unique_lock<std::mutex> lock(one_at_a_time, std::try_to_lock);  // another thread waits, or frees tensors
    if (!lock || (inner && !inner->isCompleted())) return false;
    finish();
    return true;
  }
  void end() override {
    std::lock_guard<std::mutex> lock(one_at_a_time);
    finish();
  }

 private:
  void finish() {
    if (!inner) return;
    auto of_gloo = std::move(inner);
    auto sent = std::move(inputs), received = std::move(outputs);
    auto call = std::move(after);
    try {
      of_gloo->wait();
    } catch (const std::exception& error) {
      if (strstr(error.what(), "Timed out")) end_by_watchdog();
      throw;
    }
    Below below;
    at::NoGradGuard no_grad;
    if (call) call();
  }
};

struct Work final : c10d::Work {
  std::shared_ptr<Running> running = std::make_shared<Running>();
  Clock clock;  // of NCCL's stream: a stream that waits for this work is ordered after it

  bool isCompleted() override { return running->is_over(); }
  bool isSuccess() const override { return true; }
  std::exception_ptr exception() const override { return nullptr; }
  Tensors result() override { return running->outputs; }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds) override {  // the current stream does, not the host
    Lock lock(mutex);
    join(streams[current_stream(current)], clock);
    waited[current_stream(current)].push_back(running);
    return true;
  }
  void abort() override {}
  Pointer<c10::ivalue::Future> getFuture() override {
    auto outputs = running->outputs;
    running->end();
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs));
    return future;
  }
};

struct NCCL final : c10d::Backend {
  Pointer<c10d::Backend> gloo;
  Pointer<Options> options;
  Stream stream = -1;
  uint64_t sequence = 0;
  bool is_coalescing = false;
  std::vector<Pointer<c10d::Work>> coalesced;

  NCCL(int rank, int size, Pointer<c10d::Backend> gloo, Pointer<Options> options)
      : Backend(rank, size), gloo(std::move(gloo)), options(std::move(options)) {
    static std::atomic<c10::StreamId> groups{0};
    stream = stream_of(current, -++groups);
  }
  const std::string getBackendName() const override { return kCollectives; }
  Pointer<Options> getBackendOptions() override { return options; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return false; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence; }
  void eagerConnectSingleDevice(at::Device) override {}
  void abort() override { gloo->abort(); }
  void shutdown() override { gloo->shutdown(); }
  void startCoalescing() override { is_coalescing = true; }
  Pointer<c10d::Work> endCoalescing() override {
    is_coalescing = false;
    auto all = std::move(coalesced);
    coalesced.clear();
    for (size_t i = 0; i + 1 < all.size(); i++) all[i]->wait();
    return all.empty() ? nullptr : all.back();
  }

  // --- what gloo gets
  // -------------------------------------------------------------------------------------------------------
  static Tensor cpu(const Tensor& t) {
    TORCH_CHECK(is_on_card(t), "Tensors must be ", kRuntime, " and dense (simulated: got a tensor of ", t.device(), ")");
    TORCH_CHECK(t.is_contiguous() || t.is_non_overlapping_and_dense(), "Tensors must be contiguous (simulated NCCL)");
    auto a = as_cpu(t);
    return a.is_contiguous() ? a : a.as_strided({a.numel()}, {1});
  }
  static Tensors cpu(const Tensors& all) {
    Tensors out;
    for (auto& t : all) out.push_back(cpu(t));
    return out;
  }
  static std::vector<Tensors> cpu(const std::vector<Tensors>& all) {
    std::vector<Tensors> out;
    for (auto& each : all) out.push_back(cpu(each));
    return out;
  }
  static Tensors flat(const std::vector<Tensors>& all) {
    Tensors out;
    for (auto& each : all) out.insert(out.end(), each.begin(), each.end());
    return out;
  }
  template <class O>
  std::function<void()> average(O& options, const Tensors& cpu) {  // which gloo does not have
    if (options.reduceOp != c10d::ReduceOp::AVG) return {};
    options.reduceOp = c10d::ReduceOp::SUM;
    return [cpu, size = getSize()] {
      for (auto t : cpu) t.div_(size);
    };
  }
  // The collective is in NCCL's stream, which waits for the current one.
  template <class Start>
  Pointer<c10d::Work> run(const char* name, const Tensors& in, const Tensors& out, Start start,
                          std::function<void()> after = {}) {
    check_process();
    end_waited(current_stream(current));
    auto work = c10::make_intrusive<Work>();
    {
      Lock lock(mutex);
      counts[std::string("nccl.") + name]++;
      join(streams[stream], streams[current_stream(current)]);
      auto number = launch(stream);
      for (auto& t : in) access(name, false, t, stream, number);
      for (auto& t : out) access(name, true, t, stream, number);
      for (auto* all : {&in, &out})
        for (auto& t : *all)
          allocator().recordStream(t.storage().data_ptr(),
                                   c10::Stream(c10::Stream::UNSAFE, t.device(), stream - stream_of(current, 0)));
      work->clock = streams[stream];
    }
    sequence++;
    trace(std::string("nccl.") + name);
    auto& running = *work->running;
    running.inner = start(), running.inputs = in, running.outputs = out, running.after = std::move(after);
    if (is_coalescing) coalesced.push_back(work);
    return work;
  }

  // --- collectives
  // ------------------------------------------------------------------------------------------------------------
  Pointer<c10d::Work> broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    auto a = cpu(t);
    return run("broadcast", {}, t, [&] { return gloo->broadcast(a, o); });
  }
  Pointer<c10d::Work> allreduce(Tensors& t, const c10d::AllreduceOptions& given) override {
    auto o = given;
    auto a = cpu(t);
    auto after = average(o, a);
    return run("all_reduce", {}, t, [&] { return gloo->allreduce(a, o); }, after);
  }
  Pointer<c10d::Work> allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& given) override {
    c10d::AllreduceOptions o;
    o.reduceOp = given.reduceOp;
    o.timeout = given.timeout;
    auto a = cpu(t);
    auto after = average(o, a);
    auto each = [&] {
      Pointer<c10d::Work> last;
      for (size_t i = 0; i < a.size(); i++) {
        Tensors alone{a[i]};
        last = gloo->allreduce(alone, o);
        if (i + 1 < a.size()) last->wait();
      }
      return last;
    };
    return run("all_reduce", {}, t, each, after);
  }
  Pointer<c10d::Work> reduce(Tensors& t, const c10d::ReduceOptions& given) override {
    auto o = given;
    auto a = cpu(t);
    auto after = average(o, a);
    return run("reduce", {}, t, [&] { return gloo->reduce(a, o); }, after);
  }
  Pointer<c10d::Work> allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto a = cpu(out);
    auto b = cpu(in);
    return run("all_gather", in, flat(out), [&] { return gloo->allgather(a, b, o); });
  }
  Pointer<c10d::Work> _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    auto a = cpu(out), b = cpu(in);
    return run("all_gather", {in}, {out}, [&] { return gloo->_allgather_base(a, b, o); });
  }
  Pointer<c10d::Work> allgather_into_tensor_coalesced(Tensors& out, Tensors& in,
                                                      const c10d::AllgatherOptions& o) override {
    auto a = cpu(out), b = cpu(in);
    return run("all_gather", in, out, [&] { return gloo->allgather_into_tensor_coalesced(a, b, o); });
  }
  Pointer<c10d::Work> gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override {
    auto a = cpu(out);
    auto b = cpu(in);
    return run("gather", in, flat(out), [&] { return gloo->gather(a, b, o); });
  }
  Pointer<c10d::Work> scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    auto a = cpu(out);
    auto b = cpu(in);
    return run("scatter", flat(in), out, [&] { return gloo->scatter(a, b, o); });
  }
  Pointer<c10d::Work> reduce_scatter(Tensors& out, std::vector<Tensors>& in,
                                     const c10d::ReduceScatterOptions& given) override {
    auto o = given;
    auto a = cpu(out);
    auto b = cpu(in);
    auto after = average(o, a);
    return run("reduce_scatter", flat(in), out, [&] { return gloo->reduce_scatter(a, b, o); }, after);
  }
  Pointer<c10d::Work> _reduce_scatter_base(Tensor& out, Tensor& in,
                                           const c10d::ReduceScatterOptions& given) override {
    auto o = given;
    auto a = cpu(out), b = cpu(in);
    auto after = average(o, {a});
    return run("reduce_scatter", {in}, {out}, [&] { return gloo->_reduce_scatter_base(a, b, o); }, after);
  }
  Pointer<c10d::Work> reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                                      const c10d::ReduceScatterOptions& given) override {
    auto o = given;
    auto a = cpu(out), b = cpu(in);
    auto after = average(o, a);
    return run("reduce_scatter", in, out, [&] { return gloo->reduce_scatter_tensor_coalesced(a, b, o); }, after);
  }
  Pointer<c10d::Work> alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes,
                                    std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& o) override {
    auto a = cpu(out), b = cpu(in);
    return run("all_to_all", {in}, {out}, [&] { return gloo->alltoall_base(a, b, out_sizes, in_sizes, o); });
  }
  Pointer<c10d::Work> alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    auto a = cpu(out), b = cpu(in);
    return run("all_to_all", in, out, [&] { return gloo->alltoall(a, b, o); });
  }
  Pointer<c10d::Work> send(Tensors& t, int rank, int tag) override {
    auto a = cpu(t);
    return run("send", t, {}, [&] { return gloo->send(a, rank, tag); });
  }
  Pointer<c10d::Work> recv(Tensors& t, int rank, int tag) override {
    auto a = cpu(t);
    return run("recv", {}, t, [&] { return gloo->recv(a, rank, tag); });
  }
  Pointer<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return run("barrier", {}, {}, [&] { return gloo->barrier(c10d::BarrierOptions()); });
  }
};

struct Timer final : c10d::Timer {  // of DistributedDataParallel
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    int64_t a = getTimeRef(start), b = getTimeRef(end);
    return a == c10d::kUnsetTime || b == c10d::kUnsetTime || b < a ? std::nullopt : std::optional<int64_t>(b - a);
  }
};
}  // namespace simulated
