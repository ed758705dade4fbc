"""The run folder: checkpoints, log, metadata, loading a saved policy."""
