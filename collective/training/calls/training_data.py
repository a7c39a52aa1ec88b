"""The data of a training: the rows of each global batch, and the validation's data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import keras

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training.calls.opening import open_inputs
from collective.training.input.batches import Batches
from collective.training.input.data import (
    DataArguments,
    FitData,
    fit_data,
    plan_shuffle,
)
from collective.training.input.feed import PlannedFeed
from collective.training.input.leaves import first_leaf
from collective.training.input.pipeline import Batch, Input
from collective.training.input.replica_batches import first_of, stacked
from collective.training.input.source import Source
from collective.training.preparation.refusals import check_labels
from collective.training.verification import compare_data
from collective.training.virtual.checks import check_batch as check_pieces
from collective.training.virtual.pieces import VirtualReplicas


@dataclass(frozen=True)
class TrainingData:
    """The data of a training on this rank."""

    inputs: Input | Batches  # rows by number, or batches as they come
    # The data of the validation, or None without validation.
    validation: Input | Batches | None
    backend: Backend  # on which the training runs
    # The virtual replicas that share a batch. If None, the backend's replicas.
    virtual: VirtualReplicas | None

    @classmethod
    def of(
        cls,
        arguments: DataArguments,
        backend: Backend,
        virtual: VirtualReplicas | None,
        *,
        with_rows_read: bool = False,
        with_checksums: bool = False,
        whole_batches: bool = False,
    ) -> TrainingData:
        """Open the data that ``fit`` was called with.

        Args:
            with_rows_read: Whether batches have the numbers of their rows.
            with_checksums: Whether batches that ranks read whole have checksums, where
                there are ranks to compare with.
            whole_batches: Whether each replica has whole batches of its own.

        Raises:
            UsageError: Numbers of rows are needed, and the data have none.
        """
        given, steps = fit_data(arguments), arguments.steps_per_epoch
        if whole_batches:
            given = _in_whole_batches(given, backend.most_replicas)
        inputs: Input | Batches
        if isinstance(given.train, Source):
            shuffle, seed = plan_shuffle(
                given.train, arguments.shuffle, arguments.seed, backend
            )
            inputs = Input(
                given.train,
                given.batch_size,
                seed=seed,
                shuffle=shuffle,
                with_rows_read=with_rows_read,
                with_checksums=with_checksums
                and backend.size > 1
                and not backend.elastic,
            )
        elif with_rows_read:
            raise UsageError(
                "a ledger has the numbers of the rows of each step, and rows of batches "
                "that are not known beforehand have none",
                hint="drop --ledger; or pass arrays, or dataset.unbatch() of known "
                "length, with global_batch_size=",
            )
        else:
            inputs = Batches(given.train, backend, steps, virtual)
        validation = None
        if given.validation is not None:
            size, most = given.validation_batch_size, arguments.validation_steps
            validation = open_inputs(given.validation, backend, size, most)
        for opened in (inputs, validation):
            if isinstance(opened, Batches):
                opened.begin_as_keras()
        return cls(inputs, validation, backend, virtual)

    def close(self) -> None:
        """Close the validation's data; the loop closes the data that it trains on."""
        if isinstance(self.validation, Batches):
            self.validation.close()

    @property
    def spec(self) -> Batch:
        """Return the ``tf.TensorSpec`` of a batch."""
        return self.inputs.spec

    @property
    def replica_spec(self) -> Batch:
        """Return the ``tf.TensorSpec`` of the batch that one replica has."""
        return first_of(self.spec) if self._stacked else self.spec

    @property
    def _stacked(self) -> bool:
        return isinstance(self.inputs, Batches) and self.inputs.is_stacked

    def check(self, accumulate: int, must_agree: dict[str, Any]) -> int:
        """Compare the ranks' data, and check that every piece gets a row.

        Every rank calls it.

        Returns:
            The most rows that a micro-batch may have.
        """
        must_agree |= {"accumulate": accumulate}
        compare_data(self.backend, self.inputs, self.validation, must_agree)
        if accumulate < 1:
            raise UsageError("accumulate must be at least 1", hint="--accumulate 1")
        rows = self.batch_rows or max(32, self.backend.most_replicas)
        if self.virtual is not None:
            check_pieces(self.virtual, self.inputs)
        pieces = self.virtual.count if self.virtual else self.backend.replicas
        return -(-rows // (pieces * accumulate))

    @property
    def batch_rows(self) -> int | None:
        """Return the rows of a global batch, or None if unknown."""
        if isinstance(self.inputs, Batches):
            return self.inputs.batch_size
        return self.inputs.global_batch_size

    @property
    def replica_rows(self) -> int | None:
        """Return the rows of a batch as the data yield it, or None if unknown."""
        if self._stacked:
            return first_leaf(self.replica_spec.x).shape[0]
        return self.batch_rows

    def feed(
        self, model: keras.Model, steps_per_epoch: int | None, initial_epoch: int
    ) -> PlannedFeed | Batches:
        """Return the batches for the loop."""
        inputs = self.inputs
        if isinstance(inputs, Batches):
            return inputs
        check_labels(model, inputs.source)
        return PlannedFeed(
            inputs, self.backend, steps_per_epoch, initial_epoch, self.virtual
        )


def _in_whole_batches(given: FitData, replicas: int) -> FitData:
    """Return the data in stacks of batches, of which each replica gets a whole one."""
    validation = given.validation
    return replace(
        given,
        train=stacked(given.train, replicas),
        validation=None if validation is None else stacked(validation, replicas),
    )
