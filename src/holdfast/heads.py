"""The action distributions of `hf.ActorCritic` under their documented name. The code is in `policies/heads.py`."""

from holdfast.policies.heads import Bernoulli, Categorical, Gaussian, MultiCategorical, SquashedGaussian, check_mask

__all__ = ["Bernoulli", "Categorical", "Gaussian", "MultiCategorical", "SquashedGaussian", "check_mask"]
