"""What goes into the step of one replica, and what comes out besides gradients.

``inputs`` and ``rows`` are its tensors, ``plan`` says how it treats what is not a sum
over rows, ``attachments`` travel in the all-reduce.
"""
