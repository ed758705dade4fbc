"""The seed that the learning tests start from: `make test-learning SEED=7` runs them with others."""

import os

BASE_SEED = int(os.environ.get("HOLDFAST_LEARNING_SEED", "1"))
