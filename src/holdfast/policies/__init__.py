"""Policies with memory: `RecurrentPolicy`, `ActorCritic`, encoders, action distributions."""
