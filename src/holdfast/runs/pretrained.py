"""A trained policy as a folder that can be shared. Reading it runs no code, and every file is checked before it is used.

    manifest.json       the size and SHA-256 of every file below
    config.json         how the policy is made: arguments, spaces, training settings, result of the evaluation
    model.safetensors   weights, and the statistics of normalizers
    README.md           a card for people; curve.csv and curve.png, if there is a learning curve

`hf.save_pretrained` (deploy/hub.py) writes it, `hf.load` reads it, from a disk or from the hub.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from holdfast import algorithms, plain_checks
from holdfast.config import RunConfig, default_config, imports, settings_of
from holdfast.named_objects import is_import_name, name_of
from holdfast.policies import user_policies
from holdfast.policies.base import RecurrentPolicy
from holdfast.policies.images import AS_IN_0_2
from holdfast.runs import checkpoint, hub_repository, space_json
from holdfast.runs.checkpoint import CheckpointError

FORMAT = "holdfast policy 1"
MANIFEST, CONFIG, WEIGHTS, CARD, CURVE, PICTURE = (
    "manifest.json", "config.json", "model.safetensors", "README.md", "curve.csv", "curve.png",
)  # fmt: skip
REQUIRED_FILES, OPTIONAL_FILES = (CONFIG, WEIGHTS, CARD), (CURVE, PICTURE)
LARGEST_JSON = 2**24  # bytes
MOST_LAYERS = 64  # of an encoder or a head: a short text can ask for any number
NEEDS_SAFETENSORS = "sharing policies needs safetensors: pip install 'holdfast[hub]'"
_ALL_OR_KEYS = ("actor_obs", "critic_obs")  # None in a policy and () in a config say the same: everything is seen


INCOMPLETE = b"{}\n"
"""The manifest of a folder that is being written."""


class Shared(NamedTuple):
    """What a folder holds, checked against its manifest."""

    folder: Path
    config: dict[str, Any]
    weights: bytes


def find(path: str | Path) -> Path | None:
    """The folder of a shared policy: the path itself, or "hub:user/name", which is downloaded. None for anything else."""
    if str(path).startswith(hub_repository.PREFIX):
        return _download(hub_repository.HubRepository(str(path)))
    folder = Path(path)
    return folder if (folder / MANIFEST).is_file() else None


def require_run(path: str | Path) -> None:
    """Raise CheckpointError for a shared policy, where only a run or a checkpoint will do."""
    if str(path).startswith(hub_repository.PREFIX):
        kind = "this is a policy on the hub"
    elif (Path(path) / MANIFEST).is_file() and not checkpoint.rolling(path):
        kind = "this folder holds a policy that hf.save_pretrained wrote"
    else:
        return
    raise CheckpointError(f"{path}: {kind}, not a run; it is read in Python, with hf.load({str(path)!r})")


def _download(repository: hub_repository.HubRepository) -> Path:
    """All files of a shared policy. What an interrupted download left damaged in the cache is fetched again, once."""
    manifest = repository.fetch(MANIFEST)
    try:
        entries = files_in(_bytes_of(manifest, LARGEST_JSON), manifest)
    except CheckpointError:
        manifest = repository.fetch(MANIFEST, again=True)
        entries = files_in(_bytes_of(manifest, LARGEST_JSON), manifest)
    for name, entry in entries.items():
        if not _is_intact(_bytes_of(repository.fetch(name), entry["size"]), entry):
            repository.fetch(name, again=True)  # `read` checks it
    return manifest.parent


# --- checksums --------------------------------------------------------------------------------------------------------


def manifest_of(files: dict[str, bytes]) -> bytes:
    """The manifest for these contents, by name of file. There is only one way to write it."""
    entries = {name: {"sha256": _digest(data), "size": len(data)} for name, data in files.items()}
    return _canonical({"format": FORMAT, "files": entries})


def files_in(manifest: bytes, where: Path | str) -> dict[str, dict[str, Any]]:
    """The entries of a manifest by name of file. Raises CheckpointError if it is not one that `manifest_of` wrote."""
    if manifest == INCOMPLETE:
        raise CheckpointError(f"{where}: saving this policy was interrupted; save it again")
    with checkpoint.refusals(Path(where), "this is not the manifest of a shared policy, or it is damaged"):
        data = plain_checks.mapping(_parse(manifest), "the manifest", "format", "files")
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r:.40}, this Holdfast reads {FORMAT!r}")
        entries = plain_checks.mapping(data["files"], "files", *REQUIRED_FILES)
        unknown = sorted(set(entries) - {*REQUIRED_FILES, *OPTIONAL_FILES})
        if unknown:
            raise ValueError(f"it names the file {unknown[0]!r:.40}, which is not part of a shared policy")
        for name, entry in entries.items():
            plain_checks.mapping(entry, name, "sha256", "size")
            plain_checks.integer(entry["size"], f"the size of {name}", 0)
        if _canonical(data) != manifest:
            raise ValueError("it does not have the form that save_pretrained writes")
        return entries


def is_ours(manifest: Path) -> bool:
    """Whether this file is the manifest of a shared policy, complete or being written. Web pages have a manifest.json too."""
    try:
        data = _bytes_of(manifest, LARGEST_JSON)
        return data == INCOMPLETE or bool(files_in(data, manifest))
    except CheckpointError:
        return False


def _is_intact(data: bytes, entry: dict[str, Any]) -> bool:
    return len(data) == entry["size"] and _digest(data) == entry["sha256"]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _canonical(data: Any) -> bytes:
    return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()


# --- reading ----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Shared:
    """The contents of a folder, every file checked. Raises CheckpointError with the reason."""
    manifest = folder / MANIFEST
    contents = {}
    for name, entry in files_in(_bytes_of(manifest, LARGEST_JSON), manifest).items():
        data = _bytes_of(folder / name, entry["size"])
        if not _is_intact(data, entry):
            raise CheckpointError(f"{folder / name}: damaged, cut short or changed (its SHA-256 is not the manifest's)")
        contents[name] = data
    with checkpoint.refusals(folder / CONFIG, "it does not describe a policy"):
        if len(contents[CONFIG]) > LARGEST_JSON:
            raise ValueError(f"it is larger than {LARGEST_JSON} bytes")
        config = plain_checks.mapping(
            _parse(contents[CONFIG]), "it", "format", "policy", "observation_space", "action_space", "training"
        )
        if config["format"] != FORMAT:
            raise ValueError(f"its format is {config['format']!r:.40}, this Holdfast reads {FORMAT!r}")
    return Shared(folder, config, contents[WEIGHTS])


def load(folder: Path, policy: Any = None, *, allow_imports: bool = False) -> RecurrentPolicy:
    """The policy in a folder, on the CPU. A policy of your own is passed, as to `hf.load`, or its import is allowed."""
    require_safetensors()
    shared = read(folder)
    source = folder / CONFIG
    made = policy if isinstance(policy, RecurrentPolicy) else None
    if made is None:
        with checkpoint.refusals(source, "it does not describe a policy"):
            found = [(shared.config[name], name) for name in ("observation_space", "action_space")]
            spaces = [None if data is None else space_json.from_json(data, name) for data, name in found]
            how = plain_checks.mapping(shared.config["policy"], "policy", "class")
        training = training_config(shared, allow_imports)
        kind = algorithms.policy_kind(str(how["class"]))
        if policy is not None:
            made = user_policies.build(policy, spaces[0], spaces[1], training or default_config())
        elif kind is not None:
            made = _described(*kind, how, spaces, shared, allow_imports)
        else:
            made = _own_policy(how["class"], spaces, training, source, allow_imports)
    with checkpoint.refusals(folder / WEIGHTS, "its weights do not fit the policy"):
        made.load_state_dict(_weights(shared.weights))
    return made


def training_config(shared: Shared, allow_imports: bool = False) -> RunConfig | None:
    """The settings the policy was trained with, if the folder has them. Those of an algorithm of somebody's own need its module."""
    with checkpoint.refusals(shared.folder / CONFIG, "its training settings cannot be used"):
        settings = shared.config["training"]
        if settings is None:
            return None
        try:
            return RunConfig.from_dict(plain_checks.mapping(settings, "training"), allow_imports)
        except imports.ImportNotAllowedError:
            return None


def describe_policy(policy: RecurrentPolicy) -> dict[str, Any]:
    """How `load` makes such a policy again, as plain data. A ValueError if it cannot."""
    if type(policy).__name__ in algorithms.POLICIES and type(policy).__module__.startswith("holdfast."):
        arguments = dict(policy.arguments)  # type: ignore[arg-type]
        if isinstance(arguments["core"], torch.nn.Module):
            raise ValueError(
                f"this {type(policy).__name__} was built with a core object, which a file cannot describe: build it with a name "
                "(core='lstm') or a class in a module, or write your own policy class"
            )
        core = arguments["core"]
        arguments["core"] = "none" if core is None else RunConfig(core=core).core
        if not isinstance(arguments["encoder"], str):
            arguments["encoder"] = name_of(arguments["encoder"])
        if arguments.get("mask_parents") is not None:
            arguments["mask_parents"] = [[int(key), int(value)] for key, value in arguments["mask_parents"].items()]
        return {"class": type(policy).__name__, "arguments": json.loads(json.dumps(arguments))}
    name = user_policies.recorded_name(type(policy))
    if name is None:
        raise ValueError(
            f"{type(policy).__qualname__} cannot be found again by name; define the class at the top level of a module"
        )
    return {"class": name}


def _described(
    kind: Any, settings: type[RunConfig], how: dict[str, Any], spaces: list[Any], shared: Shared, allow_imports: bool
) -> RecurrentPolicy:
    """A policy of ours from its arguments, which are checked as the settings that they are."""
    source = shared.folder / CONFIG
    with checkpoint.refusals(source, "it does not describe a policy"):
        arguments = plain_checks.mapping(plain_checks.mapping(how, "policy", "arguments")["arguments"], "arguments")
        unknown = sorted(set(arguments) - set(inspect.signature(kind).parameters))
        if unknown:
            raise ValueError(f"{kind.__name__} has no argument {unknown[0]!r:.40} here; it may need a newer Holdfast")
        known = settings_of(settings)
        arguments = {"encoder": AS_IN_0_2, **arguments}
        arguments = {k: () if k in _ALL_OR_KEYS and v is None else v for k, v in arguments.items()}
        for name in ("encoder_sizes", "head_sizes"):
            listed = arguments.get(name)
            if isinstance(listed, list) and len(listed) > MOST_LAYERS:
                raise ValueError(f"{name} has {len(listed)} entries, expected at most {MOST_LAYERS}")
        config = settings.from_dict({name: value for name, value in arguments.items() if name in known})
    imports.require_allowed(config, source, allow_imports, env=False, training=False)
    options = {name: getattr(config, name) if name in known else value for name, value in arguments.items()}
    options["core"] = None if config.core == "none" else config.core
    options |= {name: getattr(config, name) or None for name in _ALL_OR_KEYS if name in options}
    with checkpoint.refusals(source, "it does not describe a policy"):
        if "mask_parents" in options:
            options["mask_parents"] = _mask_parents(options["mask_parents"])
        if not any(map(is_import_name, (str(config.core), config.encoder))):  # code of the user's own may do anything
            layers = options.get("num_layers", 1)
            require_sizes(_weights(shared.weights), layers, lambda: kind(*spaces, **options))
        return kind(*spaces, **options)


def require_sizes(weights: Any, num_layers: Any, make: Callable[[], RecurrentPolicy]) -> None:
    """Refuse weights that are not those of the policy that `make` makes, before a policy of that size takes up memory."""
    found = plain_checks.mapping(weights, "policy")
    plain_checks.integer(num_layers, "num_layers", 1, max(64, len(found)))
    with torch.device("meta"):
        expected = make().state_dict()
    for name, tensor in expected.items():
        if name in found:  # missing and unknown names are load_state_dict's to judge
            plain_checks.weight(found[name], f"policy {name}", tensor)


def _own_policy(
    name: Any, spaces: list[Any], training: RunConfig | None, source: Path, allow_imports: bool
) -> RecurrentPolicy:
    with checkpoint.refusals(source, "it does not describe a policy"):
        if not isinstance(name, str) or not is_import_name(name):
            raise ValueError(
                f"its policy class is {name!r:.40}, expected one of {', '.join(algorithms.POLICIES)}, or module:Name"
            )
    config = default_config(policy=name)
    imports.require_allowed(config, source, allow_imports, env=False, training=False)
    return user_policies.build(name, spaces[0], spaces[1], training or config)


def require_safetensors() -> Any:
    """The module safetensors.torch."""
    try:
        import safetensors.torch
    except ImportError as missing:
        raise ModuleNotFoundError(NEEDS_SAFETENSORS) from missing
    return safetensors.torch


def _weights(data: bytes) -> dict[str, torch.Tensor]:
    weights = require_safetensors().load(data)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} has numbers that are not finite")
    return weights


def _mask_parents(pairs: Any) -> dict[int, int] | None:
    if pairs is None:
        return None
    listed = [plain_checks.sequence(pair, "mask_parents", 2) for pair in plain_checks.sequence(pairs, "mask_parents")]
    return {plain_checks.integer(key, "mask_parents", 0): plain_checks.integer(value, "mask_parents", 0)
            for key, value in listed}  # fmt: skip


def _bytes_of(file: Path, most: int) -> bytes:
    """At most one byte more than `most`: enough to see that a file is too long."""
    try:
        with file.open("rb") as handle:
            return handle.read(most + 1)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error


def _parse(data: bytes) -> Any:
    """JSON without what its standard leaves open: NaN, and a key that comes twice."""
    return json.loads(data.decode(), parse_constant=_refuse_constant, object_pairs_hook=_unique)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key comes twice")
    return dict(pairs)
