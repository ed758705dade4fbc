"""Holdfast inside other frameworks: `tensordict`, `sb3`, `torchrl`, `rsl_rl`. Each needs its framework."""
