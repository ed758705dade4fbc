"""TorchRL: `RecurrentModule`, any Holdfast core wherever `LSTMModule` or `GRUModule` is used.

    lstm = RecurrentModule(hf.LSTM(64, 128), in_key="embed", out_key="features")
    policy = TensorDictSequential(encoder, lstm, head)
    collector = Collector(env, policy, auto_register_policy_transforms=True, ...)      # one step at a time
    with set_recurrent_mode(True): policy(batch)                                       # whole sequences, [..., T]

`is_init` is TorchRL's name for `resets`. As in TorchRL, a sequence starts from the state stored with its first step,
and so does every trajectory that begins with `is_init` inside it. If that stored state is the primer's zeros, it is the
start of an episode and the core's own reset applies. Needs the extra `torchrl`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.checks import values_are_readable
from holdfast.cores import Core
from holdfast.integrations import trajectories
from holdfast.state import State

try:
    from tensordict import TensorDictBase
    from tensordict.nn import TensorDictModuleBase, dispatch
    from tensordict.utils import unravel_key_list
    from torchrl.modules import recurrent_mode
except ModuleNotFoundError as error:
    if error.name not in ("tensordict", "torchrl"):
        raise
    raise ModuleNotFoundError(f"{error}; install it with: pip install 'holdfast[torchrl]'", name=error.name) from error

INIT_KEY = "is_init"


class RecurrentModule(TensorDictModuleBase):
    """A core as a TensorDict module.

    in_keys: the input, then one key per leaf of the core's state (an LSTM has two, h and c), then "is_init" (added
    when missing). out_keys: the output, then ("next", key) for each of those state keys. With `in_key` and `out_key`
    the state keys are "recurrent_state_h", ... named for the leaves; torchrl_keys=True takes the names that LSTMModule and
    GRUModule have by default, which differ for a GRU ("recurrent_state"). default_recurrent_mode: the mode outside
    `set_recurrent_mode`. Reset modes are "zero" and "learned"; TorchRL's primer makes states fresh at every episode.

    In sequence mode ("next", state) is filled where a trajectory or the sequence ends, and zero elsewhere. Its gradient is
    carried as TorchRL's modules carry it; compiled, only that of the last step.
    """

    def __init__(
        self,
        core: Core,
        in_keys: Sequence[Any] | None = None,
        out_keys: Sequence[Any] | None = None,
        *,
        in_key: Any = None,
        out_key: Any = None,
        torchrl_keys: bool = False,
        default_recurrent_mode: bool | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(core, Core):
            raise TypeError(f"RecurrentModule takes a holdfast core (hf.LSTM, ...), got a {type(core).__name__}")
        modes = {getattr(part, "reset", "zero") for part in core.modules() if isinstance(part, Core)}
        if not modes <= {"zero", "learned"}:
            raise ValueError(
                f"reset modes {sorted(modes)} cannot work here: TorchRL's environments make the state fresh at every "
                "episode; use reset='zero' or 'learned'"
            )
        self.core = core
        names = list(state_ops.named_leaves(core.row_shapes()))
        states = [f"recurrent_state_{name.replace('.', '_')}" for name in names]
        if torchrl_keys and len(names) == 1:
            states = ["recurrent_state"]
        for argument, keys in (("in_keys", in_keys), ("out_keys", out_keys)):
            if isinstance(keys, str):
                raise TypeError(
                    f"{argument} is the string {keys!r}, expected a list of keys; or {argument[:-1]}={keys!r}"
                )
        if (in_keys is None) == (in_key is None) or (out_keys is None) == (out_key is None):
            raise ValueError("pass in_keys or in_key, and out_keys or out_key: one of each pair")
        in_keys = unravel_key_list([in_key, *states] if in_keys is None else list(in_keys))
        out_keys = unravel_key_list([out_key, *(("next", s) for s in states)] if out_keys is None else list(out_keys))
        if in_keys[-1] != INIT_KEY:
            in_keys = [*in_keys, INIT_KEY]
        if len(in_keys) != len(names) + 2 or len(out_keys) != len(names) + 1:
            raise ValueError(
                f"the state of {type(core).__name__} has the leaves {names}: in_keys are the input and "
                f"{len(names)} state keys, out_keys the output and as many; got in_keys={in_keys}, out_keys={out_keys}"
            )
        self.in_keys, self.out_keys = in_keys, out_keys
        self._default_mode = default_recurrent_mode

    @property
    def state_keys(self) -> list[Any]:
        return list(self.in_keys[1:-1])

    @property
    def recurrent_mode(self) -> bool:
        """Whether sequences are expected now."""
        mode = recurrent_mode()
        return bool(self._default_mode if mode is None else mode)

    def make_python_based(self) -> RecurrentModule:
        """Itself, for code written for LSTMModule: the core chooses its kernel. `hf.LSTM(kernel="reference")` is the
        plain one."""
        return self

    def make_cudnn_based(self) -> RecurrentModule:
        """Itself, for code written for LSTMModule: the core chooses its kernel, on a GPU one that resets inside the
        sequence, which cuDNN cannot."""
        return self

    @property
    def canonical_keys(self) -> list[Any]:
        """The keys that this module reads and writes, for `torchrl.modules.canonicalize_rnn_subset`."""
        return [*self.in_keys, *self.out_keys]

    def canonicalize(self, data: TensorDictBase, *, inplace: bool = False) -> TensorDictBase:
        """`data` with contiguous tensors at `canonical_keys`. A core takes any layout, so this is for code written for
        LSTMModule."""
        result = data if inplace else data.copy()
        for key in self.canonical_keys:
            if (tensor := data.get(key, None)) is not None:
                result.set(key, tensor.contiguous())
        return result

    def make_tensordict_primer(self) -> Any:
        """The transform that puts fresh states into an environment's TensorDicts."""
        from torchrl.data import Unbounded
        from torchrl.envs.transforms import TensorDictPrimer

        for key, out in zip(self.state_keys, self.out_keys[1:]):
            if out != ("next", *((key,) if isinstance(key, str) else key)):
                raise ValueError(
                    f"the state goes from step to step only if {key!r} is written as ('next', {key!r}), not {out!r}"
                )
        rows, dtype = state_ops.leaves(self.core.row_shapes()), self.core.state_dtype()
        specs = {key: Unbounded(shape=r.shape, dtype=r.dtype or dtype) for key, r in zip(self.state_keys, rows)}
        return TensorDictPrimer(specs, expand_specs=True)

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        x, stored, init = self._read(tensordict)
        batch = tuple(tensordict.batch_size)
        if self.recurrent_mode:
            y, after = self._sequence(x, stored, init, batch)
        else:
            self._refuse_a_time_batch(tensordict)
            y, after = self._step(x, stored, init, batch)
        tensordict.set(self.out_keys[0], y)
        for key, leaf in zip(self.out_keys[1:], state_ops.ordered_leaves(after, self.core.row_shapes())):
            tensordict.set(key, leaf)
        return tensordict

    # --- the two modes ------------------------------------------------------------------------------------------

    def _step(self, x: Tensor, stored: State, init: Tensor, batch: tuple[int, ...]) -> tuple[Tensor, State]:
        """Every element of the batch is one step of its own environment."""
        state = state_ops.tree_map(lambda r, leaf: leaf.reshape(-1, *r.shape), self.core.row_shapes(), stored)
        y, after = self.core(x.reshape(-1, x.shape[-1]), state, init.reshape(-1))
        return y.view(*batch, -1), state_ops.tree_map(lambda leaf: leaf.reshape((*batch, *leaf.shape[1:])), after)

    def _sequence(self, x: Tensor, stored: State, init: Tensor, batch: tuple[int, ...]) -> tuple[Tensor, State]:
        """The last batch dimension is time; all others are environments."""
        if not batch:
            raise ValueError(
                "a sequence needs a time dimension: batch dimensions [..., T], got a TensorDict without any"
            )
        steps = batch[-1]

        def time_major(t: Tensor, row: int) -> Tensor:
            """[..., T, *row] -> [T, B, *row]; `row`: how many dimensions the row has."""
            return t.reshape(-1, steps, *t.shape[t.dim() - row :]).transpose(0, 1)

        rows = state_ops.tree_map(lambda leaf, r: time_major(leaf, len(r.shape)), stored, self.core.row_shapes())
        y, after = trajectories.run(self.core, time_major(x, 1), rows, time_major(init, 0))
        back = state_ops.tree_map(lambda leaf: leaf.transpose(0, 1).reshape((*batch, *leaf.shape[2:])), after)
        return y.transpose(0, 1).reshape(*batch, -1), back

    # --- what comes in ------------------------------------------------------------------------------------------

    def _read(self, td: TensorDictBase) -> tuple[Tensor, State, Tensor]:
        x = td.get(self.in_keys[0], None)
        if x is None:
            raise KeyError(f"RecurrentModule reads {self.in_keys[0]!r}, which is not in the TensorDict: {_keys(td)}")
        if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(x):
            raise RuntimeError(
                "a core cannot run under torch.vmap: where trajectories begin is in the data; "
                "pass deactivate_vmap=True (or shifted=True) to GAE or the value estimator"
            )
        init = td.get(INIT_KEY, None)
        if init is None:
            raise KeyError(
                f"no {INIT_KEY!r} in the TensorDict ({_keys(td)}): append torchrl.envs.InitTracker() to the "
                "environment, or collect with auto_register_policy_transforms=True"
            )
        if init.dtype != torch.bool:
            raise TypeError(f"{INIT_KEY!r} has dtype {init.dtype}, expected torch.bool; use flags.bool()")
        if init.numel() != td.batch_size.numel():
            raise ValueError(
                f"{INIT_KEY!r} has shape {tuple(init.shape)}, expected one flag per element of {list(td.batch_size)}"
            )
        init = init.reshape(td.batch_size)
        stored = [td.get(key, None) for key in self.state_keys]
        missing = [key for key, leaf in zip(self.state_keys, stored) if leaf is None]
        if missing and values_are_readable(init):
            starts = init[..., 0] if self.recurrent_mode and init.dim() else init
            if not bool(starts.all()):
                warnings.warn(
                    f"no {missing[0]!r} in the TensorDict ({_keys(td)}): a step inside an episode starts from a state of zeros. "
                    "Append module.make_tensordict_primer() to the environment, or collect with "
                    "auto_register_policy_transforms=True",
                    stacklevel=2,
                )
        rows, dtype = state_ops.leaves(self.core.row_shapes()), self.core.state_dtype()
        leaves = [
            torch.zeros(*td.batch_size, *row.shape, dtype=row.dtype or dtype, device=x.device) if leaf is None else leaf
            for row, leaf in zip(rows, stored)
        ]
        return x, state_ops.from_leaves(leaves, like=self.core.row_shapes()), init

    def _refuse_a_time_batch(self, td: TensorDictBase) -> None:
        """A batch that holds time but runs step by step would train with gradients through one step only."""
        if recurrent_mode() is not None or self._default_mode is not None or not td.batch_dims:
            return
        collected = td.get(("next", "done"), None) is not None or td.get(("next", "reward"), None) is not None
        if collected and (td.names or [None])[-1] in (None, "time") and td.batch_size[-1] > 1:
            raise RuntimeError(
                f"this TensorDict {list(td.batch_size)} holds finished steps, but no recurrent mode is set: wrap the "
                "call in torchrl.modules.set_recurrent_mode(True) to run sequences, or in set_recurrent_mode(False) "
                "if every element is a separate step"
            )


def _keys(td: TensorDictBase) -> str:
    return ", ".join(sorted(map(str, td.keys(include_nested=True))))
