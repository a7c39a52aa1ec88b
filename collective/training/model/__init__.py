"""The record of a model, and the variables that make two ranks the same."""
