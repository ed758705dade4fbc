"""POPGym's tasks in torch, a file per family. `RepeatPrevious`, `RepeatFirst` and `PositionOnlyCartPole` are one folder up.

Rules, rewards and spaces are POPGym's (1.0.7); `tests/envs/popgym` plays both with the same cards, boards and noise.
"""
