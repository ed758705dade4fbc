"""Several processes: ranks of one run, their rendezvous and metrics, and the child processes of a command."""
