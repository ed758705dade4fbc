"""Reads .onnx and .pt2 files that `holdfast export` wrote, and runs their step. Memory is `runner.py`'s affair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast import heads
from holdfast.cores.base import Core
from holdfast.exported_signature import KEY, Port, Signature, next_name, take
from holdfast.state import RowShape, State

Arrays = dict[str, Any]  # by input or output name: numpy for ONNX, tensors for pt2

SUFFIXES = (".onnx", ".pt2")


class ExportedState(Core):
    """The shape of an exported policy's state, so that `hf.Memory` can keep it. The step is in the file."""

    def __init__(self, ports: list[Port]) -> None:
        super().__init__()
        self.input_size = self.output_size = 0
        self._rows = {port.name: RowShape(port.shape) for port in ports}
        self._starts = {
            port.name: torch.zeros(port.shape) if port.initial is None else torch.tensor(port.initial) for port in ports
        }

    def row_shapes(self) -> State:
        return self._rows

    def initial_rows(self) -> State:
        return self._starts

    def state_dtype(self) -> torch.dtype:
        return torch.float32

    def device(self) -> torch.device:
        return torch.device("cpu")


class ExportedPolicy:
    """One step of an exported policy, for any number of environments."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: there is no such file; `holdfast export RUN -o {path}` writes it")
        self.file = path
        if path.suffix == ".onnx":
            self._run, text = _open_onnx(path, threads)
        else:
            self._run, text = _open_pt2(path)
        self.signature = Signature.from_json(text, str(path))
        self.core = ExportedState(self.signature.states)
        self.device = torch.device("cpu")
        self.observations = self.signature.observations
        self.action_dtype = self.signature.action.get("dtype")
        self._state_names = [port.name for port in self.signature.states]

    def step(
        self, obs: Any, resets: Tensor | None, state: State, action_mask: Any, deterministic: bool
    ) -> tuple[Any, Any, Any, State]:
        """(action as the environment takes it, raw action, value, state) of B environments."""
        feed: Arrays = {port.name: _as(take(obs, port), port) for port in self.observations}
        batch = next(iter(feed.values())).shape[0]
        feed["resets"] = np.zeros(batch, bool) if resets is None else resets.numpy()
        for name in self._state_names:
            feed[name] = state[name].numpy()
        masks = self._masks(action_mask, batch)
        feed.update(masks)
        out = self._run(feed)
        action = torch.from_numpy(out["action"])
        raw = torch.from_numpy(out["mean"]) if "mean" in out else action
        if not deterministic:
            raw = self._distribution(out, masks).sample()
            action = self._clipped(raw)
        new_state = {name: torch.from_numpy(out[next_name(name)]) for name in self._state_names}
        return action, raw, torch.from_numpy(out["value"]), new_state

    def _masks(self, given: Any, batch: int) -> Arrays:
        ports = self.signature.masks
        if not ports:
            if given is not None:
                raise ValueError(f"{self.file} was exported without action masks; export the policy again with --masks")
            return {}
        if given is None:
            return {port.name: np.ones((batch, *port.shape), bool) for port in ports}
        parts = [given] if len(ports) == 1 else list(given)
        if len(parts) != len(ports):
            raise ValueError(f"{len(parts)} action masks came, expected one per head: {len(ports)}")
        out = {}
        for port, part in zip(ports, parts):
            mask = np.ones((batch, *port.shape), bool) if part is None else np.asarray(part)
            heads.check_mask(torch.from_numpy(mask), (batch, *port.shape), f"({port.name})")
            out[port.name] = mask
        return out

    def _distribution(self, out: Arrays, masks: Arrays) -> Any:
        about = self.signature.action
        kind = about.get("kind")
        if kind == "gaussian":
            mean, std = torch.from_numpy(out["mean"]), torch.from_numpy(out["std"])
            return torch.distributions.Normal(mean, std, validate_args=False)
        if kind is None:
            raise ValueError(
                f"{self.file} cannot sample: Holdfast does not know the distribution {about.get('name')}; use "
                "deterministic=True"
            )
        logits = torch.from_numpy(out["logits"])
        if kind == "categorical":
            return heads.Categorical(logits, start=about["start"])
        if kind == "bernoulli":
            return heads.Bernoulli(logits)
        parents = dict(about["parents"])
        late = [torch.from_numpy(mask) if j in parents else None for j, mask in enumerate(masks.values())]
        return heads.MultiCategorical(logits, about["nvec"], late if parents else None, parents)

    def _clipped(self, action: Tensor) -> Tensor:
        low, high = (self.signature.action.get(bound) for bound in ("low", "high"))
        if low is None or high is None:
            return action
        bounds = [np.array(b, dtype=np.float32) for b in (low, high)]  # None becomes NaN: no bound
        low, high = (torch.from_numpy(np.where(np.isnan(b), s * np.inf, b)) for b, s in zip(bounds, (-1, 1)))
        return action.clamp(low, high)


def _as(part: Any, port: Port) -> np.ndarray[Any, Any]:
    """An array of the port's dtype; refuses what would lose more than precision."""
    array = part.cpu().numpy() if isinstance(part, Tensor) else np.asarray(part)
    if array.dtype == port.dtype:
        return array
    if not np.can_cast(array.dtype, port.dtype, "same_kind"):
        raise TypeError(
            f"{port.name} has dtype {array.dtype}, expected {port.dtype}; convert it with .astype(np.{port.dtype})"
        )
    return array.astype(port.dtype)


def _open_onnx(path: Path, threads: int) -> tuple[Any, str | None]:
    try:
        import onnxruntime
    except ModuleNotFoundError as missing:
        raise ImportError(f"{path} needs onnxruntime: pip install 'holdfast[onnx]'") from missing
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ValueError(f"{path}: onnxruntime cannot read it ({str(error).splitlines()[0]})") from error
    names = [output.name for output in session.get_outputs()]

    def run(feed: Arrays) -> Arrays:
        return dict(zip(names, session.run(names, feed)))

    return run, session.get_modelmeta().custom_metadata_map.get(KEY)


def _open_pt2(path: Path) -> tuple[Any, str | None]:
    texts = {f"{KEY}.json": ""}
    try:
        program = torch.export.load(path, extra_files=texts)
    except Exception as error:
        raise ValueError(f"{path}: torch.export cannot read it ({str(error).splitlines()[0]})") from error
    module = program.module()

    def run(feed: Arrays) -> Arrays:
        with torch.no_grad():
            out = module(**{name: torch.as_tensor(array) for name, array in feed.items()})
        return {name: tensor.numpy() for name, tensor in out.items()}

    return run, texts[f"{KEY}.json"]
