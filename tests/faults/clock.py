"""Runs a program whose wall clock can jump: ``python -m tests.faults.clock PROGRAM ...``

A test cannot set the clock of a machine. So a library of ours, which is loaded first, answers
three calls of the C library, and adds the seconds in the file ``clock`` of the job's folder.
Waits by the wall clock that have begun are not ended by it, as a real jump would end them;
later ones are wrong by these seconds, unlike in a real jump.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile int64_t none, *added = &none;
static int (*real)(clockid_t, struct timespec*);

__attribute__((constructor)) static void start(void) {
  real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  int file = open(getenv("FAULT_CLOCK"), O_RDONLY);
  void* at = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
  if (at != MAP_FAILED) added = at;
}
int clock_gettime(clockid_t clock, struct timespec* now) {
  if (!real) start();
  int failed = real(clock, now);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += *added;
  return failed;
}
int gettimeofday(struct timeval* now, void* zone) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}
time_t time(time_t* now) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (now) *now = exact.tv_sec;
  return exact.tv_sec;
}
"""


def set_ahead(folder: Path, seconds: int) -> None:
    """Set the wall clock of the job ahead by so many seconds, at once."""
    file = os.open(folder / "clock", os.O_RDWR | os.O_CREAT)
    os.pwrite(file, struct.pack("q", seconds), 0)
    os.close(file)


def main(program: list[str]) -> None:
    """Replace this process by the program."""
    folder = Path(os.environ["FAULT_FOLDER"])
    library = folder / f"clock-{os.getpid()}.so"
    compile_ = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(compile_, input=SOURCE, text=True, check=True)
    if not (folder / "clock").exists():
        set_ahead(folder, 0)
    os.environ |= {"LD_PRELOAD": str(library), "FAULT_CLOCK": str(folder / "clock")}
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
