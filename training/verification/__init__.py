"""The step proves itself before it trains, and the ranks that they train alike.

``verify_step`` compares the shared step with Keras' own on a few rows; ``compare_ranks``
compares what the ranks are about to do. Both run before the first update.
"""
