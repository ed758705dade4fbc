"""Reads .onnx and .pt2 files that `holdfast export` wrote, and runs their step. `runner.py` keeps the memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.cores.base import Core
from holdfast.deploy import checksum
from holdfast.deploy.exported_signature import KEY, Port, Signature, batch_size, nest, next_name, take
from holdfast.policies import heads
from holdfast.policies.action_parts import joined_mask, split_mask
from holdfast.state import RowShape, State, tree_map

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]  # by the name of an input or output

SUFFIXES = (".onnx", ".pt2")
_PARAMETERS = {
    "greedy": ("q",), "categorical": ("logits",), "multi_categorical": ("logits",), "bernoulli": ("logits",),
    "gaussian": ("mean", "std"), "squashed_gaussian": ("mean", "std"),
}  # fmt: skip
"""The outputs that a distribution is made of."""

Opened = tuple[Callable[[Arrays], Arrays], str | None, tuple[set[str], set[str]] | None]
"""One step of a file, its description, and the names of its graph's inputs and outputs, if the format gives them."""


class ExportedState(Core):
    """The form of an exported policy's state, so that `hf.Memory` can keep it. The step is in the file."""

    def __init__(self, ports: list[Port]) -> None:
        super().__init__()
        self.input_size = self.output_size = 0
        self._rows = {port.name: RowShape(port.shape, getattr(torch, port.dtype)) for port in ports}
        self._starts = {
            port.name: torch.zeros(port.shape) if port.example is None else torch.tensor(port.example) for port in ports
        }

    def row_shapes(self) -> State:
        return self._rows

    def initial_rows(self) -> State:
        return self._starts

    def dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        return torch.float32, torch.device("cpu")


class ExportedPolicy:
    """One step of an exported policy, for any number of environments, in numpy."""

    in_numpy = True

    def __init__(self, path: Path, threads: int = 1) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: there is no such file; `holdfast export RUN -o {path}` writes it")
        self.file = path
        sealed = checksum.verify(path)
        self._run, text, names = _open_onnx(path, threads) if path.suffix == ".onnx" else _open_pt2(path)
        self.signature = Signature.from_json(text, str(path))
        if self.signature.about.get("checksum") and not sealed:
            raise checksum.damaged(path)
        self.core: Core = ExportedState(self.signature.states)
        self.ports = self.signature.observations
        self.expects_mask = bool(self.signature.masks)
        self._parts = self.signature.action_parts()
        self._places = [
            Port("action", (), "", tuple(part["path"])) for part in self._parts
        ]  # for `nest`, which reads paths
        self._mask_sizes = nest(self._places, [part.get("choices", 0) for part in self._parts])
        self.first_action = nest(self._places, [int(part.get("start", 0)) for part in self._parts])
        self.crosses_episodes = self.signature.about.get("reset") == "never"
        self._next = [(port.name, next_name(port.name)) for port in self.signature.states]
        if names is not None:
            self._require_names(*names)
        self._bounds = [_bounds(part) for part in self._parts]

    def __repr__(self) -> str:
        return str(self.file)

    def _require_names(self, inputs: set[str], outputs: set[str]) -> None:
        """The graph takes and gives what its description says."""
        described = {port.name for port in self.signature.inputs()}
        needed = {later for _, later in self._next} | {
            name + part["suffix"] for part in self._parts for name in ("action", *_PARAMETERS.get(part["kind"], ()))
        }
        if described != inputs or not needed <= outputs:
            strange = sorted((described ^ inputs) | (needed - outputs))
            raise ValueError(
                f"{self.file}: its description does not fit its graph ({strange[0]!r:.40} is in one of them only); "
                "export the policy again"
            )

    def inputs(self, obs: Any, rewards: Any = None) -> tuple[Arrays, int | None]:
        """Observations by input name with a batch dimension, and B; None: they came without one."""
        ports = self.signature.observations
        feed = {port.name: _as(take(obs, port), port) for port in ports}
        batch = batch_size(ports, [array.shape for array in feed.values()])
        return feed if batch is not None else {name: array[None] for name, array in feed.items()}, batch

    def with_parts(self, inputs: Arrays, parts: dict[str, Any]) -> Arrays:
        """Inputs with these parts of the observation, at the top, replaced."""
        ports = [port for port in self.ports if port.path and port.path[0] in parts]
        return {**inputs, **{port.name: _as(take(parts, port), port) for port in ports}}

    def flags(self, resets: Any, batch: int) -> Array:
        """[B] bool, checked."""
        if resets is None:
            return np.zeros(batch, bool)
        flags: Array = resets.cpu().numpy() if isinstance(resets, Tensor) else np.asarray(resets)
        if flags.dtype != bool:
            raise TypeError(f"resets has dtype {flags.dtype}, expected bool; use flags.astype(bool)")
        if flags.shape != (batch,):
            raise ValueError(
                f"resets has shape {flags.shape}, expected ({batch},): one flag per environment, True where the "
                "observation is the first of an episode"
            )
        return flags

    def from_memory(self, state: State) -> Arrays:
        return {name: leaf.numpy() for name, leaf in state.items()}

    def to_memory(self, state: Arrays) -> State:
        return {name: torch.from_numpy(leaf) for name, leaf in state.items()}

    def step(
        self, feed: Arrays, flags: Array, state: Arrays, action_mask: Any, deterministic: bool
    ) -> tuple[Any, Array | None, Any, Arrays, list[Array]]:
        """(action as the environment takes it, value, raw action, state, logits of its parts) of B environments."""
        masks = self._masks(action_mask, len(flags))
        out = self._run({**feed, "resets": flags, **state, **masks})
        actions, raws, logits = [], [], []
        for part, bounds in zip(self._parts, self._bounds):
            names = {name: name + part["suffix"] for name in ("action", "logits", "mean", "std", "q")}
            own = {name: out[output] for name, output in names.items() if output in out}
            if deterministic:
                action = own["action"]
                raw = own["mean"] if part["kind"] == "gaussian" else action
            else:
                raw = self._distribution(part, own, masks).sample().numpy()
                action = raw if bounds is None else np.clip(raw, *bounds)
            actions.append(action.astype(part.get("dtype", action.dtype), copy=False))
            raws.append(raw)
            logits += [own["logits"]] if "logits" in own else []
        state = {name: out[later] for name, later in self._next}
        return nest(self._places, actions), out.get("value"), nest(self._places, raws), state, logits

    def result(self, arrays: Any, numpy: bool) -> Any:
        return arrays if numpy else tree_map(torch.as_tensor, arrays)

    def _masks(self, given: Any, batch: int) -> Arrays:
        ports = self.signature.masks
        if not ports:
            if given is not None:
                raise ValueError(f"{self.file} was exported without action masks; export the policy again with --masks")
            return {}
        if self.signature.action["kind"] == "factored":
            given = joined_mask(given, self._mask_sizes)
        elif given is not None:
            given = heads.mask_tensors(given, torch.device("cpu"))
            if len(ports) == 1 and isinstance(given, list):  # the heads side by side
                given = joined_mask(tuple(given), tuple(self.signature.action.get("nvec", ())))
        parts = [None] * len(ports) if given is None else [given] if len(ports) == 1 else list(given)
        if len(parts) != len(ports):
            raise ValueError(f"got {len(parts)} action masks, expected one per head: {len(ports)}")
        masks = {
            port.name: np.ones((batch, *port.shape), bool) if part is None else part.cpu().numpy()
            for port, part in zip(ports, parts)
        }
        if given is not None:
            self._check_masks([torch.from_numpy(mask) for mask in masks.values()], batch)
        return masks

    def _check_masks(self, masks: list[Tensor], batch: int) -> None:
        """As the heads of a policy check them."""
        of_parts: list[list[Any]] = [list(masks)]
        if self.signature.action["kind"] == "factored":
            of_parts = [[mask] for mask in split_mask(masks[0], self._mask_sizes)]
        for about, own in zip(self._parts, of_parts):
            shape = (batch, about.get("choices", self.signature.masks[0].shape[-1]))
            if about["kind"] == "multi_categorical":
                nvec, parents = about["nvec"], dict(about["parents"])
                heads.MultiCategorical(torch.zeros(batch, sum(nvec)), nvec, own[0] if len(own) == 1 else own, parents)
            elif about["kind"] == "bernoulli":
                heads.Bernoulli(torch.zeros(shape), own[0])
            elif own[0] is not None:
                heads.check_mask(own[0], shape, f"for {shape[1]} actions")

    def _distribution(self, about: dict[str, Any], out: Arrays, masks: Arrays) -> Any:
        """Of one part of the action, from its own outputs. masks: those of an action without parts."""
        tensors = {name: torch.from_numpy(array) for name, array in out.items()}
        if about["kind"] == "gaussian":
            return torch.distributions.Normal(tensors["mean"], tensors["std"], validate_args=False)
        if about["kind"] == "squashed_gaussian":
            mean, log_std = tensors["mean"].flatten(1), tensors["std"].flatten(1).log()
            center, half_range = (torch.tensor(about[name], dtype=mean.dtype) for name in ("center", "half_range"))
            return heads.SquashedGaussian(mean, log_std, center, half_range, tensors["mean"].shape[1:])
        if about["kind"] == "greedy":
            return heads.Greedy(tensors["q"], start=about["start"])
        if about["kind"] == "categorical":
            return heads.Categorical(tensors["logits"], start=about["start"])
        if about["kind"] == "bernoulli":
            return heads.Bernoulli(tensors["logits"])
        if about["kind"] == "multi_categorical":
            parents = dict(
                about["parents"]
            )  # heads whose mask depends on a choice; otherwise the logits hold the masks
            # All masks: what one head may not choose, another head's mask need not allow anything for.
            given = [torch.from_numpy(mask) for mask in masks.values()] if parents else None
            return heads.MultiCategorical(tensors["logits"], about["nvec"], given, parents)
        raise ValueError(
            f"{self.file} cannot sample: Holdfast does not know the distribution {about['name']}; "
            "use deterministic=True"
        )


def _bounds(action: dict[str, Any]) -> tuple[Array, Array] | None:
    if "low" not in action:
        return None
    dtype = np.dtype(action["dtype"]) if np.dtype(action["dtype"]).kind == "f" else np.float32
    low, high = (np.array(action[name], dtype=dtype) for name in ("low", "high"))  # None, no bound, becomes NaN
    return np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)


def _as(part: Any, port: Port) -> Array:
    """An array of the port's dtype; refuses what would lose more than precision."""
    array: Array = part.cpu().numpy() if isinstance(part, Tensor) else np.asarray(part)
    if array.dtype == port.dtype:
        return array
    if not np.can_cast(array.dtype, port.dtype, "same_kind"):
        raise TypeError(
            f"{port.name} has dtype {array.dtype}, expected {port.dtype}; convert it with .astype(np.{port.dtype})"
        )
    return array.astype(port.dtype)


def _open_onnx(path: Path, threads: int) -> Opened:
    try:
        import onnxruntime
    except ModuleNotFoundError as missing:
        raise ImportError(f"{path} needs onnxruntime: pip install 'holdfast[onnx]'") from missing
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ValueError(f"{path}: onnxruntime cannot read it ({_first_line(error)})") from error
    names = [output.name for output in session.get_outputs()]

    def run(feed: Arrays) -> Arrays:
        return dict(zip(names, session.run(names, feed)))

    described = session.get_modelmeta().custom_metadata_map.get(KEY)
    return run, described, ({port.name for port in session.get_inputs()}, set(names))


def _open_pt2(path: Path) -> Opened:
    texts = {f"{KEY}.json": ""}
    try:
        module = torch.export.load(path, extra_files=texts).module()
    except Exception as error:
        raise ValueError(f"{path}: torch.export cannot read it ({_first_line(error)})") from error

    def run(feed: Arrays) -> Arrays:
        with torch.no_grad():
            out = module(**{name: torch.as_tensor(array) for name, array in feed.items()})
        return {name: tensor.numpy() for name, tensor in out.items()}

    return run, texts[f"{KEY}.json"], None


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0] or type(error).__name__
