"""Several processes in one run: ranks, rendezvous, metrics over ranks."""
