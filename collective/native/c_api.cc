#include "c_api.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "session.h"

namespace collective {
namespace {

// How often a wait for a handle is reported to deadlock detection.
constexpr std::chrono::milliseconds kPollInterval(100);

thread_local std::string error;

std::mutex core_mutex;
// Freed by `at_exit`, but not in a fork.
std::shared_ptr<Core>& core = *new std::shared_ptr<Core>;
int generation = 0;

// Whether this process is a fork of one that was in a job. It has the parent's
// memory but no thread of it: a collective would take part in the parent's
// name, and the destruction of the core would leave the job in its name.
std::atomic<bool> forked{false};
const int forks = pthread_atfork(nullptr, nullptr, [] {
  if (core) forked = true;
});
const struct AtExit {
  ~AtExit() {
    if (!forked) core.reset();
  }
} at_exit;

constexpr char kForkHint[] =
    "call collectives in the process that called init(); start others by "
    "subprocess, or by multiprocessing.get_context(\"spawn\")";

std::string ForkOf(const Core& parent) {
  return "process " + std::to_string(getpid()) + " is a fork of rank " +
         std::to_string(parent.job().rank()) + ", and not a rank of the job";
}

void ThrowIfForked() {
  if (forked) throw Failure(Code::kInvalidArgument, ForkOf(*core), kForkHint);
}

[[noreturn]] void Invalid(const std::string& what) {
  throw Failure(Code::kInvalidArgument, what,
                "the library and its callers must be of one version");
}

// The last owner may be a callback in a worker thread, and ~Queue joins that.
void Destroy(Core* last) {
  if (!Queue::InWorker()) {
    delete last;
    return;
  }
  try {
    std::thread([last] { delete last; }).detach();
  } catch (const std::system_error&) {
    last->job().Leave();  // leaked, but no other rank waits for this one
  }
}

template <class... Arguments>
std::shared_ptr<Core> NewCore(Arguments&&... arguments) {
  return {new Core(std::in_place, std::forward<Arguments>(arguments)...), &Destroy};
}

// Replaces the core of the former job.
void Replace(std::shared_ptr<Core> next, int32_t* rank, int32_t* size) {
  *rank = next->job().rank();
  *size = next->job().size();
  std::lock_guard<std::mutex> lock(core_mutex);
  generation = next->job().generation() + 1;
  core = std::move(next);
}

}  // namespace

int32_t SetErrorFromException() {
  try {
    throw;
  } catch (const Failure& failure) {
    error = failure.what();
    return static_cast<int32_t>(failure.code());
  } catch (const std::bad_alloc&) {
    error = std::string("out of memory\nHINT: ") + kOutOfMemoryHint;
  } catch (const std::exception& exception) {
    error = std::string(exception.what()) +
            "\nHINT: this is a defect of the native core; please report it";
  }
  return static_cast<int32_t>(Code::kInternal);
}

std::shared_ptr<Core> CurrentCore() {
  ThrowIfForked();
  std::lock_guard<std::mutex> lock(core_mutex);
  if (!core) {
    throw Failure(Code::kFailedPrecondition, "collective is not initialized",
                  "call collective.init() first");
  }
  return core;
}

void Convert(const collective_request& from, Request* to) {
  if (from.kind < 0 || from.kind > static_cast<int>(Kind::kBarrier) || from.op < 0 ||
      from.op >= kOps || from.algorithm < 0 ||
      from.algorithm > static_cast<int>(Algorithm::kHierarchical)) {
    Invalid("unknown collective, operation or algorithm");
  }
  to->kind = static_cast<Kind>(from.kind);
  to->op = static_cast<Op>(from.op);
  to->root = from.root;
  to->algorithm = static_cast<Algorithm>(from.algorithm);
  to->has_transport = from.transport >= 0;
  to->transport =
      from.transport >= 0 ? static_cast<DType>(from.transport) : DType::kFloat32;
  if (to->has_transport && to->transport != DType::kFloat16 &&
      to->transport != DType::kBFloat16) {
    throw Failure(Code::kInvalidArgument, "transport must be float16 or bfloat16",
                  "leave it out to keep the tensors' own type");
  }
  to->name.assign(from.name ? from.name : "");
  to->plan = PlanOf(from.plan, Core::IndexOf(from.group));
  to->once = from.once != 0;
  to->ticket = from.ticket;
  to->issued = from.issued;
  to->counts.assign(from.counts, from.counts + from.counts_length);
  to->tensors.resize(from.tensors_length);
  for (int i = 0; i < from.tensors_length; ++i) {
    const collective_tensor& tensor = from.tensors[i];
    if (tensor.dtype < 0 || tensor.dtype >= kDTypes || tensor.count < 0) {
      Invalid("unknown dtype or negative count");
    }
    Tensor& mine = to->tensors[i];
    mine.input = tensor.input;
    mine.output = tensor.output;
    mine.count = tensor.count;
    mine.dtype = static_cast<DType>(tensor.dtype);
    mine.shape.assign(tensor.shape, tensor.shape + tensor.dimensions);
  }
  const bool one = to->kind == Kind::kAllGather || to->kind == Kind::kReduceScatter ||
                   to->kind == Kind::kAllToAll;
  if (one && from.tensors_length != 1) Invalid("takes exactly one tensor");
}

void SetCallerWaiting(bool waits) {
  const std::shared_ptr<Core> now = [] {
    std::lock_guard<std::mutex> lock(core_mutex);
    return core;
  }();
  if (now) now->job().SetCallerWaiting(waits);
}

}  // namespace collective

using namespace collective;

struct collective_handle {
  std::mutex mutex;
  std::condition_variable change;
  bool finished = false;
  Code code = Code::kOk;
  std::string message;
};

extern "C" {

int32_t collective_init(int32_t rank, int32_t size, int32_t local_rank,
                        int32_t local_size, const char* job) {
  return Guard([&] {
    ThrowIfForked();
    std::lock_guard<std::mutex> lock(core_mutex);
    if (core) return;
    core = NewCore(RankInfo{rank, size, local_rank, local_size, job},
                   Settings::FromEnvironment(), generation);
    ++generation;
  });
}

int32_t collective_shutdown(void) {
  if (forked) return 0;  // only the parent may leave the job
  return Guard([&] {
    std::shared_ptr<Core> last;
    {
      std::lock_guard<std::mutex> lock(core_mutex);
      last.swap(core);
    }
    if (last) last->job().Leave();
  });
}

const char* collective_error(void) { return error.c_str(); }

const char* collective_kernels(void) { return BestKernels().name; }

int32_t collective_group(const int32_t* ranks, int32_t length, int32_t* group) {
  return Guard([&] {
    *group = CurrentCore()->AddGroup(std::vector<int>(ranks, ranks + length));
  });
}

int32_t collective_members(int32_t group, int32_t* size, int32_t* me) {
  return Guard([&] {
    const auto core = CurrentCore();
    const Communicator& ranks = core->queue(group, Order::kProgramOrder).ranks();
    *size = ranks.size();
    *me = ranks.me();
  });
}

int32_t collective_rank_info(int32_t group, collective_ranks* info) {
  return Guard([&] {
    const auto core = CurrentCore();
    const Job& job = core->job();
    const std::vector<int>& members = core->members(group);
    *info = {-1, static_cast<int32_t>(members.size()), 0, 0};
    for (int i = 0; i < info->size; ++i) {
      const int rank = members[i];
      if (rank == job.rank()) info->rank = i;
      if (job.host_of(rank) != job.host_of(job.rank())) continue;
      info->local_rank += rank < job.rank();
      ++info->local_size;
    }
  });
}

int32_t collective_rank_of(int32_t group, int32_t member, int32_t* rank) {
  return Guard([&] { *rank = CurrentCore()->members(group).at(member); });
}

int32_t collective_run(const collective_request* request) {
  return Guard([&] {
    const auto core = CurrentCore();
    static thread_local Request converted;  // keeps its memory
    Convert(*request, &converted);
    Queue& queue = core->queue(request->group, static_cast<Order>(request->order));
    converted.among = queue.among();
    queue.Run(converted);
  });
}

static int32_t Submit(const collective_request* request, collective_done done,
                      void* argument, bool blocks) {
  return Guard([&] {
    Request converted;
    Convert(*request, &converted);
    const auto core = CurrentCore();
    Queue& queue = core->queue(request->group, static_cast<Order>(request->order));
    converted.among = queue.among();
    queue.Submit(
        std::move(converted),
        [done, argument](Code code, const char* message) {
          done(argument, static_cast<int32_t>(code), message);
        },
        blocks);
  });
}

int32_t collective_submit(const collective_request* request, collective_done done,
                          void* argument) {
  const auto order = static_cast<Order>(request->order);
  return Submit(request, done, argument, order == Order::kProgramOrder);
}

int32_t collective_start(const collective_request* request,
                         collective_handle** handle) {
  auto made = std::make_unique<collective_handle>();
  const int32_t code = Submit(
      request,
      [](void* argument, int32_t code, const char* message) {
        auto* handle = static_cast<collective_handle*>(argument);
        // Under the lock: the waiter frees the handle as soon as it can.
        std::lock_guard<std::mutex> lock(handle->mutex);
        handle->code = static_cast<Code>(code);
        handle->message = message;
        handle->finished = true;
        handle->change.notify_all();
      },
      made.get(), false);
  if (code == 0) *handle = made.release();
  return code;
}

int32_t collective_wait(collective_handle* handle) {
  // In a fork nothing finishes it, and its mutex may have been held.
  if (forked) return Guard(&ThrowIfForked);
  std::unique_ptr<collective_handle> owned(handle);
  std::unique_lock<std::mutex> lock(owned->mutex);
  const auto finished = [&] { return owned->finished; };
  bool waits = false;
  while (!owned->change.wait_for(lock, kPollInterval, finished)) {
    // The last owner of the core fails its handles, which takes this lock.
    lock.unlock();
    SetCallerWaiting(waits = true);
    lock.lock();
  }
  if (waits) SetCallerWaiting(false);
  const Code code = owned->code;
  if (code != Code::kOk) error = owned->message;
  lock.unlock();
  return static_cast<int32_t>(code);
}

int32_t collective_finished(collective_handle* handle) {
  if (forked) return 1;
  std::lock_guard<std::mutex> lock(handle->mutex);
  return handle->finished;
}

int32_t collective_join(int64_t* served) {
  return Guard([&] { *served = CurrentCore()->Join(); });
}

void collective_plan(int32_t plan, int32_t group, const char* function,
                     const char* name) {
  AddToPlan(plan, Core::IndexOf(group), function, name);
}

int32_t collective_lost(void) {
  bool lost = false;
  Guard([&] { lost = CurrentCore()->job().lost(); });
  return lost;
}

int32_t collective_reconfigure(int32_t admits, int32_t* rank, int32_t* size) {
  return Guard([&] {
    const auto last = CurrentCore();
    last->job().Retire();
    Replace(NewCore(last->job(), admits != 0), rank, size);
  });
}

int32_t collective_depart(void) {
  return Guard([] { CurrentCore()->job().Depart(); });
}

int32_t collective_pending_joins(void) {
  int32_t waiting = 0;
  Guard([&] { waiting = CurrentCore()->job().PendingJoins(); });
  return waiting;
}

int32_t collective_late_join(int32_t* rank, int32_t* size) {
  return Guard(
      [&] { Replace(NewCore(CurrentCore()->job(), Job::LateJoin{}), rank, size); });
}

int32_t collective_hosts(int32_t* hosts, int32_t* former) {
  return Guard([&] {
    const auto core = CurrentCore();
    const Job& job = core->job();
    for (int rank = 0; rank < job.size(); ++rank) {
      hosts[rank] = job.host_of(rank);
      former[rank] = job.previous_ranks()[rank];
    }
  });
}

void collective_abort(const char* message) {
  Guard([&] {
    CurrentCore()->job().Break(Code::kUnavailable, message,
                               "see the first error above");
  });
}

}  // extern "C"
