// The timeline and the flight recorder, for Python.
#include <string>

#include "c_api.h"
#include "recorder/recorder.h"
#include "recorder/timeline.h"
#include "session.h"

using namespace collective;

extern "C" {

void collective_timeline_start(int32_t file, int64_t limit, int32_t process) {
  StartTimeline(Descriptor(file), limit, process);
}

void collective_timeline_stop() { StopTimeline(); }

void collective_timeline_keep(int32_t on) { KeepEvents(on != 0); }

int32_t collective_timeline_take(void* events, int32_t most) {
  return TakeEvents(static_cast<TimelineEvent*>(events), most);
}

int32_t collective_recorder_open(int32_t rank, int32_t size, int32_t local_rank,
                                 int32_t local_size, const char* job,
                                 int32_t launch_rank) {
  return Guard([&] {
    const auto settings = Settings::FromEnvironment();
    Recorder::Open(RankInfo{rank, size, local_rank, local_size, job}, launch_rank,
                   settings.start_seconds, settings.stall_seconds);
  });
}

int32_t collective_recorder_reopen(int32_t launch_rank, int32_t joined) {
  return Guard([&] {
    const auto core = CurrentCore();
    const Job& job = core->job();
    Recorder::Reopen(job.rank_info(), job.local().Copy(), Job::kRecorderAt, launch_rank,
                     joined != 0, job.settings().stall_seconds);
  });
}

void collective_recorder_await_dumps(void) { Recorder::Current()->AwaitDumps(); }

void collective_recorder_renumber(int32_t rank) { Recorder::Current()->Renumber(rank); }

uint64_t collective_recorder_begin(int32_t kind, const char* name, int64_t bytes) {
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

void collective_recorder_request_dump(const char* reason) { RequestDump(reason); }

int32_t collective_recorder_watch(int32_t milliseconds) {
  return Recorder::Current()->Watch(milliseconds);
}

void collective_recorder_sample(const char* stack) {
  Recorder::Current()->Sample(stack);
}

void collective_recorder_request_samples(int32_t milliseconds) {
  Recorder::Current()->RequestSamples(milliseconds);
}

int32_t collective_recorder_local_size(void) {
  return Recorder::Current()->local_size();
}

int32_t collective_recorder_read(int32_t local_rank, void* rank) {
  return Recorder::Current()->Read(local_rank, static_cast<Recorder::Rank*>(rank));
}

const char* collective_recorder_reason(void) {
  static thread_local std::string reason;
  reason = Recorder::Current()->reason();
  return reason.c_str();
}

void collective_recorder_finish_dump(void) { Recorder::Current()->FinishDump(); }

void collective_recorder_close(void) {
  if (Recorder* recorder = Recorder::Current()) recorder->Close();
}

}  // extern "C"
