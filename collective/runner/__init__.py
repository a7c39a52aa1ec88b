"""``horovod.runner``: starts a job from Python."""

from collective.run_function import run as run
