"""``tf-parameter-server``: a chief, asynchronous workers, and servers of variables.

Begin with ``backend``, the chief's side; ``server`` is the other ranks' side.
"""
