"""``horovod.tensorflow.functions``: objects and variables, the same on every rank."""

from collective.tensorflow.objects import allgather_object as allgather_object
from collective.tensorflow.objects import broadcast_object as broadcast_object
from collective.tensorflow.objects import broadcast_object_fn as broadcast_object_fn
from collective.tensorflow.variables import broadcast_variables as broadcast_variables
