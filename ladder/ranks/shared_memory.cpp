// The collectives of CPU ranks on one machine, through memory that they share; shared_memory.py compiles and joins them.
//
// A collective is cut into pieces, numbered alike on all ranks. Its start copies this rank's part of a piece into a slot
// of its own and raises its number `written`; its wait looks at the others' numbers and reads their slots. There is no
// thread, and on the fast path no system call. Piece i lies in slot i % slots, which is written again only when every
// rank's number `read` is beyond i. Pieces are completed in their order, and a start first completes what is `slots`
// pieces older: so it waits only for peers that are themselves so far behind.

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Works = c10::intrusive_ptr<c10d::Work>;

constexpr int64_t kPage = 4096;             // bytes: no two ranks write to one page
constexpr int64_t kGrain = 1 << 15;         // numbers that a thread sums at least
constexpr int64_t kCopyGrain = 1 << 19;     // bytes that a thread copies at least
constexpr int kSpins = 100;                 // looks at a number before others may have the core
constexpr auto kYields = 2ms, kLook = 50ms;  // of waiting before it sleeps; between looks whether a peer lives
constexpr auto kDeadline = 30min;           // as gloo's; ladder/ranks/watch.py ends sooner what it counts

// How many pieces a rank has written and read, in a page of its own, two cache lines apart.
struct alignas(kPage) Progress {
  alignas(128) std::atomic<uint64_t> written;
  alignas(128) std::atomic<uint64_t> read;
};

void copy(void* to, const void* from, int64_t bytes) {
  at::parallel_for(0, bytes, kCopyGrain, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, end - begin);
  });
}

// sum[i] = parts[0][i] + parts[1][i] + ..., in this order, rounded once; one of the parts may be the sum itself.
template <typename Number>
void add(Number* sum, const std::vector<const void*>& parts, int64_t count) {
  constexpr int64_t kBlock = 256;
  at::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end; start += kBlock) {
      const int64_t n = std::min(kBlock, end - start);
      at::opmath_type<Number> block[kBlock] = {};  // float for the 16-bit numbers
      for (const void* part : parts) {
        for (int64_t i = 0; i < n; i++) block[i] += static_cast<const Number*>(part)[start + i];
      }
      for (int64_t i = 0; i < n; i++) sum[start + i] = static_cast<Number>(block[i]);
    }
  });
}

struct Piece {
  at::Tensor result;  // is kept until the piece is complete
  char* to;           // where in it: of a gather, for rank 0
  int64_t bytes;
  int64_t stride;  // bytes between the ranks' parts of a gather; 0 for a sum
};

// For ladder/ranks/watch.py, of all groups of this process.
std::atomic<bool> a_peer_died = false, abandoned = false;
std::atomic<int64_t> pieces_written = 0;  // a rank that the others wait for has written fewer

class SharedMemory : public c10d::Backend {
 public:
  // fd: a file that the ranks share.
  SharedMemory(int fd, int rank, int size, int64_t slots, int64_t slot_bytes)
      : Backend(rank, size), fd_(fd), slots_(slots), slot_bytes_(slot_bytes) {
    const int64_t bytes = size * (sizeof(Progress) + slots * slot_bytes);
    void* start = MAP_FAILED;
    if (ftruncate(fd, bytes) == 0) start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    TORCH_CHECK(start != MAP_FAILED, "cannot share ", bytes, " bytes of memory: ", std::strerror(errno));
    memory_ = static_cast<char*>(start);
    // Locks are the process's: they go when it ends, however it does. (Or when it closes any descriptor of the file.)
    struct flock lock = byte(rank);
    TORCH_CHECK(fcntl(fd, F_SETLK, &lock) == 0, "cannot lock shared memory: ", std::strerror(errno));
  }

  const std::string getBackendName() const override { return "shared-memory"; }

  Works allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(tensors.size() == 1 && options.reduceOp == c10d::ReduceOp::SUM, "shared memory: one tensor, summed");
    TORCH_CHECK(tensors[0].is_non_overlapping_and_dense(), "shared memory: the tensor has holes");
    return start(tensors[0], tensors[0], false);
  }

  Works allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(inputs.size() == 1, "shared memory: one tensor, gathered");
    return start(outputs.at(0), inputs[0], true);
  }

  // Completes the first `count` pieces.
  void complete(uint64_t count) {
    const std::lock_guard<std::mutex> guard(mutex_);
    while (completed_ < count) finish();
  }

 private:
  struct Pending : c10d::Work {
    Pending(SharedMemory* owner, uint64_t count) : owner(owner), count(count) {}
    bool wait(std::chrono::milliseconds) override {
      owner->complete(count);
      return true;
    }
    SharedMemory* owner;  // lives as long as the process
    uint64_t count;       // of the pieces up to the last one of this collective
  };

  static struct flock byte(int rank) {
    return {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1, .l_pid = 0};
  }

  Progress& progress(int rank) { return reinterpret_cast<Progress*>(memory_)[rank]; }

  char* slot(int rank, uint64_t piece) {
    return memory_ + size_ * sizeof(Progress) + (rank * slots_ + piece % slots_) * slot_bytes_;
  }

  Works start(const at::Tensor& output, const at::Tensor& input, bool gather) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const int64_t bytes = input.nbytes();
    const char* from = static_cast<const char*>(input.const_data_ptr());
    char* to = static_cast<char*>(output.mutable_data_ptr());
    if (gather) {
      TORCH_CHECK(input.is_contiguous() && output.is_contiguous(), "shared memory: tensors with gaps");
      TORCH_CHECK(static_cast<int64_t>(output.nbytes()) == size_ * bytes, "shared memory: an output of wrong size");
      copy(to + rank_ * bytes, from, bytes);
    }
    for (int64_t done = 0; done < bytes; done += slot_bytes_) {
      const int64_t length = std::min(slot_bytes_, bytes - done);
      const uint64_t piece = completed_ + queue_.size();
      if (queue_.size() == static_cast<size_t>(slots_)) finish();
      if (piece >= static_cast<uint64_t>(slots_)) await(&Progress::read, piece - slots_ + 1);
      copy(slot(rank_, piece), from + done, length);
      progress(rank_).written.store(piece + 1, std::memory_order_release);
      pieces_written.fetch_add(1, std::memory_order_relaxed);
      queue_.push_back({output, to + done, length, gather ? bytes : 0});
    }
    return c10::make_intrusive<Pending>(this, completed_ + queue_.size());
  }

  // Completes the oldest piece.
  void finish() {
    await(&Progress::written, completed_ + 1);
    const Piece& piece = queue_.front();
    std::vector<const void*> parts(size_);
    for (int rank = 0; rank < size_; rank++) {
      parts[rank] = rank == rank_ ? piece.to : slot(rank, completed_);
      if (piece.stride && rank != rank_) copy(piece.to + rank * piece.stride, parts[rank], piece.bytes);
    }
    if (!piece.stride) {
      AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, piece.result.scalar_type(), "all_reduce", [&] {
        add(reinterpret_cast<scalar_t*>(piece.to), parts, piece.bytes / sizeof(scalar_t));
      });
    }
    completed_++;
    progress(rank_).read.store(completed_, std::memory_order_release);
    queue_.pop_front();
  }

  bool all_have(std::atomic<uint64_t> Progress::* number, uint64_t count) {
    for (int rank = 0; rank < size_; rank++) {
      if (rank != rank_ && (progress(rank).*number).load(std::memory_order_acquire) < count) return false;
    }
    return true;
  }

  // Waits until a number of every peer has come to `count`. Throws c10::DistBackendError when a peer has died before, or
  // when this is abandoned.
  void await(std::atomic<uint64_t> Progress::* number, uint64_t count) {
    for (int i = 0; i < kSpins; i++) {
      if (all_have(number, count)) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    const auto start = Clock::now();
    auto look = start + kLook;
    while (!all_have(number, count)) {
      const auto waited = Clock::now() - start;
      if (waited < kYields) {
        sched_yield();
      } else {
        std::this_thread::sleep_for(std::min<Clock::duration>(waited / 16, 1ms));
      }
      if (Clock::now() < look) continue;
      look = Clock::now() + kLook;
      if (waited > kDeadline) C10_THROW_ERROR(DistBackendError, "shared memory: a rank has not come for 30 minutes");
      if (abandoned) C10_THROW_ERROR(DistBackendError, "shared memory: told to wait no longer");
      for (int rank = 0; rank < size_; rank++) {
        struct flock lock = byte(rank);
        const bool dead = fcntl(fd_, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
        // it may have written its part and ended just now
        if (rank == rank_ || (progress(rank).*number).load(std::memory_order_acquire) >= count) continue;
        if (!dead) continue;
        a_peer_died = true;
        C10_THROW_ERROR(DistBackendError, c10::str("shared memory: rank ", rank, " has died"));
      }
    }
  }

  int fd_;
  char* memory_;  // of the file: the Progress of each rank, then the slots of each
  int64_t slots_, slot_bytes_;
  std::mutex mutex_;
  std::deque<Piece> queue_;  // started and not completed, in their order
  uint64_t completed_ = 0;   // pieces
};

void join_memory(int64_t fd, int64_t rank, int64_t size, int64_t slots, int64_t slot_bytes, std::string name) {
  auto backend = c10::make_intrusive<SharedMemory>(fd, rank, size, slots, slot_bytes);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(c10::intrusive_ptr<c10d::Store>(), rank, size);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  group->setGroupName(name);
  c10d::register_process_group(name, group);
  group.release();  // PyTorch knows groups by name, and does not keep them: this one lives as long as the process
}

// What ladder/kernels/ordered.py does without Python, whose operators take longer than a small all-reduce.
at::Tensor settle(
    const at::Tensor& x, const std::optional<at::Tensor>& pending, const std::optional<at::Tensor>& after) {
  if (!pending) return x.clone();
  static const auto wait = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                               .typed<at::Tensor(const at::Tensor&)>();
  return at::add(x, wait.call(*pending));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ladder, library) {
  const std::string schema = "settle_in_cpp(Tensor x, Tensor? pending, Tensor? after) -> Tensor";
  library.def(schema.c_str(), torch::dispatch(c10::DispatchKey::CPU, settle));
  library.def("join_memory(int fd, int rank, int size, int slots, int slot_bytes, str name) -> ()", join_memory);
  library.def("memory_lost_peer() -> bool", []() -> bool { return a_peer_died; });
  library.def("memory_progress() -> int", []() -> int64_t { return pieces_written; });
  library.def("memory_abandon() -> ()", [] { abandoned = true; });
}
