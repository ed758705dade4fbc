"""How fast our POPGym environments step, without a policy: seconds per step and environment steps per second.

    python benchmarks/popgym_envs.py
    python benchmarks/popgym_envs.py --device cuda --only Battleship

On a GPU the step is captured in a CUDA graph, as rollouts do it. `kernels` counts the tensor operations of one step that
start a kernel (views are not counted): about 3 microseconds each inside a graph. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from gymnasium import spaces
from torch.utils._python_dispatch import TorchDispatchMode

import holdfast.envs


def random_action(env: holdfast.envs.TorchVectorEnv) -> torch.Tensor:
    space = env.single_action_space
    if isinstance(space, spaces.Box):
        return torch.rand(env.num_envs, *space.shape, device=env.device) * 4 - 2
    if isinstance(space, spaces.MultiDiscrete):
        columns = [torch.randint(int(n), (env.num_envs,), device=env.device) for n in space.nvec]
        return torch.stack(columns, 1)
    return torch.randint(int(space.n), (env.num_envs,), device=env.device)


class CountKernels(TorchDispatchMode):
    """Counts operations whose result has storage of its own."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        allocates_only = func.overloadpacket.__name__ in ("empty", "detach", "alias")
        if not func.is_view and not allocates_only:
            self.count += 1
        return result


def kernels_per_step(env: holdfast.envs.TorchVectorEnv, actions: torch.Tensor) -> int:
    with CountKernels() as counted:
        env.transition(env.state, actions, env.draw())
    return counted.count


def stepper(env: holdfast.envs.TorchVectorEnv, actions: torch.Tensor) -> Callable[[], None]:
    """A function that does one step: `transition`, replayed as a CUDA graph on a GPU."""
    if env.device.type != "cuda":
        return lambda: env.step(actions) and None
    state = {name: leaf.clone() for name, leaf in env.state.items()}

    def step() -> None:
        moved = env.transition(state, actions, env.draw())
        for name, leaf in state.items():
            leaf.copy_(moved.state[name])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(env.generator)
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds_per_step(step: Callable[[], None], device: torch.device, budget: float) -> float:
    def run(times: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / times

    run(3)
    times = max(3, int(budget / run(3)))
    return min(run(max(1, times // 3)) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-envs", type=int, default=8192)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="only ids that contain this text")
    parser.add_argument("--seconds", type=float, default=0.3, help="measuring time per environment")
    args = parser.parse_args()
    print(
        f"{args.num_envs} environments, {args.device}, torch {torch.__version__}, {torch.get_num_threads()} threads\n"
    )
    print("| environment | ms per step | million steps/s | kernels |\n|---|---|---|---|")
    for row in holdfast.envs.list_envs():
        if args.only not in row.id:
            continue
        env = holdfast.envs.make(row.id, args.num_envs, device=args.device, seed=0)
        env.reset()
        actions = random_action(env)
        kernels = kernels_per_step(env, actions)
        seconds = seconds_per_step(stepper(env, actions), env.device, args.seconds)
        name = row.id.removeprefix("holdfast/").removesuffix("-v0")
        print(f"| {name} | {1e3 * seconds:.3f} | {args.num_envs / seconds / 1e6:.2f} | {kernels} |", flush=True)


if __name__ == "__main__":
    main()
