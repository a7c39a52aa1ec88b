"""Virtual replicas: the training is defined by their number, not by that of the processes.

``pieces`` says which process computes which virtual replica, ``tree`` in which order
their sums are added and how partial sums get to every process. ``checks`` refuses numbers
that cannot be. ``training.verification.deterministic`` fixes what else the bits depend on.
"""
