"""``horovod.runner.common.util``: what scripts import from Horovod's launcher."""
