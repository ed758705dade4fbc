"""`Trainer`: rollouts, updates, logs, checkpoints, evaluation, in one loop that can be stopped anywhere and resumed.

    result = hf.Trainer(hf.TrainConfig.preset("repeat-previous-easy")).run()

PPO itself is in `ppo.py`, segments come from `collect.py`; this file decides when what happens and keeps the run.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.algorithms.ppo import PPO
from holdfast.config import TrainConfig
from holdfast.display.live import Display
from holdfast.distributed import metrics as rank_metrics
from holdfast.distributed import ranks as distributed
from holdfast.engines import cuda_graph as cuda_graphs
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy
from holdfast.rollout.collector import Collector
from holdfast.rollout.env_failures import EnvFailedError, FailureLog, RebuildingEnv, training_env
from holdfast.rollout.reward_scale import RewardScale
from holdfast.rollout.segment import Segment
from holdfast.runs import checkpoint, rng_state, saved_policy
from holdfast.runs.log import RunFolderError, RunLog, write_metadata
from holdfast.runs.retry_schedule import RetrySchedule
from holdfast.state import tree_map
from holdfast.training import nonfinite, replay_check, run_state, telemetry
from holdfast.training.evaluation import EvalResult, evaluate
from holdfast.training.stop_signal import StopSignal

RECENT_EPISODES = 100  # rollout/ep_rew_mean is over these
NAN = float("nan")


class Callback:
    """Hooks into a run; return False from any of them to stop it after the present update.

    In a distributed run every rank calls them, with the rollout of its own environments; one that stops, stops all.
    """

    def on_run_start(self, trainer: Trainer) -> None: ...

    def on_rollout_end(self, trainer: Trainer, segment: Segment) -> bool | None: ...

    def on_update_end(self, trainer: Trainer, row: dict[str, float]) -> bool | None: ...

    def on_eval(self, trainer: Trainer, result: EvalResult) -> bool | None: ...

    def on_run_end(self, trainer: Trainer) -> None:
        """However the training loop ended, by an error too."""


@dataclass
class TrainResult:
    """What a run came to. `mean_return` is over fresh evaluation episodes with sampled actions."""

    mean_return: float
    std_error: float
    steps: int
    updates: int
    seconds: float
    run_dir: Path
    stopped_by: str  # "finished", "interrupt", "callback" or "target"


class Trainer:
    """A training run. Give `env` (any gymnasium vector environment) or `policy` to use your own and not the config's.

    `eval_env`: environments for evaluation, made from the config unless given; needed with an `env` of your own and
    `eval_every`.
    """

    def __init__(
        self,
        config: TrainConfig,
        env: Any = None,
        policy: RecurrentPolicy | None = None,
        callbacks: Sequence[Any] = (),
        eval_env: Any = None,
    ) -> None:
        self.config = config
        if env is not None and eval_env is None and config.eval_every:
            raise ValueError(
                "evaluation during training needs environments of its own: pass eval_env=, or set eval_every=0"
            )
        self.eval_env = eval_env
        self.callbacks = list(callbacks)
        self._say: Any = print
        self.log: RunLog | None = None
        self.display: Display | None = None
        self.update = 0  # finished updates
        self.ranks, self.device = distributed.join(config.device)
        self.env_share = self.ranks.share(config.num_envs)  # which of all environments are in this process
        config.require_envs_for(self.ranks.size)
        self.env_failures = FailureLog(config, self.ranks.rank, self._tell)
        if self.device.type == "cpu":
            torch.set_num_threads(config.threads or _threads_for(config, len(self.env_share)))
        rng_state.seed(config.seed)  # every rank makes the same policy
        self._own_env = env is None
        self.env = self._make_env(len(self.env_share)) if env is None else env
        if self.env.num_envs != len(self.env_share):
            of_this = f", {len(self.env_share)} of them for rank {self.ranks.rank}" if self.ranks.size > 1 else ""
            raise ValueError(
                f"the environment has {self.env.num_envs} copies, the config says num_envs={config.num_envs}{of_this}"
            )
        self._own_policy = policy is None
        self.policy = self._make_policy() if policy is None else policy
        self.policy.to(self.device)
        autocast = torch.bfloat16 if config.precision == "bf16" else None
        graphed = cuda_graphs.can_graph(self.env, self.device, config.inputs)
        self.collector = (cuda_graphs.GraphCollector if graphed else Collector)(
            self.env,
            self.policy,
            config.num_steps,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
            bptt=config.bptt,
            inputs=config.inputs,
            autocast=autocast,
            seed=self.ranks.seed(config.seed),
        )
        if not self.ranks.leads:
            rng_state.seed(self.ranks.seed(config.seed))  # and acts with random numbers of its own
        self.autocast = autocast
        some_unused = not self._own_policy or config.reset == "learned"
        # Hooks of DDP cannot be captured: where minibatches become graphs, PPO averages gradients between them.
        leg = None if graphed and not some_unused else self.ranks.averaging(self.policy, some_unused)
        self.ppo = PPO(self.policy, config, leg, self.ranks)
        share = len(self.env_share)
        self.reward_scale = RewardScale(share, config.gamma, self.device) if config.normalize_reward else None
        self.steps = 0
        self.best_return = -float("inf")
        self._patience = RetrySchedule(self._tell)
        self.spoiled = nonfinite.Watch(config, self.ranks.rank, self._tell)
        self._earlier_seconds = 0.0  # training time before `_began`
        self._began: float | None = None
        self.recent_returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.recent_lengths: deque[int] = deque(maxlen=RECENT_EPISODES)
        self.resumed_from: Path | None = None
        self.saved_elsewhere: Path | None = None  # the last checkpoint, where the run's folder could not take it
        self._unchecked = True  # no rollout of this process has been replayed yet
        self.stopping = StopSignal()

    @property
    def seconds(self) -> float:
        """Training time so far, that of the parts before a resume included."""
        return self._earlier_seconds + (0.0 if self._began is None else time.perf_counter() - self._began)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        """Train to the end (or to Ctrl-C, which saves and returns), then evaluate on fresh episodes."""
        config, folder = self.config, self.config.folder
        log = None
        if self.ranks.leads:
            self._prepare_folder(folder)
            log = self.log = RunLog(folder, tensorboard=config.tensorboard, wandb=config.track, config=config.to_dict())
            if self.resumed_from is not None:
                log.rewind(self.update)
        shown = config if self.ranks.leads else replace(config, quiet=True)
        display = self.display = Display(shown, config.num_updates)
        if self.ranks.leads:
            self._say = display.note
        elif not config.quiet:
            self._say = lambda text: print(f"rank {self.ranks.rank}, {text}", flush=True)
        else:
            self._say = lambda text: None
        if self.resumed_from is not None:
            display.note(f"resumed from {self.resumed_from}{self._resume_words}")
        warnings = telemetry.Warnings(config, getattr(self.env, "single_action_space", None))
        self._began = time.perf_counter()
        try:
            with self.stopping.on_ctrl_c(display.note):
                self._ask("on_run_start")
                while self.update < config.num_updates and not self.stopping.agree(self.ranks, self.device):
                    before, steps_before = time.perf_counter(), self.steps
                    row, segment = self._one_update()
                    row["time/fps"] = (self.steps - steps_before) / (time.perf_counter() - before)
                    row["time/elapsed"] = self.seconds
                    if log is not None and log.write(row, self.steps):
                        self._tell(f"{log.problem}; rows of the log are kept in memory and tried again")
                    display.update(row, warnings.look(row, segment))
                    self.spoiled.look(row, segment, self.policy, self.collector.memory)
                    self._after_update(row, folder)
        except EnvFailedError as error:
            raise self.env_failures.last_words(error, self._save_what_is_learnt(folder)) from error
        finally:
            self._ask("on_run_end")
            if log is not None and (elsewhere := log.close()) is not None:
                self._tell(f"rows of the log that the run's folder could not take are in {elsewhere}")
            display.close()
        self._earlier_seconds, self._began = self.seconds, None
        self._save_at_the_end(folder)
        if self.eval_env is None and not self._own_env:
            self.eval_env = self.env  # training is over, and saved: it may be used up
        final = self.evaluate(config.final_eval_episodes)
        return TrainResult(
            final.mean_return,
            final.std_error,
            self.steps,
            self.update,
            self.seconds,
            folder,
            self.stopping.reason or "finished",
        )

    def _one_update(self) -> tuple[dict[str, float], Segment]:
        config = self.config
        try:
            segment = self.collector.rollout()
        except ValueError as error:
            replay_check.rollout_failed(self.policy, error)
            raise
        self._ask("on_rollout_end", segment)
        ended = rank_metrics.episodes(
            self.ranks, segment.episode_returns, segment.episode_lengths, RECENT_EPISODES, self.device
        )
        self.recent_returns.extend(ended[0])
        self.recent_lengths.extend(ended[1])
        all_valid = not self.collector.feed.has_dummy_steps
        every = config.replay_check_every
        checked = self.update == 0 or (every > 0 and self.update % every == 0)
        began = time.perf_counter()
        gap = NAN
        # What the environment or an earlier failure spoiled is not the policy's fault: that update will be skipped.
        if (checked or self._unchecked) and nonfinite.inputs_are_finite(segment):
            gap = replay_check.check(self.policy, segment, self.autocast, config.bptt)
            self._unchecked = False
        losses = self.ppo.update(segment, self.update / config.num_updates, all_valid)
        seconds = time.perf_counter() - began
        stale = self._staleness(segment) if checked else NAN
        # Statistics move only here, between an update and the next rollout.
        if self.reward_scale is not None:
            ends = segment.terminated | segment.truncated
            self.reward_scale.update(segment.rewards, ends, segment.valid, self.ranks)
            self.collector.reward_scale = self.reward_scale.value
        if isinstance(self.policy, ActorCritic) and self.policy.normalizes:
            real = segment.obs if all_valid else tree_map(lambda o: o[segment.valid], segment.obs)
            self.policy.update_normalizer(real, self.ranks)
        self.update += 1
        row: dict[str, float] = {
            "update": self.update,
            "steps": int(segment.valid.sum()) if not all_valid else segment.resets.numel(),
            "rollout/ep_rew_mean": _mean(self.recent_returns),
            "rollout/ep_len_mean": _mean(self.recent_lengths),
            "rollout/episodes": len(segment.episode_returns),
            **losses,
            **telemetry.memory_metrics(self.collector.memory.read(), segment.resets),
            "memory/replay_gap": gap if checked else NAN,  # a resumed run writes what an unbroken one does
            "memory/staleness": stale,
            "eval/mean_return": NAN,
            "eval/mean_length": NAN,
            "time/env": segment.seconds["env"],
            "time/policy": segment.seconds["policy"],
            "time/update": seconds,
        }
        if isinstance(self.env, RebuildingEnv):
            row["env/failures"] = self.env_failures.count
        row = rank_metrics.combine(row, self.ranks, config.num_envs, self.device)
        self.steps = row["steps"] = self.steps + int(row["steps"])
        if config.eval_every and self.update % config.eval_every == 0:
            result = self.evaluate(config.eval_episodes)
            row["eval/mean_return"], row["eval/mean_length"] = result.mean_return, result.mean_length
            self._ask("on_eval", result)
        self._ask("on_update_end", row)
        enough = config.stop_at is not None and row["rollout/ep_rew_mean"] >= config.stop_at
        if enough and len(self.recent_returns) == RECENT_EPISODES:
            self.stopping.reason = self.stopping.reason or "target"
        return row, segment

    def _after_update(self, row: dict[str, float], folder: Path) -> None:
        evaluated, best = row["eval/mean_return"], self.best_return
        if evaluated > best:  # False for NaN
            self.best_return = evaluated
            if not self._try_to_save(checkpoint.folder_of(folder) / "best.pt"):
                self.best_return = best
        scheduled = self.config.checkpoint_every and self.update % self.config.checkpoint_every == 0
        # While updates come to nothing the last checkpoint stays the last good one.
        if (scheduled or self._patience.due(self.update)) and self.spoiled.in_a_row == 0:
            self._try_to_save(checkpoint.path_for(folder, self.update))

    def _staleness(self, segment: Segment) -> float:
        """Stored against recomputed: where this segment ended, under the weights before and after the update."""
        with torch.no_grad(), torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            state = segment.start_state
            now = self.policy.evaluate(
                segment.obs, segment.actions, state, segment.resets, action_mask=segment.action_mask, return_state=True
            ).state
        return telemetry.staleness(self.collector.memory.take(segment.num_envs, None)[0], now)

    def evaluate(self, episodes: int, deterministic: bool = False) -> EvalResult:
        """Fresh episodes in environments of their own, with memory of their own; training does not notice.

        In a distributed run all ranks call it, and rank 0 plays.
        """
        return self.ranks.from_leader(self._play(episodes, deterministic) if self.ranks.leads else None)

    def _play(self, episodes: int, deterministic: bool) -> EvalResult:
        if self.eval_env is None:
            if not self._own_env:
                raise ValueError(
                    "with an env of your own, evaluation needs another: Trainer(config, env, eval_env=...)"
                )
            self.eval_env = self._make_env(min(self.config.num_envs, episodes))
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            return evaluate(
                self.policy,
                self.eval_env,
                episodes,
                deterministic=deterministic,
                seed=self.config.seed + 1_000_003 * (self.update + 1),
                inputs=self.config.inputs,
            )

    # --- saving and resuming -----------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Everything that is needed to go on as if nothing had happened. In a distributed run all ranks call it."""
        data = run_state.payload(self)
        if self.ranks.leads:
            checkpoint.save(path, data)

    def _try_to_save(self, path: Path) -> bool:
        """Save a checkpoint of the run; if the disk does not let us, say so and try again later."""
        problem = None
        try:
            self.save(path)
            if self.ranks.leads:
                checkpoint.prune(self.config.folder, self.config.keep_checkpoints)
        except OSError as error:
            problem = str(error)
        return self._patience.learn(self.ranks.from_leader(problem), self.update)

    def _save_what_is_learnt(self, folder: Path) -> Path | None:
        """The last checkpoint of a run whose environments are gone: one of the last update, where no other rank waits."""
        path = checkpoint.path_for(folder, self.update)
        if self.update and not self.ranks.joined and not path.exists() and self.spoiled.in_a_row == 0:
            self._try_to_save(path)
        return next(iter(checkpoint.rolling(folder)[::-1]), None)

    def _save_at_the_end(self, folder: Path) -> None:
        """The last checkpoint; in the system's temporary folder if the run's own cannot be written."""
        if self._try_to_save(checkpoint.path_for(folder, self.update)):
            return
        instead = Path(tempfile.gettempdir()) / f"holdfast-{folder.name}-update_{self.update:08d}.pt"
        self.save(instead)
        self.saved_elsewhere = instead
        self._tell(f"the run's folder could not be written to the end; the last checkpoint is {instead}")

    @classmethod
    def resume(
        cls,
        path: str | Path,
        env: Any = None,
        policy: RecurrentPolicy | None = None,
        callbacks: Sequence[Any] = (),
        eval_env: Any = None,
        **overrides: Any,
    ) -> Trainer:
        """Continue a run from its folder or one of its checkpoints. `overrides` change settings (total_steps=...)."""
        file, saved = saved_policy.read(path)
        config = TrainConfig.from_dict({**saved["config"], **overrides})
        if not saved["own_policy"] and policy is None:
            raise ValueError(f"{file} was trained with a policy of your own: pass it, Trainer.resume(path, policy=...)")
        if "run_dir" not in overrides and file.parent.name == "checkpoints":
            config.run_dir = str(file.parent.parent)  # where the run is now, not where it was
        torch.set_num_threads(saved["threads"])
        trainer = cls(config, env, policy, callbacks, eval_env)
        exact = run_state.restore(trainer, saved)
        trainer._resume_words = (
            ""
            if exact
            else ": this environment cannot restore its state, so all episodes were restarted with fresh memory"
        )
        trainer.resumed_from = file
        return trainer

    _resume_words = ""

    # --- inside ------------------------------------------------------------------------------------------------------

    def _make_env(self, num_envs: int) -> Any:
        return training_env(self.config, num_envs, self.device, self.env_failures)

    def _tell(self, text: str) -> None:
        """A line for whoever watches; of any rank, while there is no display yet."""
        self._say(f"update {self.update}: {text}")

    def _make_policy(self) -> ActorCritic:
        from holdfast.rollout.vector_env import input_space

        env = self.env
        observation_space = input_space(env.single_observation_space, env.single_action_space, self.config.inputs)
        return saved_policy.policy_from(self.config, observation_space, env.single_action_space)

    def _prepare_folder(self, folder: Path) -> None:
        if self.resumed_from is None and checkpoint.rolling(folder):
            raise FileExistsError(
                f"{folder} already holds a run; resume it (holdfast train --resume {folder}), remove it, or choose "
                "another name or run_dir"
            )
        try:
            if self.resumed_from is not None:
                checkpoint.drop_after(folder, self.update)  # they belong to the part that is done anew
            write_metadata(folder, self.config.to_dict())
        except OSError as error:
            raise RunFolderError(
                f"{folder} cannot be written: {error}; choose another run_dir, or make room"
            ) from error

    def _ask(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, hook, None)
            if method is not None and method(self, *arguments) is False:
                self.stopping.reason = "callback"


def _threads_for(config: TrainConfig, num_envs: int) -> int:
    """One thread for small networks and minibatches, where handing work around costs more than it saves."""
    sequences = num_envs * config.num_steps // config.minibatches
    work = sequences * config.hidden_size**2  # multiplications of a recurrent product per minibatch, over a constant
    return 1 if work < 2**28 else torch.get_num_threads()


def _mean(values: deque[Any]) -> float:
    return float(np.mean(values)) if values else NAN
