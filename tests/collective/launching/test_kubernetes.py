"""The manifests for Kubernetes: their form, and the match of their parts."""

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
    # Values that the operator will write there, as in the sample.
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


def test_the_launcher_knows_workers_by_the_key_of_the_job(job):
    keys = job["spec"]["sshAuthMountPath"]
    worker = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    (command,) = worker["containers"][0]["args"]
    assert command.endswith(f"-h {keys}/id_rsa")
    docker = (ROOT / "Dockerfile").read_text()
    assert f'KnownHostsCommand /bin/sed "s/^/* /" {keys}/id_rsa.pub' in docker
    assert "StrictHostKeyChecking yes" in docker


@pytest.fixture
def indexed():
    """Return the service and the Job."""
    text = (ROOT / "deploy" / "indexed-job.yaml").read_text()
    return list(yaml.safe_load_all(text))


def check_form(found, model, where=""):
    """Check that every field is in the published API, with the right type."""
    client = pytest.importorskip("kubernetes.client")
    if isinstance(found, dict) and hasattr(client, model):
        kind = getattr(client, model)
        names = {name: field for field, name in kind.attribute_map.items()}
        assert set(found) <= set(names), f"{where}: {set(found) - set(names)}"
        for name, value in found.items():
            check_form(value, kind.openapi_types[names[name]], f"{where}.{name}")
    elif isinstance(found, list):
        assert model.lower().startswith("list["), where
        for value in found:
            check_form(value, model[5:-1], where)
    elif isinstance(found, dict):
        assert model.lower().startswith("dict"), where
    else:
        types = {"str": str, "int": int, "bool": bool}
        assert isinstance(found, types.get(model, object)), where


def test_kubernetes_takes_the_indexed_job(indexed):
    service, job = indexed
    check_form(service, "V1Service")
    check_form(job, "V1Job")
    job["spec"]["template"]["spec"]["subDomain"] = "digits"
    with pytest.raises(AssertionError, match="subDomain"):
        check_form(job, "V1Job")


def test_every_pod_of_the_indexed_job_finds_the_head(indexed):
    service, job = indexed
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    options = parse(container["args"])
    assert options.agent and options.nodes == spec["completions"] == spec["parallelism"]
    assert (
        spec["completionMode"] == "Indexed" and service["spec"]["clusterIP"] == "None"
    )
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert options.head.startswith(f"{name}-0.{pod['subdomain']}:")
    assert options.command == ["python", "train.py"]
    (variable,) = container["env"]
    assert variable["name"] == "COLLECTIVE_SECRET_FILE"
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert variable["value"].startswith(mounts["secret"])
    docker = (ROOT / "Dockerfile").read_text()
    assert f"WORKDIR {container['workingDir']}" in docker.splitlines()


def documents(name):
    return list(yaml.safe_load_all((ROOT / "deploy" / name).read_text()))


def takes(kind, found):
    """Return whether the published API has every field; it drops unknown ones."""
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api"
    )
    return getattr(models, kind).from_dict(found).to_dict() == found


def test_the_api_of_jobset_takes_the_job():
    (job,) = documents("jobset.yaml")
    assert takes("JobsetV1alpha2JobSet", job)
    job["spec"]["network"]["enableDNS"] = True
    assert not takes("JobsetV1alpha2JobSet", job)


def test_the_api_of_kubeflow_trainer_takes_runtime_and_job():
    runtime, job = documents("trainjob.yaml")
    assert takes("TrainerV1alpha1TrainingRuntime", runtime)
    assert takes("TrainerV1alpha1TrainJob", job)
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


@pytest.mark.parametrize("file", ["jobset.yaml", "trainjob.yaml"])
def test_every_pod_of_a_jobset_finds_the_head(file):
    first = documents(file)[0]
    nodes = first["spec"].get("mlPolicy", {}).get("numNodes")
    made = first["spec"]["template"] if nodes else first
    (replicated,) = made["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    options = parse(container["args"])
    assert options.agent and options.nodes == (nodes or job["completions"])
    assert options.command == ["python", "train.py"]
    # JobSet names pods in this way, and labels them with its own name.
    name = "$(JOBSET)" if nodes else first["metadata"]["name"]
    assert options.head == f"{name}-{replicated['name']}-0-0.{name}:7070"
    variables = {v["name"]: v for v in container["env"]}
    if nodes:
        label = variables["JOBSET"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert label == "metadata.labels['jobset.sigs.k8s.io/jobset-name']"
        step = replicated["template"]["metadata"]["labels"]
        assert step == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    secret = variables["COLLECTIVE_SECRET_FILE"]["value"]
    assert secret.startswith(mounts["secret"])
    indexed_job = documents("indexed-job.yaml")[1]["spec"]["template"]["spec"]
    assert pod["volumes"] == indexed_job["volumes"]
