"""The checks, in the order in which they run: each may rely on what the ones before it have established."""

from holdfast.doctor.checks import repeatability, rollout, rows, training, gradients, identity, lifecycle  # noqa: F401, I001
from holdfast.doctor.checks.base import ITSELF, REGISTRY, Case, Check, NotApplicable

__all__ = ["ITSELF", "REGISTRY", "Case", "Check", "NotApplicable"]
