"""Communication hooks: gradients that are compressed before they are summed.

With a hook, replicas send fewer bytes of gradients and receive approximate sums: the
trained model is **not equal to one process**. Begin with ``hook``, the base class of all
hooks; ``power_sgd`` is built in, and ``named`` finds a hook by its name.
``compressed_exchange`` and ``hook_state`` run any hook in the step.
"""

from collective.training.compression.hook import CommunicationHook, Exchanged
from collective.training.compression.power_sgd import PowerSGD

__all__ = ["CommunicationHook", "Exchanged", "PowerSGD"]
