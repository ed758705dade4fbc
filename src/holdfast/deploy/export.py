"""`export_policy`: a trained policy as one file for other programs, with memory as named inputs and outputs.

    export_policy(policy, "policy.onnx")       # onnxruntime, in any language; or "policy.pt2": torch.export.load

The file holds weights, normalizer, and a description of its inputs and outputs. A short program next to it shows its
use. The file is compared with the policy before it gets its name. `export_graph.py` does the tracing.
"""

from __future__ import annotations

import operator
import os
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.cores.base import reset_mode_of
from holdfast.cores.named import made_of
from holdfast.deploy import checksum
from holdfast.deploy.export_graph import ExportError, plain_copy, quietly, trace
from holdfast.deploy.exported_signature import KEY, Port, Signature, sample_observations
from holdfast.deploy.feedback import WithPreviousAction
from holdfast.deploy.runner import Runner
from holdfast.policies.base import RecurrentPolicy
from holdfast.runs.writing import write_whole
from holdfast.state import leaves, ordered_leaves, tree_map

FORMATS = ("onnx", "pt2")
TOLERANCE = 1e-4  # between the file and the policy, in units of the larger of 1 and the value


@dataclass(frozen=True)
class Exported:
    """What `export_policy` wrote."""

    path: Path
    usage: Path
    """A program that shows the file's use."""
    signature: Signature
    difference: float
    """The largest between the file's and the policy's numbers, over some steps with random resets."""


def export_policy(
    policy: RecurrentPolicy,
    path: str | Path,
    format: str | None = None,
    *,
    masks: bool = False,
    example_obs: Any = None,
    action_space: Any = None,
    about: dict[str, Any] | None = None,
) -> Exported:
    """Write one step of `policy` to `path`; the format is the suffix's unless given.

    masks: take action masks as an input. example_obs: a batch of observations, for a policy that has no
    `observation_space`. action_space: whose Box clips actions, for a policy that has none. about: plain data to put
    into the file's description.
    """
    policy = getattr(policy, "_orig_mod", policy)  # torch.compile's wrapper
    if not isinstance(policy, RecurrentPolicy):
        raise TypeError(f"export takes a policy (hf.ActorCritic, hf.RecurrentPolicy), got a {type(policy).__name__}")
    path, format = _target(path, format)
    policy = plain_copy(policy.deployed())
    _require_numbers(policy)
    examples = _examples(policy, example_obs)
    action_space = getattr(policy, "action_space", None) if action_space is None else action_space
    if format == "onnx":
        _require_onnx()
    program, signature = trace(policy, examples, masks=masks, action_space=action_space)
    signature = replace(signature, about={**_about(policy), **(about or {})})
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".exporting") as folder:
        unchecked = Path(folder) / path.name
        (_write_onnx if format == "onnx" else _write_pt2)(program, signature, unchecked, policy)
        with quietly():  # without masks everything is allowed, which is meant here
            difference = compare(policy, unchecked, examples)
        os.replace(unchecked, path)
    usage = path.with_name(f"{path.stem}_{format}_usage.py")
    write_whole(usage, [usage_program(path.name, format, signature).encode()])
    return Exported(path, usage, signature, difference)


def compare(policy: RecurrentPolicy, file: Path, examples: Any, steps: int = 30) -> float:
    """Run file and policy side by side with random resets; the largest difference, or an ExportError."""
    ours, theirs = Runner(policy), Runner(file)
    random = np.random.default_rng(0)
    count = len(leaves(examples)[0])
    largest = 0.0
    for _ in range(steps):
        rows, resets = random.integers(0, count, 3), random.random(3) < 0.2
        obs = tree_map(operator.itemgetter(rows), examples)
        try:
            a, b = ours.act(obs, resets), theirs.act(obs, resets)
        except FloatingPointError as error:
            raise ExportError(
                f"this {type(policy).__name__} gives NaN or infinity for finite observations; look at its weights, or export "
                "an earlier checkpoint"
            ) from error
        except Exception as error:  # of onnxruntime
            if file.suffix != ".onnx":
                raise
            raise ExportError(
                f"the ONNX file of this {type(policy).__name__} does not run; let the `mode` of its distribution, encode and decode "
                "be operations that do not depend on values (torch's Beta and Dirichlet are not), or export to .pt2"
            ) from error
        pairs = list(zip(_numbers(ours), _numbers(theirs)))
        if a.value is not None:
            pairs.append((a.value, b.value))
        raw = zip(leaves(a.raw_action), leaves(b.raw_action))
        pairs += [(want, got) for want, got in raw if want.dtype.kind == "f"]
        for want, got in pairs:
            difference = np.max(np.abs(want - got) / np.maximum(1.0, np.abs(want)), initial=0.0)
            largest = float(np.maximum(largest, difference))  # NaN stays
    if not largest <= TOLERANCE:
        raise ExportError(
            f"the exported graph and {type(policy).__name__} differ by {largest:.2g}, more than {TOLERANCE:g}: "
            "look for randomness, or for something that encode or decode keeps from call to call"
        )
    return largest


def _require_numbers(policy: RecurrentPolicy) -> None:
    """A policy with a weight that is NaN acts all the same, if its actions are discrete: always the first one."""
    for name, weight in policy.named_parameters():
        if bool(weight.isnan().any()):
            raise ExportError(
                f"{name} of this {type(policy).__name__} holds NaN, expected numbers; export an earlier checkpoint"
            )


def _numbers(runner: Runner) -> list[np.ndarray[Any, Any]]:
    state, core = runner.memory.read(), runner.memory.core
    if isinstance(core, WithPreviousAction):  # a discrete action may differ where two are equally likely
        state, core = state["policy"], core.core
    return [leaf.float().cpu().numpy() for leaf in ordered_leaves(state, core.row_shapes())]


def _target(path: str | Path, format: str | None) -> tuple[Path, str]:
    path = Path(path)
    format = path.suffix[1:] if format is None else format
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r} for {path}; one of {', '.join(FORMATS)}")
    if path.suffix != f".{format}":
        raise ValueError(f"{path}: a file of format {format} ends in .{format}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    return path, format


def _examples(policy: RecurrentPolicy, example_obs: Any) -> Any:
    space = getattr(policy, "observation_space", None)
    if example_obs is None and space is None:
        raise ExportError(
            f"{type(policy).__name__} has no observation_space; pass example_obs=, a batch of its observations [N, ...]"
        )
    if example_obs is None:
        return sample_observations(space, 16)

    def plain(part: Any) -> np.ndarray[Any, Any]:
        array = part.detach().cpu().numpy() if isinstance(part, Tensor) else np.asarray(part)
        return array.astype(np.float32) if array.dtype == np.float64 else array

    return tree_map(plain, example_obs)


def _about(policy: RecurrentPolicy) -> dict[str, Any]:
    from holdfast import __version__

    core = made_of(policy.core)
    versions = {"holdfast": __version__, "torch": torch.__version__, "checksum": "sha256"}
    return {**versions, "policy": type(policy).__name__, "core": core, "reset": reset_mode_of(policy.core)}


# --- formats --------------------------------------------------------------------------------------------------------


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ImportError(f"ONNX needs {missing.name}: pip install 'holdfast[onnx]'; or export to .pt2") from missing


def _write_onnx(
    program: torch.export.ExportedProgram, signature: Signature, path: Path, policy: RecurrentPolicy
) -> None:
    try:
        with quietly("torch.onnx", "onnxscript"):
            written = torch.onnx.export(
                program,
                input_names=[port.name for port in signature.inputs()],
                output_names=signature.outputs,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:
        raise ExportError(_onnx_lacks(error, policy)) from error
    assert written is not None
    _rename_what_is_called_like_a_port(written.model.graph)
    for value in (*written.model.graph.inputs, *written.model.graph.outputs):
        if value.shape is not None:
            value.shape[0] = "batch"
    written.model.metadata_props[KEY] = signature.to_json()
    written.model.metadata_props[f"{KEY}_checksum"] = checksum.UNSEALED
    written.model.producer_name = "holdfast"
    written.save(str(path), external_data=False)
    checksum.seal(path)


def _rename_what_is_called_like_a_port(graph: Any) -> None:
    """Torch names a value by its operator: a mean inside the policy would share its name with the output `mean`."""
    ports = [*graph.inputs, *graph.outputs]
    names, ids = {port.name for port in ports}, {id(port) for port in ports}
    for node in graph:
        for value in node.outputs:
            if value.name in names and id(value) not in ids:
                value.name = f"{value.name}_inside"


def _onnx_lacks(error: BaseException, policy: RecurrentPolicy) -> str:
    """The operator that ONNX does not have, from the exporter's chain of errors."""
    said, link = [], error
    while link is not None:
        said.append(str(link))
        link = link.__cause__ or link.__context__  # type: ignore[assignment]
    name = type(policy).__name__
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([\w.:]+)'", "\n".join(said))
    if missing is not None:
        return (
            f"{name} uses the operator {missing[1]}, which ONNX lacks; write encode or decode without it, or export "
            "to .pt2"
        )
    return f"{name} cannot be converted to ONNX: {said[-1].splitlines()[0] if said[-1] else type(error).__name__}"


def _write_pt2(
    program: torch.export.ExportedProgram, signature: Signature, path: Path, policy: RecurrentPolicy
) -> None:
    with quietly("torch.export"):
        torch.export.save(program, path, extra_files={f"{KEY}.json": signature.to_json()})
    checksum.seal_archive(path)


# --- its use ---------------------------------------------------------------------------------------------------------
# The program that is written next to an exported file: how to run it without Holdfast. `usage_*.py.txt` are its templates.


def usage_program(file: str, format: str, signature: Signature) -> str:
    """A short program that runs the file for three steps."""
    library = "np" if format == "onnx" else "torch"
    names = [f"action{part['suffix']}" for part in signature.action_parts()]
    printed = ", ".join(f'out["{name}"]' for name in (*names, "value") if name in signature.outputs)
    observations, states = (_dict(ports, library) for ports in (signature.observations, signature.states))
    masks = f", **{_dict(signature.masks, library, 'ones')}" if signature.masks else ""
    template = Path(__file__).with_name(f"usage_{format}.py.txt").read_text(encoding="utf-8")
    outputs = ", ".join(signature.outputs)
    return template.format(file=file, outputs=outputs, state=states, obs=observations, masks=masks, printed=printed)


def _dict(ports: list[Port], library: str, make: str = "zeros") -> str:
    """The text of a dict of arrays by input name."""
    parts = []
    for port in ports:
        shape = f"({', '.join(map(str, ('B', *port.shape)))})" if port.shape else "(B,)"
        dtype = "bool_" if (library, port.dtype) == ("np", "bool") else port.dtype  # numpy 1.24 to 1.26 have no np.bool
        fill = f"full({shape}, {port.example}" if isinstance(port.example, int) else f"{make}({shape}"
        parts.append(f'"{port.name}": {library}.{fill}, dtype={library}.{dtype})')
    return "{" + ", ".join(parts) + "}"
