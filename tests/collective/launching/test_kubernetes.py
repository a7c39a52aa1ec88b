"""The manifest for the MPI operator: its form, and that its parts fit together."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from collective import hosts
from collective.launch.command_line import parse

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[3]
SCHEMA = json.loads(Path(__file__).with_name("mpijob.schema.json").read_text())


@pytest.fixture
def job():
    return yaml.safe_load((ROOT / "deploy" / "mpijob.yaml").read_text())


def test_the_operator_takes_it(job):
    jsonschema.validate(job, SCHEMA)


def test_the_form_is_checked(job):
    job["spec"]["slotsPerWorker"] = "2"
    job["spec"]["runPolicy"]["cleanPods"] = "All"
    errors = list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(job))
    assert len(errors) == 2


def test_its_launcher_has_the_hostfile_of_its_workers(job):
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    assert launcher["command"] == ["python", "-m", "collective.launch"]
    given = parse(launcher["args"])
    assert given.hostfile == "/etc/mpi/hostfile"
    assert given.command == ["python", "train.py"]
    # What the operator will write there, and the sample shows.
    name, slots = job["metadata"]["name"], job["spec"]["slotsPerWorker"]
    wanted = [
        hosts.Host(f"{name}-worker-{i}.{name}.default.svc", slots)
        for i in range(replicas["Worker"]["replicas"])
    ]
    assert hosts.read(ROOT / "hostfiles" / "mpi-operator") == wanted


def test_both_run_the_same_image_in_the_folder_of_the_dockerfile(job):
    docker = (ROOT / "Dockerfile").read_text()
    specs = job["spec"]["mpiReplicaSpecs"].values()
    containers = [c for s in specs for c in s["template"]["spec"]["containers"]]
    assert len({c["image"] for c in containers}) == 1
    assert {f"WORKDIR {c['workingDir']}" for c in containers} <= set(
        docker.splitlines()
    )
