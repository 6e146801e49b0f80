// Small collectives of CPU ranks on several machines; one_hop.py compiles this and connects the machines.
//
// A start hands this machine's message to the TCP connections of all others, whose buffers take it, and a wait reads
// theirs: there is no thread. Messages are completed in their order, as all ranks start them. A start first completes
// those that would make more than kInFlight: so a peer has twice that to read at most, which the buffers take, and no
// start waits for ever.

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>

namespace {

using Works = c10::intrusive_ptr<c10d::Work>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kLargest = 1 << 16;   // bytes to all peers together: of more the ring sends fewer, in its own thread
constexpr int64_t kInFlight = 1 << 17;  // bytes that were sent, and whose answers are not yet read

// The ranks of a node that share memory wait for their sums in the same order: a sum ends with a gather among them.
class OneHop : public c10d::Backend {
 public:
  // sockets: of the peer on each node, -1 on this one. inner: for large messages. memory: of this node's ranks, or null.
  OneHop(std::vector<int64_t> sockets, int rank, int size, Group inner, Group memory)
      : Backend(rank, size), sockets_(std::move(sockets)), inner_(std::move(inner)), memory_(std::move(memory)) {
    nodes_ = sockets_.size();
    node_ = std::find(sockets_.begin(), sockets_.end(), -1) - sockets_.begin();
  }

  const std::string getBackendName() const override { return "one-hop"; }

  // The ranks of a node first add, then rank i of each exchanges the i-th part, and then those of a node gather them.
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (is_large(tensors[0].nbytes())) return inner_->allreduce(tensors, options);
    const at::Tensor whole = tensors[0].view(-1);
    at::Tensor part = whole;
    if (memory_) {
      memory_->allreduce(tensors)->wait();
      const int sharers = memory_->getSize();
      if (whole.numel() % sharers == 0) part = whole.view({sharers, -1})[memory_->getRank()];
    }
    const at::Tensor parts = at::empty({nodes_, part.numel()}, part.options());
    return start(part, parts, [this, whole, part, parts] {
      Tensors rows = parts.unbind();
      rows[node_] = part;
      at::Tensor sum = nodes_ > 2 ? rows[0].to(at::toOpMathType(rows[0].scalar_type())) : rows[0];  // rounded once
      for (int64_t i = 1; i < nodes_; i++) sum = at::add(sum, rows[i]);
      part.copy_(sum);
      if (part.numel() < whole.numel()) gather(whole, part.clone());
    });
  }

  Works allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    if (is_large(outputs[0].nbytes() / nodes_)) {
      return inner_->allgather_into_tensor_coalesced(outputs, inputs, options);
    }
    const at::Tensor parts = outputs[0].view({nodes_, -1}), own = parts[node_];
    if (memory_) {
      gather(own, inputs[0]);
    } else {
      own.copy_(inputs[0].view(-1));
    }
    return start(own, parts, [] {});
  }

 private:
  struct Message {
    at::Tensor parts;
    int64_t bytes;
    std::function<void()> then;
  };

  struct Pending : c10d::Work {
    Pending(OneHop* owner, uint64_t count) : owner(owner), count(count) {}
    bool wait(std::chrono::milliseconds) override {
      while (owner->completed_ < count) owner->complete();
      return true;
    }
    OneHop* owner;   // lives as long as the process
    uint64_t count;  // of the messages up to this one
  };

  bool is_large(int64_t bytes) const { return bytes * (nodes_ - 1) > kLargest; }

  void gather(at::Tensor whole, at::Tensor part) { memory_->_allgather_base(whole, part)->wait(); }

  // Sends this node's part; the Work reads those of the others into their rows of `parts`, and calls then().
  Works start(const at::Tensor& own, const at::Tensor& parts, std::function<void()> then) {
    const int64_t bytes = own.nbytes();
    while (!queue_.empty() && in_flight_ + bytes > kInFlight) complete();
    for (const int64_t socket : sockets_) {
      const char* from = static_cast<const char*>(own.const_data_ptr());
      // a peer that is lost shows where its answer is read
      for (ssize_t left = bytes, n; socket >= 0 && left > 0; left -= n, from += n) {
        if ((n = ::send(socket, from, left, MSG_NOSIGNAL)) >= 0) continue;
        if (errno != EINTR) break;
        n = 0;  // a signal came: send the rest
      }
    }
    in_flight_ += bytes;
    queue_.push_back({parts, bytes, std::move(then)});
    return c10::make_intrusive<Pending>(this, completed_ + queue_.size());
  }

  // Reads the answers to the oldest message. Throws c10::DistNetworkError when a peer is lost, or a signal comes.
  void complete() {
    const Message& message = queue_.front();
    char* to = static_cast<char*>(message.parts.mutable_data_ptr());
    for (int64_t i = 0; i < nodes_; i++, to += message.bytes) {
      for (ssize_t done = 0, n; sockets_[i] >= 0 && done < message.bytes; done += n) {
        n = ::recv(sockets_[i], to + done, message.bytes - done, MSG_WAITALL);
        if (n > 0) continue;
        const char* reason = n == 0 ? "it has closed its connection" : std::strerror(errno);
        C10_THROW_ERROR(DistNetworkError, c10::str("one hop: node ", i, " is lost: ", reason));
      }
    }
    message.then();
    in_flight_ -= message.bytes;
    queue_.pop_front();
    completed_++;
  }

  std::vector<int64_t> sockets_;
  Group inner_, memory_;
  int64_t nodes_, node_, in_flight_ = 0;
  std::deque<Message> queue_;
  uint64_t completed_ = 0;  // messages
};

void join_hops(
    std::vector<int64_t> sockets, int64_t rank, int64_t size, std::string inner, std::string memory, std::string name) {
  const Group shared = memory.empty() ? nullptr : c10d::resolve_process_group(memory);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(c10::intrusive_ptr<c10d::Store>(), rank, size);
  group->setBackend(
      c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
      c10::make_intrusive<OneHop>(sockets, rank, size, c10d::resolve_process_group(inner), shared));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  group->setGroupName(name);
  c10d::register_process_group(name, group);
  static auto* groups = new std::vector<Group>();  // PyTorch knows them by name, and does not keep them
  groups->push_back(std::move(group));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ladder, library) {
  library.def("join_hops(int[] sockets, int rank, int size, str inner, str memory, str name) -> ()", join_hops);
}
