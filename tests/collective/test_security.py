"""Each promise of docs/reference/security.md, tested by an attack on it."""

import contextlib
import os
import re
import resource
import socket
import stat
import subprocess
import sys
import textwrap
import threading

import pytest
from meeting import name_of_job, rank

from collective import python_command, run_function, timeline
from collective.backends.horovod import build
from collective.doctor import multi_host, report
from collective.doctor.findings import Finding
from collective.errors import CollectiveError, UsageError, printable
from collective.hosts import Host
from collective.launch import command_line, output, processes, reachability
from collective.launch.agents import folders
from collective.launch.options import LaunchOptions
from collective.launch.remote_shell import RemoteShell
from collective.net import interfaces, private_files, shared_secret
from collective.training.observers.ledger.writer import Ledger
from collective.training.observers.trace_file import TraceFile
from tests import launch

pytestmark = launch.NOT_ON_RANKS
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users")
ANOTHER_USER = pytest.param("another user's", marks=as_root)

# ---- listeners ------------------------------------------------------------------


def ends(listener_knows, caller_knows):
    """Return the outcome of a connection between two ends that know these secrets."""
    here, there = socket.socketpair()
    failed = []

    def listen():
        with here:
            try:
                shared_secret.verify_caller(here, listener_knows)
            except OSError as error:
                failed.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    with there:
        try:
            shared_secret.verify_listener(there, caller_knows)
        except OSError as error:
            failed.append(error)
    thread.join()
    return failed


def test_both_ends_prove_that_they_know_the_secret():
    assert ends("known", "known") == []
    failed = ends("known", "guessed")
    assert failed and all(
        isinstance(error, shared_secret.WrongSecretError) for error in failed
    )


def test_the_secret_is_never_sent_and_no_proof_serves_twice():
    key, sent = shared_secret.generate(), []

    class Heard:
        def __init__(self, link):
            self.link = link

        def sendall(self, data):
            sent.append(data)
            self.link.sendall(data)

        def __getattr__(self, name):
            return getattr(self.link, name)

    for _ in range(2):
        here, there = socket.socketpair()
        with here, there:
            thread = threading.Thread(
                target=shared_secret.verify_caller, args=(Heard(here), key)
            )
            thread.start()
            shared_secret.verify_listener(Heard(there), key)
            thread.join()
    said = b"".join(sent)
    assert key.encode() not in said and bytes.fromhex(key) not in said
    assert len(set(sent)) == len(sent)


def test_a_silent_stranger_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(shared_secret, "_SECONDS", 0.05)
    here, there = socket.socketpair()
    with here, there, pytest.raises(OSError):
        shared_secret.verify_caller(here, "known")


def test_the_launcher_listens_only_where_it_should(monkeypatch):
    mine = [interfaces.Interface(f"eth{i}", f"127.0.0.{i}/24") for i in (2, 3)]
    monkeypatch.setattr(interfaces, "interfaces", lambda: mine)
    with reachability.listening(["eth1"], "s") as none_of_that_name:
        assert len(none_of_that_name) == 2  # then all are reported
    with reachability.listening(["eth3"], "s") as (address,):
        host, port = address.split(":")
        assert host == "127.0.0.3"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(port)), 60)
        with socket.create_connection((host, int(port)), 60) as link:
            link.sendall(b"x" * 64)  # a stranger learns only a random number
            assert len(link.recv(100)) == 32 and link.recv(100) == b""


def test_no_secret_is_on_a_command_line(monkeypatch):
    """This holds for the launcher's probes and the doctor's: ps shows them to all users."""
    said = []

    def asked(command, seconds, given=""):
        said.append((command, given))
        return processes.Result(0, "")

    monkeypatch.setattr(shared_secret, "generate", lambda: "the-secret")
    monkeypatch.setattr(reachability, "run", asked)
    monkeypatch.setattr(multi_host, "run", asked)
    with pytest.raises(CollectiveError):
        reachability.check([Host("192.0.2.1")], LaunchOptions(), "mpirun")
    multi_host.examine_hosts([Host("192.0.2.1")], RemoteShell())
    assert len(said) == 2
    for command, given in said:
        assert "the-secret" not in " ".join(command)
        assert given == "the-secret\n"


# ---- files ----------------------------------------------------------------------


def test_a_private_file_is_made_new_for_this_user(tmp_path):
    path = tmp_path / "file"
    private_files.write(path, b"data")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert private_files.read(path) == b"data"
    with pytest.raises(FileExistsError):
        private_files.write(path, b"other")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        private_files.write(link, b"data")
    assert not (tmp_path / "target").exists()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            private_files.write(tmp_path / "full", b"data")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "full").exists()


def planted(tmp_path, how):
    """Return a file that another user could have planted."""
    path = tmp_path / "planted"
    path.write_bytes(b"data")
    if how == "is a link":
        path = tmp_path / "planted.link"
        path.symlink_to(tmp_path / "planted")
    elif how == "is not a file":
        path = tmp_path / "pipe"
        path.parent.mkdir(exist_ok=True)
        sockets = socket.socket(socket.AF_UNIX)
        sockets.bind(str(path))
        sockets.close()
    elif how == "can be written by other users":
        path.chmod(0o622)
    else:
        os.chown(path, NOBODY, NOBODY)
    return path


WAYS = [
    "is a link",
    "can be written by other users",
    pytest.param(f"belongs to user {NOBODY}", marks=as_root),
]


@pytest.mark.parametrize("how", WAYS)
def test_a_planted_file_is_not_read(tmp_path, how):
    with pytest.raises(CollectiveError, match=how):
        private_files.read(planted(tmp_path, how))


@pytest.mark.parametrize("how", WAYS)
def test_a_planted_result_is_not_unpickled(tmp_path, how):
    """The result is of a rank in collective.run."""
    planted(tmp_path, how).rename(tmp_path / "0-0.result")
    with pytest.raises(CollectiveError, match=how):
        run_function.files_in(tmp_path)


@pytest.mark.parametrize("how", WAYS)
def test_a_planted_call_is_not_run(tmp_path, how):
    planted(tmp_path, how).rename(tmp_path / "call")
    assert run_function._rank(tmp_path) == 1
    assert how in (tmp_path / "0-0.failure").read_text()


@pytest.mark.parametrize("how", WAYS)
def test_a_planted_folder_of_a_job_is_not_used(tmp_path, monkeypatch, how):
    """In Ray and Spark, rank and actor meet there, and unpickle each other's messages."""
    monkeypatch.setattr(folders, "of", lambda name: tmp_path / name)
    folder = tmp_path / "job"
    folder.mkdir()
    if how == "is a link":
        folder.rename(tmp_path / "other")
        folder.symlink_to(tmp_path / "other")
    elif "belongs" in how:
        os.chown(folder, NOBODY, NOBODY)
    else:
        folder.chmod(0o777)
    with pytest.raises(CollectiveError, match=how):
        folders.make("job")
    with pytest.raises(CollectiveError, match=how), folders.used(folder):
        pass
    assert folder.exists()


def test_a_wheel_is_not_taken_from_a_folder_that_others_write(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wheels = build.cache()
    wheels.mkdir(parents=True)
    target = build.Target(("tensorflow", "2.21"), None)
    (wheels / f"horovod-{target.version}-cp311.whl").touch()
    (tmp_path / "collective").chmod(0o700)
    assert build.kept(target) is not None
    (tmp_path / "collective").chmod(0o777)
    with pytest.raises(CollectiveError, match="can be written by other users"):
        build.kept(target)


def begin_trace(path):
    TraceFile(path, 1000, create=True)


@pytest.mark.parametrize("planted", ["rank.0", "rank.0/stdout"])
def test_output_follows_no_link(planted, tmp_path):
    style = output.OutputStyle(directory=tmp_path)
    treasure = tmp_path / "mine" / "stdout"
    treasure.parent.mkdir()
    treasure.write_text("kept")
    (tmp_path / planted).parent.mkdir(exist_ok=True)
    (tmp_path / planted).symlink_to(
        treasure if planted.endswith("stdout") else treasure.parent
    )
    with pytest.raises(OSError) as refused:
        output.RankOutput(0, 1, style)
    assert str(refused.value.filename).endswith(planted)
    assert treasure.read_text() == "kept"


@pytest.mark.parametrize("how", ["a link", "not a plain file", ANOTHER_USER])
@pytest.mark.parametrize("write", [timeline.start, begin_trace, Ledger])
@launch.NEEDS_CORE
def test_a_planted_name_gets_no_timeline_and_no_ledger(write, how, tmp_path):
    path, treasure = tmp_path / "planted", tmp_path / "mine"
    treasure.write_text("kept")
    if how == "a link":
        path.symlink_to(treasure)
    elif how == "not a plain file":
        os.mkfifo(path)
    else:
        path.touch(0o666)
        os.chown(path, NOBODY, NOBODY)
    with pytest.raises(UsageError, match=f"planted: it is {how}"):
        write(os.fspath(path))
    assert treasure.read_text() == "kept"


@as_root
def test_output_goes_to_no_folder_of_another_user(tmp_path):
    (tmp_path / "rank.0").mkdir()
    os.chown(tmp_path / "rank.0", NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="another user"):
        output.RankOutput(0, 1, output.OutputStyle(directory=tmp_path))


# ---- the rendezvous -----------------------------------------------------------

# Occupies the name by which the ranks of a job meet, before they do.
SQUAT = r"""
    import os, socket, sys
    os.setuid(65534)
    name = sys.stdin.readline().strip()
    held = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    held.bind("\0" + name)
    held.listen(4)
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def squatting(name):
    squatter = subprocess.Popen(
        [sys.executable, "-I", "-c", textwrap.dedent(SQUAT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        squatter.stdin.write(f"{name}\n")
        squatter.stdin.flush()
        assert squatter.stdout.readline() == "held\n"
        yield
    finally:
        squatter.communicate()


@as_root
@launch.NEEDS_CORE
@pytest.mark.launches
def test_a_name_that_another_user_holds_is_refused_at_once():
    job = shared_secret.generate()
    with squatting(name_of_job(job)):
        ranks = [rank(number, job) for number in (0, 1)]
        for one in ranks:
            printed = one.communicate(timeout=240)[0]
            assert f"a process of user {NOBODY} holds the name" in printed, printed


MEET_AGAIN = """
    import collective, sys
    from collective import session
    collective.init()
    collective.barrier()
    if collective.rank() == 2:
        print("lost", flush=True)
        sys.stdin.read()
    try:
        while True:
            collective.barrier()
    except collective.PeerLost:
        session.regroup()
    print(collective.size())
"""


@as_root
@launch.NEEDS_CORE
@pytest.mark.launches
def test_survivors_meet_though_another_user_has_seen_the_first_name():
    """Another user occupies the former second name, when one hash gave both names."""
    job = shared_secret.generate()
    guess = "/".join([*name_of_job(job).split("/")[:3], "0.1.0"])
    with squatting(guess), contextlib.ExitStack() as stack:
        ranks = [
            rank(number, job, of=3, program=MEET_AGAIN, stdin=subprocess.PIPE)
            for number in range(3)
        ]
        for one in ranks:
            stack.callback(one.kill)
        assert ranks[2].stdout.readline() == "lost\n"
        ranks[2].kill()
        for one in ranks[:2]:
            assert one.communicate(timeout=240)[0].splitlines()[-1] == "2"


@launch.NEEDS_CORE
@pytest.mark.launches
def test_what_ranks_share_has_no_name_that_another_could_open():
    job = shared_secret.generate()
    ranks = [rank(number, job) for number in (0, 1)]
    for one in ranks:
        met, *shared = one.communicate(timeout=240)[0].splitlines()
        assert met == "met" and shared
        for name in shared:  # anonymous memory of the job and of the recorder
            assert name == "/memfd:collective (deleted)"


def test_each_job_of_our_launcher_has_a_name_that_nobody_can_guess():
    def names():
        command = [*launch.command("native", 2), "--dry-run", "true"]
        done = launch.capture(command)
        words = done.stdout.split()
        return {word for word in words if word.startswith("COLLECTIVE_JOB=")}

    (first,), (second,) = names(), names()
    assert first != second and len(first) == len("COLLECTIVE_JOB=") + 32


# ---- output --------------------------------------------------------------

EVIL = "w\x1b[31m\x1b]0;title\x07\x9b2J\u202e\r"


def steers(text):
    return any(letter in text for letter in "\x1b\x07\x9b\u202e\r")


def test_texts_do_nothing_to_a_terminal(capsys):
    assert printable("ü\tä\n") == "ü\tä\n"
    assert printable("\x1b[31m") == "\\x1b[31m"
    error = CollectiveError(f"the shape of {EVIL} differs", hint=f"rename {EVIL}")
    output.print_message(f"host said {EVIL}")
    found = report.findings_text([Finding(EVIL, EVIL)])
    texts = [str(error), error.message, capsys.readouterr().err, printable(found)]
    assert not any(steers(text) for text in texts)


def test_tables_show_brackets_as_they_are():
    """A name or a hint is not markup: pip install '.[cpu]' must be shown in full."""
    why = {
        "usable": False,
        "reason": "[/red] [bold]none",
        "hint": "pip install '.[cpu]'",
    }
    found = {"single": {"summary": "one", "alone": why, "launched": why}}
    printed = report.backends_text(found)
    assert "[/red] [bold]none" in printed and "'.[cpu]'" in printed


@launch.NEEDS_CORE
@pytest.mark.launches
def test_the_core_shows_names_harmlessly(tmp_path):
    """The core itself prints which ranks wait, after a while without progress."""
    script = """
        import os, sys, time, numpy as np, collective
        collective.init()
        if collective.rank() == 0:
            os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 2)
            collective.allreduce(np.ones(3), name="w\\x1b[31m\\x07\\x9b")
        # Not before the other one has reported it.
        while not os.path.exists(sys.argv[1]) or not os.path.getsize(sys.argv[1]):
            time.sleep(0.01)
        collective.shutdown()
    """
    log = tmp_path / "stderr"
    command = [*launch.command("native", 2), sys.executable, "-c"]
    env = launch.environment(COLLECTIVE_STALL_SECONDS="1", COLLECTIVE_RECORDER="off")
    launch.capture([*command, textwrap.dedent(script), str(log)], 120, env=env)
    printed = log.read_text()
    assert re.search(r"no progress for \d+ s", printed)
    assert "all-reduce 'w\\x1b[31m\\x07\\x9b'" in printed and not steers(printed)


PLANTED = "raise SystemExit('a planted module runs')\n"


@pytest.fixture
def working_directory_of_others(tmp_path, monkeypatch):
    """Make a folder whose modules hide Python's, as another user could do in /tmp."""
    for name in ("argparse", "runpy", "json", "collective"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)


def test_no_module_of_the_working_directory_runs(working_directory_of_others):
    commands = [
        python_command.command("collective.launch", "--version"),
        [sys.executable, *python_command.arguments("collective.launch", "--version")],
        RemoteShell().command(Host("localhost"), "collective.launch", "--version"),
        [*command_line.parse(["--keras", "s.py"]).command, "--help"],
    ]
    for command in commands:
        ended = processes.run(command, 240)
        assert ended.code == 0 or "cannot read the script" in ended.error, ended
        assert "-m" not in command


def test_a_script_sees_what_python_alone_shows_it(
    working_directory_of_others, tmp_path
):
    own = tmp_path / "own"
    own.mkdir()
    (own / "beside.py").write_text("")
    script = own / "script.py"
    script.write_text("import beside, sys\nprint(repr(sys.path))\n")
    alone = processes.run([sys.executable, str(script)], 240).out
    ours = command_line.parse(["--keras", str(script)]).command
    single = [*ours[:4], "--backend", "single", *ours[4:]]
    # It imports TensorFlow, perhaps on a busy machine.
    found = processes.run(single, 300)
    assert found.out == alone, found
