"""Sharing a trained policy: `hf.save_pretrained` writes a folder, `policy.push_to_hub` uploads it to the Hugging Face Hub.

`hf.load` reads both. What the folder holds, and how it is checked, is in `runs/pretrained.py`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from holdfast.deploy.model_card import card
from holdfast.deploy.training_record import TrainingRecord, evaluation_data, find_record
from holdfast.policies.base import RecurrentPolicy
from holdfast.runs import hub_repository, pretrained, space_json
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
        "holdfast": _version(),
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


def _version() -> str:
    from holdfast import __version__

    return __version__
