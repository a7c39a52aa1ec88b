"""The thread of each rank that samples its Python stack and writes dumps."""

from __future__ import annotations

import gc
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import FrameType

from collective import library
from collective.environment import Environment
from collective.launch.processes import is_stopped
from collective.net import private_files
from collective.recorder import memory
from collective.recorder.dump import Dump

_SAMPLE_MILLISECONDS = 1000
_ANSWER_MILLISECONDS = 500
_FRAMES = 24
_CLOSED, _SAMPLE, _DUMP = 0, 1, 2  # as in native/recorder/recorder.h

rank_info = Environment()  # of this process
# What to type if the job has failed, or "": `recorder.advise` sets it.
advice: Callable[[], str] = str
_thread: threading.Thread | None = None


def start_watching(environment: Environment, folder: str) -> None:
    """Start the thread, which writes dumps into a folder."""
    global rank_info, _thread
    rank_info = environment
    library.load().collective_recorder_sample(_stack())
    _thread = threading.Thread(
        target=_watch, args=(folder,), name="flight recorder", daemon=True
    )
    _thread.start()


def stop_watching() -> None:
    """Join the thread, after the recorder was closed."""
    if _thread is not None and _thread is not threading.current_thread():
        _thread.join(5)


def _watch(folder: str) -> None:
    core = library.load()
    while (event := core.collective_recorder_watch(_SAMPLE_MILLISECONDS)) != _CLOSED:
        core.collective_recorder_sample(_stack())
        if event == _DUMP:
            try:
                _dump(folder)
            except Exception as error:  # it must not replace the job's own error
                print(f"collective: flight recorder: {error!r}", file=sys.stderr)
            finally:
                core.collective_recorder_finish_dump()


def _dump(folder: str) -> None:
    core = library.load()
    now, wall = time.monotonic_ns(), time.time()
    core.collective_recorder_request_samples(_ANSWER_MILLISECONDS)
    host = socket.gethostname()
    local = range(core.collective_recorder_local_size())
    ranks = [rank for i in local if (rank := memory.read_rank(i, host, now)).rank >= 0]
    ranks.sort(key=lambda rank: rank.rank)
    size = len(ranks) if rank_info.size == rank_info.local_size else rank_info.size
    for rank in ranks:
        if rank.state == "alive" and is_stopped(rank.pid):
            rank.state = "stopped"
    reason = core.collective_recorder_reason().decode(errors="replace")
    dump = Dump(reason, wall, size, ranks)
    name = f"collective-{datetime.fromtimestamp(wall):%Y%m%d-%H%M%S}-{host}"
    path = _write(dump, folder, f"{name}-{os.getpid()}")
    what = advice()
    hint = f"\nHINT: {what}" if what else ""
    summary = f"{dump.summary()}\nflight recorder: {path}{hint}"
    print(summary, file=sys.stderr, flush=True)


def _write(dump: Dump, folder: str, name: str) -> Path:
    """Write a new file that only the user can read."""
    text = dump.text().encode()
    for where in (folder, tempfile.gettempdir()):
        for suffix in ("", *(f"-{number}" for number in range(2, 10))):  # in one second
            path = Path(where, f"{name}{suffix}.txt")
            try:
                private_files.write(path, text)
            except FileExistsError:
                continue
            except OSError:
                break
            return path
    raise OSError(f"cannot write a dump to {folder}, nor to {where}")


def _stack() -> bytes:
    """Return the main thread's stack, innermost line first.

    Garbage collection is off: in this thread it could free TensorFlow graphs and so
    wait for a lock of the main thread, while that thread waits for the interpreter
    lock.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return _main_stack()
    finally:
        if collects:
            gc.enable()


def _main_stack() -> bytes:
    frame: FrameType | None = sys._current_frames().get(
        threading.main_thread().ident or 0
    )
    lines: list[str] = []
    while frame is not None and len(lines) < _FRAMES:
        code = frame.f_code
        lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return "\n".join(lines).encode(errors="replace")
