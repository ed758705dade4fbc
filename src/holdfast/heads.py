"""The action distributions of our policies under their documented name. The code is in `policies/heads.py`."""

from holdfast.policies.heads import (
    Bernoulli,
    Categorical,
    Factored,
    Gaussian,
    Greedy,
    MultiCategorical,
    SquashedGaussian,
    check_mask,
)

__all__ = [
    "Bernoulli",
    "Categorical",
    "Factored",
    "Gaussian",
    "Greedy",
    "MultiCategorical",
    "SquashedGaussian",
    "check_mask",
]
