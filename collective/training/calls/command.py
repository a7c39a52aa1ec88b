"""The work of ``train.py``: data, model and backend by name, training and summary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective import backends, fit_options
from collective.backends.base import Backend
from collective.backends.capabilities import Serving
from collective.backends.quiet import quiet
from collective.errors import UsageError
from collective.fit_options import FitOptions
from collective.training.calls import models
from collective.training.calls.evaluate import evaluate
from collective.training.calls.fit import fit
from collective.training.input import datasets
from collective.training.loop.summary import Summary
from collective.training.observers.checkpoint.schedule import Checkpoint
from collective.training.preparation import parts
from collective.training.process.failure import guarded
from collective.training.process.names import options_named
from collective.training.verification.deterministic import THREADS

PRECISIONS = ("float32", "float64", "mixed_bfloat16", "mixed_float16")
CLIPS = ("global_clipnorm", "clipnorm", "clipvalue")
OF_OPTIMIZER = ("optimizer", "learning_rate", *CLIPS)
OF_FIT = ("global_batch_size", "epochs", "verbose", *fit_options.NAMES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingJob(FitOptions):
    """The options of ``train.py``; see ``train.py --help`` for their meaning."""

    backend: str = "auto"
    options: backends.Options = dataclasses.field(default_factory=backends.Options)
    model: str = "cnn"
    data: str = "digits"
    global_batch_size: int = 64
    epochs: int = 12
    optimizer: str = "adam"
    learning_rate: float = 2e-3
    global_clipnorm: float | None = None
    clipnorm: float | None = None
    clipvalue: float | None = None
    precision: str = "float32"
    seed: int = 0  # a script without seeds is not repeatable, and a command is one
    test: bool = True
    verbose: str | int = "auto"

    @classmethod
    def of(cls, given: Mapping[str, Any], **more: Any) -> TrainingJob:
        """Make a job from the options of ``train.py``; ``more`` takes precedence."""

        def own(kind: Any) -> dict[str, Any]:
            names = [field.name for field in dataclasses.fields(kind)]
            return {name: given[name] for name in names if name in given}

        options = backends.Options(**own(backends.Options))
        return cls(**({"options": options} | own(cls) | more))


def run(
    job: TrainingJob,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    checkpoint: Checkpoint | None = None,
    ledger: str | None = None,
    report: Callable[[Summary], None] | None = None,
    backend: Backend | None = None,
) -> Summary:
    """Train, evaluate on the test data, and sum up. Every rank calls it.

    Args:
        callbacks, checkpoint, ledger: As for ``collective.training.fit``.
        report: Called on rank 0, with the summary.
        backend: The result of ``make_backend``; by default a new one.
    """
    backend = backend or make_backend(job)
    with options_named(), guarded(backend):
        _set_precision(job.precision)
        keras.utils.set_random_seed(job.seed)
        data = datasets.load(job.data, seed=job.seed)
        with backend.scope():
            model = parts.made(lambda: _model(job, data), backend, job.shard_weights)
        result = fit(
            model,
            data.train,
            backend=backend,
            callbacks=callbacks,
            checkpoint=checkpoint,
            ledger=ledger,
            **{name: getattr(job, name) for name in OF_FIT},
        )
        test: dict[str, float] = {}
        if job.test and data.test is not None:
            rows = max(job.global_batch_size, 32 * backend.most_replicas)
            how: dict[str, Any] = {
                "verbose": 0,
                "return_dict": True,
                "backend": backend,
            }
            test = result.afterwards(
                lambda: evaluate(model, data.test, batch_size=rows, **how)
            )
        summary = Summary.of(
            dataclasses.asdict(job),
            result,
            test,
            model.count_params(),
            len(data.train),
        )

        def report_once() -> None:
            nonlocal report
            if report is not None and backend.rank == 0:
                report(summary)
                report = None
            if backend.elastic:
                backend.barrier()  # if rank 0 dies before it, a new rank 0 reports

        result.afterwards(report_once)
    return summary


def make_backend(job: TrainingJob) -> Backend:
    """Start and return the job's backend; every rank calls it before any operation.

    Raises:
        UsageError: An option does not fit, or the backend cannot be used here.
    """
    if job.precision == "float64" and job.options.transport_dtype:
        raise UsageError(
            "--transport-dtype is for float32 gradients, and these are float64",
            hint="drop one of the two",
        )
    options = job.options
    if job.virtual_replicas is not None and options.threads is None:
        options = dataclasses.replace(options, threads=THREADS)
    with quiet():
        backend = backends.get(job.backend, options)
    if isinstance(backend, Serving):
        backend.serve()
    with quiet():
        tf.zeros([])  # the first operation starts the devices, and prints about them
    return backend


def _set_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise UsageError(
            f"unknown precision {precision!r}",
            hint=f"--precision {' | '.join(PRECISIONS)}",
        )
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)


def _model(job: TrainingJob, data: datasets.Data) -> keras.Model:
    """Build the model and, unless it comes compiled, compile it."""
    x = data.train.spec[0]
    shape = tf.nest.map_structure(lambda s: tuple(s.shape), x)
    model = models.build(job.model, input_shape=shape, classes=data.classes)
    if model.compiled:
        for option in OF_OPTIMIZER:
            if getattr(job, option) != getattr(TrainingJob(), option):
                raise UsageError(
                    f"model {job.model!r} comes compiled, with an optimizer of its own",
                    hint=f"drop --{option.replace('_', '-')}, or do not compile it",
                )
        return model
    optimizer = _optimizer(job)
    if data.classes:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    else:
        model.compile(optimizer, "mse", jit_compile=False)
    return model


def _optimizer(job: TrainingJob) -> keras.Optimizer:
    clips = {name: value for name in CLIPS if (value := getattr(job, name)) is not None}
    if len(clips) > 1:
        raise UsageError(
            f"one way to clip at a time, not {' and '.join(clips)}",
            hint="keep one of --global-clipnorm, --clipnorm, --clipvalue",
        )
    if not 0 <= job.learning_rate < math.inf:
        raise UsageError(
            f"a learning rate of {job.learning_rate}", hint="--learning-rate 0.002"
        )
    for name, value in clips.items():
        if not value > 0:  # Keras would not clip
            raise UsageError(
                f"{name} is {value}, not a number above 0",
                hint=f"--{name.replace('_', '-')} 1",
            )
    try:
        kind = type(keras.optimizers.get(job.optimizer))
        return kind(learning_rate=job.learning_rate, **clips)
    except (ValueError, TypeError) as error:
        first = str(error).split("\n")[0]
        raise UsageError(
            f"optimizer {job.optimizer!r} cannot be made: {first}",
            hint="--optimizer sgd | adam | adamw | rmsprop | ... (keras.optimizers)",
        ) from None
