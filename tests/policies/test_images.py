"""Images and grids: which Box is one, how its numbers lie, what reads it, and that all of it trains, saves and exports."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

import holdfast as hf
from holdfast.algorithms import make_policy
from holdfast.config import ALGORITHMS
from holdfast.policies import encoders
from holdfast.policies.images import Grid, Image, layout_of

PAGE = Path(__file__).parents[2] / "docs" / "images.md"
ROW = re.compile(r"^\| `(\(.*?\))` \| (\w+)(?: (-?\d+) to (\d+))? \| .* \| (.*) \|$", re.M)
TABLE = [
    (tuple(int(side) for side in shape.strip("(),").split(",")), dtype, low, high, expected)
    for shape, dtype, low, high, expected in ROW.findall(PAGE.read_text())
]


def box(shape: tuple[int, ...], dtype: str = "uint8", low: float = 0, high: float = 255) -> spaces.Box:
    return spaces.Box(low, high, shape, np.dtype(dtype).type)


def as_floats(x: Any) -> Any:
    return torch.as_tensor(x).float() / 255


def test_the_page_lists_at_least_twenty_spaces() -> None:
    assert len(TABLE) >= 20


@pytest.mark.parametrize(("shape", "dtype", "low", "high", "expected"), TABLE)
def test_every_layout_gets_the_network_that_the_page_says_or_an_error(
    shape: tuple[int, ...], dtype: str, low: str, high: str, expected: str
) -> None:
    space = box(shape, dtype, *((float(low), float(high)) if low else (-np.inf, np.inf)))
    if expected.startswith("error"):
        with pytest.raises(ValueError, match=expected.removeprefix("error: --") + "="):
            encoders.for_space(space)
        return
    encoder = encoders.for_space(space)
    assert (str(encoder) or "vector") == expected
    space.seed(0)
    obs = torch.as_tensor(np.stack([space.sample(), space.sample()]))
    assert encoder(obs).shape == (2, encoder.size)


@pytest.mark.parametrize("kind", ["nature", "impala", "grid"])
@pytest.mark.parametrize("shape", [(12, 10, 3), (3, 12, 10), (1, 12, 10, 3), (3, 12, 10, 1)])
def test_a_picture_gives_the_same_features_in_every_layout(kind: str, shape: tuple[int, ...]) -> None:
    picture = torch.randint(0, 256, (5, 3, 12, 10), dtype=torch.uint8)
    orders = {
        (12, 10, 3): picture.permute(0, 2, 3, 1),
        (3, 12, 10): picture,
        (1, 12, 10, 3): picture.permute(0, 2, 3, 1).unsqueeze(1),
        (3, 12, 10, 1): picture.unsqueeze(-1),  # channels as frames
    }
    reference = encoders.for_space(box((3, 12, 10)), encoder=kind)
    encoder = encoders.for_space(box(shape), encoder=kind)
    encoder.load_state_dict(reference.state_dict())
    torch.testing.assert_close(encoder(orders[shape]), reference(picture))


def test_numbers_are_scaled_from_their_bounds_so_that_bytes_and_floats_give_the_same_features() -> None:
    pixels = torch.randint(0, 256, (4, 40, 40, 3), dtype=torch.uint8)
    of_bytes = encoders.for_space(box((40, 40, 3)))
    for low, high in ((0.0, 1.0), (-1.0, 1.0)):
        of_floats = encoders.for_space(box((40, 40, 3), "float32", low, high))
        of_floats.load_state_dict(of_bytes.state_dict())
        torch.testing.assert_close(of_floats(pixels / 255 * (high - low) + low), of_bytes(pixels))


def test_a_code_is_known_by_its_embedding_and_not_by_its_size() -> None:
    grid = encoders.for_space(box((7, 7, 2)))
    assert isinstance(grid, Grid)
    swapped = encoders.for_space(box((7, 7, 2)))
    swapped.load_state_dict(grid.state_dict())
    with torch.no_grad():  # 3 and 200 change places in the second channel
        swapped.embedding[[256 + 3, 256 + 200]] = grid.embedding[[256 + 200, 256 + 3]]
    x = torch.zeros(2, 7, 7, 2, dtype=torch.uint8)
    x[0, 2, 3, 1], x[1, 2, 3, 1] = 3, 200
    torch.testing.assert_close(grid(x), swapped(x.flip(0)))
    assert not torch.allclose(grid(x)[0], grid(x)[1])


def test_codes_between_other_bounds_are_read_and_those_outside_are_refused() -> None:
    grid = encoders.for_space(box((9, 9, 3), "int64", -1, 6))
    x = torch.full((1, 9, 9, 3), -1)
    assert grid(x).shape == (1, grid.size) and not torch.allclose(grid(x), grid(x + 7))
    for wrong in (-2, 7):
        with pytest.raises(ValueError, match="allows -1 to 6"):
            grid(x + 1 + wrong)
    with pytest.raises(ValueError, match=r"grid reads integers between bounds.*use encoder='nature'"):
        encoders.for_space(box((9, 9, 3), "float32", 0, 1), encoder="grid")


def test_channels_decide_where_the_shape_does_not_tell() -> None:
    assert layout_of((20, 24, 28), "last")[:3] == (20, 24, 28)
    assert layout_of((20, 24, 28), "first")[:3] == (24, 28, 20)
    config = hf.PPOConfig(channels="last")
    space = box((3, 3, 3))
    policy = make_policy(config, space, spaces.Discrete(2))
    assert str(policy.encoder) == "grid of codes 3 x 3 x 3, channels last"


# --- policies of earlier versions ----------------------------------------------------------------------------------------


def features_of_0_2(encoder: Any, x: torch.Tensor) -> torch.Tensor:
    last = x.shape[-1] in (1, 3, 4) and x.shape[1] not in (1, 3, 4)
    return encoder.network((x.permute(0, 3, 1, 2) if last else x).float() / 255.0)


@pytest.mark.parametrize(
    ("shape", "weights"),
    [
        ((7, 7, 3), [(32, 3, 3, 3), (32, 32, 3, 3)]),
        ((3, 12, 12), [(32, 3, 3, 3), (32, 32, 3, 3)]),
        ((84, 84, 12), [(32, 84, 3, 3), (32, 32, 3, 3)]),  # the height for channels
        ((1, 3, 3), [(32, 1, 2, 2)]),
        ((40, 36, 1), [(32, 1, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]),
    ],
)
def test_encoder_0_2_is_the_network_that_0_2_made(shape: tuple[int, ...], weights: list[tuple[int, ...]]) -> None:
    encoder = encoders.for_space(box(shape), encoder="0.2")
    found = {name: tuple(tensor.shape) for name, tensor in encoder.state_dict().items()}
    assert {f"network.{2 * i}.weight": size for i, size in enumerate(weights)}.items() <= found.items()
    x = torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
    assert torch.equal(encoder(x), features_of_0_2(encoder, x))


@pytest.mark.parametrize("space", [box((84, 84)), box((8, 8, 3), "float32", 0, 1), box((4, 84, 84, 1))])
def test_encoder_0_2_flattens_what_0_2_flattened(space: spaces.Box) -> None:
    assert isinstance(encoders.for_space(space, encoder="0.2"), encoders.Vector)


def test_a_config_and_a_policy_folder_of_0_2_get_the_network_of_0_2(tmp_path: Path) -> None:
    from holdfast.runs import pretrained

    old = json.loads((Path(__file__).parents[1] / "runs" / "run_0_2" / "lstm" / "config.json").read_text())
    assert hf.RunConfig.from_dict(old).encoder == "0.2" and hf.PPOConfig().encoder == "auto"

    policy = hf.ActorCritic(box((7, 7, 3)), spaces.Discrete(3), "gru", 8, encoder="0.2")
    hf.save_pretrained(policy, tmp_path / "policy")
    shared = pretrained.read(tmp_path / "policy")
    for name in ("encoder", "channels"):  # 0.2 did not write them
        del shared.config["policy"]["arguments"][name]
    files = {name: (tmp_path / "policy" / name).read_bytes() for name in (pretrained.WEIGHTS, pretrained.CARD)}
    files[pretrained.CONFIG] = json.dumps(shared.config).encode()
    (tmp_path / "policy" / pretrained.CONFIG).write_bytes(files[pretrained.CONFIG])
    (tmp_path / "policy" / pretrained.MANIFEST).write_bytes(pretrained.manifest_of(files))
    loaded = hf.load(tmp_path / "policy")
    obs = np.random.default_rng(0).integers(0, 256, (4, 7, 7, 3), np.uint8)
    assert isinstance(loaded.encoder, Image)
    np.testing.assert_array_equal(loaded.act(obs).value, policy.act(obs).value)


# --- encoders by name --------------------------------------------------------------------------------------------------


class Mean(nn.Module):
    """The mean of each channel."""

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        self.size = space.shape[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().mean((1, 2)) / 255


def test_a_named_encoder_reads_the_images_of_a_dict_and_nothing_else() -> None:
    space = spaces.Dict(rgb=box((36, 36, 3)), depth=box((36, 36)), joints=box((4, 5), "float32", -1, 1))
    parts = encoders.for_space(space, encoder="impala").parts
    assert [str(part) for part in parts] == [
        "IMPALA CNN 36 x 36 x 3, channels last",
        "IMPALA CNN 36 x 36 x 1",
        "vector of 20 numbers",
    ]
    assert [type(part) for part in encoders.for_space(space["joints"], encoder=lambda s: Mean(s)).modules()] == [Mean]
    with pytest.raises(ValueError, match=r"encoder='nature' reads images .* leave it out"):
        encoders.for_space(spaces.Discrete(3), encoder="nature")
    with pytest.raises(ValueError, match="unknown encoder 'natur'; one of auto, vector, nature"):
        encoders.for_space(space, encoder="natur")
    with pytest.raises(ValueError, match="encoder='natur' must be one of auto, vector, nature"):
        hf.PPOConfig(encoder="natur")
    with pytest.raises(TypeError, match=r"made a Linear, expected an nn\.Module that turns"):
        encoders.for_space(space["rgb"], encoder=lambda s: nn.Linear(2, 2))


def test_an_encoder_of_ones_own_is_named_in_the_config_and_imported_from_files_only_if_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("module_of_an_encoder")
    module.Mean = Mean  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "module_of_an_encoder", module)
    options = dict(
        encoder="module_of_an_encoder:Mean", core="gru", hidden_size=4, num_envs=2, num_steps=8, total_steps=16
    )
    config = hf.PPOConfig(**options, final_eval_episodes=2, run_dir=str(tmp_path), quiet=True)
    trainer = hf.Trainer(config, env=Shades)
    assert isinstance(trainer.policy.encoder.parts[0], Mean)
    trainer.run()
    with pytest.raises(ValueError, match=r"names encoder 'module_of_an_encoder:Mean'.*--allow-imports"):
        hf.load(tmp_path)
    assert isinstance(hf.load(tmp_path, allow_imports=True).encoder.parts[0], Mean)
    policy = hf.ActorCritic(box((9, 40, 3)), spaces.Discrete(2), hidden_size=4, encoder=Mean)
    hf.save_pretrained(policy, tmp_path / "shared")
    assert isinstance(hf.load(tmp_path / "shared", allow_imports=True).encoder, Mean)


# --- the whole way -------------------------------------------------------------------------------------------------------


class Shades(gym.Env[Any, Any]):
    """Bright or dark, and a text. Action 1 is right where it is bright. Episodes are cut off after six steps."""

    observation_space = spaces.Dict(
        mission=spaces.Text(20), picture=spaces.Box(0, 255, (12, 30, 3), np.uint8), direction=spaces.Discrete(4)
    )
    action_space: Any = spaces.Discrete(2)

    def _see(self) -> Any:
        self.bright = int(self.np_random.integers(2))
        picture = np.full((12, 30, 3), 200 * self.bright, np.uint8)
        return {"mission": "be right", "picture": picture, "direction": self.count % 4}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self._see(), {}

    def step(self, action: Any) -> Any:
        reward, self.count = float(action == self.bright), self.count + 1
        return self._see(), reward, False, self.count == 6, {}


@pytest.mark.parametrize("algorithm", ["ppo", "pqn", "r2d2", "sac"])
def test_every_algorithm_trains_on_images_which_stay_bytes_and_texts_are_left_out(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = dict(num_envs=4, num_steps=8, core="gru", hidden_size=8, total_steps=64, final_eval_episodes=4)
    if algorithm in ("r2d2", "sac"):
        sizes |= dict(warmup_steps=32, batch_size=4, sequence_length=8)
    kind = ALGORITHMS[algorithm]
    known = {name: value for name, value in sizes.items() if name in kind.__dataclass_fields__}
    seen = []

    class Look(hf.Callback):
        def on_rollout_end(self, trainer: Any, segment: Any) -> None:
            seen.append({key: part.dtype for key, part in segment.obs.get("obs", segment.obs).items()})

    trainer = hf.Trainer(kind(**known, run_dir=str(tmp_path), device="cpu"), env=Shades, callbacks=[Look()])
    result = trainer.run()
    assert seen[0] == {"direction": torch.int64, "picture": torch.uint8}
    assert 0 <= result.mean_return <= 6
    words = capsys.readouterr().out
    assert "encoder picture: CNN 12 x 30 x 3, channels last" in words
    assert "encoder mission: a text, which is left out" in words
    if algorithm in ("r2d2", "sac"):
        rows = trainer.algorithm.buffer.sample(2, length=8).obs["obs"]
        assert rows["picture"].dtype == torch.uint8


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_texts_are_left_out_of_collected_segments_whatever_the_autoreset_mode(mode: AutoresetMode) -> None:
    env = SyncVectorEnv([Shades] * 2, autoreset_mode=mode)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "gru", 4)
    segment = next(iter(hf.collect(env, policy, steps=16)))
    assert set(segment.obs) == {"direction", "picture"} and bool(segment.truncated.any())
    hf.ppo_loss(policy, segment).backward()
    obs, _ = env.reset()
    assert policy.act(obs).action.shape == (2,)
    assert hf.Runner(policy).act(obs).action.shape == (2,)


def test_raw_atari_frames_are_met_with_the_two_wrappers_that_help() -> None:
    space = box((210, 160, 3))
    policy = hf.ActorCritic(space, spaces.Discrete(2), hidden_size=4)
    lines = encoders.encoder_lines(policy, space)
    assert "AtariPreprocessing(env) and FrameStackObservation(env, 4)" in lines[1] and len(lines) == 2
    assert len(encoders.encoder_lines(policy, box((84, 84)))) == 1


def images() -> spaces.Dict:
    return spaces.Dict(
        grid=box((7, 7, 3)), codes=box((5, 6, 1), "int64", 0, 9), rgb=box((36, 40, 3)), frames=box((2, 36, 36, 1)),
        floats=box((3, 12, 12), "float32", -1, 1),
    )  # fmt: skip


@pytest.mark.parametrize("encoder", ["auto", "impala"])
def test_an_exported_policy_sees_images_as_the_policy_does(encoder: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    space = images() if encoder == "auto" else spaces.Dict(rgb=box((36, 40, 3)))
    policy = hf.ActorCritic(space, spaces.Discrete(5), "gru", 8, encoder=encoder)
    hf.export_policy(policy, tmp_path / "policy.onnx")
    space.seed(0)
    samples = [space.sample() for _ in range(12)]
    obs = {key: np.stack([sample[key] for sample in samples]) for key in space}
    values = [hf.Runner(source).act(obs).value for source in (policy, tmp_path / "policy.onnx")]
    np.testing.assert_allclose(*values, atol=1e-5)
    assert np.ptp(values[0]) > 1e-3


def test_actor_and_critic_may_see_other_images() -> None:
    policy = hf.ActorCritic(
        images(), spaces.Discrete(3), "gru", 8, actor_obs=("grid",), critic_obs=("rgb", "codes"), normalize_obs=True
    )
    lines = encoders.encoder_lines(policy, images())
    assert lines == [
        "grid: grid of codes 7 x 7 x 3, channels last",
        "codes: grid of codes 5 x 6 x 1, channels last",
        "rgb: CNN 36 x 40 x 3, channels last",
    ]
    space = images()
    space.seed(0)
    obs = {key: np.stack([part]) for key, part in space.sample().items()}
    policy.act(obs)
    policy.update_normalizer({key: torch.as_tensor(part) for key, part in obs.items()})
    policy.predict({"grid": obs["grid"]})


def test_the_doctor_finds_nothing_wrong_with_images_and_grids() -> None:
    space = spaces.Dict(grid=box((7, 7, 3)), rgb=box((12, 30, 3)))
    assert hf.doctor.examine(hf.ActorCritic(space, spaces.Discrete(3), "gru", 8)).ok
