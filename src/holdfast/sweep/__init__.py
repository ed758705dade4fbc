"""Search for better settings of a training run: `holdfast sweep`."""
