"""Communication hooks: gradients that are compressed before they are summed.

With a hook, replicas send fewer bytes of gradients and receive approximate sums: the
trained model is **not equal to one process**. Begin with ``hook``, what a hook has to do;
``power_sgd`` is the one built in. ``exchange`` and ``state`` run any hook in the step;
``collective.training.assemble`` chooses them.
"""

from collective.training.compression.hook import CommunicationHook, Exchanged
from collective.training.compression.power_sgd import PowerSGD

__all__ = ["CommunicationHook", "Exchanged", "PowerSGD"]
