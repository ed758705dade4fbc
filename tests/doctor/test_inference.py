"""What a policy observes, found out from the layer that its observation reaches first."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import doctor
from holdfast.doctor.inference import UnknownObservation, infer_space
from holdfast.doctor.subjects.choose import as_subject

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_policy_in_the_readme_is_examined_as_it_stands():
    source = re.search(r"^class MyPolicy\(.*?(?=^\S)", README, flags=re.DOTALL | re.MULTILINE)
    names = {"hf": hf, "torch": torch, "nn": nn}
    exec(source.group(), names)
    torch.manual_seed(0)
    doctor.assert_healthy(names["MyPolicy"]())


class Encoder(nn.Module):
    """Layers in the wrong order of assignment, as in a policy whose core comes first."""

    def __init__(self, encode, **layers):
        super().__init__()
        self.core, self.head = nn.LSTM(64, 32), nn.Linear(32, 5)
        for name, layer in layers.items():
            setattr(self, name, layer)
        self._encode = encode

    def encode(self, obs):
        return self._encode(self, obs)


def _image(m, obs):
    return m.out(m.conv(obs / 255).flatten(1))


def _channels_last(m, obs):
    return m.out(m.conv(obs.permute(0, 3, 1, 2)).flatten(1))


CASES = {
    "a vector": (Encoder(lambda m, x: m.first(x), first=nn.Linear(4, 64)), (4,)),
    "flattened": (Encoder(lambda m, x: m.first(x.flatten(1).float()), first=nn.Linear(12, 64)), (12,)),
    "an image": (Encoder(_image, conv=nn.Conv2d(3, 2, 4, 4), out=nn.Linear(2 * 21 * 21, 64)), (3, 84, 84)),
    "channels last": (Encoder(_channels_last, conv=nn.Conv2d(3, 2, 2), out=nn.Linear(2 * 15 * 15, 64)), (16, 16, 3)),
}


@pytest.mark.parametrize(("policy", "shape"), CASES.values(), ids=CASES)
def test_the_shape_fits_the_first_layer_that_is_reached(policy, shape):
    assert infer_space(policy.encode, policy) == shape


def test_an_embedding_observes_whole_numbers():
    policy = Encoder(lambda m, x: m.table(x), table=nn.Embedding(7, 64))
    assert infer_space(policy.encode, policy).n == 7


def test_without_a_layer_before_the_core_the_core_says_it():
    class Plain(hf.RecurrentPolicy):
        def __init__(self):
            super().__init__(core=hf.LSTM(6, 4))

        def encode(self, obs):
            return obs

        def decode(self, features):
            return torch.distributions.Categorical(logits=features), features[:, 0]

    assert as_subject(Plain()).space.space == (6,)


def test_a_policy_that_cannot_be_read_is_asked_for_in_one_line():
    class Opaque(hf.RecurrentPolicy):
        def __init__(self):
            super().__init__(core=hf.LSTM(6, 4))

        def encode(self, obs):
            return obs["left"] + obs["right"]

        def decode(self, features):
            return torch.distributions.Categorical(logits=features), features[:, 0]

    with pytest.raises(UnknownObservation, match=r"observation_space=.*--obs-shape") as error:
        as_subject(Opaque())
    assert "\n" not in str(error.value)
