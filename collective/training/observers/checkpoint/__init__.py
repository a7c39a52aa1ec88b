"""The state of a training between two steps: in memory, on disk, and resumed.

Begin with ``state`` (what the next step depends on), then ``storage`` (one checkpoint on
disk, atomic and verified) and ``schedule`` (when one is due, written in the background).
"""
