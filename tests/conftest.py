"""Tests run one thread per process, and so do the processes they start: the runner has a process per core.

They share a GPU, if there is one: JAX may not take three quarters of its memory for one process.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch

torch.set_num_threads(1)
