"""Training loops of a script's own, on every rank.

``notice`` says at the first update that such a loop is not distributed, and what does it.
"""
