"""An exported file whose bytes changed is refused; a flipped bit never loads as other numbers."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast as hf
from holdfast.deploy import checksum

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module", params=["onnx", "pt2"])
def exported(request, tmp_path_factory):
    torch.manual_seed(0)
    policy = hf.ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(4), "gru", 8)
    return hf.export_policy(policy, tmp_path_factory.mktemp("sealed") / f"policy.{request.param}").path


def test_a_file_that_was_not_changed_is_read(exported):
    assert checksum.verify(exported)
    assert hf.Runner(exported).act(np.zeros((2, 3), np.float32)).action.shape == (2,)


@pytest.mark.parametrize("seed", range(3))
def test_a_single_flipped_bit_is_refused_wherever_it_is(exported, tmp_path, seed):
    content, random = exported.read_bytes(), np.random.default_rng(seed)
    at = content.rindex(checksum.MARK)
    places = [*random.integers(0, len(content), 60).tolist(), at + 20, len(content) - 1]
    places = [place for place in places if not at <= place < at + len(checksum.MARK)]  # see the next test
    for number, place in enumerate(places):
        changed = bytearray(content)
        changed[place] ^= 1 << int(random.integers(8))
        file = tmp_path / f"{number}{exported.suffix}"
        file.write_bytes(changed)
        with pytest.raises(ValueError, match=r"the file is damaged, its checksum does not match; copy it again"):
            hf.Runner(file)


def test_a_file_that_lost_its_checksum_is_refused(exported, tmp_path):
    file = tmp_path / exported.name
    file.write_bytes(exported.read_bytes().replace(checksum.MARK, b"h" * len(checksum.MARK)))
    with pytest.raises(ValueError, match="the file is damaged"):
        hf.Runner(file)


def test_a_file_of_the_first_version_has_no_checksum_and_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.deploy.export._about", lambda policy: {"holdfast": "0.1.0", "core": "GRU"})
    monkeypatch.setattr(checksum, "seal", lambda path: None)
    monkeypatch.setattr(checksum, "UNSEALED", "none")
    policy = hf.ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(4), "gru", 8)
    file = hf.export_policy(policy, tmp_path / "policy.pt2").path
    assert not checksum.verify(file)
    hf.Runner(file).act(np.zeros((2, 3), np.float32))
