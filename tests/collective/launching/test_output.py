"""The output of ranks, and its destinations."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from collective.hosts import Host, is_local
from collective.launch import output, processes, supervisor
from collective.running_time import Deadline
from tests.launch import PATIENCE_SECONDS, await_that, capture, environment

ROOT = Path(__file__).parents[3]
LAUNCH = [sys.executable, "-m", "collective.launch"]
pytestmark = pytest.mark.launches


def launch(*arguments):
    return capture([*LAUNCH, *arguments])


RAISES = (
    "import os, signal, sys, time\n"
    "rank = os.environ['COLLECTIVE_RANK']\n"
    "print('out', rank, flush=True); print('err', rank, file=sys.stderr, flush=True)\n"
    "ready = sys.argv[1]\n"
    "while rank == '1' and not os.path.exists(ready): time.sleep(0.01)\n"
    "if rank == '1': raise RuntimeError('of rank ' + rank)\n"
    "signal.signal(signal.SIGTERM, lambda *_: (print(LINES * 'more\\n'), os._exit(0)))\n"
    "open(ready, 'w').close()\n"
    "time.sleep(1000)"
)


@pytest.mark.parametrize(
    ("to_files", "more", "times"),
    [(True, 0, {1}), (False, 0, {1}), (False, 40, {1, 2})],
)
def test_the_last_on_the_screen_is_who_failed_and_why(tmp_path, to_files, more, times):
    """The traceback is shown, unless it is directly above."""
    files = ["--output-filename", str(tmp_path / "out")] if to_files else []
    program = RAISES.replace("LINES", str(more))
    ready = str(tmp_path / "ready")
    done = launch("-np", "2", *files, sys.executable, "-c", program, ready)
    assert done.returncode == 1
    last = done.stderr.splitlines()
    assert last[-1] == "collective.launch: rank 1 failed: it ended with exit code 1"
    # On a busy machine it may arrive after the other rank's lines: then it is there once.
    assert done.stderr.count("RuntimeError: of rank 1") in times
    if to_files or more:
        assert "RuntimeError: of rank 1" in last[-2]
    assert ("[1] out 1" in done.stdout) is not to_files
    if to_files:
        assert (tmp_path / "out/rank.1/stdout").read_text() == "out 1\n"
        assert (tmp_path / "out/rank.1/stderr").read_text().startswith("err 1\nTrace")


def test_a_bus_error_has_a_hint(capsys):
    for how in ("by SIGBUS", "by SIGSEGV"):
        output.report_failure("rank 1", how, [])
        assert ("df -h /dev/shm" in capsys.readouterr().err) is (how == "by SIGBUS")


@pytest.mark.parametrize("limit", [2 << 30, resource.RLIM_INFINITY])
def test_an_abort_under_a_limit_of_memory_has_a_hint(limit, monkeypatch, capsys):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    for how in ("by SIGABRT", "by SIGKILL"):
        output.report_failure("rank 1", how, [])
        expected = how == "by SIGABRT" and limit == 2 << 30
        assert ("ulimit -v unlimited: each" in capsys.readouterr().err) is expected


def test_a_line_changes_a_terminal_no_longer_than_itself(tmp_path, monkeypatch):
    """A title without its end would hide all that other ranks and the launcher print later."""
    begun = ["\x1b]0;title", "\x1b[31mred", "\x0elines", "\x1b[3", "\x9d52;c;text"]
    normal = "\x1b\\\x1b[0m\x1b(B\x0f"
    other, mine = os.openpty()
    shown = output.RankOutput(1, 2, output.OutputStyle())
    with open(mine, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        for text in (*begun, "plain"):
            shown._show([1], f"{text}\n", False)
        printed = b""
        while not printed.endswith(b"plain\r\n"):  # the kernel passes it in parts
            printed += os.read(other, 4096)
    os.close(other)
    expected = [f"[1] {text}{normal}" for text in begun]
    lines = printed.decode().replace("\r", "").splitlines()
    assert lines == [*expected, "[1] plain"]
    with (tmp_path / "file").open("w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        shown._show([1], f"{begun[0]}\n", False)
    assert (tmp_path / "file").read_text() == f"[1] {begun[0]}\n"


def test_numbers_of_files_are_as_wide_as_the_largest(tmp_path):
    made = output.RankOutput(3, 11, output.OutputStyle(directory=tmp_path))
    made.finish(Deadline(0))
    assert (tmp_path / "rank.03" / "stderr").exists()


def test_a_next_generation_appends_to_files(tmp_path):
    style = output.OutputStyle(directory=tmp_path)
    first = output.RankOutput(0, 1, style)
    first._files[0].write("first\n")
    first._files[0].flush()
    second = output.RankOutput(0, 1, dataclasses.replace(style, appends=True))
    for made, text in ((second, "second\n"), (first, "last\n")):  # they overlap
        made._files[0].write(text)
        made._files[0].flush()
    assert (tmp_path / "rank.0" / "stdout").read_text() == "first\nsecond\nlast\n"


def test_where_no_file_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = launch("-np", "1", "--output-filename", str(tmp_path / "file"), "true")
    assert done.returncode == 2
    assert "cannot write" in done.stderr and "HINT: --output-filename" in done.stderr


def test_each_line_with_its_time():
    done = launch("-np", "1", "--prefix-output-with-timestamp", "echo", "hello")
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
    assert re.fullmatch(stamp + r" \[0\] hello\n", done.stdout)


@pytest.mark.parametrize("level", [None, "0"])
def test_what_tensorflow_logs_at_its_import_is_hidden(level):
    env = environment()
    del env["TF_CPP_MIN_LOG_LEVEL"]
    if level:
        env["TF_CPP_MIN_LOG_LEVEL"] = level
    script = """
        echo 'WARNING: All log messages before absl::InitializeLog() is called' >&2
        echo 'I0000 00:00:17.5 9 port.cc:153] oneDNN custom operations are on.' >&2
        echo "level $TF_CPP_MIN_LOG_LEVEL" >&2
    """
    done = capture([*LAUNCH, "-np", "1", "sh", "-c", script], env=env)
    assert f"[0] level {level or '2'}\n" in done.stderr
    assert ("oneDNN" in done.stderr) is ("absl" in done.stderr) is bool(level)


def test_dry_run_starts_nothing(tmp_path):
    done = launch("-np", "2", "--dry-run", "touch", str(tmp_path / "x"))
    assert done.returncode == 0 and not (tmp_path / "x").exists()
    assert "[1] " in done.stdout and "COLLECTIVE_RANK=1" in done.stdout


def test_several_names_of_this_host_are_one_host():
    # The text is in one write, because without prefixes the ranks' writes mix.
    code = (
        "import os; os.write(1, os.environ['COLLECTIVE_LOCAL_SIZE'].encode() + b'\\n')"
    )
    hosts = "localhost:1,127.0.0.1:2"
    done = launch("-H", hosts, "--no-prefix", sys.executable, "-c", code)
    assert (done.stdout, done.returncode) == ("3\n" * 3, 0), done.stderr


def test_what_a_rank_started_dies_with_a_killed_launcher():
    code = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "print('here', flush=True); time.sleep(1000)"
    )
    process = subprocess.Popen(
        [*LAUNCH, "-np", "2", sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    for _ in range(2):
        assert b"here" in process.stdout.readline()
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 5  # two ranks, a child of each, the watchdog
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not psutil.wait_procs(family, timeout=PATIENCE_SECONDS)[1]


def test_last_error_lines():
    first = ["Traceback (most recent call last):", "  a", "Error: 1"]
    second = ["Traceback (most recent call last):", "  b", "Error: 2", ""]
    assert output.last_error_lines(["x", *first, "y", *second]) == second[:-1]
    assert output.last_error_lines([str(i) for i in range(50)])[0] == "38"
    deep = [*second[:1], *(f"  {i}" for i in range(100)), "Error: deep"]
    words = output.last_error_lines(deep)
    assert (words[0], words[-1], "  ..." in words) == (deep[0], deep[-1], True)
    assert output.last_error_lines([]) == []


def test_which_hosts_are_this_one():
    assert all(is_local(Host(n)) for n in ("localhost", "127.0.0.1", "127.0.0.2"))
    assert not is_local(Host("192.0.2.77"))
    assert not is_local(Host("nowhere.invalid"))
    assert not is_local(Host("localhost", user="somebody"))


def test_a_long_line_takes_time_linear_in_its_length(tmp_path):
    """The test counts work, not seconds: each piece is examined once."""
    reading, writing = os.pipe()
    text = "x" * (1 << 22) + "\r\nnext\rlast"

    def write():
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(text.encode())

    thread = threading.Thread(target=write)
    thread.start()
    looked_at = 0

    class Counted(str):
        def splitlines(self, keepends=False):
            nonlocal looked_at
            looked_at += len(self)
            return str.splitlines(self, keepends)

    real = codecs.getincrementaldecoder("utf-8")

    class Decoder:
        def __init__(self, errors):
            self.decoder = real(errors)

        def decode(self, data):
            return Counted(self.decoder.decode(data))

    with (
        pytest.MonkeyPatch.context() as patch,
        os.fdopen(reading, "rb", buffering=0) as pipe,
    ):
        patch.setattr(output.codecs, "getincrementaldecoder", lambda _: Decoder)
        assert "".join(output.lines(pipe)) == f"{text}\n"
    thread.join()
    assert looked_at == len(text)


def test_pipes_that_a_daemon_holds_are_waited_for_together(monkeypatch):
    """All ranks share one deadline of 10 s."""
    made = [output.RankOutput(rank, 3, output.OutputStyle()) for rank in range(3)]
    held = [os.pipe() for _ in range(6)]
    pipes = [os.fdopen(reading, "rb", buffering=0) for reading, _ in held]
    for rank, one in enumerate(made):
        one.attach(pipes[2 * rank], pipes[2 * rank + 1])
        one.start()
    deadline = Deadline(0.5)
    made[0].finish(deadline)
    assert deadline.passed()
    waits: list[float] = []
    monkeypatch.setattr(threading.Thread, "join", lambda _, pause: waits.append(pause))
    for one in made[1:]:
        one.finish(deadline)
    assert not waits
    monkeypatch.undo()
    for _, writing in held:
        os.close(writing)


ELASTIC = """
import os, signal, time
def save(number, frame):
    print("saves", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
print("here", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("elastic", [True, False])
def test_a_closed_terminal_lets_ranks_of_an_elastic_job_save_their_state(elastic):
    more = ["--min-np", "1"] if elastic else []
    process = subprocess.Popen(
        [*LAUNCH, "-np", "2", *more, sys.executable, "-c", ELASTIC],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        # Note that these tests may run under nohup.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    assert process.stdout is not None
    for _ in range(2):
        assert "here" in process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    rest, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 128 + signal.SIGHUP
    assert rest.count("saves") == (2 if elastic else 0)


def test_ctrl_c_while_modules_load_prints_no_traceback(tmp_path):
    (tmp_path / "psutil.py").write_text("raise KeyboardInterrupt")
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt")
    done = capture(
        [*LAUNCH, "-np", "2", "true"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.ENOENT, "on the PATH"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EAGAIN, "ulimit -u"),
        (errno.EACCES, "chmod +x"),
    ],
)
def test_why_a_program_does_not_start(code, hint):
    error = OSError(code, os.strerror(code), "program")
    assert hint in supervisor._why_not_started(error, "program").splitlines()[-1]


def ends(process):
    """Return whether a killed process ends; the kernel may take a while to end it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        await_that(
            lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        )
    return True


LATE = """
import sys, threading, time
from collective.launch import processes
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
late = processes.start(["sleep", "1000"], has_threads=True)
print(late.pid, flush=True)
time.sleep(1000)
"""


def test_what_is_started_late_dies_with_its_parent():
    """It dies even if no watchdog is left."""
    command = [sys.executable, "-c", LATE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        late = psutil.Process(int(parent.stdout.readline()))
        await_that(lambda: late.name() == "sleep")
        parent.kill()
    assert ends(late)


def test_what_a_command_started_is_killed_at_its_deadline(tmp_path, monkeypatch):
    """An example is a remote shell that does not answer."""
    file = tmp_path / "pid"
    wait = processes.wait

    def wait_from_then_on(process, seconds, outputs):
        await_that(lambda: file.exists() and file.read_text().endswith("\n"))
        return wait(process, seconds, outputs)

    monkeypatch.setattr(processes, "wait", wait_from_then_on)
    script = f"setsid sleep 1000 & echo $! > {file}; sleep 1000"
    result = processes.run(["sh", "-c", script], 0.5)
    assert result == processes.Result(None, error="no answer in 0.5 s")
    with contextlib.suppress(psutil.NoSuchProcess):
        assert ends(psutil.Process(int(file.read_text())))
