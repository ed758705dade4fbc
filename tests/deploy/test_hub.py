"""Sharing policies: folders, and a local server that speaks the hub's API."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import holdfast as hf
from deploy.hub_server import HubServer
from holdfast.config.imports import ImportNotAllowedError
from holdfast.deploy import hub as sharing
from holdfast.runs import checkpoint, pretrained
from holdfast.runs.checkpoint import CheckpointError
from holdfast.training.evaluation import EvalResult
from pretrained_mutants import hunt

pytest.importorskip("safetensors")
pytest.importorskip("huggingface_hub")

BOX = spaces.Box(-1, 1, (3,), np.float32)


def small_policy(seed: int = 0, **options: Any) -> hf.ActorCritic:
    torch.manual_seed(seed)
    return hf.ActorCritic(BOX, spaces.Discrete(4), options.pop("core", "gru"), 8, normalize_obs=True, **options)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with a result."""
    from holdfast.cli import main

    folder = tmp_path_factory.mktemp("runs") / "tmaze"
    flags = (
        "--env holdfast/TMaze-v0 --env-args length=3 --core gru --hidden-size 8 --num-envs 4 --num-steps 16 --seed 5"
    )
    more = ["--total-steps", "1024", "--run-dir", str(folder), "--quiet", "--final-eval-episodes", "4"]
    assert main(["train", *flags.split(), *more, "--threads", "1", "--no-tensorboard"]) == 0
    return folder


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        small_policy(1),
        small_policy(2, core=None, head_sizes=(5,), encoder_sizes=()),
        small_policy(3, core=hf.LSTM, critic_core="separate", normalize_value=True),
        hf.ActorCritic(BOX, spaces.MultiDiscrete([2, 3]), "lstm", 8, mask_parents={1: 0}),
        hf.ActorCritic(
            BOX, spaces.Box(-1, np.array([1, 2], np.float32)), "window", 8, squash_actions=True, initial_std=0.3
        ),
        hf.ActorCritic(spaces.Dict({"a": BOX, "b": spaces.Discrete(3)}), spaces.Discrete(2), "lru", 8, num_layers=2),
    ],
    ids=["gru", "no memory", "class", "mask parents", "box actions", "dict"],
)
def test_a_policy_comes_back_from_its_folder_bit_for_bit(policy: hf.ActorCritic, tmp_path: Path):
    if policy.normalizes and isinstance(policy.observation_space, spaces.Box):
        policy.update_normalizer(torch.randn(50, 3))
    loaded = hf.load(hf.save_pretrained(policy, tmp_path / "shared"))
    assert same_weights(policy, loaded)
    assert loaded.observation_space == policy.observation_space and loaded.action_space == policy.action_space
    assert loaded.mask_parents == policy.mask_parents
    obs = (
        {"a": torch.randn(2, 3), "b": torch.tensor([0, 2])}
        if isinstance(policy.observation_space, spaces.Dict)
        else torch.randn(2, 3)
    )
    for _ in range(3):
        first, second = (each.act(obs, deterministic=True) for each in (policy, loaded))
        assert torch.equal(first.action, second.action) and torch.equal(first.value, second.value)


@pytest.mark.parametrize("views", [{}, {"actor_obs": ("a",), "critic_obs": ("a", "b")}])
def test_what_actor_and_critic_see_comes_back_from_the_folder(views: dict[str, Any], tmp_path: Path):
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Box(-1, 1, (3,))})
    policy = hf.ActorCritic(space, spaces.Discrete(2), "gru", 4, **views)
    back = hf.load(hf.save_pretrained(policy, tmp_path / "policy"))
    assert same_weights(back, policy) and (back.critic_encoder is None) == (policy.critic_encoder is None)


def test_a_shared_folder_says_nothing_about_the_machine(tmp_path: Path):
    config = hf.TrainConfig(
        "CartPole-v1", hidden_size=4, num_envs=2, num_steps=4, total_steps=8, epochs=1, minibatches=1, threads=1, device="cpu",
        env_kwargs={"render_mode": None, "sutton_barto_reward": True}, final_eval_episodes=1, quiet=True,
        run_dir=str(tmp_path / "secret-run"),
    )  # fmt: skip
    run = hf.Trainer(config).run().run_dir
    file = checkpoint.find(run)
    saved = checkpoint.load(file)
    saved["config"]["env_kwargs"] |= {"rom": "/home/secret/rom", "list": ["secret"], "token": {"a": "secret"}}
    checkpoint.save(file, saved)
    folder = hf.save_pretrained(hf.load(run), tmp_path / "secret-place" / "shared")
    for name in ("README.md", "config.json", "manifest.json"):
        text = (folder / name).read_text()
        assert "secret" not in text and str(tmp_path) not in text, name
    assert 'hf.load("shared")' in (folder / "README.md").read_text()
    kept = json.loads((folder / "config.json").read_text())["training"]["env_kwargs"]
    assert kept == {"render_mode": None, "sutton_barto_reward": True}


def test_the_folder_of_a_run_has_its_settings_curve_and_result(run: Path, tmp_path: Path):
    folder = hf.save_pretrained(hf.load(run), tmp_path / "shared")
    config, result = json.loads((folder / "config.json").read_text()), json.loads((run / "result.json").read_text())
    assert config["steps"] == 1024 and config["training"]["env"] == "holdfast/TMaze-v0"
    assert config["training"]["run_dir"] is None
    assert config["evaluation"] == {
        "mean_return": result["mean_return"], "std_error": result["std_error"], "episodes": 4, "deterministic": False
    }  # fmt: skip
    card = (folder / "README.md").read_text()
    assert "![learning curve](curve.png)" in card and (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert f"Mean return {result['mean_return']:.4g}" in card and '| env_kwargs | {"length": 3} |' in card
    steps = [int(line.split(",")[0]) for line in (folder / "curve.csv").read_text().splitlines()[1:]]
    assert steps == sorted(steps) and steps[-1] == 1024


def test_a_run_whose_evaluation_episodes_did_not_end_is_shared_without_a_result(run: Path, tmp_path: Path):
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    result = json.loads((copied / "result.json").read_text())

    def evaluation(changes: dict[str, Any]) -> Any:
        (copied / "result.json").write_text(json.dumps({**result, **changes}))
        folder = hf.save_pretrained(hf.load(copied), tmp_path / "shared")
        return json.loads((folder / "config.json").read_text())["evaluation"]

    assert evaluation({"mean_return": float("nan"), "std_error": float("nan"), "episodes": 0}) is None
    some = evaluation({"std_error": float("nan"), "episodes": 1})
    assert some["episodes"] == 1 and some["std_error"] is None  # as many as ended, not as many as asked for
    nothing = EvalResult.of([], [])
    folder = hf.save_pretrained(hf.load(copied), tmp_path / "shared", evaluation=nothing)
    assert json.loads((folder / "config.json").read_text())["evaluation"] is None


def test_the_program_on_the_card_runs(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # where the folder is
    card = (hf.save_pretrained(hf.load(run), tmp_path / "shared") / "README.md").read_text()
    names: dict[str, Any] = {}
    exec(card.split("```python\n")[1].split("```")[0], names)
    assert names["runner"].act(np.zeros(4, np.float32), resets=True).action is not None


def test_weights_that_were_trained_further_get_no_result_of_the_run(run: Path, tmp_path: Path):
    policy = hf.load(run)
    with torch.no_grad():
        next(policy.parameters()).add_(0.1)
    config = json.loads((hf.save_pretrained(policy, tmp_path / "shared") / "config.json").read_text())
    assert config["evaluation"] is None and config["training"] is None
    with pytest.raises(ValueError, match="not those of any checkpoint"):
        hf.save_pretrained(policy, tmp_path / "other", run=run)


def test_the_policy_of_a_trainer_knows_its_run(run: Path, tmp_path: Path):
    trainer = hf.Trainer.resume(run, total_steps=1088, run_dir=str(tmp_path / "run"), quiet=True)
    trainer.run()
    assert (
        json.loads((hf.save_pretrained(trainer.policy, tmp_path / "shared") / "config.json").read_text())["steps"]
        == 1088
    )


def test_saving_again_replaces_a_shared_policy_and_nothing_else(tmp_path: Path):
    folder = hf.save_pretrained(small_policy(1), tmp_path / "shared")
    hf.save_pretrained(small_policy(2), folder)
    assert same_weights(hf.load(folder), small_policy(2))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("mine")
    with pytest.raises(FileExistsError, match="choose an empty folder"):
        hf.save_pretrained(small_policy(1), tmp_path / "mine")
    assert (tmp_path / "mine" / "README.md").read_text() == "mine"


@pytest.mark.parametrize("manifest", ['{"name": "my web app", "icons": []}', "", "{}", "[" * 10_000, '{"files": {}}'])
def test_a_folder_with_the_manifest_of_something_else_is_left_alone(tmp_path: Path, manifest: str):
    folder = tmp_path / "app"
    folder.mkdir()
    mine = {"manifest.json": manifest, "README.md": "mine", "curve.png": "mine", "config.json": "{}"}
    for name, text in mine.items():
        (folder / name).write_text(text)
    with pytest.raises(FileExistsError, match="has files of something else in it; choose an empty folder"):
        hf.save_pretrained(small_policy(1), folder)
    assert {file.name: file.read_text() for file in folder.iterdir()} == mine


@pytest.mark.parametrize("there_before", [True, False])
def test_a_save_that_is_killed_anywhere_is_refused_in_one_line_and_can_be_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there_before: bool
):
    folder, write_whole, writes = tmp_path / "shared", sharing.write_whole, 0
    if there_before:
        hf.save_pretrained(small_policy(1), folder)

    def write_or_die(path: Path, chunks: Any) -> None:
        nonlocal writes
        writes += 1
        if writes == deadly:
            path.with_name(f".{path.name}.0.tmp").write_bytes(b"half")  # what a killed write leaves
            raise KeyboardInterrupt
        write_whole(path, chunks)

    monkeypatch.setattr(sharing, "write_whole", write_or_die)
    for deadly in range(1, 6):  # incomplete manifest, config, weights, card, manifest
        writes = 0
        with pytest.raises(KeyboardInterrupt):
            hf.save_pretrained(small_policy(2), folder)
        if deadly > 1 or not there_before:
            with pytest.raises((CheckpointError, FileNotFoundError)) as refusal:
                hf.load(folder)
            assert "\n" not in str(refusal.value)
        writes = 99
        assert same_weights(hf.load(hf.save_pretrained(small_policy(3), folder)), small_policy(3))
        assert not list(folder.glob(".*"))
        if not there_before:
            shutil.rmtree(folder)


def test_policies_that_cannot_come_back_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="built with a core object"):
        hf.save_pretrained(hf.ActorCritic(BOX, spaces.Discrete(2), hf.LSTM(128, 8)), tmp_path / "a")
    with pytest.raises(ValueError, match=r"could not be loaded again .* expected torch.float32") as error:
        hf.save_pretrained(small_policy().double(), tmp_path / "b")
    assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match="interrupted"):
        hf.load(tmp_path / "b")
    with pytest.raises(TypeError, match=r"hf.load\(run\)"):
        hf.save_pretrained("runs/x", tmp_path / "c")  # type: ignore[arg-type]


OWN = """
import torch
import holdfast as hf
from pathlib import Path
Path(__file__).with_name("imported").touch()

class Own(hf.RecurrentPolicy):
    def __init__(self, observation_space):
        super().__init__(core=hf.GRU(3, 4))
        self.head = torch.nn.Linear(4, 3)
    def encode(self, obs):
        return obs
    def decode(self, features):
        out = self.head(features)
        return torch.distributions.Categorical(logits=out[:, :2]), out[:, 2]
"""


def test_a_policy_of_your_own_is_imported_only_if_that_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_shared_policy.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_shared_policy  # type: ignore[import-not-found]

    policy = own_shared_policy.Own(BOX)
    folder = hf.save_pretrained(policy, tmp_path / "shared")
    (tmp_path / "imported").unlink()
    monkeypatch.delitem(sys.modules, "own_shared_policy")
    with pytest.raises(ImportNotAllowedError, match="allow_imports=True"):
        hf.load(folder)
    assert not (tmp_path / "imported").exists()
    assert same_weights(hf.load(folder, policy=own_shared_policy.Own), policy)
    assert same_weights(hf.load(folder, policy=own_shared_policy.Own(BOX)), policy)
    assert same_weights(hf.load(folder, allow_imports=True), policy) and (tmp_path / "imported").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md", "manifest.json"])
def test_a_file_that_was_changed_cut_short_or_removed_is_refused_in_one_line(name: str, tmp_path: Path):
    folder = hf.save_pretrained(small_policy(), tmp_path / "shared")
    file, data = folder / name, (folder / name).read_bytes()
    for changed in (data[:-1], data + b" ", data.replace(b"8", b"9", 1), b""):
        file.write_bytes(changed)
        with pytest.raises(CheckpointError) as error:
            hf.load(folder)
        assert str(folder) in str(error.value) and "\n" not in str(error.value)
    file.unlink()
    with pytest.raises(CheckpointError):
        hf.load(folder)


def forged(folder: Path, change: Any) -> Path:
    """The folder with another config and a manifest that fits it."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    files = {name: (folder / name).read_bytes() for name in pretrained.REQUIRED_FILES}
    files["config.json"] = json.dumps(config).encode()
    (folder / "config.json").write_bytes(files["config.json"])
    (folder / "manifest.json").write_bytes(pretrained.manifest_of(files))
    return folder


@pytest.mark.parametrize("name", ["encoder_sizes", "head_sizes"])
def test_a_config_that_asks_for_very_many_layers_is_refused(tmp_path: Path, name: str):
    folder = hf.save_pretrained(small_policy(), tmp_path / "shared")
    forged(folder, lambda config: config["policy"]["arguments"].update({name: [1] * 65}))
    with pytest.raises(CheckpointError, match=f"{name} has 65 entries, expected at most 64"):
        hf.load(folder)


def test_a_short_config_that_asks_for_much_memory_is_refused(tmp_path: Path):
    folder = hf.save_pretrained(small_policy(), tmp_path / "shared")
    box = {"kind": "Box", "shape": [2**24], "dtype": "float64", "low": 0.0, "high": 1.0}
    space = {"kind": "Dict", "parts": {str(i): box for i in range(12)}}
    forged(folder, lambda config: config.update(observation_space=space))
    with pytest.raises(CheckpointError, match="observation_space asks for 201326592 numbers in all, expected at most"):
        hf.load(folder)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_policy_that_sees_unsigned_integers_can_be_shared(tmp_path: Path, dtype: Any):
    space = spaces.Dict({"depth": spaces.Box(0, 1000, (2,), dtype), "b": BOX})
    policy = hf.ActorCritic(space, spaces.Discrete(2), "gru", 4)
    back = hf.load(hf.save_pretrained(policy, tmp_path / "shared"))
    assert same_weights(back, policy) and back.observation_space == space


def test_mutants_run_no_code_and_none_loads_silently_wrong():
    outcomes, failures = hunt(150, seed=11)
    assert failures == []
    assert outcomes["tampered, refused"] == 75 and outcomes["forged, refused"] > 20 and outcomes["forged, loaded"] > 5


# --- the hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


def test_a_policy_comes_back_from_the_hub_bit_for_bit(hub: HubServer, run: Path):
    policy = hf.load(run)
    address = policy.push_to_hub("me/tmaze")
    assert address.startswith(f"{hub.endpoint}/me/tmaze/commit/")
    loaded = hf.load("hub:me/tmaze")
    assert same_weights(policy, loaded)
    files = hub.commits["me/tmaze"][-1][1]
    assert set(files) == {"manifest.json", *pretrained.REQUIRED_FILES, *pretrained.OPTIONAL_FILES}
    assert 'hf.load("hub:me/tmaze")' in files["README.md"].decode()
    downloads = hub.requests["GET model.safetensors"]
    runner = hf.Runner("hub:me/tmaze")
    assert runner.act(np.zeros(4, np.float32), resets=True).action is not None
    assert hub.requests["GET model.safetensors"] == downloads == 1  # the second time it comes from the cache


def test_a_revision_is_one_commit(hub: HubServer):
    first = small_policy(1).push_to_hub("me/two").rpartition("/")[2]
    small_policy(2).push_to_hub("me/two")
    assert same_weights(hf.load("hub:me/two"), small_policy(2))
    assert same_weights(hf.load(f"hub:me/two@{first}"), small_policy(1))


def test_a_download_that_breaks_off_goes_on_where_it_stopped(hub: HubServer):
    policy = small_policy(3)
    policy.push_to_hub("me/cut")
    hub.cut_after["model.safetensors"] = [100, 700]
    assert same_weights(hf.load("hub:me/cut"), policy)
    assert hub.requests["GET model.safetensors"] == 3


def test_a_download_that_never_ends_is_refused_and_works_later(hub: HubServer):
    small_policy(3).push_to_hub("me/cut")
    hub.cut_after["model.safetensors"] = [0] * 50
    with pytest.raises(CheckpointError, match=r"model.safetensors: the hub refused or the transfer failed") as error:
        hf.load("hub:me/cut")
    assert "\n" not in str(error.value)
    hub.cut_after.clear()
    assert same_weights(hf.load("hub:me/cut"), small_policy(3))


def test_a_damaged_download_is_fetched_again_and_a_tampered_file_is_refused(hub: HubServer):
    small_policy(4).push_to_hub("me/bad")
    data = hub.commits["me/bad"][-1][1]["model.safetensors"]
    flipped = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
    hub.replaced["model.safetensors"] = [flipped]
    assert same_weights(hf.load("hub:me/bad"), small_policy(4))
    hub.add_commit("me/bad", {"model.safetensors": flipped})
    with pytest.raises(CheckpointError, match=r"model.safetensors: damaged, cut short or changed"):
        hf.load("hub:me/bad")


def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch):
    small_policy(5).push_to_hub("me/full")

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.HfApi.hf_hub_download", full)
    with pytest.raises(
        CheckpointError, match=r"the cache cannot be written \(No space left on device\); free space, or"
    ):
        hf.load("hub:me/full")


def test_what_is_not_there_is_said_in_one_line(hub: HubServer):
    hub.add_commit("me/else", {"README.md": b"something else"})
    for name, message in {
        "hub:me/none": "there is no such repository, or it is private",
        "hub:me/else": "is it a policy of Holdfast?",
        "hub:me/else@nothing": "no such revision",
    }.items():
        with pytest.raises(CheckpointError, match=message) as error:
            hf.load(name)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="expected hub:user/name"):
        hf.load("hub:../../etc")
    with pytest.raises(ValueError, match="expected hub:user/name"):
        small_policy().push_to_hub("nothing")


@pytest.mark.parametrize("revision", ["../../../../x", "/x", "main/../../x", "..", "refs/.."])
def test_a_revision_that_leads_out_of_the_cache_is_refused(hub: HubServer, tmp_path: Path, revision: str):
    small_policy(1).push_to_hub("me/two")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"expected a branch, a tag or a commit: no \.\. part and no leading /"):
        hf.load(f"hub:me/two@{revision}")
    assert set(tmp_path.rglob("*")) == before


def test_without_a_network_the_cache_is_used(hub: HubServer):
    small_policy(5).push_to_hub("me/offline")
    hf.load("hub:me/offline")
    hub.down = True
    assert same_weights(hf.load("hub:me/offline"), small_policy(5))
    with pytest.raises(CheckpointError, match="the hub cannot be reached"):
        hf.load("hub:me/other")


def test_the_endpoint_of_the_environment_is_used_by_a_fresh_process(hub: HubServer, tmp_path: Path):
    small_policy(6).push_to_hub("me/fresh")
    program = """
        import holdfast as hf
        print(sum(float(w.detach().double().abs().sum()) for w in hf.load("hub:me/fresh").parameters()))
    """
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == sum(float(w.detach().double().abs().sum()) for w in small_policy(6).parameters())


def test_the_manifest_names_every_file(tmp_path: Path):
    folder = hf.save_pretrained(small_policy(), tmp_path / "shared")
    named = pretrained.files_in((folder / "manifest.json").read_bytes(), folder)
    assert {*named, "manifest.json"} == {path.name for path in folder.iterdir()}
