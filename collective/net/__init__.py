"""Network interfaces of this host, and what is exchanged in secret or kept private."""
