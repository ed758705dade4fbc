"""Every example runs, shortened by its arguments, and shows what it says it shows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from examples.test_recipes import RUNS as RECIPES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# file: (arguments, what its result must satisfy)
RUNS = {
    "auxiliary_loss.py": (["15000"], lambda r: r["with"] > r["without"] + 0.5),
    "rnd.py": (["60000"], lambda r: r["with"] > 0.9 > 0.1 > r["without"]),
    "dict_actions.py": (["12000"], lambda r: r["mean_return"] > 0.55),  # one part alone gets 0.5 at most
    "own_memory.py": (["30000"], lambda r: r["mean_return"] > 0.5),
    "own_loop.py": (["--updates", "2", "--num-steps", "32"], lambda r: r["first_ratio_gap"] < 1e-5),
    "own_sac_loop.py": (["1100"], lambda r: r["last_loss"] < 0.5 * r["first_loss"]),
    "meta_rl.py": (["--updates", "40"], lambda r: r["never"] > r["zero"]),
    "manual_reset.py": (
        [],
        lambda r: r["others_changed"] == 0 and r["line_2_from_a_newcomer"] < 1e-6 < r["line_2_changed"],
    ),
    "own_env_and_policy.py": (["--steps", "6000"], lambda r: r["mean_return"] > 0.9),
    "own_torch_env.py": (["--steps", "20000", "--seconds", "0.1"], lambda r: r["mean_return"] > 0.9),
    "jax_own_env.py": (["--steps", "30000"], lambda r: r["mean_return"] > 0.9),
    "craftax_gru.py": (
        ["--steps", "1024", "--num-envs", "8", "--hidden-size", "16", "--device", "cpu"],
        lambda r: r["steps"] == 1024 and r["first_replay_gap"] < 1e-5,
    ),
    "envpool_async.py": (["--steps", "8000"], lambda r: r["mean_return"] > 50 and r["worst_replay_gap"] <= 1e-5),
    "pettingzoo_signals.py": (["--steps", "8000"], lambda r: r["mean_return"] > 0.9),
    "two_agents.py": ([], lambda r: max(r.values()) < 1e-5),
    "several_policies.py": (["--steps", "80"], lambda r: r["changes"] > 3 and r["worst"] < 1e-5),
    "sb3_recurrent_ppo.py": (["--steps", "1024"], lambda r: r["mean_return"] > 5),
    "sb3_own_policy.py": (
        ["--steps", "512"],
        lambda r: "second time" in r["as_written"] and "Expected hidden" in r["with_detach"] and r["steps"] == 512,
    ),
    "sb3_masked.py": (["--steps", "2048"], lambda r: r["steps"] == 2048),
    "torchrl_ppo.py": (["--updates", "1"], lambda r: r["first_kl"] < 1e-5),
    "torchrl_recurrent_ppo_docs.py": (["--batches", "1"], lambda r: r["first_kl"] < 1e-5),
}

NEEDS = {
    "jax_own_env.py": "jax",  # this and the next two: in `make test-peers`
    "craftax_gru.py": "craftax",
    "envpool_async.py": "envpool",
    "pettingzoo_signals.py": "pettingzoo",
    "sb3_recurrent_ppo.py": "sb3_contrib",
    "sb3_own_policy.py": "sb3_contrib",
    "sb3_masked.py": "sb3_contrib",
    "torchrl_ppo.py": "torchrl",
    "torchrl_recurrent_ppo_docs.py": "torchrl",
}


def run(path: Path, arguments: list[str]):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(arguments)


@pytest.fixture(autouse=True)
def threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", RUNS)
def test_example_runs_and_holds_what_it_says(name):
    pytest.importorskip(NEEDS.get(name, "torch"))
    arguments, holds = RUNS[name]
    result = run(EXAMPLES / name, arguments)
    assert holds(result), result


def test_torchrls_documented_recurrent_ppo_trains_as_with_its_own_module():
    pytest.importorskip("torchrl")
    path = EXAMPLES / "torchrl_recurrent_ppo_docs.py"
    ours, theirs = (run(path, ["--batches", "6", "--memory", memory]) for memory in ("holdfast", "torchrl"))
    assert ours["late_return"] == theirs["late_return"]  # every action the same
    assert abs(ours["weight_norm"] - theirs["weight_norm"]) < 1e-5


def test_every_example_is_run_by_the_tests():
    elsewhere = {"rsl_rl_robot.py"}  # in test_rsl_rl_robot.py, with rsl_rl
    tested = set(RUNS) | elsewhere | {p.name for p in (EXAMPLES / "migrating").glob("*.py")}
    tested |= {f"{name}.py" for name in RECIPES}
    assert {p.name for p in EXAMPLES.rglob("*.py")} <= tested
