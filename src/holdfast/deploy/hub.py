"""Sharing a trained policy: `hf.save_pretrained` writes a folder, `policy.push_to_hub` uploads it to the Hugging Face Hub.

`hf.load` reads both. What the folder holds, and how it is checked, is in `runs/pretrained.py`.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from holdfast.config import RunConfig
from holdfast.deploy.model_card import card
from holdfast.policies.base import RecurrentPolicy
from holdfast.runs import checkpoint, hub_repository, pretrained, saved_policy, space_json
from holdfast.runs.log import RESULT_NAME, read_progress
from holdfast.runs.writing import TEMPORARY, write_whole
from holdfast.training.evaluation import EvalResult


def save_pretrained(
    policy: RecurrentPolicy,
    folder: str | Path,
    *,
    run: str | Path | None = None,
    evaluation: EvalResult | None = None,
    name: str | None = None,
) -> Path:
    """Write a policy to a folder that can be shared: weights, config, spaces, normalizer, result and a card.

    run: the run whose record (settings, learning curve, result) is included; by default the one that the policy was trained
    in or loaded from, if these are its weights. evaluation: another result, of `hf.evaluate` with sampled actions. name: the
    title of the card; the folder's name by default. The folder is read back and compared before this returns.
    """
    folder = Path(folder)
    base = folder.resolve().name  # a path says something about the machine
    return _write(policy, folder, run, evaluation, name or base, base)


def push_to_hub(
    policy: RecurrentPolicy,
    repo_id: str,
    *,
    run: str | Path | None = None,
    evaluation: EvalResult | None = None,
    private: bool = False,
    message: str = "Upload a policy with holdfast",
) -> str:
    """Upload a policy to "user/name" on the hub, in one commit; the repository is made if it does not exist.

    Returns the commit's address. `hf.load("hub:user/name")` loads it. run, evaluation: as in `save_pretrained`.
    """
    hub = hub_repository.open_hub()
    repo_id = hub_repository.HubRepository(repo_id).repo  # one error for a name that is none
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        _write(policy, Path(folder), run, evaluation, repo_id, f"{hub_repository.PREFIX}{repo_id}")
        with hub_repository.one_line_errors(repo_id), hub_repository.quiet():
            hub.create_repo(repo_id, private=private, exist_ok=True)
            return str(hub.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message).commit_url)


def _write(
    policy: RecurrentPolicy,
    folder: Path,
    run: str | Path | None,
    evaluation: EvalResult | None,
    title: str,
    source: str,
) -> Path:
    from holdfast import __version__

    safetensors = pretrained.require_safetensors()
    if not isinstance(policy, RecurrentPolicy):
        raise TypeError(f"save_pretrained takes a policy, got a {type(policy).__name__}; hf.load(run) gives one")
    how = pretrained.describe_policy(policy)
    record = _record(policy, run)
    result = record.result if record else None
    if evaluation is not None:
        result = evaluation_data(evaluation.mean_return, evaluation.std_error, len(evaluation.returns))
    spaces = [getattr(policy, name, None) for name in ("observation_space", "action_space")]
    if record is not None:
        spaces = [own if own is not None else recorded for own, recorded in zip(spaces, record.spaces)]
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in policy.state_dict().items()}
    config = {
        "format": pretrained.FORMAT,
        "holdfast": __version__,
        "policy": how,
        "observation_space": None if spaces[0] is None else space_json.to_json(spaces[0]),
        "action_space": None if spaces[1] is None else space_json.to_json(spaces[1]),
        "training": record.config.to_dict() if record else None,
        "steps": record.steps if record else None,
        "evaluation": result,
    }
    files = {
        pretrained.CONFIG: (json.dumps(config, indent=1, allow_nan=False) + "\n").encode(),
        pretrained.WEIGHTS: safetensors.save(weights, {"format": "pt"}),
    }
    if record is not None and record.curve:
        lines = ["steps,mean_return", *(f"{steps},{value!r}" for steps, value in record.curve)]
        files[pretrained.CURVE] = ("\n".join(lines) + "\n").encode()
        picture = _picture(record)
        if picture is not None:
            files[pretrained.PICTURE] = picture
    text = card(
        source=source,
        title=title,
        policy=how,
        num_parameters=sum(parameter.numel() for parameter in policy.parameters()),
        spaces=(str(spaces[0]), str(spaces[1])),
        evaluation=result,
        config=record.config if record else None,
        steps=record.steps if record else None,
        points=record.curve if record else None,
        picture=pretrained.PICTURE in files,
    )
    files[pretrained.CARD] = text.encode()
    _write_files(folder, files)
    _require_same(policy, weights, folder)
    return folder


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    """The manifest says that the folder is incomplete until all files are there. A kill leaves a folder that is refused, and
    that can be written again."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / pretrained.MANIFEST
    left_by_a_kill = set(folder.glob(TEMPORARY))
    if not pretrained.is_ours(manifest) and any(file not in left_by_a_kill for file in folder.iterdir()):
        raise FileExistsError(f"{folder} has files of something else in it; choose an empty folder, or a new one")
    write_whole(manifest, [pretrained.INCOMPLETE])
    for file in left_by_a_kill:
        file.unlink(missing_ok=True)
    for name in pretrained.OPTIONAL_FILES:
        (folder / name).unlink(missing_ok=True)
    for name, data in files.items():
        write_whole(folder / name, [data])
    write_whole(manifest, [pretrained.manifest_of(files)])


def _require_same(policy: RecurrentPolicy, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Read the folder as `hf.load` will, and compare; a policy that cannot be loaded again is not shared."""
    try:
        loaded = pretrained.load(
            folder, allow_imports=True
        ).state_dict()  # the classes of this policy are in use already
        different = [name for name in weights if not torch.equal(loaded[name], weights[name])]
        if different:
            raise ValueError(f"{different[0]} is another after loading")
    except Exception as error:
        write_whole(folder / pretrained.MANIFEST, [pretrained.INCOMPLETE])
        text = " ".join(str(error).split())
        raise ValueError(f"this {type(policy).__name__} could not be loaded again from {folder}: {text}") from error


def _record(policy: RecurrentPolicy, run: str | Path | None) -> TrainingRecord | None:
    if run is not None:
        found = find_record(policy, Path(run))
        if found is None:
            raise ValueError(f"the weights of this policy are not those of any checkpoint in {run}")
        return found
    return None if policy.trained_in is None else find_record(policy, policy.trained_in)


def _picture(record: TrainingRecord) -> bytes | None:
    """The learning curve as a PNG; None without matplotlib."""
    from holdfast.display.plot import plot_runs

    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        try:
            return plot_runs([record.run], Path(folder) / "curve.png").read_bytes()
        except ModuleNotFoundError:
            return None


# --- what a run says -------------------------------------------------------------------------------------------------
# What a run's folder says about the weights of a policy: settings, steps, learning curve, result.
#
# Only of these very weights: a policy that was trained further elsewhere has no record there.


METRIC = "rollout/ep_rew_mean"
MOST_POINTS = 500  # of a learning curve


@dataclass
class TrainingRecord:
    """curve: (steps, mean return) up to these weights. result: of the final evaluation, if it was of these weights."""

    run: Path
    config: RunConfig
    steps: int
    spaces: tuple[Any, Any]
    curve: list[tuple[int, float]]
    result: dict[str, Any] | None


def find_record(policy: RecurrentPolicy, run: Path) -> TrainingRecord | None:
    """The record of the checkpoint that holds these weights; None if none of the run's does."""
    weights = {name: tensor.detach().cpu() for name, tensor in policy.state_dict().items()}
    best = checkpoint.folder_of(run) / "best.pt"
    for file in [*reversed(checkpoint.rolling(run)), *([best] if best.is_file() else [])]:
        _, saved = saved_policy.read(file)
        if _equal(saved["policy"], weights):
            config = saved_policy.settings(file, saved)
            steps = int(saved["steps"])
            # Folders and names say something about the machine, and nothing about the policy. A text that the environment
            # takes may be a path or a token.
            told = {name: value for name, value in config.env_kwargs.items() if _is_number(value)}
            config = replace(config, run_dir=None, name=None, threads=None, device="auto", env_kwargs=told)
            result = _result(run, steps, config.final_eval_episodes)
            return TrainingRecord(run, config, steps, saved_policy.spaces(saved), _curve(run, steps), result)
    return None


def _is_number(value: Any) -> bool:
    """Or several, or true, false and none."""
    return all(map(_is_number, value)) if isinstance(value, list) else value is None or isinstance(value, (int, float))


def _equal(saved: Any, weights: dict[str, torch.Tensor]) -> bool:
    return (
        isinstance(saved, dict)
        and saved.keys() == weights.keys()
        and all(isinstance(saved[name], torch.Tensor) and torch.equal(saved[name], weights[name]) for name in weights)
    )


def _curve(run: Path, steps: int) -> list[tuple[int, float]]:
    rows = [row for row in read_progress(run) if float(row["steps"]) <= steps]
    points = [
        (int(float(row["steps"])), float(row[METRIC])) for row in rows if row.get(METRIC) not in (None, "", "nan")
    ]
    stride = -(-len(points) // MOST_POINTS) or 1
    return points[::-1][::stride][::-1]  # the last one is always there


def evaluation_data(mean_return: float, std_error: float, episodes: int) -> dict[str, Any] | None:
    """An evaluation with sampled actions as plain data; None if no episode ended, so that there is no mean."""
    if not math.isfinite(mean_return):
        return None
    error = std_error if math.isfinite(std_error) else None  # NaN for one episode
    return {"mean_return": mean_return, "std_error": error, "episodes": episodes, "deterministic": False}


def _result(run: Path, steps: int, asked_for: int) -> dict[str, Any] | None:
    try:
        result = json.loads((run / RESULT_NAME).read_text())
        if int(result["steps"]) != steps:
            return None
        mean, error = float(result["mean_return"]), float(result["std_error"])
        return evaluation_data(mean, error, int(result.get("episodes", asked_for)))  # 0.1 did not write their number
    except (OSError, ValueError, KeyError, TypeError):
        return None
