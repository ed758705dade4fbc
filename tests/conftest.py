"""Tests run one thread per process, and so do the processes they start: the runner has a process per core."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
