"""The launcher, and through it the other files of this directory on 2 to 4 ranks."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import tests.launch
from tests.launch import (
    NEEDS_CORE,
    NOT_ON_RANKS,
    PATIENCE_SECONDS,
    PYTHONPATH,
    capture,
)

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.launches, NOT_ON_RANKS]


def command(size, *arguments):
    return [sys.executable, "-m", "collective.launch", "-np", str(size), *arguments]


def launch(size, *arguments, timeout=300, **variables):
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return capture(command(size, *arguments), timeout, env={**environment, **variables})


def python(code):
    return [sys.executable, "-c", code]


@NEEDS_CORE
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {}),
        (3, {"COLLECTIVE_SIMD": "avx2", "COLLECTIVE_STORES": "ordinary"}),
        pytest.param(4, {}, marks=pytest.mark.matrix),
        (2, {"COLLECTIVE_SIMD": "baseline", "COLLECTIVE_STORES": "streaming"}),
    ],
    ids=["2", "3-avx2-ordinary", "4", "2-baseline-streaming"],
)
def test_the_other_tests_on_several_ranks(size, settings):
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    if settings:  # other kernels run without TensorFlow, which takes long to start
        files = [file for file in files if file.name == "test_allreduce.py"]
    result = launch(
        size,
        *[sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"],
        *map(str, files),
        **tests.launch.environment(forked=True, **settings),
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert result.stdout.count(" passed") == size


def test_gives_each_rank_its_number_and_prefixes_its_lines():
    code = (
        "import os; print(os.environ['COLLECTIVE_RANK'], os.environ['COLLECTIVE_SIZE'])"
    )
    result = launch(3, *python(code))
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == ["[0] 0 3", "[1] 1 3", "[2] 2 3"]


def test_everything_behind_the_first_word_is_the_command():
    result = launch(1, "echo", "-np", "7", "--verbose")
    assert result.stdout == "[0] -np 7 --verbose\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_starts_where_its_streams_are_closed_as_a_daemon_does(closed, tmp_path):
    files = "for n in 0 1 2; do test -e /proc/$$/fd/$n || exit 3; done; cat; echo here"
    line = shlex.join(command(2, "--output-filename", str(tmp_path), "sh", "-c", files))
    assert subprocess.run(f"{line} {closed}", shell=True, timeout=240).returncode == 0
    assert [p.read_text() for p in tmp_path.glob("*/stdout")] == ["here\n"] * 2


def test_no_line_is_lost_where_the_screen_lacks_its_letters():
    code = "import sys; sys.stdout.buffer.write('gr\\u00fcn\\n'.encode())"
    result = launch(1, *python(code), PYTHONIOENCODING="ascii")
    assert result.stdout == "[0] gr\\xfcn\n"


def test_a_real_time_signal_has_a_name():
    result = launch(1, *python("import os; os.kill(os.getpid(), 36)"))
    assert result.returncode == 128 + 36 and "by SIGRT36" in result.stderr


def test_ends_with_the_code_of_the_first_rank_that_failed():
    code = (
        "import os, sys, time\n"
        "if os.environ['COLLECTIVE_RANK'] == '1': sys.exit(7)\n"
        "time.sleep(1000)"
    )
    start = time.monotonic()
    result = launch(3, *python(code), timeout=30)
    assert result.returncode == 7
    assert "rank 1 ended with exit code 7" in result.stderr
    assert time.monotonic() - start < 300  # before the others end by themselves


def test_a_killed_rank_gives_128_and_the_signal():
    code = (
        "import os, signal, time\n"
        "if os.environ['COLLECTIVE_RANK'] == '0': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(1000)"
    )
    result = launch(2, *python(code), timeout=30)
    assert result.returncode == 128 + signal.SIGKILL
    assert "rank 0 ended by SIGKILL" in result.stderr


@NEEDS_CORE
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_exits_before_init_is_not_waited_for(late):
    code = (
        "import os, time, collective\n"
        "if os.environ['COLLECTIVE_RANK'] == '1': raise SystemExit\n"
        f"time.sleep({late})\n"
        "collective.init()"
    )
    result = launch(2, *python(code), timeout=60, COLLECTIVE_START_TIMEOUT="600")
    assert result.returncode == 1
    assert "where rank 0 waits for it" in result.stderr
    last = "rank 1 failed: it ended with exit code 0 before it called collective.init()"
    assert result.stderr.splitlines()[-1] == f"collective.launch: {last}"


def test_ranks_that_need_no_other_may_end_when_they_like():
    code = (
        "import os, time\n"
        "if os.environ['COLLECTIVE_RANK'] == '1': raise SystemExit\n"
        "time.sleep(0.5); print('end')"
    )
    result = launch(2, *python(code))
    assert (result.returncode, result.stdout) == (0, "[0] end\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_passes_signals_on(number):
    code = "import time; print('here', flush=True); time.sleep(1000)"
    process = subprocess.Popen(
        command(2, *python(code)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    for _ in range(2):
        assert b"here" in process.stdout.readline()
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    assert process.wait(timeout=PATIENCE_SECONDS) == 128 + number
    process.stdout.close()
    assert not psutil.wait_procs(children, timeout=PATIENCE_SECONDS)[1]


def test_no_rank_outlives_a_killed_launcher():
    code = "import time; print('here', flush=True); time.sleep(1000)"
    process = subprocess.Popen(
        command(2, *python(code)),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    for _ in range(2):
        assert b"here" in process.stdout.readline()
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    process.stdout.close()
    assert len(children) == 3  # two ranks, and the watchdog
    assert not psutil.wait_procs(children, timeout=PATIENCE_SECONDS)[1]


def test_bad_arguments_end_with_2():
    assert launch(0, "true").returncode == 2
    assert launch(2).returncode == 2
    missing = launch(2, "/no/such/program")
    assert missing.returncode == 2
    assert "HINT" in missing.stderr
