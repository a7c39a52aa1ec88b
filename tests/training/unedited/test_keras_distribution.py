"""The view of the job in ``keras.distribution``, and its refusals."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from collective.errors import UsageError
from collective.training.unedited.keras_distribution.job_devices import (
    replace_keras_distribution,
)
from collective.training.unedited.script_job import ScriptJob
from tests.training.unedited.test_unedited import Ranks


@pytest.fixture
def job():
    found = ScriptJob(Ranks(0, []))
    yield found
    found.undo()
    keras.distribution.set_distribution(None)


def test_keras_distribution_shows_the_job(job):
    known = keras.distribution
    before = known.list_devices()
    replace_keras_distribution(job)
    assert known.list_devices() == known.list_devices("cpu") == ["cpu:0", "cpu:1"]
    assert known.list_devices("tpu") == [] and known.get_device_count() == 2
    known.initialize()
    known.initialize(num_processes=2, process_id=0)
    parallel = known.DataParallel()
    assert (parallel.num_processes, parallel.num_model_replicas) == (2, 2)
    assert parallel.data_shard_id == 0
    data = tf.data.Dataset.range(6).batch(3)
    assert parallel.distribute_dataset(data) is data
    with parallel.scope():
        assert known.distribution() is parallel
    known.set_distribution(parallel)
    job.undo()
    assert known.list_devices() == before
    assert known.DataParallel().num_processes == 1


def test_each_rank_knows_its_number():
    job = ScriptJob(Ranks(1, []))
    replace_keras_distribution(job)
    try:
        found = keras.distribution.DataParallel()
        assert (found.num_processes, found.data_shard_id) == (2, 1)
        keras.distribution.initialize(process_id=1)
    finally:
        job.undo()


def layout(axes):
    mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"))
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["d/kernel"] = axes
    return keras.distribution.ModelParallel(layout_map=layouts)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda k: k.DataParallel(devices=["cpu:0"]), "has 1 devices, and this job 2"),
        (
            lambda k: k.DataParallel(auto_shard_dataset=False),
            "auto_shard_dataset=False",
        ),
        (lambda k: layout((None, "model")), "lays weights out over 2 replicas"),
    ],
)
def test_other_distributions_are_refused_by_name(job, make, text):
    replace_keras_distribution(job)
    with pytest.raises(UsageError, match=text):
        keras.distribution.set_distribution(make(keras.distribution))
    keras.distribution.set_distribution(layout((None, None)))


def test_a_layout_of_a_tensor_changes_no_value(job):
    replace_keras_distribution(job)
    tensor = tf.ones([2, 3])
    assert keras.distribution.distribute_tensor(tensor, (None, "model")) is tensor


def test_initialize_of_another_job_is_refused(job):
    replace_keras_distribution(job)
    with pytest.raises(
        UsageError, match=r"initialize\(num_processes=4\) on rank 0 of 2"
    ):
        keras.distribution.initialize(num_processes=4)
    with pytest.raises(UsageError, match="process_id=1"):
        keras.distribution.initialize(process_id=1)
