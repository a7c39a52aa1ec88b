"""horovodrun's flags: their meaning, and their effect on the ranks."""

from __future__ import annotations

import argparse
import shlex
import sys

import pytest

from collective import python_command
from collective.errors import UsageError
from collective.launch.__main__ import main
from collective.launch.command_line import parse
from collective.launch.options import OF_A_RANK, add_options, from_parsed, words
from collective.run_function import launcher_words


def variables(*arguments):
    return parse([*arguments, "true"]).variables


@pytest.mark.parametrize(
    "arguments, wanted",
    [
        ("-np 2", {}),
        ("--fusion-threshold-mb 32", {"HOROVOD_FUSION_THRESHOLD": "33554432"}),
        ("--cycle-time-ms 3.5", {"HOROVOD_CYCLE_TIME": "3.5"}),
        ("--cache-capacity 0", {"HOROVOD_CACHE_CAPACITY": "0"}),
        ("--hierarchical-allreduce", {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}),
        ("--no-hierarchical-allgather", {"HOROVOD_HIERARCHICAL_ALLGATHER": "0"}),
        (
            "--timeline-filename t.json --timeline-mark-cycles",
            {"HOROVOD_TIMELINE": "t.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1"},
        ),
        (
            "--no-stall-check",
            {
                "HOROVOD_STALL_CHECK_DISABLE": "1",
                "COLLECTIVE_STALL_SECONDS": "1000000000",
            },
        ),
        (
            "--stall-check-warning-time-seconds 5 "
            "--stall-check-shutdown-time-seconds 9",
            {
                "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
                "COLLECTIVE_STALL_SECONDS": "5",
                "COLLECTIVE_TIMEOUT": "9",
            },
        ),
        (
            "--start-timeout 7",
            {"HOROVOD_START_TIMEOUT": "7", "COLLECTIVE_START_TIMEOUT": "7"},
        ),
        (
            "--network-interface eth0 --network-interfaces eth1,ib0",
            {
                "COLLECTIVE_INTERFACES": "eth0,eth1,ib0",
                "NCCL_SOCKET_IFNAME": "eth0,eth1,ib0",
                "HOROVOD_GLOO_IFACE": "eth0",
            },
        ),
        ("--log-level DEBUG", {"HOROVOD_LOG_LEVEL": "DEBUG"}),
        ("--log-without-timestamp", {"HOROVOD_LOG_HIDE_TIME": "1"}),
        ("--torus-allreduce", {"HOROVOD_TORUS_ALLREDUCE": "1"}),
        ("--no-torus-allreduce", {"HOROVOD_TORUS_ALLREDUCE": "0"}),
        ("--log-hide-timestamp", {"HOROVOD_LOG_HIDE_TIME": "1"}),
        ("--no-log-hide-timestamp", {"HOROVOD_LOG_HIDE_TIME": "0"}),
        (
            "--autotune --autotune-log-file a.csv",
            {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "a.csv"},
        ),
    ],
)
def test_variables(arguments, wanted):
    assert variables(*arguments.split()) == wanted


COMMAND = ["python", "-np", "7", "--verbose"]


def test_everything_behind_the_first_word_is_the_command():
    given = parse([*["-np", "2", "-p", "22", "-i", "key"], *COMMAND])
    assert given.command == COMMAND
    assert (given.shell.port, given.shell.identity_file, given.num_proc) == (
        22,
        "key",
        2,
    )
    assert not given.verbose
    given = parse(["-hostfile", "h", "--mpi-args=--map-by node", "true"])
    assert (given.hostfile, given.mpi_args) == ("h", ["--map-by", "node"])


CONFIG = """
controller: mpi
params:
  fusion_threshold_mb: 16
  cycle_time_ms: 2
timeline:
  filename: from-file.json
  mark_cycles: true
stall_check:
  enabled: false
"""


@pytest.mark.parametrize("first", [True, False])
def test_what_is_typed_beats_the_configuration_file(tmp_path, first):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    typed = ["--fusion-threshold-mb", "1"]
    named = ["--config-file", str(file)]
    given = parse([*(typed + named if first else named + typed), "true"])
    assert given.use_mpi
    assert given.variables == {
        "HOROVOD_FUSION_THRESHOLD": "1048576",
        "HOROVOD_CYCLE_TIME": "2",
        "HOROVOD_TIMELINE": "from-file.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "COLLECTIVE_STALL_SECONDS": "1000000000",
    }


# Nine lists, each of ten times the one before.
BILLION = "v0: &v0 [x]\n" + "\n".join(
    f"v{i}: &v{i} [{', '.join([f'*v{i - 1}'] * 10)}]" for i in range(1, 10)
)


@pytest.mark.parametrize(
    "text, message",
    [
        ("params: 3", "is not a section"),
        ("- a", "no sections"),
        ("a: [", "is not YAML"),
        ("params:\n  cache_capacity: many", "is not of type int"),
        ("params:\n  cache_capacity: true", "is not of type int"),
        ('timeline:\n  filename: "a\\0b"', "has characters that no variable"),
        ('timeline:\n  filename: "\\ud800"', "has characters that no variable"),
        ("controller: jsrun", "jsrun"),
        ("a: !!int ''", "is not YAML: string index out of range"),
        ("a: !!timestamp x", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("#" * (1 << 20), "is not YAML: it has over 65536 characters"),
        (BILLION + "\ncontroller: *v9", "unknown controller"),
        (f"{BILLION}\nparams: {{cache_capacity: *v9}}", "is not a section"),
    ],
)
def test_bad_configuration_files(tmp_path, text, message):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        parse(["--config-file", str(file), "true"])
    assert str(file) in caught.value.message and caught.value.hint


def test_unknown_settings_of_a_configuration_file_warn(tmp_path, capsys):
    # Horovod's own config.test.yaml has logging: hide_timestamp, which it ignores.
    file = tmp_path / "config.yaml"
    file.write_text(
        "logging:\n  level: INFO\n  hide_timestamp: true\n"
        "params:\n  torus_allreduce: true\nparam:\n  x: 3\n"
    )
    given = parse(["--config-file", str(file), "true"])
    assert given.variables == {
        "HOROVOD_LOG_LEVEL": "INFO",
        "HOROVOD_TORUS_ALLREDUCE": "1",
    }
    printed = capsys.readouterr().err
    assert "logging: hide_timestamp is ignored; known are level" in printed
    assert "param: x is ignored; known are sections params" in printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("true", "Neither -np nor a list of hosts"),
        ("-np 2", "no command"),
        ("-np 0 true", "at least 1 rank"),
        ("-np 2 --gloo -H nowhere.invalid:2 true", "this host only"),
        ("-np 5 -H localhost:4 true", "have 4 slots"),
        ("-np 2 --min-np 3 true", "only 2 ranks"),
        ("-np 2 --min-np 0 true", "--min-np 0: at least 1"),
        ("--jsrun true", "LSF's jsrun is not supported"),
        ("--agent --encrypt true", "--encrypt: agents encrypt nothing"),
        ("--requeue-on USR1 true", "--requeue-on: the script of the Slurm job"),
        ("-np 2 --start-timeout 0 true", "--start-timeout 0: at least 1"),
        ("-np 2 --max-np 1 true", "that is more"),
        ("-np 2 --max-np 3 true", "could never have more"),
        ("-np 2 --host-discovery-script x true", "needs --max-np"),
        ("--max-np 2 --host-discovery-script false true", "exit code 1"),
        ("-H a:x true", "slots=x"),
        ("--hostfile /no/such true", "No such file"),
        ("-np 2 --cycle-time-ms -1 true", "negative"),
        ("-np 2 --cycle-time-ms nan true", "no number"),
        ("-np 2 --reset-limit 0 true", "--reset-limit 0: at least 1"),
        ("--max-np 2 --slots-per-host 0 true", "--slots-per-host 0: at least 1"),
        ("-np 2 --elastic-timeout 0 true", "--elastic-timeout 0: at least 1"),
        ("-np 2 --blacklist-cooldown-range 9 8 true", "at most the second"),
        ("-np 2 --config-file /no/such true", "cannot read"),
        ("-np 2 --mpi-args=' true", "--mpi-args=': No closing quotation"),
        ("-np 2 --mpirun /no/such --mpi true", "there is no /no/such on this host"),
        ("-np 2 --mpirun true --mpi true", "is not the mpirun of Open MPI"),
    ],
)
def test_wrong_use_gives_2_and_a_hint(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert main(arguments.split()) == 2
    printed = capsys.readouterr().err
    assert message in printed and "\nHINT: " in printed


def test_elastic_options():
    assert parse(["-np", "2", "true"]).cooldown == (1.0, 64.0)
    words = "--elastic-timeout 5 --reset-limit 3 --blacklist-cooldown-range 10 100"
    given = parse(["-np", "2", *words.split(), "true"])
    assert (given.elastic_timeout, given.reset_limit, given.cooldown) == (
        5,
        3,
        [10, 100],
    )


def test_words_of_a_program_are_those_that_are_typed():
    """The programs are ``collective.run``, Ray and Spark."""
    given = {
        "--num-proc": 2,
        "--reset-limit": None,
        "--blacklist-cooldown-range": (10, 100),
        "--network-interfaces": ["eth0", "eth1"],
        "--mpi-args": "--map-by node",
        "--hosts": "",
        "--verbose": True,
        "--tcp": False,
    }
    options = parse([*launcher_words(given), "true"])
    assert (options.num_proc, options.reset_limit, options.hosts) == (2, None, "")
    assert (options.cooldown, options.nics) == ([10, 100], ["eth0", "eth1"])
    assert options.mpi_args == ["--map-by", "node"]
    assert options.verbose and not options.tcp
    with pytest.raises(UsageError, match="--reset-limit 0: at least 1"):
        parse([*launcher_words({"--reset-limit": 0}), "true"])


def test_what_does_nothing_on_one_host_says_so(capfd):
    words = "-np 1 --mpi-args=-x --tcp --binding-args=--x --no-prefix true"
    assert main(words.split()) == 0
    printed = capfd.readouterr().err
    assert "--mpi-args, --tcp: without effect on one host" in printed
    assert "--binding-args: on one host it only keeps ranks from being bound" in printed


@pytest.mark.parametrize(
    "arguments",
    [
        "-np two true",
        "--no-such-flag true",
        "-H a:1 --hostfile f true",
    ],
)
def test_what_cannot_be_parsed_gives_2_and_a_hint(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    assert "\nHINT: " in capsys.readouterr().err


def test_a_slurm_allocation_gives_the_hosts(capsys, monkeypatch):
    for name in ("RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "COLLECTIVE_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "nowhere[01-02].invalid")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
    assert main(["--gloo", "true"]) == 2
    message = capsys.readouterr().err
    assert "Slurm allocation: nowhere01.invalid:2,nowhere02.invalid:2" in message


def test_check_build_needs_no_command(capsys):
    assert main(["-cb"]) == 0
    message = capsys.readouterr().out
    for title in ("Frameworks", "Controllers", "Tensor Operations"):
        assert f"Available {title}:" in message
    assert "[X] this launcher" in message


def test_the_command_keeps_options_that_begin_as_ours_do():
    typed = ["-np", "2", "python", "train.py", "--timeline", "t.json", "--verb", "0"]
    assert parse(typed).command == typed[2:]


PROGRAM = [
    sys.executable,
    *python_command.arguments("collective.distribute", silently=True),
]


@pytest.mark.parametrize(
    "typed, wanted",
    [
        ("-np 2 --keras my.py --epochs 3", [*PROGRAM, "my.py", "--epochs", "3"]),
        (
            "-np 2 --keras --backend mpi my.py",
            [*PROGRAM, "--backend=mpi", "my.py"],
        ),
        (
            "-np 2 --keras --set seed=3 --set verify=run my.py",
            [*PROGRAM, "--set=seed=3", "--set=verify=run", "my.py"],
        ),
        ("--keras --output all my.py", [*PROGRAM, "--output=all", "my.py"]),
        ("--keras --output-filename d my.py", [*PROGRAM, "--output=all", "my.py"]),
        ("--keras python my.py a", ["python", *PROGRAM[1:], "my.py", "a"]),
        (
            "--keras /opt/bin/python3.12 -m my.module -x",
            ["/opt/bin/python3.12", *PROGRAM[1:], "-m", "my.module", "-x"],
        ),
        ("-np 2 python my.py --keras", ["python", "my.py", "--keras"]),
    ],
)
def test_a_keras_script_is_run_by_distribute(typed, wanted):
    options = parse(typed.split())
    assert list(options.command) == wanted
    # Only one rank prints, directly on our own standard output.
    alone = "--keras" in typed.split("my.py")[0] and "--output=all" not in wanted
    assert options.style.plain_stdout == alone
    assert options.use_mpi == ("--backend=mpi" in wanted)


@pytest.mark.parametrize(
    "typed",
    [
        "python x",
        "--no-prefix --verbose python x",
        "--output-filename 'my dir' --prefix-output-with-timestamp python x",
        "--keras my.py",
        "--keras --output all my.py",
        "--keras --output rank0 -prefix-timestamp my.py",
        "--binding-args='--bind-to core' python x",
    ],
)
def test_the_supervisor_of_a_rank_gets_the_options_that_concern_it(typed):
    given = parse(shlex.split(typed))
    parser = argparse.ArgumentParser()
    add_options(parser, OF_A_RANK)
    parser.add_argument("command", nargs="+")
    command = [*words(given, OF_A_RANK), "--", *given.command]
    got = from_parsed(parser.parse_args(command))
    assert got.style == given.style and list(got.command) == list(given.command)
    assert (got.verbose, got.binding_args) == (given.verbose, given.binding_args)


def test_gloo_keeps_a_keras_script_from_mpirun():
    words = ["-np", "2", "--keras", "--backend", "horovod", "my.py"]
    assert parse(words).use_mpi
    assert not parse(["--gloo", *words]).use_mpi


@pytest.mark.parametrize(
    "typed, message",
    [
        ("--keras --loops --min-np 1 my.py", "--loops with --min-np"),
        ("--keras --max-np 2 -H a:1,b:1 my.py", "--max-np and a list of hosts"),
        ("--keras --min-np 1 --max-np 2 --host-discovery-script x my.py", "begin anew"),
        ("--resume runs python my.py", "--resume goes with --keras"),
        ("--backend mpi python my.py", "--backend goes with --keras"),
        ("--output all python my.py", "--output goes with --keras"),
        ("--keras python", "--keras takes a script, not 'python'"),
        ("--keras python -c pass", "--keras takes a script, not 'python -c'"),
    ],
)
def test_what_keras_does_not_go_with(typed, message):
    with pytest.raises(UsageError, match=message) as caught:
        parse(typed.split())
    assert caught.value.exit_code == 2 and caught.value.hint


def test_help_says_what_keras_is_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert "--keras               the command is script.py: its fit, evaluate" in shown
