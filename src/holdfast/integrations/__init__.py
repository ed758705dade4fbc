"""Holdfast inside other frameworks: `tensordict`, `sb3`, `torchrl`. Each needs its framework."""
