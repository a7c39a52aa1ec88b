"""What a caller passes: data of many kinds, names of functions, words for errors.

Begin with ``data``: whatever ``fit`` is given becomes one of two kinds of data.
"""
