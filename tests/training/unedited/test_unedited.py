"""Keras' own functions replaced by ours: their arguments, and the state after them."""

from __future__ import annotations

import inspect
import os
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.distribute import Strategy, command
from collective.distribute import unedited as distribute
from collective.distribute.unedited import distribute_keras
from collective.errors import UsageError
from collective.training.process import failure
from collective.training.steps.batch_function import BatchFunction
from collective.training.unedited import files
from collective.training.unedited.script import Script, print_failure
from collective.training.unedited.script_job import FIT, SAVE, ScriptJob
from tests import launch

STOCK = {
    name: inspect.getattr_static(keras.Model, name)
    for name in ("fit", "evaluate", "predict", "save", "save_weights", "export")
}
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(50, 4)).astype("float32")
Y = X[:, :1] * 2 - 1


def make(optimizer: str = "adam") -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


@pytest.fixture
def distributed():
    found = distribute_keras("single")
    yield found
    found.undo()


JOINS = {
    f"COLLECTIVE_{name}": value
    for name, value in (
        *(("RANK", "2"), ("SIZE", "3"), ("LOCAL_RANK", "2"), ("LOCAL_SIZE", "3")),
        ("JOINS", "1"),
    )
}


class Ranks:
    """A backend of two ranks, of which this is one; ``sent`` has the broadcast values."""

    name, size, replicas, elastic = "two", 2, 2, False

    def __init__(self, rank: int, sent: list):
        self.rank, self.sent = rank, sent

    def broadcast_array(self, array, root=0):
        if root:  # nobody reads what the second rank sends
            return np.array(array)
        if self.rank == 0:
            self.sent.append(np.array(array))
            return np.array(array)
        return self.sent.pop(0)

    def abort(self, exit_code):
        raise SystemExit(exit_code)

    def ended_by_another(self, error):
        return None


def test_signatures_are_keras_own_and_undo_restores_them():
    found = distribute_keras("single")
    assert distribute_keras("auto") is found
    for name in ("fit", "evaluate", "predict"):
        ours, stock = getattr(keras.Model, name), STOCK[name]
        assert ours is not stock and ours.__doc__ == stock.__doc__
        assert inspect.signature(ours) == inspect.signature(stock)
        assert getattr(tf.keras.Model, name) is getattr(keras.Sequential, name) is ours
    found.undo()
    for name, stock in STOCK.items():
        assert inspect.getattr_static(keras.Model, name) is stock, name
    assert "fit" not in vars(keras.Model) and distribute._distribution is None


def test_fit_evaluate_and_predict_are_those_of_keras(distributed, tmp_path):
    model, stock = make(), make()
    given = dict(epochs=2, shuffle=False, verbose=0, validation_split=0.3)
    history = model.fit(X, Y, 16, **given)
    wanted = STOCK["fit"](stock, X, Y, 16, **given)
    assert isinstance(history, keras.callbacks.History)
    for name, values in wanted.history.items():
        assert history.history[name] == pytest.approx(values, rel=1e-6)
    ours, theirs = (
        [m.evaluate(X, Y, verbose=0), m.predict(X[:9], verbose=0)]
        for m in (model, stock)
    )
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5, atol=1e-6)
    assert distributed.job.used >= {"Model.fit", "Model.evaluate", "Model.predict"}
    # The model and the file have no attributes of ours.
    assert type(model) is keras.Sequential
    assert set(vars(model)) <= set(vars(stock))
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


MIRRORED = """
import keras, numpy as np, tensorflow as tf
keras.utils.clear_session()
def made():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
x = np.arange(96, dtype="float32").reshape(24, 4) / 100
y = x[:, :1]
class Items(keras.utils.PyDataset):
    def __len__(self): return 3
    def __getitem__(self, k): return x[8 * k : 8 * k + 8], y[8 * k : 8 * k + 8]
losses = [
    made().fit(data, epochs=2, verbose=0, shuffle=False).history["loss"]
    for data in (tf.data.Dataset.from_tensor_slices((x, y)).batch(8), Items(workers=1))
]
wanted = made().fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
strategy = tf.distribute.MirroredStrategy(["CPU:0"])
assert isinstance(strategy, tf.distribute.MirroredStrategy)
assert strategy.num_replicas_in_sync == 2
assert float(strategy.reduce("sum", strategy.run(lambda: tf.constant(1.0)), None)) == 2
with strategy.scope():
    model = made()
again = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
losses.append(again.history["loss"])
np.testing.assert_allclose(losses, [wanted.history["loss"]] * 3, rtol=1e-6)
"""


@pytest.mark.trains
def test_batches_and_a_cleared_session_on_several_devices(tmp_path):
    """Our strategy is the default one, and each strategy that the script makes.

    Keras' reader and its reset must not see it.
    """
    script = tmp_path / "script.py"
    script.write_text(MIRRORED)
    command = [
        sys.executable,
        "-m",
        "collective.distribute",
        "--backend",
        "tf-mirrored",
    ]
    env = launch.environment(XDG_CACHE_HOME=str(tmp_path))
    code, output = launch.run([*command, "--devices", "2", str(script)], env, 200)
    assert code == 0, output


def test_wrong_arguments_are_the_errors_of_keras(distributed):
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        make().fit(X, Y, epoch=3)
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        make().fit(X, x=Y)
    with pytest.raises(TypeError, match="backend"):
        make().predict(X, backend="mpi")


def test_calls_from_a_callback_and_of_a_subclass_are_keras_own(distributed):
    seen = []

    class Nested(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.model.predict(X[:2], verbose=0))
            make().fit(X, Y, verbose=0)

    class Own(keras.Sequential):
        def fit(self, *args, **kwargs):
            return super().fit(*args, verbose=0, **kwargs)

    layers = [keras.Input((4,)), keras.layers.Dense(1)]
    model = Own(layers)
    model.compile("sgd", "mse")
    found = model.fit(X, Y, callbacks=[Nested()])
    assert len(found.epoch) == len(seen) == 1 and seen[0].shape == (2, 1)


def test_options_of_fit_reach_the_step():
    found = distribute_keras("single", accumulate=3)
    try:
        model = make()
        model.fit(X, Y, 10, verbose=0)
        assert isinstance(model.train_function, BatchFunction)
        assert model.train_function.settings.options.accumulate == 3
    finally:
        found.undo()
    with pytest.raises(UsageError, match="no option 'epochs'") as caught:
        distribute_keras("single", epochs=3)
    assert "accumulate" in caught.value.hint


@pytest.mark.parametrize(
    "variables, match",
    [
        ({"TF_USE_LEGACY_KERAS": "1"}, "only Keras 3"),
        ({"COLLECTIVE_MIN_NP": "2"}, "min_np is an option of backend 'mpi'"),
        (JOINS, "ranks cannot join a job"),
        ({"COLLECTIVE_SEED": "x"}, "COLLECTIVE_SEED='x'"),
    ],
    ids=["legacy", "elastic", "joins", "seed"],
)
def test_what_cannot_work_is_refused(variables, match, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=match):
        distribute_keras("single")
    assert "fit" not in vars(keras.Model) and distribute._distribution is None


def test_an_asynchronous_backend_and_another_keras_are_refused(
    distributed, monkeypatch
):
    distributed.undo()
    with pytest.raises(UsageError, match="backend 'tf-parameter-server'"):
        distribute_keras("tf-parameter-server")
    with pytest.raises(UsageError, match="unknown output 'none'"):
        distribute_keras("single", output="none")
    again = distribute_keras("single")
    monkeypatch.setenv("KERAS_BACKEND", "jax")  # the script sets it too late
    with pytest.raises(UsageError, match="asks for Keras' backend 'jax'"):
        make().fit(X, Y)
    again.undo()


# --- several ranks, one at a time ----------------------------------------------------


def test_only_rank_zero_saves_and_others_wait_for_it(tmp_path):
    sent: list = []
    for rank in (0, 1):
        job = ScriptJob(Ranks(rank, sent))
        files.replace_savers(job)
        try:
            path = tmp_path / f"of{rank}"
            path.mkdir()
            model = make()
            os.chdir(path)
            model.save("a.keras")
            keras.saving.save_model(model, "b.keras")
            tf.keras.models.save_model(model, filepath="c.keras")
        finally:
            os.chdir(tmp_path)
            job.undo()
        # The paths differ here, like the folders: each rank writes its own files.
        assert sorted(os.listdir(path)) == ["a.keras", "b.keras", "c.keras"]
    assert not sent
    for rank in (0, 1):
        job = ScriptJob(Ranks(rank, sent))
        files.replace_savers(job)
        model.save(tmp_path / "same.keras")
        assert (tmp_path / "same.keras").exists() == (rank == 0)
        (tmp_path / "same.keras").unlink(missing_ok=True)
        job.undo()
    assert not sent


def test_a_save_that_fails_fails_on_every_rank(tmp_path):
    sent: list = []
    for rank in (0, 1):
        job = ScriptJob(Ranks(rank, sent))

        def write():
            raise PermissionError(13, "no", "file")

        with pytest.raises(PermissionError) as caught:
            job.write("file", write if rank == 0 else pytest.fail)
        assert caught.value.errno == 13 and not job.inside

    class Unpicklable(Exception):
        def __init__(self, a, b):
            super().__init__("text")

    def write_other():
        raise Unpicklable(1, 2)

    with pytest.raises(Unpicklable):
        ScriptJob(Ranks(0, sent)).write("f", write_other)
    with pytest.raises(RuntimeError, match="Unpicklable: text"):
        ScriptJob(Ranks(1, sent)).write("f", pytest.fail)


def test_ranks_at_different_places_are_named(capsys):
    sent: list = []
    with ScriptJob(Ranks(0, sent)).calling(SAVE, "p"):
        pass
    with pytest.raises(SystemExit) as end, ScriptJob(Ranks(1, sent)).calling(FIT):
        pass
    assert end.value.code == 1
    assert "rank 1 is in Model.fit, and rank 0 in a save" in capsys.readouterr().err


def test_the_lock_of_downloads_follows_no_link(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "keras_cache", lambda: tmp_path)
    treasure = tmp_path / "mine"
    treasure.write_text("kept")
    (tmp_path / ".set.lock").symlink_to(treasure)
    for _ in range(2):  # also without a link
        with files.one_at_a_time("set"):
            assert treasure.read_text() == "kept"
        (tmp_path / ".set.lock").unlink()


def test_a_folder_of_another_rank_is_taken_once(tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    os.utime(old)
    job, stock_mkdir = ScriptJob(Ranks(0, [])), os.mkdir
    files.replace_mkdir(job)
    try:
        other = str(tmp_path / "runs")
        os.rmdir(old)
        stock_mkdir(other)  # another rank does this
        os.makedirs(other)
        with pytest.raises(FileExistsError):
            os.makedirs(other)
        os.makedirs(os.path.join(other, "a", "b"))
        with pytest.raises(FileExistsError):
            os.mkdir(os.path.join(other, "a"))
        with pytest.raises(FileExistsError):
            os.mkdir(os.path.dirname(os.__file__))
    finally:
        job.undo()


# --- strategies of a script -----------------------------------------------------------


def test_a_strategy_of_the_script_is_ours(distributed):
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    assert isinstance(strategy, Strategy)
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy
        model = make()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
    model.fit(strategy.experimental_distribute_dataset(data), verbose=0)
    assert int(strategy.run(lambda: tf.constant(3))) == 3
    assert isinstance(tf.distribute.get_strategy(), Strategy)
    distributed.undo()
    assert not isinstance(tf.distribute.get_strategy(), Strategy)
    assert not isinstance(tf.distribute.OneDeviceStrategy("/cpu:0"), Strategy)


# --- running a script -----------------------------------------------------------------


@pytest.fixture
def main(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "path", ["first", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


PROGRAM = """
import pickle, sys
import beside
class Mine: pass
assert __name__ == "__main__" and __spec__ is None and __package__ is None
copy = pickle.loads(pickle.dumps(Mine()))
result = [sys.argv, __file__, sys.path[0], type(copy) is Mine, beside.NUMBER]
"""


def test_a_script_runs_as_by_python(main, tmp_path):
    (tmp_path / "beside.py").write_text("NUMBER = 4")
    path = tmp_path / "my.py"
    path.write_text(PROGRAM)
    Script(str(path), "", ["-x", "--", "y"]).run()
    found = sys.modules["__main__"].result
    sys.modules.pop("beside")
    argv = [str(path), "-x", "--", "y"]
    assert found == [argv, str(path), str(tmp_path), True, 4]


def test_a_module_and_a_package_run(main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "of_a_user"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text("NUMBER = 5")
    (folder / "__main__.py").write_text("from .part import NUMBER\nimport sys")
    Script("", "of_a_user", ["a"]).run()
    ran = sys.modules["__main__"]
    assert ran.NUMBER == 5 and ran.sys.argv[1:] == ["a"]
    assert ran.__package__ == "of_a_user"
    for name in [n for n in sys.modules if n.split(".")[0] == "of_a_user"]:
        del sys.modules[name]


def test_no_script_and_no_module_are_wrong_use(main, tmp_path):
    for path in (tmp_path / "none.py", tmp_path):  # before TensorFlow is loaded
        with pytest.raises(UsageError, match="cannot read the script"):
            command._what(command.parser().parse_args([str(path)]))
    with pytest.raises(UsageError, match="no module named"):
        Script("", "no.such", [])


def test_a_failure_shows_the_lines_of_the_script_only(
    main, tmp_path, capsys, monkeypatch
):
    path = tmp_path / "my.py"
    for name in ("last_type", "last_value", "last_traceback"):
        monkeypatch.setattr(sys, name, None, raising=False)
    for body, last in (
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import collective.backends as b\nb.get('x')", "UsageError: unknown backend"),
        ("a b", "SyntaxError: invalid syntax"),
    ):
        path.write_text(body)
        with pytest.raises((ZeroDivisionError, UsageError, SyntaxError)) as caught:
            Script(str(path), "", []).run()
        error = caught.value
        # pytest's own frame is the first one here.
        error.__traceback__ = error.__traceback__.tb_next
        print_failure(error)
        assert sys.last_value is error  # as after an error by Python alone
        text = capsys.readouterr().err
        assert text.count('  File "') == 1 and f'"{path}"' in text, text
        assert last in text


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_failure_is_shown_by_the_hook_of_the_script(wrapped, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append(error[1]))
    error = ValueError("of the script")
    if wrapped:
        failure._when_uncaught(error, lambda: None, prints=False)
    print_failure(error)
    assert seen == [error] and not capsys.readouterr().err
    monkeypatch.setattr(sys, "excepthook", lambda *error: 1 / 0)
    print_failure(error)
    text = capsys.readouterr().err
    assert "ZeroDivisionError" in text and text.endswith("ValueError: of the script\n")


def test_a_loop_outside_of_the_replicas_of_devices_is_refused_by_name(backends_by_name):
    """TensorFlow's error would be that a variable has no handle."""
    found = distribute_keras(backends_by_name("tf-mirrored:2"))
    try:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(np.ones((6, 4))) ** 2)
        with pytest.raises(UsageError, match="outside of the replicas") as caught:
            tape.gradient(loss, model.trainable_variables)
        assert "--loops" in caught.value.hint
    finally:
        found.undo()
