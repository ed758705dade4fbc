"""No module uses another module's `_private` names.

What another module needs is public, with a good name. `self._x`, `cls._x` and `super()._x` are the object's own;
`other._x` is allowed where the same module defines `_x`, as in a comparison of two objects of one class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from structure.source_tree import modules

ALLOWED = {
    "_fields": "NamedTuple: documented",
    "_asdict": "NamedTuple: documented",
    "_version": "torch: counts changes in place of a tensor; no public name",
    "_replace": "NamedTuple: documented",
    "_foreach_norm": "torch: one call for all gradients; no public name",
    "_foreach_copy_": "torch: the same",
    "_foreach_lerp_": "torch: the same",
    "_step_supports_amp_scaling": "torch: whether an optimizer reads grad_scale and found_inf; no public name",
    "_has_any_global_hook": "torch: the only way to see hooks on all modules",
    "_forward_hooks": "torch: the only way to see a module's hooks",
    "_forward_pre_hooks": "torch: the same",
    "_backward_hooks": "torch: the same, also of a tensor",
    "_backward_pre_hooks": "torch: the same",
    "_post_accumulate_grad_hooks": "torch: the same, of a parameter",
    "_sequence_nr": "torch: the order in which autograd recorded its nodes; no public name",
    "_assert_async": "torch: a check on the device that waits for nothing; no public name",
    "_validate_args": "torch: the switch that Distribution itself reads",
    "_orig_mod": "torch: the module inside what torch.compile returned; no public name",
    "_BatchNorm": "torch: base class of the batch norms, imported by torch's own users",
    "_ConvNd": "torch: the same, of the convolutions",
    "_DropoutNd": "torch: the same, of the dropouts",
    "_dynamo": "torch: torch._dynamo.reset and its configuration have no public name",
    "_dynamo_marked_constant": "torch: assume_constant_result sets it, but imports the whole compiler first",
    "_ops": "torch: the module with the class of operators; no public name",
    "_functorch": "torch: whether a vmap is active; no public name",
    "_are_functorch_transforms_active": "torch: the same",
    "_is_tracing": "torch: whether torch.jit.trace is recording; no public name",
    "_dispatch_keys": "torch: whether a tensor is a fake or a wrapper; no public name",
    "_len_torch_dispatch_stack": "torch: the same, of modes",
    "_current_level": "torch: whether forward-mode differentiation is active; no public name",
    "_C": "torch: the module that holds some of these",
    "_cuda_clearCublasWorkspaces": "torch: what its own CUDA graphs call for the same reason; no public name",
    "_cuda_endAllocateToPool": "torch: ends what a failed capture has begun; no public name",
    "_cuda_releasePool": "torch: gives back the memory of a failed capture; no public name",
    "_cuda_getDevice": "torch: the current device without the checks that torch.cuda adds",
    "_cuda_getCurrentRawStream": "torch: the current stream as a number, for a kernel launch",
    "_env_obs": "gymnasium: the observations that a SyncVectorEnv could not stack; no public name",
    "_last_lstm_states": "sb3-contrib: where RecurrentPPO keeps its memory",
    "_rnn_initial_states": "skrl: where recurrent agents keep their memory; no public name",
    "_rnn_final_states": "skrl: the same",
    "_rnn_sequence_length": "skrl: how they cut what they stored",
    "_rnn_tensors_names": "skrl: the same",
    "_tensors_names": "skrl: the same",
    "_observation_preprocessor": "skrl: what they do to observations",
}
"""Names of other packages that have no public counterpart, and why each is used."""


def foreign_private_names(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and name of each use of a private name that the module does not define."""
    mine = set(_defined(tree))
    return [(line, name) for line, name in _used(tree) if name not in mine and name not in ALLOWED]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            parts = [part for alias in node.names for part in alias.name.split(".")]
            parts += (getattr(node, "module", None) or "").split(".")
            yield from ((node.lineno, part) for part in parts if _is_private(part))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) >= 2:
            target, name = node.args[:2]
            by_name = node.func.id in ("getattr", "setattr", "hasattr", "delattr") and not _is_own(target)
            if by_name and isinstance(name, ast.Constant) and isinstance(name.value, str) and _is_private(name.value):
                yield node.lineno, name.value


def _is_own(node: ast.AST) -> bool:
    """self, cls or super()."""
    if isinstance(node, ast.Call):
        node = node.func
        return isinstance(node, ast.Name) and node.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _defined(tree: ast.Module) -> Iterator[str]:
    """Functions, classes, variables and fields of the module, and attributes that its objects give themselves."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from holdfast.memory import _rows", ["_rows"]),
        ("import holdfast._hidden", ["_hidden"]),
        ("from holdfast import memory\nmemory._rows()", ["_rows"]),
        ("policy._encode(obs)", ["_encode"]),
        ("policy.core._step(x)", ["_step"]),
        ("getattr(policy, '_encode')(obs)", ["_encode"]),
        ("trainer._update = 3", ["_update"]),
        ("class A:\n    def f(self): return self._x + super()._y", []),
        ("class A:\n    def __init__(self): self._x = 1\n    def __eq__(self, other): return self._x == other._x", []),
        ("def _f(): ...\n_f()", []),
        ("torch._foreach_norm(x); row._fields; type(x).__name__; _ = x", []),
    ],
)
def test_the_reader_of_syntax_trees_sees_foreign_private_names(code, names):
    assert [name for _, name in foreign_private_names(ast.parse(code))] == names


def test_no_module_uses_the_private_names_of_another():
    uses = [f"{file}:{line} {name}" for file, tree in modules().items() for line, name in foreign_private_names(tree)]
    assert not uses, "make these public under a good name:\n" + "\n".join(uses)


def test_every_exception_is_still_needed():
    used = {name for tree in modules().values() for _, name in _used(tree)}
    texts = {node.value for tree in modules().values() for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert {name for name in ALLOWED if name not in used | texts} == set()
