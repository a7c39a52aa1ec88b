"""``horovod.common.elastic``: state that survives changes of the ranks."""

from collective.tensorflow.elastic import ObjectState as ObjectState
from collective.tensorflow.elastic import State as State
