"""A Slurm of our own on the nodes: a controller on the first, a daemon on each."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.nodes import NETWORK, Nodes, environment

PATH = os.environ["PATH"] + ":/usr/sbin"
CPUS = 4


def program(name: str) -> str | None:
    """Return the program's path; Debian's names end in ``-wlm``."""
    return shutil.which(f"{name}-wlm", path=PATH) or shutil.which(name, path=PATH)


def why_not() -> str:
    """Return why there is no Slurm here; empty if there is."""
    missing = [n for n in ("slurmctld", "slurmd", "srun") if not program(n)]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client"
    return ""


def settings(home: Path, daemon: str) -> list[str]:
    """Return the lines of slurm.conf that every Slurm of the tests has.

    Args:
        home: The folder of its state and logs.
        daemon: The path of slurmd; Debian keeps the plug-ins next to it.
    """
    plugins = next((Path(daemon).parents[1] / "lib").glob("*/slurm-wlm"), None)
    return [
        "ClusterName=test",
        "AuthType=auth/none",
        "CredType=cred/none",
        "SlurmUser=root",
        "SlurmdUser=root",
        f"StateSaveLocation={home}",
        f"SlurmctldPidFile={home}/ctld.pid",
        f"SlurmdPidFile={home}/%n.pid",
        f"SlurmdSpoolDir={home}/%n",
        f"SlurmctldLogFile={home}/ctld.log",
        f"SlurmdLogFile={home}/%n.log",
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        *([f"PluginDir={plugins}"] if plugins else []),
    ]


def _configuration(nodes: Nodes, home: Path) -> str:
    daemon = program("slurmd")
    assert daemon
    lines = [
        *settings(home, daemon),
        f"SlurmctldHost=node1({NETWORK}.1)",
        "ProctrackType=proctrack/linuxproc",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "JobRequeue=1",
        "KillWait=5",
        f"NodeName=node[1-{nodes.count}] NodeAddr={NETWORK}.[1-{nodes.count}] CPUs={CPUS}",
        "PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE",
    ]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def slurm(nodes: Nodes, seconds: float = 60) -> Iterator[dict[str, str]]:
    """Start Slurm; yield the variables with which srun finds it.

    Raises:
        RuntimeError: If the nodes are not idle in time.
    """
    home = nodes.folder / "slurm"
    home.mkdir()
    (home / "slurm.conf").write_text(_configuration(nodes, home))
    env = {**environment(), "SLURM_CONF": str(home / "slurm.conf")}
    controller, daemon, step = map(program, ("slurmctld", "slurmd", "slurmstepd"))
    assert controller and daemon
    commands = [nodes.on(1, [controller, "-D", "-c"])]
    for number in range(1, nodes.count + 1):
        words = [daemon, "-D", "-N", f"node{number}", *(["-d", step] if step else [])]
        commands.append(nodes.on(number, words))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    daemons = [
        subprocess.Popen(words, env=env, start_new_session=True, **quiet)
        for words in commands
    ]
    try:
        deadline = time.monotonic() + seconds
        while True:
            query = nodes.on(1, ["sinfo", "-h", "-o", "%D %t"])
            done = subprocess.run(query, env=env, capture_output=True, text=True)
            if done.stdout.split() == [str(nodes.count), "idle"]:
                break
            if time.monotonic() > deadline:
                log = (home / "ctld.log").read_text()[-2000:]
                raise RuntimeError(f"Slurm does not start: {done} {log}")
            time.sleep(0.3)
        yield {"SLURM_CONF": env["SLURM_CONF"]}
    finally:
        for each in reversed(daemons):
            each.terminate()
        for each in daemons:
            try:
                each.wait(20)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
