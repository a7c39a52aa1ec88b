"""The state of a training between two steps, written to disk and resumed from there.

Begin with ``schedule``: it says when a checkpoint is due, writes it in the background, and
resumes from the newest. ``storage`` has one checkpoint on disk, atomic and verified;
``stores`` has the folders and URLs that hold checkpoints; ``identity`` says which training
a checkpoint belongs to. The state itself is ``training.loop.state``.
"""
