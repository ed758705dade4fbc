"""The training loop: trainer, one iteration, evaluation, replay check, guards, warnings."""
