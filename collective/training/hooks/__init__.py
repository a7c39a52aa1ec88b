"""Communication hooks: gradients that are compressed before they are summed.

A hook makes fewer bytes of the gradients that replicas send, and approximate sums of what
they receive: the trained model is **not equal to that of one process**. Begin with
``hook``, what a hook has to do; ``power_sgd`` is the one built in. ``exchange`` and
``state`` run any hook in the step, and are chosen by ``collective.training.assemble``.
"""

from collective.training.hooks.hook import CommunicationHook, Exchanged
from collective.training.hooks.power_sgd import PowerSGD

__all__ = ["CommunicationHook", "Exchanged", "PowerSGD"]
