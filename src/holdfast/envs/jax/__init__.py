"""Environments written in JAX: gymnax, Craftax, POPGym Arcade, Brax, and your own.

`protocol.py` says what an environment must offer, `suites.py` finds those of the packages by name, `vector_env.py` steps many of
them at once and hands out torch tensors, `tensors.py` moves arrays between JAX and torch without copies.
Nothing here imports JAX until an environment is made.
"""
