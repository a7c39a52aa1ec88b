"""A process among the others of a job: small exchanges, failures, Ctrl-C, random generators.

The words of errors are here, too: names that the caller knows, arguments that were meant.
"""
