#include "c_api.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "core.h"
#include "recorder/recorder.h"
#include "recorder/timeline.h"
#include "session.h"
#include "transport/messages.h"

namespace collective {
namespace {

// How often who waits for a handle tells so.
constexpr std::chrono::milliseconds kLook(100);

thread_local std::string error;

std::mutex core_mutex;
// Freed by `at_exit`, which leaves it alone in a fork.
std::shared_ptr<Core>& core = *new std::shared_ptr<Core>;
int generation = 0;

// Whether this process is a fork of one that was in a job. It has its memory,
// but none of its threads: a collective would take the part of the parent, and
// the end of the core would leave the job in its name.
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

// Runs `action`; turns what it throws into a code and this thread's error.
template <class Action>
int32_t Guard(Action&& action) {
  try {
    action();
    return 0;
  } catch (const Failure& failure) {
    error = failure.what();
    return static_cast<int32_t>(failure.code());
  } catch (const std::bad_alloc&) {
    error = std::string("out of memory\nHINT: ") + kOutOfMemoryHint;
    return static_cast<int32_t>(Code::kInternal);
  } catch (const std::exception& exception) {
    error = std::string(exception.what()) +
            "\nHINT: this is a defect of the native core; please report it";
    return static_cast<int32_t>(Code::kInternal);
  }
}

[[noreturn]] void Invalid(const std::string& what) {
  throw Failure(Code::kInvalidArgument, what,
                "the library and its callers must be of one version");
}

// Puts the job that a process has met anew in the place of the last.
void Succeed(std::shared_ptr<Core> next, int32_t* rank, int32_t* size,
             int32_t* former) {
  const Job& job = next->job();
  *rank = job.rank();
  *size = job.size();
  std::copy(job.former().begin(), job.former().end(), former);
  std::lock_guard<std::mutex> lock(core_mutex);
  generation = job.generation() + 1;
  core = std::move(next);
}

}  // namespace

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
  if (from.kind < 0 || from.kind > static_cast<int>(Kind::kBarrier) ||
      from.op < 0 || from.op >= kOps || from.algorithm < 0 ||
      from.algorithm > static_cast<int>(Algorithm::kHierarchical)) {
    Invalid("unknown collective, operation or algorithm");
  }
  to->kind = static_cast<Kind>(from.kind);
  to->op = static_cast<Op>(from.op);
  to->root = from.root;
  to->algorithm = static_cast<Algorithm>(from.algorithm);
  to->has_transport = from.transport >= 0;
  to->transport = from.transport >= 0 ? static_cast<DType>(from.transport)
                                      : DType::kFloat32;
  if (to->has_transport && to->transport != DType::kFloat16 &&
      to->transport != DType::kBFloat16) {
    throw Failure(Code::kInvalidArgument,
                  "transport must be float16 or bfloat16",
                  "leave it out to keep the tensors' own type");
  }
  to->name.assign(from.name ? from.name : "");
  to->plan = PlanOf(from.plan, Core::IndexOf(from.group));
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
  const bool one = to->kind == Kind::kAllGather ||
                   to->kind == Kind::kReduceScatter ||
                   to->kind == Kind::kAllToAll;
  if (one && from.tensors_length != 1) Invalid("takes exactly one tensor");
}

void TellHeld(bool waits) {
  std::shared_ptr<Core> now;
  {
    std::lock_guard<std::mutex> lock(core_mutex);
    now = core;
  }
  if (now) now->job().Held(waits);
}

Request& Scratch() {
  static thread_local Request request;  // keeps its memory between calls
  return request;
}

Place PlaceOf(int rank, int size, int local_rank, int local_size,
              const char* job) {
  Place place;
  place.rank = rank;
  place.size = size;
  place.local_rank = local_rank;
  place.local_size = local_size;
  place.job = job;
  return place;
}

}  // namespace collective

using collective::Code;
using collective::CurrentCore;
using collective::Guard;
using collective::Order;
using collective::Recorder;

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
    collective::ThrowIfForked();
    std::lock_guard<std::mutex> lock(collective::core_mutex);
    if (collective::core) return;
    collective::core = std::make_shared<collective::Core>(
        collective::PlaceOf(rank, size, local_rank, local_size, job),
        collective::generation);
    ++collective::generation;
  });
}

int32_t collective_shutdown(void) {
  if (collective::forked) return 0;  // the job is the parent's to leave
  return Guard([&] {
    std::shared_ptr<collective::Core> last;
    {
      std::lock_guard<std::mutex> lock(collective::core_mutex);
      last.swap(collective::core);
    }
    if (last) last->job().Leave();
  });
}

const char* collective_error(void) { return collective::error.c_str(); }

const char* collective_kernels(void) { return collective::BestKernels().name; }

const char* collective_plugin(void) {
  static thread_local std::string path;
  path = collective::Plugin();
  return path.c_str();
}

int32_t collective_group(const int32_t* ranks, int32_t length, int32_t* group) {
  return Guard([&] {
    *group = CurrentCore()->AddGroup(std::vector<int>(ranks, ranks + length));
  });
}

int32_t collective_members(int32_t group, int32_t* size, int32_t* me) {
  return Guard([&] {
    const auto core = CurrentCore();
    const collective::Communicator& ranks =
        core->queue(group, Order::kProgramOrder).ranks();
    *size = ranks.size();
    *me = ranks.me();
  });
}

int32_t collective_rank_info(int32_t group, collective_ranks* info) {
  return Guard([&] {
    const auto core = CurrentCore();
    const collective::Job& job = core->job();
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

int32_t collective_run(const collective_request* request) {
  return Guard([&] {
    const auto core = CurrentCore();
    collective::Request& converted = collective::Scratch();
    collective::Convert(*request, &converted);
    collective::Queue& queue =
        core->queue(request->group, static_cast<Order>(request->order));
    converted.among = queue.among();
    queue.Run(converted);
  });
}

static int32_t Submit(const collective_request* request, collective_done done,
                      void* argument, bool blocks) {
  return Guard([&] {
    collective::Request converted;
    collective::Convert(*request, &converted);
    const auto core = CurrentCore();
    collective::Queue& queue =
        core->queue(request->group, static_cast<Order>(request->order));
    converted.among = queue.among();
    queue.Submit(
        std::move(converted),
        [done, argument](Code code, const char* message) {
          done(argument, static_cast<int32_t>(code), message);
        },
        blocks);
  });
}

int32_t collective_submit(const collective_request* request,
                          collective_done done, void* argument) {
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
        // Told under the lock: the waiter frees the handle as soon as it may.
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
  // In a fork nobody ends it, and its mutex may have been held.
  if (collective::forked) return Guard(&collective::ThrowIfForked);
  std::unique_ptr<collective_handle> owned(handle);
  std::unique_lock<std::mutex> lock(owned->mutex);
  const auto finished = [&] { return owned->finished; };
  bool held = false;
  while (!owned->change.wait_for(lock, collective::kLook, finished)) {
    lock.unlock();  // for whoever lets go of the core last ends its handles
    collective::TellHeld(held = true);
    lock.lock();
  }
  if (held) collective::TellHeld(false);
  const Code code = owned->code;
  if (code != Code::kOk) collective::error = owned->message;
  lock.unlock();
  return static_cast<int32_t>(code);
}

int32_t collective_finished(collective_handle* handle) {
  if (collective::forked) return 1;
  std::lock_guard<std::mutex> lock(handle->mutex);
  return handle->finished;
}

int32_t collective_join(int64_t* served) {
  return Guard([&] { *served = CurrentCore()->Join(); });
}

void collective_plan(int32_t plan, int32_t group, const char* function,
                     const char* name) {
  collective::AddToPlan(plan, collective::Core::IndexOf(group), function, name);
}

int32_t collective_timeline_start(const char* path, int64_t limit,
                                  int32_t process) {
  return Guard([&] { collective::StartTimeline(path, limit, process); });
}

void collective_timeline_stop() { collective::StopTimeline(); }

int32_t collective_lost(void) {
  bool lost = false;
  Guard([&] { lost = CurrentCore()->job().lost(); });
  return lost;
}

int32_t collective_regroup(int32_t* rank, int32_t* size, int32_t* former) {
  return Guard([&] {
    const auto last = CurrentCore();
    last->job().Retire();
    collective::Succeed(std::make_shared<collective::Core>(*last), rank, size,
                        former);
  });
}

int32_t collective_part(void) {
  return Guard([] { CurrentCore()->job().Part(); });
}

int32_t collective_waiting(void) {
  int32_t waiting = 0;
  Guard([&] { waiting = CurrentCore()->job().AtDoor(); });
  return waiting;
}

int32_t collective_enter(int32_t* rank, int32_t* size, int32_t* former) {
  return Guard([&] {
    collective::Succeed(std::make_shared<collective::Core>(
                            *CurrentCore(), collective::Job::Later{}),
                        rank, size, former);
  });
}

int32_t collective_place(int32_t* rank, int32_t* size) {
  return Guard([&] {
    const auto core = CurrentCore();
    *rank = core->job().rank();
    *size = core->job().size();
  });
}

int32_t collective_hosts(int32_t* hosts) {
  return Guard([&] {
    const auto core = CurrentCore();
    for (int rank = 0; rank < core->job().size(); ++rank) {
      hosts[rank] = core->job().host_of(rank);
    }
  });
}

void collective_abort(const char* message) {
  Guard([&] {
    CurrentCore()->job().Break(Code::kUnavailable, message,
                               "see the first error above");
  });
}

int32_t collective_recorder_open(int32_t rank, int32_t size, int32_t local_rank,
                                 int32_t local_size, const char* job,
                                 int32_t called) {
  return Guard([&] {
    const auto settings = collective::Settings::FromEnvironment();
    Recorder::Open(collective::PlaceOf(rank, size, local_rank, local_size, job),
                   called, settings.start_seconds, settings.stall_seconds);
  });
}

int32_t collective_recorder_follow(int32_t called, int32_t joined) {
  return Guard([&] {
    const auto core = CurrentCore();
    const collective::Job& job = core->job();
    Recorder::Follow(job.place(), job.here().Copy(),
                     collective::Job::kRecorderAt, called, joined != 0,
                     job.settings().stall_seconds);
  });
}

void collective_recorder_settle(void) { Recorder::Current()->Settle(); }

void collective_recorder_renumber(int32_t rank) {
  Recorder::Current()->Renumber(rank);
}

uint64_t collective_recorder_begin(int32_t kind, const char* name,
                                   int64_t bytes) {
  Recorder* recorder = Recorder::Current();
  return recorder ? recorder->Begin(kind, name, bytes) : 0;
}

void collective_recorder_end(uint64_t number, int32_t failed) {
  Recorder* recorder = Recorder::Current();
  if (recorder && number) recorder->End(number, failed);
}

double* collective_recorder_position(void) {
  Recorder* recorder = Recorder::Current();
  return recorder ? recorder->position() : nullptr;
}

void collective_recorder_incident(const char* what) {
  collective::TellRecorder(what);
}

int32_t collective_recorder_watch(int32_t milliseconds) {
  return Recorder::Current()->Watch(milliseconds);
}

void collective_recorder_sample(const char* stack) {
  Recorder::Current()->Sample(stack);
}

void collective_recorder_gather(int32_t milliseconds) {
  Recorder::Current()->Gather(milliseconds);
}

int32_t collective_recorder_places(void) {
  return Recorder::Current()->places();
}

int32_t collective_recorder_read(int32_t local_rank, void* rank) {
  return Recorder::Current()->Read(local_rank,
                                   static_cast<Recorder::Rank*>(rank));
}

const char* collective_recorder_reason(void) {
  static thread_local std::string reason;
  reason = Recorder::Current()->reason();
  return reason.c_str();
}

void collective_recorder_done(void) { Recorder::Current()->Done(); }

void collective_recorder_close(void) {
  if (Recorder* recorder = Recorder::Current()) recorder->Close();
}

}  // extern "C"
