"""Code and commands of the documentation: programs run, fragments parse and use names that exist, flags are flags.

Pages that have a test of their own: README.md and training.md (tests/test_readme.py), doctor.md, frameworks.md, deployment.md,
bench.md. Here every page is checked, and those in RUN are run as they are printed.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
import textwrap

import pytest
import torch

import holdfast as hf
import holdfast.envs
from docs.blocks import PAGES, ROOT, blocks, commands
from holdfast.config import PRESETS

sys.path.insert(0, str(ROOT / "docs" / "tools"))
commands_page = importlib.import_module("commands_page")

RUN = [
    "docs/index.md",
    "docs/start.md",
    "docs/own_policy.md",
    "docs/own_memory.md",
    "docs/own_environment.md",
    "docs/own_loop.md",
    "docs/recurrent_ppo.md",
]
RUN += ["docs/memories.md", "docs/performance/gpu.md", "docs/popgym.md"]


def names_that_a_page_takes_for_granted(page: str) -> dict:
    if page == "docs/performance/gpu.md":
        a, b, h0 = torch.rand(5, 3, 4), torch.rand(5, 3, 4), torch.zeros(3, 4)
        return {"a": a, "b": b, "h0": h0, "resets": torch.rand(5, 3) < 0.3, "fill": torch.ones(4)}
    if page == "docs/popgym.md":
        space = holdfast.envs.make("holdfast/BattleshipEasy-v0", num_envs=64).action_space
        return {"actions": torch.as_tensor(space.sample())}
    return {"hf": hf} if page == "docs/memories.md" else {}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """An empty folder, one thread, and a preset that takes a second."""
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    fast = {"total_steps": 4096, "num_envs": 16, "hidden_size": 16, "threads": 1, "quiet": True, "tensorboard": False}
    monkeypatch.setitem(PRESETS, "repeat-previous-easy", {**PRESETS["repeat-previous-easy"], **fast})
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("page", RUN)
def test_a_page_runs_as_it_is_printed(page, small):
    torch.manual_seed(0)
    names = names_that_a_page_takes_for_granted(page)
    code = blocks(page, "python")
    assert code
    for block in code:
        exec(compile(block, page, "exec"), names)


def test_the_class_of_the_page_on_environments_is_that_of_the_example():
    printed = blocks("docs/own_environment.md", "python")[0]
    assert printed[printed.index("class Fetch") :] in (ROOT / "examples" / "own_torch_env.py").read_text()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_blocks_parse_and_use_names_that_exist(page):
    for block in blocks(page, "python"):
        tree = ast.parse(textwrap.dedent(block))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (path := dotted(node)):
                first, *rest = path.split(".")
                if first in ("hf", "holdfast"):
                    assert resolves(hf, rest), f"{page}: {path}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast"):
                module = import_if_possible(node.module)
                missing = [alias.name for alias in node.names if module and not resolves(module, [alias.name])]
                assert not missing, f"{page}: {node.module} has no {missing}"


def dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return inner and f"{inner}.{node.attr}"


def resolves(start, names: list[str]) -> bool:
    """Whether each name is an attribute or a submodule of the one before."""
    here = start
    for name in names:
        if not hasattr(here, name):
            if not hasattr(here, "__path__"):
                return False
            here = import_if_possible(f"{here.__name__}.{name}")
            if here is None:
                return False
        else:
            here = getattr(here, name)
    return True


def import_if_possible(name: str):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if "pip install" in str(error):  # an extra that is not installed
            return None
        raise


def test_the_two_memories_for_cleanrl_give_the_same_numbers():
    before, after = blocks("docs/migrate.md", "python")[:2]
    names: dict = {}
    exec(before, names)
    exec(after, names)
    torch.manual_seed(3)
    old, new = names["Memory"](), names["NewMemory"]()
    new.load_state_dict(old.state_dict())
    x, done = torch.randn(20 * 5, 64), (torch.rand(20 * 5) < 0.2).float()
    h, c = torch.randn(2, 1, 5, 128)
    y_old, state_old = old.get_states(x, (h, c), done)
    y_new, state_new = new.get_states(x, {"h": h.transpose(0, 1), "c": c.transpose(0, 1)}, done)
    torch.testing.assert_close(y_new, y_old, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(state_new["c"].transpose(0, 1), state_old[1], atol=1e-6, rtol=1e-5)


def test_the_pairs_for_frameworks_run(small):
    pytest.importorskip("sb3_contrib")
    pytest.importorskip("torchrl")
    from broken.base import size
    from broken.cleanrl_agents import Agent

    env = holdfast.envs.make("CartPole-v1", num_envs=4)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core="lstm", hidden_size=8)
    segment = next(hf.collect(env, policy, steps=6))
    state, done = (torch.zeros(1, 4, size.hidden),) * 2, torch.zeros(4)
    given = {
        "agent": Agent(),
        "obs": torch.zeros(4, size.obs),
        "lstm_state": state,
        "done": done,
        "initial_state": state,
    }
    given |= {
        "b_obs": torch.zeros(8, size.obs),
        "b_dones": torch.zeros(8),
        "b_actions": torch.zeros(8),
        "rows": slice(8),
    }
    given |= {name: type(name, (), {}) for name in ("TorchRLModule", "ValueFunctionAPI")}
    given["train_cfg"] = {"actor": {}, "critic": {}, "algorithm": {}}
    for block in blocks("docs/migrate.md", "python")[
        2:-4
    ]:  # the last four are parts of the programs in examples/migrating
        names = dict(given)
        if "policy.act" in block:
            names |= {"policy": policy, "segment": segment, "obs": segment.obs[0], "done": segment.resets[0]}
        exec(compile(block, "docs/migrate.md", "exec"), names)
        if "new" in names:
            assert (names["new"].log_prob - segment.log_prob).abs().max() < 1e-5


# --- commands -----------------------------------------------------------------------------------------------------


@functools.cache
def flags_of(command: str) -> set[str]:
    options = commands_page.read_help(commands_page.help_of(command))[2]
    flags = {flag for names, _, _ in options for flag in re.findall(r"(?<!\S)(--?[a-z][\w-]*)", names)}
    return flags | {"--help"}


@functools.cache
def flags_of_program(path: str) -> str:
    """The source of a program, and of the modules next to it that it imports: its flags are somewhere in there."""
    source = (ROOT / path).read_text()
    beside = [
        ROOT / path.rpartition("/")[0] / f"{name}.py" for name in re.findall(r"^(?:from|import) (\w+)", source, re.M)
    ]
    return source + "".join(file.read_text() for file in beside if file.exists())


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_exist_and_so_do_their_flags(page):
    from holdfast.cli.commands import COMMANDS

    extras = set(re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.M))
    for program, *words in commands(page):
        line = " ".join([program, *words])
        flags = {word.split("=")[0] for word in words if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", word)}
        if program == "make":
            assert f"\n{words[0]}:" in (ROOT / "Makefile").read_text(), f"{page}: {line}"
        elif program == "pip":
            wanted = {name for word in words for group in re.findall(r"\[(.*?)\]", word) for name in group.split(",")}
            ours = wanted if "holdfast" in line or '".[' in line or ".[" in line else set()
            assert ours <= extras, f"{page}: {line}"
        elif program == "python" and words[0].endswith(".py"):
            assert (ROOT / words[0]).exists(), f"{page}: {line}"
            source = flags_of_program(words[0])
            unknown = {flag for flag in flags if flag not in source and flag.strip("-").replace("-", "_") not in source}
            assert not unknown, f"{page}: {line}"
        elif program == "torchrun":
            flags = {flag for flag in re.findall(r" (--[a-z][\w-]*)", line.partition("holdfast train")[2])}
            assert flags <= flags_of("train"), f"{page}: {line}"
        elif program == "holdfast" and words[0] in COMMANDS:
            unknown = {flag for flag in flags if flag not in flags_of(words[0])}
            assert not unknown, f"{page}: {line}: {unknown}"
            if "--preset" in words and (preset := words[words.index("--preset") + 1]).islower() and "/" not in preset:
                assert preset in PRESETS or "..." in preset, f"{page}: {line}"
        elif program == "holdfast":
            assert words[0].startswith(("-", "COMMAND")), f"{page}: {line}"
