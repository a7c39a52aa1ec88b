"""One file per collective, on NumPy arrays."""
