"""A reader understands any contents of a file or a variable, or names the error.

A ``CollectiveError`` is an answer (``UsageError`` is one); any other exception is a bug.
"""

from __future__ import annotations

import json
import random
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from collective import environment
from collective.errors import CollectiveError
from collective.launch import horovod_settings
from collective.recorder import dump
from collective.training.observers.ledger import verify

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)
# Texts in YAML and JSON that a generator of values does not write.
ODD = st.sampled_from(
    [
        *(b"", b"\xff\xfe", b"{" * 1500, b"[" * 1500, b"- " * 1500, b"2000-13-45"),
        *(b"&a [*a]", b"? [1]\n: 2", b"!!python/none", b"9" * 5000, b"a: !!int x"),
        *(b"a: 2000-13-45", b"\x00", b"<<: 1", b"a: &x\n  b: *x"),
    ]
)
few = settings(
    max_examples=60,
    deadline=None,
    phases=set(Phase) - {Phase.explain},
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def named(*names: str) -> st.SearchStrategy[dict]:
    """Return tables with some of the keys that a reader looks for, and another key."""
    keys = st.sampled_from([*names, "other"])
    return st.dictionaries(keys, VALUES, max_size=len(names))


def understood(read, *arguments) -> None:
    try:
        read(*arguments)
    except CollectiveError as error:
        assert str(error)


def as_yaml(value: object) -> bytes:
    return yaml.safe_dump(value).encode("utf-8", "surrogateescape")


SECTIONS = list(dict.fromkeys(s.section for s in horovod_settings.SETTINGS))
KEYS = sorted({s.key for s in horovod_settings.SETTINGS})


@few
@given(
    ODD
    | st.dictionaries(
        st.sampled_from([*SECTIONS, "controller", "other"]), named(*KEYS) | PLAIN
    ).map(as_yaml)
)
def test_config_files_of_horovodrun(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    empty = dict.fromkeys(s.dest for s in horovod_settings.SETTINGS)
    options = Namespace(**empty, use_mpi=False, use_gloo=False)
    understood(horovod_settings.read_config, str(tmp_path / "file"), options)


@few
@given(
    ODD.map(lambda content: content.decode("latin-1"))
    | st.builds(
        lambda cluster, task: json.dumps({"cluster": cluster, "task": task}),
        named("worker", "chief", "ps")
        | st.dictionaries(
            st.sampled_from(["worker", "chief"]), st.lists(st.text(), max_size=3)
        ),
        named("type", "index")
        | st.builds(
            lambda kind, index: {"type": kind, "index": index},
            st.sampled_from(["worker", "chief", "evaluator"]),
            PLAIN,
        ),
    )
)
def test_clusters_of_tensorflow(content):
    understood(environment.detect, {"TF_CONFIG": content})


LAUNCHED = [
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    *("PMIX_RANK", "PMIX_NAMESPACE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    *("SLURM_TASKS_PER_NODE", "SLURM_STEP_ID", "SLURM_NODEID", "HOROVOD_RANK"),
    *("HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "RANK"),
    *("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    *("COLLECTIVE_RANK", "COLLECTIVE_SIZE", "COLLECTIVE_LOCAL_RANK"),
    *("COLLECTIVE_LOCAL_SIZE", "COLLECTIVE_JOB"),
]


@few
@given(
    st.dictionaries(
        st.sampled_from(LAUNCHED),
        st.integers(-2, 5).map(str)
        | st.text(st.characters(exclude_characters="\0"), max_size=5)
        | st.sampled_from(["2(x3)", "2,", "1e9", "٣", "9" * 5000]),
        max_size=8,
    )
)
def test_variables_of_launchers(variables):
    understood(environment.detect, variables)


LEDGER = (
    {"from": 0, "replicas": 2, "backend": "native"},
    {"step": 0, "read": [[0, 2, 7], [2, 4, 7]]},
)
PLAN = {"rows": 8, "global_batch_size": 4, "seed": 1, "shuffle": True}
SMALL = st.none() | st.integers(-2, 9) | st.text(max_size=3) | st.floats()
LISTS = SMALL | st.lists(SMALL | st.lists(SMALL, max_size=4), max_size=3)


@few
@given(
    st.lists(
        st.builds(
            lambda line, key, value: {**line, "plan": PLAN, key: value},
            st.sampled_from(LEDGER),
            st.sampled_from(["from", "replicas", "backend", "step", "read", "other"]),
            LISTS,
        )
        | st.builds(
            lambda key, value: {**LEDGER[0], "plan": {**PLAN, key: value}},
            st.sampled_from([*PLAN, "other"]),
            SMALL,
        )
        | st.builds(lambda plan: {**LEDGER[0], "plan": plan}, LISTS),
        max_size=3,
    ).map(lambda lines: "\n".join(map(json.dumps, lines)).encode())
    | ODD
)
def test_ledgers(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    understood(verify.check, tmp_path / "file")


@few
@given(
    st.text()
    | named("reason", "at", "size", "ranks").map(
        lambda table: dump._MARK + json.dumps(table)[1:]
    )
)
def test_dumps_of_the_flight_recorder(content):
    understood(dump.parse_dump, content, "file")


@pytest.mark.trains
@pytest.mark.parametrize("seed", range(20))
def test_checkpoints_with_a_changed_byte(seed, saved, tmp_path):
    """A file with a changed byte, cut or missing is not used, and the reason is named."""
    from collective.training.observers.checkpoint import storage

    folder, model, plan = saved
    files = sorted(path for path in folder.iterdir() if path.is_file())
    drawn = random.Random(seed)
    file = drawn.choice(files)
    whole = file.read_bytes()
    place = drawn.randrange(len(whole))
    kind = drawn.choice(["byte", "end", "missing", "longer"])
    try:
        if kind == "missing":
            file.unlink()
        else:
            other = bytes([whole[place] ^ drawn.randrange(1, 256)])
            file.write_bytes(
                {
                    "byte": whole[:place] + other + whole[place + 1 :],
                    "end": whole[:place],
                    "longer": whole + other,
                }[kind]
            )
        try:
            storage.read(folder, model, plan)
        except storage.Unusable as error:
            assert str(error)
        else:
            # For example, blanks around the text of the manifest change nothing.
            assert json.loads(file.read_text()) == json.loads(whole), (file, kind)
    finally:
        file.write_bytes(whole)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with a checkpoint, its model and its plan of batches."""
    from collective import backends
    from collective.training import Checkpoint
    from collective.training.observers.checkpoint import storage
    from tests.training import small

    folder: Path = tmp_path_factory.mktemp("saved")
    result = small.train(
        backends.get("single"), epochs=1, checkpoint=Checkpoint(folder, every=6)
    )
    (path,) = storage.saved_in(folder)
    return path, result.model, storage._manifest(path)["plan"]
