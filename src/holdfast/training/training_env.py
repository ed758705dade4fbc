"""The environments of a training run, and what is said and kept when they fail."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gymnasium.vector import AutoresetMode

from holdfast import envs
from holdfast.config import RunConfig
from holdfast.config.imports import allow_imports_flag
from holdfast.envs.base import TorchVectorEnv
from holdfast.envs.user_envs import can_be_made_again
from holdfast.envs.workers import what_happened
from holdfast.rollout.env_failures import BrokenEnvError, EnvFailedError, RebuildingEnv
from holdfast.rollout.vector_env import autoreset_mode
from holdfast.runs.writing import unlinked


class FailureLog:
    """Counts a run's failures, says each in a line, and appends the tracebacks to a file in the run's folder."""

    def __init__(self, config: RunConfig, rank: int, notify: Callable[[str], None]) -> None:
        self.config, self.notify, self.count = config, notify, 0
        self.limit = config.max_env_failures if config.env_failure == "rebuild" else 0
        self.rank = rank

    @property
    def file(self) -> Path:
        return self.config.folder / f"env_failures-rank{self.rank}.txt"

    def __call__(self, number: int, text: str) -> None:
        self.count += 1
        with contextlib.suppress(OSError), open(self.file, "a", opener=unlinked) as log:
            log.write(f"--- failure {self.count}\n{text.rstrip()}\n\n")
        if number <= self.limit:
            self.notify(
                f"an environment failed ({what_happened(text)}). All environments are rebuilt, open episodes truncated; "
                f"failure {number} of at most {self.limit}, traceback in {self.file}"
            )

    def final_error(self, error: EnvFailedError, saved: Path | None) -> EnvFailedError:
        """The error that ends a run: what happened, where the tracebacks are, what is left, what can be done."""
        folder = shlex.quote(str(self.config.folder))
        resume = f"continue with holdfast train --resume {folder}{allow_imports_flag(self.config)}"
        kept = f"The last checkpoint is {saved}; {resume}" if saved else "No update was finished, nothing is saved"
        if isinstance(error, BrokenEnvError):
            return BrokenEnvError(f"{error}. The traceback is in {self.file}. {kept}")
        more = (
            "--env-failure rebuild rebuilds them"
            if self.config.env_failure == "stop"
            else "allow more with --max-env-failures"
        )
        return EnvFailedError(f"{error}. Tracebacks are in {self.file}. {kept}; {more}")


def training_env(
    config: RunConfig, num_envs: int, device: torch.device, report: FailureLog, own_env: Any = None
) -> Any:
    """The environments of a config, or of what the user passed instead; in a `RebuildingEnv` where they can fail.

    An environment that the user made is not wrapped: it cannot be made again.
    """

    if own_env is not None and not can_be_made_again(own_env):
        return envs.make(own_env, num_envs, vectorization=config.vectorization)

    def make() -> Any:
        return envs.make(
            config.env if own_env is None else own_env,
            num_envs,
            device=device,
            vectorization=config.vectorization,
            **config.env_options,
        )

    env = make()
    if isinstance(env, TorchVectorEnv) or autoreset_mode(env) != AutoresetMode.SAME_STEP:
        return env
    return RebuildingEnv(make, limit=report.limit, timeout=config.env_timeout, report=report, first=env)
