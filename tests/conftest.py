"""Tests run one thread per process: the runner has a process per core."""

import torch

torch.set_num_threads(1)
