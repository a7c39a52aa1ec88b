"""Keras callbacks in a job of many ranks.

``hooks`` calls them on rank 0 and has the other ranks follow; ``observer`` attaches them
to the training loop.
"""
