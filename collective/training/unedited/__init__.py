"""Keras scripts that are not edited: all ranks run them, and share out each step.

``collective.distribute.unedited`` replaces what has to be replaced. ``calls`` makes all ranks
call Keras' own ``fit``, ``evaluate`` and ``predict`` together, with the options of
``collective.training.calls.set_options``; ``script_job`` and ``units`` are what they do together, again after a rank
has died; ``growth`` lets ranks join, by a ``record`` of the units. ``seeds`` and ``entropy``
give all ranks the same random numbers. ``files`` lets rank 0 alone write models,
``searches`` has all ranks make the trials of a search together, and ``script`` runs a file as
Python does. ``python -m collective.distribute`` and ``collectiverun --keras`` are made of
these.
"""
