"""``horovod.common.process_sets``: some of the ranks."""

from collective.tensorflow.process_sets import ProcessSet as ProcessSet
from collective.tensorflow.process_sets import add_process_set as add_process_set
from collective.tensorflow.process_sets import global_process_set as global_process_set
from collective.tensorflow.process_sets import remove_process_set as remove_process_set
