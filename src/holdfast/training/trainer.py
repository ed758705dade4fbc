"""`Trainer`: rollouts, updates, logs, checkpoints, evaluation, in one loop that can be stopped anywhere and resumed.

    result = hf.Trainer(hf.TrainConfig.preset("repeat-previous-easy")).run()

`parts.py` builds what a run consists of, `iteration.py` is one rollout and its update, `runs/folder.py` keeps the
checkpoints, `run_state.py` knows what is in them. This file decides the order of events.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from holdfast import algorithms
from holdfast.algorithms.base import Algorithm
from holdfast.algorithms.reward_model import RewardModel
from holdfast.config import RunConfig, default_config, given, imports, settings_of
from holdfast.config.imports import allow_imports_flag
from holdfast.display.first_lines import first_lines
from holdfast.display.live import Display
from holdfast.distributed.processes import Terminated
from holdfast.distributed.ranks import RankLostError, is_lost_rank
from holdfast.envs.bridge import UnknownEnvError
from holdfast.envs.user_envs import can_be_made_again, is_vector_env
from holdfast.policies.base import autocast, autocast_dtype
from holdfast.rollout.env_failures import EnvFailedError
from holdfast.rollout.segment import Segment
from holdfast.runs import checkpoint, saved_policy
from holdfast.runs.folder import RunFolder
from holdfast.runs.log import RunLog
from holdfast.shown_text import show
from holdfast.spans import span
from holdfast.training import parts as run_parts
from holdfast.training import run_state
from holdfast.training.callbacks import Callback, Hooks
from holdfast.training.checkpoint_check import check_before_building
from holdfast.training.eval_schedule import SHORTEST_RUN, EvalSchedule
from holdfast.training.evaluation import EvalResult, evaluate
from holdfast.training.iteration import Iteration, RunProgress
from holdfast.training.nonfinite import NonFiniteGuard
from holdfast.training.run_warnings import Warnings
from holdfast.training.stop_signal import StopSignal
from holdfast.training.training_env import training_env

MOST_EVALUATION_STEPS = 200_000
"""An evaluation that is longer than this and than the training is cut off: some episodes never end."""


@dataclass
class TrainResult:
    """The result of a run. `mean_return` is over fresh evaluation episodes; the algorithm says whether their actions are sampled."""

    mean_return: float
    std_error: float
    steps: int
    updates: int
    seconds: float
    run_dir: Path
    stopped_by: str  # "finished", "interrupt", "callback" or "target"
    episodes: int = 0
    """Evaluation episodes behind `mean_return`; fewer than asked for if the others did not end."""
    actions: str = ""
    """How their actions were drawn, such as "white noise"; "" if as in training."""


class Trainer:
    """A training run. `env` and `policy` replace those of the config, and `trainer.config` says so.

    env: an id, a class, a function, one gymnasium environment (row 0 is that object, the others are deep copies) or a
    vector environment; see `holdfast.envs.make`. policy: an `hf.RecurrentPolicy`, or a class or function that makes one,
    or its name, "my_module:MyPolicy". eval_env: environments for evaluation, of the same kinds as `env`. By default they
    are made like those of training. If `env` is an existing environment, only `eval_env` lets training be evaluated. algorithm: a
    class of your own, in place of the one that the config names; its `Config` is the config's class. reward_model: adds
    rewards of its own to those of the environment.
    """

    def __init__(
        self,
        config: RunConfig,
        env: Any = None,
        policy: Any = None,
        callbacks: Sequence[Any] = (),
        eval_env: Any = None,
        *,
        algorithm: type[Algorithm] | None = None,
        reward_model: RewardModel | None = None,
    ) -> None:
        config, kind = _with_algorithm(config, algorithm)
        config = run_parts.with_own(config, env, policy)
        if env is not None and not can_be_made_again(env) and eval_env is None and config.eval_every:
            raise ValueError(
                "evaluation during training needs separate environments: pass eval_env=, or set eval_every=0"
            )
        config = replace(config)  # the run's own: its folder is chosen when it starts
        self.config, self.hooks, self.eval_env = config, Hooks(self, callbacks), eval_env
        self.progress, self.stop_signal = RunProgress(), StopSignal()
        self.log: RunLog | None = None
        self.display: Display | None = None
        self.resumed_from: Path | None = None
        self.episodes_restarted = False
        self._checkpoint_requested = self._made_eval_env = False
        self._saved_with_files: Path | None = None  # the last checkpoint that names files of the algorithm
        self.print_resume_hint = True  # at SIGTERM; False where the run is a part of something that says it
        self.parts = parts = run_parts.build(config, kind, env, policy, self._notify_of_update)
        self.config = config = parts.config
        self.ranks, self.device, self.env = parts.ranks, parts.device, parts.env
        self.policy, self.collector, self.algorithm = parts.policy, parts.collector, parts.algorithm
        self.env_failures = parts.env_failures
        if self.eval_env is not None and not is_vector_env(self.eval_env):
            num_envs = min(config.num_envs, config.final_eval_episodes)
            self.eval_env = training_env(config, num_envs, self.device, self.env_failures, self.eval_env)
        self.folder = RunFolder(config, self.ranks, self._save, self._notify_of_update, self._alert)
        self.nonfinite_guard = NonFiniteGuard(config, self.ranks.rank, self._notify_of_update)
        self.no_evals = self._no_evals()
        eval_envs = getattr(self.eval_env, "num_envs", None)
        self._schedule = EvalSchedule(self.progress, len(parts.env_share), config.num_steps, eval_envs)
        self.reward_model = _checked_reward_model(reward_model, parts)
        self._iteration = Iteration(config, parts, self.progress, self.hooks, self._may_prefetch, self.reward_model)

    @property
    def callbacks(self) -> list[Any]:
        """Hooks into the run."""
        return self.hooks.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: list[Any]) -> None:
        self.hooks.callbacks = callbacks

    @property
    def update(self) -> int:
        """Finished updates."""
        return self.progress.update

    @property
    def steps(self) -> int:
        """Environment steps trained on so far."""
        return self.progress.steps

    @property
    def seconds(self) -> float:
        """Training time so far, including the parts before a resume."""
        return self.progress.seconds

    @property
    def saved_elsewhere(self) -> Path | None:
        """The last checkpoint, if the run's folder did not take it."""
        return self.folder.saved_elsewhere

    @property
    def engines(self) -> dict[str, str]:
        """The engines of rollout and update, and what prevents a faster one."""
        return self.parts.engines.report()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        """Train to the end (or to Ctrl-C, which saves and returns), then evaluate on fresh episodes.

        SIGTERM saves, says how to resume, and ends the process with exit code 143.
        """
        with self.stop_signal.on_sigterm():
            try:
                self._train()
                self.stop_signal.end_at_once()
                return self._result()
            except Terminated:
                if self.ranks.leads and self.print_resume_hint:
                    show(self._resume_hint(), file=sys.stderr)
                raise
            except RuntimeError as error:
                if not (self.ranks.joined and is_lost_rank(error)):
                    raise
                raise RankLostError(self._lost_rank(error)) from error
            finally:
                self.folder.release()

    def _train(self) -> None:
        """The updates, and the checkpoint after the last one."""
        display = self._open()
        self.progress.num_updates = self.config.num_updates
        self.progress.start_clock()
        try:
            with self.stop_signal.on_ctrl_c(display.note):
                self.hooks.run("on_run_start")
                while self.update < self.config.num_updates and not self.stop_signal.sync(self.ranks, self.device):
                    self._one_update()
        except EnvFailedError as error:
            saved = self._save_what_was_learned()
            if self.stop_signal.terminated:  # their processes got the signal, too
                raise Terminated from error
            raise self.env_failures.final_error(error, saved) from error
        finally:
            self._close()
        self.progress.stop_clock()
        self.folder.save_at_the_end(self.update)

    def _resume_hint(self) -> str:
        saved = shlex.quote(str(self.saved_elsewhere or self.folder.path))
        done = f"stopped by {self.stop_signal.reason} after update {self.update} of {self.config.num_updates}"
        return f"{done}; continue with   holdfast train --resume {saved}{allow_imports_flag(self.config)}"

    def _lost_rank(self, error: RuntimeError) -> str:
        """What a rank says when another one is gone. Their group is broken, so nothing more is saved."""
        lost = f"rank {self.ranks.rank} lost another rank after update {self.update} of {self.config.num_updates}"
        reason = " ".join(
            str(error).split("] ")[-1].split(". ")[0].split()
        )  # gloo begins with its file and ends with advice
        again = "start all ranks again"
        if self.folder.last_checkpoint():
            again += f" with --resume {shlex.quote(str(self.folder.path))}{allow_imports_flag(self.config)}"
        return f"{lost} ({reason}); {again}"

    def _one_update(self) -> None:
        before, steps_before = time.perf_counter(), self.steps
        expected = self.engines
        row, segment = self._iteration.run()
        if self.engines != expected:
            for part, engine in self.engines.items():
                if engine != expected[part]:
                    self._notify_of_update(f"{part}: {engine}")
            if self.ranks.leads:
                self.folder.record_engines(self.engines)
        self._evaluate_if_due(row)
        self.hooks.run("on_update_end", row)
        if self.progress.reached(self.config.stop_at):
            self.stop_signal.reason = self.stop_signal.reason or "target"
        row["time/fps"] = (self.steps - steps_before) / (time.perf_counter() - before)
        row["time/elapsed"] = self.seconds
        self._publish(row, segment)
        with self.parts.engines.exclusive():
            self.nonfinite_guard.after_update(row, segment, self.policy, self.collector.memory)
        self._save_if_due(row)

    def _may_prefetch(self) -> bool:
        """Whether the rollout after this update may begin before the update has been reported: nobody can change the run."""
        config, update = self.config, self.update + 1
        acts = any(_acts(callback) for callback in self.callbacks)
        due = any(every and update % every == 0 for every in (config.eval_every, config.checkpoint_every))
        return not (acts or due or update >= config.num_updates or self.stop_signal.reason or self.ranks.joined)

    def _evaluate_if_due(self, row: dict[str, float]) -> None:
        every = self.config.eval_every
        if self.no_evals or (self.update % every if every else not self._schedule.is_due()):
            return
        result = self.evaluate(self.config.eval_episodes) if every else self._evaluate_on_schedule()
        if result is None:
            return
        for name in ("mean_return", "std_error", "mean_length"):
            row[f"eval/{name}"] = getattr(result, name)
        row["eval/episodes"] = len(result.returns)
        self.hooks.run("on_eval", result)

    def _try_to_make_eval_env(self, copies: int) -> None:
        """Nobody asked for these evaluations, so training goes on without them where a second environment is refused."""
        problem = ""
        if self.eval_env is None and self.ranks.leads:
            try:
                self._make_eval_env(copies)
            except Exception as error:
                problem = f"a second environment could not be made ({type(error).__name__}: {error})"
        self.no_evals = self.ranks.from_leader(problem)
        if problem:
            self._notify_of_update(f"no evaluation during training: {problem}")

    def _make_eval_env(self, copies: int) -> None:
        if self.parts.make_env is None:
            raise ValueError("with your own env, evaluation needs a second one: Trainer(config, env, eval_env=...)")
        self.eval_env, self._made_eval_env = self.parts.make_env(copies), True

    def _no_evals(self) -> str:
        """Why training is not evaluated before its end; "" if it is."""
        config = self.config
        if config.eval_every is not None:
            return "" if config.eval_every else "eval_every is 0"
        if self.eval_env is None and self.parts.make_env is None:
            return "there is no second environment: eval_env"
        if config.total_steps < SHORTEST_RUN:
            return "the run is short"
        if (
            self.parts.collector.prefetches
        ):  # one CUDA graph; a step of an evaluation takes as long as many of its steps
            return "its steps would be much slower than those of training; eval_every asks for them"
        return ""

    def _publish(self, row: dict[str, float], segment: Segment) -> None:
        """To the log and the display."""
        with span("log"):
            if self.ranks.leads:
                with suppress(OSError):  # tried again after the next update
                    self.folder.go_on()
            if self.log is not None and self.log.write(row, self.steps):
                self._notify_of_update(f"{self.log.problem}; rows of the log are kept in memory and retried")
        assert self.display is not None
        with span("display"):
            self.display.update(row, self._warnings.after_update(row, segment))

    def _save_if_due(self, row: dict[str, float]) -> None:
        progress, every = self.progress, self.config.checkpoint_every
        evaluated, best = row["eval/mean_return"], progress.best_return
        if self.config.eval_every and evaluated > best:  # False for NaN
            progress.best_return = evaluated
            if not self.folder.save_best(self.update):
                progress.best_return = best
        scheduled = self._checkpoint_requested or (every and self.update % every == 0)
        # While whole updates are skipped, the last checkpoint stays the last good one.
        if (scheduled or self.folder.should_retry(self.update)) and self.nonfinite_guard.in_a_row == 0:
            self._checkpoint_requested = False
            self.folder.save(self.update)

    def _result(self) -> TrainResult:
        if self.eval_env is None and self.parts.make_env is None:
            self.eval_env = self.env  # training is done, so evaluation may use it
        final, evaluation = self.evaluate(self.config.final_eval_episodes), self.algorithm.evaluates_with()
        return TrainResult(
            mean_return=final.mean_return,
            std_error=final.std_error,
            steps=self.steps,
            updates=self.update,
            seconds=self.seconds,
            run_dir=self.folder.path,
            stopped_by=self.stop_signal.reason or "finished",
            episodes=len(final.returns),
            actions=evaluation if evaluation != self.algorithm.explores_with else "",
        )

    def evaluate(
        self, episodes: int, deterministic: bool | None = None, record: Sequence[str] | None = None
    ) -> EvalResult:
        """Play fresh episodes in separate environments with a separate memory; training is not affected.

        deterministic: play the most likely actions; None: as the algorithm evaluates. record: what to keep of every step, as in
        `hf.evaluate`. In a distributed run all ranks call it, and rank 0 plays.
        """
        seed = self.config.seed + 1_000_003 * (self.update + 1)
        most_steps = max(MOST_EVALUATION_STEPS, self.steps)
        return self._evaluate(episodes, deterministic, seed=seed, record=record, max_steps=most_steps)

    def _evaluate_on_schedule(self) -> EvalResult | None:
        """An evaluation that nobody asked for; None where it cannot be played within its steps."""
        schedule, progress = self._schedule, self.progress
        self._try_to_make_eval_env(schedule.episodes)
        if self.no_evals:
            return None
        most, episodes = schedule.left, schedule.episodes
        # Other episodes than those of the result and of runs with the next seeds, whose mean would share their luck.
        seed = (1_000_003 * (self.update + 1) + 10_007 * (self.config.seed + 1)) % 2**31
        acting = None if self.algorithm.evaluates_deterministically else self.parts.engines.for_evaluation
        result = self._evaluate(episodes, None, seed=seed, max_steps=most * episodes, acting=acting)
        complete = len(result.returns) == episodes
        progress.eval_steps += max(result.lengths) if complete else most
        progress.last_eval = self.update
        return result if complete else None  # those that ended are the short ones

    def _evaluate(self, episodes: int, deterministic: bool | None, **options: Any) -> EvalResult:
        if deterministic is None:
            deterministic = self.algorithm.evaluates_deterministically
        with span("evaluation"), self.parts.engines.exclusive():
            played = self._play(episodes, deterministic=deterministic, **options) if self.ranks.leads else None
            return self.ranks.from_leader(played)

    def _play(self, episodes: int, **options: Any) -> EvalResult:
        config = self.config
        copies = min(config.num_envs, episodes)
        if self._made_eval_env and self.eval_env.num_envs < copies:
            self.eval_env.close()
            self.eval_env = None
        if self.eval_env is None:
            self._make_eval_env(copies)
        with autocast(self.device, autocast_dtype(config.precision)):
            return evaluate(self.policy, self.eval_env, episodes, inputs=config.inputs, **options)

    # --- begin and end -----------------------------------------------------------------------------------------------

    def _open(self) -> Display:
        """The run's folder, log and display, and the lines that a run begins with."""
        config, folder = self.config, self.folder
        resumed_at = None if self.resumed_from is None else self.update
        earlier_engines = {} if resumed_at is None else folder.recorded_engines()
        actions = {"training": self.algorithm.explores_with, "evaluation": self.algorithm.evaluates_with()}
        continued_at = None
        if self.ranks.leads:
            continued_at = folder.prepare(self.engines, resumed_at, self.resumed_from, actions=actions)
        self.policy.trained_in = folder.path
        action_space = getattr(self.env, "single_action_space", None)
        self._warnings = Warnings(self.algorithm, action_space, self.progress.first_returns)
        shown = config if self.ranks.leads else replace(config, quiet=True)
        self.display = display = Display(shown, config.num_updates, self._iteration.metrics, actions)
        if self.ranks.leads:
            self.log = RunLog(
                folder.path,
                tensorboard=config.tensorboard,
                wandb=config.track,
                config=config.to_dict(),
                notify=self._notify_of_update,
                before_writing=folder.keep,
            )
        if self.log is not None and continued_at is not None:
            self.log.rewind(continued_at, lambda: folder.removed_folder(continued_at))
        if self.resumed_from is not None:
            restarted = ": this environment cannot restore its state, so all episodes were restarted with fresh memory"
            display.note(f"resumed from {self.resumed_from}{restarted if self.episodes_restarted else ''}")
            if earlier_engines and earlier_engines != self.engines:
                before = "; ".join(f"{leg}: {engine}" for leg, engine in earlier_engines.items())
                display.note(f"the engines have changed, so numbers may differ in rounding; before: {before}")
        said = first_lines(config, self.engines, self.parts.chosen, self.parts.encoder, self.parts.for_actions)
        for line in [*said[:-1], *self.algorithm.first_lines(), self._about_returns(actions), said[-1]]:
            display.note(line)
        return display

    def _about_returns(self, actions: dict[str, str]) -> str:
        """Which actions the returns of this run are of, and when they are evaluated."""
        every = self.config.eval_every
        times = f"every {every} updates" if every else "up to 20 times, at most 2.5% of the steps"
        when = f"after training only ({self.no_evals})" if self.no_evals else times
        return f"returns training episodes: {actions['training']}; evaluation: {actions['evaluation']}, {when}"

    def _close(self) -> None:
        reason = self.stop_signal.reason
        try:
            self.hooks.run("on_run_end")
        finally:
            self.stop_signal.reason = reason  # the run is over: nothing is left to stop
            if self.log is not None and (elsewhere := self.log.close()) is not None:
                self._notify_of_update(f"rows of the log that the run's folder could not take are in {elsewhere}")
            elif self.log is not None and self.log.num_waiting:
                self._alert(f"{self.log.num_waiting} rows of the log are lost: no disk has room for them")
            if self.display is not None:
                self.display.close()

    def notify(self, text: str) -> None:
        """Show the user a line: in the display, or from the other ranks with their number."""
        if self.display is None:
            show(*text.splitlines())
        elif self.ranks.leads:
            self.display.note(text)
        elif not self.config.quiet:
            show(f"rank {self.ranks.rank}, {text}")

    def _alert(self, text: str) -> None:
        """Show a line that says what was lost, also if the run is quiet."""
        if self.config.quiet and self.ranks.leads:
            show(f"update {self.update}: {text}", file=sys.stderr)
        else:
            self._notify_of_update(text)

    def _notify_of_update(self, text: str) -> None:
        self.notify(f"update {self.update}: {text}")

    # --- saving and resuming -----------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a checkpoint: all that a resumed run needs to continue. In a distributed run all ranks call it."""
        self._save(Path(path))

    def request_checkpoint(self) -> None:
        """Save in the run's folder after the current update. In a distributed run all ranks call it."""
        self._checkpoint_requested = True

    def _save(self, path: Path | None) -> None:
        with self.parts.engines.exclusive():
            data = run_state.payload(self, self._save_files(path))
        if self.ranks.leads and path is not None:
            checkpoint.save(path, data)

    def _save_files(self, path: Path | None) -> dict[str, Any] | None:
        """What is too large for a checkpoint, beside a rolling one of this run; None beside others. What the checkpoint says of it."""
        if not self.algorithm.keeps_files:
            return None
        own = path is not None and path == checkpoint.path_for(self.folder.path, self.update)
        named = self.ranks.from_leader(str(path) if own else None)
        if named is None:
            return None
        folder = run_state.files_folder(Path(named).parent, self.ranks.rank)
        try:
            if self._saved_with_files is not None and self._saved_with_files.exists():
                self.algorithm.prune_files(folder)  # only now: the checkpoint may not have been written
            self._saved_with_files = Path(named)
            return self.algorithm.save_files(folder)
        except OSError:
            if not self.ranks.joined:
                raise
            return None  # the others wait for this rank

    def _save_what_was_learned(self) -> Path | None:
        """The last checkpoint of a run whose environments are gone; one of the last update, where no other rank waits."""
        alone = not self.ranks.joined and self.nonfinite_guard.in_a_row == 0
        if self.update and alone and not self.folder.has_checkpoint_of(self.update):
            self.folder.save(self.update)
        return self.folder.last_checkpoint()

    @classmethod
    def resume(
        cls,
        path: str | Path,
        env: Any = None,
        policy: Any = None,
        callbacks: Sequence[Any] = (),
        eval_env: Any = None,
        allow_imports: bool | Collection[str] = False,
        algorithm: type[Algorithm] | None = None,
        reward_model: RewardModel | None = None,
        **overrides: Any,
    ) -> Trainer:
        """Continue a run from its folder or one of its checkpoints. `overrides` change settings (total_steps=...).

        The run continues in the folder of the checkpoint, or in `run_dir=`, never in a folder that the file names. A checkpoint
        that was copied elsewhere continues in a new folder next to it. allow_imports: import modules that the file names
        (an environment `my_module:MyEnv-v0`), which runs their code; True, or the names that may be.
        """
        file, saved = saved_policy.read(path)
        allowed = allow_imports if algorithm is None else True  # the user has passed the class that the file names
        config = saved_policy.settings(file, saved, allowed, **overrides)
        require_resumable(saved_policy.settings(file, saved, allowed), config)
        with checkpoint.refusals(file):
            check_before_building(saved)
        if saved.get("reward_model") is not None and reward_model is None:
            raise ValueError(
                f"{file} was trained with a reward model: pass one, Trainer.resume(path, reward_model=...)"
            )
        if not saved["own_policy"] and policy is None:
            raise ValueError(
                f"{file} was trained with your own policy: pass it, Trainer.resume(path, policy=...), or name it "
                "with --policy module:Name"
            )
        if overrides.get("run_dir") is None:
            config.run_dir = str(checkpoint.run_of(file))
        imports.require_allowed(config, file, allow_imports, env=env is None, policy=policy is None)
        if saved["own_policy"] and policy is None:
            saved_policy.require_weights_of(config, file, saved)
        torch.set_num_threads(saved["threads"])
        try:
            trainer = cls(config, env, policy, callbacks, eval_env, algorithm=algorithm, reward_model=reward_model)
        except (ImportError, UnknownEnvError):
            raise
        except Exception as error:
            if env is not None or policy is not None or overrides.keys() - {"run_dir"}:
                raise
            with checkpoint.refusals(file, "its run cannot be built here"):  # everything came from the file
                raise error
        with checkpoint.refusals(file), trainer.parts.engines.exclusive():
            trainer.episodes_restarted = not run_state.restore(trainer, saved, file.parent)
        trainer.resumed_from = file
        return trainer


def require_resumable(before: RunConfig, after: RunConfig) -> None:
    """Raise ValueError if a setting that a run is built on has changed."""
    for name, declared in settings_of(type(before)).items():
        if declared.fixed and getattr(before, name) != getattr(after, name):
            changed = given(name, getattr(after, name))
            raise ValueError(f"{changed} cannot change when a run is resumed; start a new run with it")


def _checked_reward_model(model: Any, parts: run_parts.Parts) -> RewardModel | None:
    if model is not None and not isinstance(model, RewardModel):
        raise TypeError(f"reward_model is a {type(model).__name__}, expected an hf.RewardModel")
    if model is not None and parts.ranks.joined:
        raise ValueError(
            "a reward model learns in one process; start the run without torchrun, or without reward_model="
        )
    return None if model is None else model.to(parts.device)


def _with_algorithm(config: Any, algorithm: type[Algorithm] | None) -> tuple[RunConfig, type[Algorithm]]:
    """The class that trains by a config, and the config with its name."""
    default = type(default_config()).__name__
    if not isinstance(config, RunConfig):
        raise TypeError(f"Trainer takes a config, got a {type(config).__name__}; write hf.{default}(...)")
    if algorithm is None:
        if not config.algorithm:
            raise ValueError(
                f"the {type(config).__name__} names no algorithm; use hf.{default}(...), or pass algorithm=MyAlgorithm"
            )
        return config, algorithms.algorithm_class(config.algorithm)
    if not isinstance(algorithm, type) or not issubclass(algorithm, Algorithm):
        raise TypeError(f"algorithm is {algorithm!r:.60}, expected a class based on hf.Algorithm")
    if not isinstance(config, algorithm.Config):
        raise TypeError(f"{algorithm.__name__} takes a {algorithm.Config.__name__}, got a {type(config).__name__}")
    return replace(config, algorithm=algorithms.recorded_name(algorithm)), algorithm


def _acts(callback: Any) -> bool:
    """Whether a callback may change the run after an update."""
    hook, none = getattr(callback, "on_update_end", None), Callback.on_update_end
    return (
        hook is not None
        and getattr(hook, "__func__", hook) is not none
        and not getattr(callback, "only_watches", False)
    )
