"""Animated GIFs of a policy's episodes, for environments that render. `evaluate` plays them; this records frames."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from holdfast import envs
from holdfast.config import RunConfig
from holdfast.policies.base import RecurrentPolicy
from holdfast.training.evaluation import evaluate

MAX_FRAMES = 1000
"""Frames kept per episode."""


class Recorder:
    """Frames of a vector environment with one copy, by episode; pass it to `evaluate` as `record`."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.episodes: list[list[np.ndarray[Any, Any]]] = []

    def __call__(self, resets: Tensor) -> None:
        if bool(resets[0]) or not self.episodes:
            self.episodes.append([])
        if len(self.episodes[-1]) < MAX_FRAMES:
            self.episodes[-1].append(_frame(self.env))


def record_episodes(
    policy: RecurrentPolicy, config: RunConfig, folder: Path, *, episodes: int, deterministic: bool, seed: int
) -> list[Path]:
    """Play `episodes` episodes in one rendering environment and write `episode_1.gif`, ... into `folder`."""
    try:
        from PIL import Image
    except ImportError as missing:
        raise ModuleNotFoundError("--video needs Pillow: pip install 'holdfast[plot]'") from missing
    if config.env.startswith("holdfast/"):
        raise ValueError(
            f"{config.env} has nothing to render; --video works with environments that draw rgb_array frames"
        )
    rendering = {"env_kwargs": {**config.env_kwargs, "render_mode": "rgb_array"}}
    try:
        env = envs.make(config.env, 1, **{**config.env_options, **rendering})
    except (ValueError, TypeError) as error:
        if "argument 'render_mode'" not in str(error):
            raise
        raise ValueError(
            f"{config.env} cannot be filmed, because it takes no render_mode; give its constructor a parameter render_mode, "
            'and let render() return a picture if it is "rgb_array"'
        ) from error
    try:
        recorder = Recorder(env)
        evaluate(policy, env, episodes, deterministic=deterministic, seed=seed, inputs=config.inputs, record=recorder)
    finally:
        env.close()
    folder.mkdir(parents=True, exist_ok=True)
    milliseconds = round(1000 / float((env.metadata or {}).get("render_fps") or 30))
    paths = []
    for i, frames in enumerate(recorder.episodes[:episodes], 1):
        images = [Image.fromarray(frame) for frame in frames]
        path = folder / f"episode_{i}.gif"
        path.unlink(missing_ok=True)  # it may be a link
        images[0].save(path, save_all=True, append_images=images[1:], duration=milliseconds, loop=0)
        paths.append(path)
    return paths


def _frame(env: Any) -> np.ndarray[Any, Any]:
    try:
        frames = env.render()
    except Exception as error:  # whatever a renderer raises without a display
        hint = "; without a display, set MUJOCO_GL=egl (or osmesa)" if "mujoco" in sys.modules else ""
        said = str(error).strip().partition("\n")[0]
        raise ValueError(f"{_name(env)}.render() failed: {type(error).__name__}: {said}{hint}") from error
    frame = frames[0] if isinstance(frames, (tuple, list)) else frames
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        raise ValueError(f"{_name(env)}.render() returned no rgb_array frame; this environment does not support video")
    return frame.astype(np.uint8)


def _name(env: Any) -> str:
    return type(getattr(env, "envs", [env])[0].unwrapped).__name__
