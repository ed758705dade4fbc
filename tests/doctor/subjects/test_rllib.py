"""RLlib's recurrent modules: its example, its default, and an example with mistakes."""

import dataclasses

import numpy as np
import pytest
import torch

from holdfast import doctor
from holdfast.doctor import subjects
from holdfast.doctor.subjects.choose import as_subject

pytest.importorskip("ray.rllib")

from gymnasium import spaces
from ray.rllib.algorithms.ppo.ppo_catalog import PPOCatalog
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.examples.rl_modules.classes.lstm_containing_rlm import LSTMContainingRLModule

SPACES = {"observation_space": spaces.Box(-1.0, 1.0, (4,), np.float32), "action_space": spaces.Discrete(3)}


def example(kind=LSTMContainingRLModule, **config):
    return kind(**SPACES, model_config={"lstm_cell_size": 32, **config})


def default():
    config = DefaultModelConfig(use_lstm=True, lstm_cell_size=16, fcnet_hiddens=[16])
    return DefaultPPOTorchRLModule(**SPACES, model_config=dataclasses.asdict(config), catalog_class=PPOCatalog)


@pytest.mark.parametrize(("seed", "make"), enumerate([example, default]))
def test_the_example_and_the_default_module_have_no_finding(seed, make):
    torch.manual_seed(seed)
    report = doctor.examine(subjects.RLlib(make()), seed=seed)
    assert report.findings == (), report.to_text()


def test_sequences_shorter_than_a_segment_are_a_note():
    torch.manual_seed(0)
    report = doctor.examine(subjects.RLlib(example(max_seq_len=5)))
    assert [f.cause for f in report.findings] == ["truncated-bptt"]


class IgnoresStateIn(LSTMContainingRLModule):
    def _forward_train(self, batch, **kwargs):
        zeros = {key: torch.zeros_like(x) for key, x in batch[Columns.STATE_IN].items()}
        return super()._forward_train({**batch, Columns.STATE_IN: zeros}, **kwargs)


class SwapsBatchAndTime(LSTMContainingRLModule):
    def setup(self):
        super().setup()
        self._lstm.batch_first = False

    def _compute_embeddings_and_state_outs(self, batch):
        steps = batch[Columns.OBS].shape[1]
        state = {key: x[:1].expand(steps, -1).contiguous() for key, x in batch[Columns.STATE_IN].items()}
        embeddings, out = super()._compute_embeddings_and_state_outs({**batch, Columns.STATE_IN: state})
        rows = len(batch[Columns.OBS])
        return embeddings, {key: x[:1].expand(rows, -1) for key, x in out.items()}


@pytest.mark.parametrize(
    ("kind", "cause"), [(IgnoresStateIn, "starts-from-zeros"), (SwapsBatchAndTime, "layout-swapped")]
)
def test_a_mistake_is_named(kind, cause):
    torch.manual_seed(0)
    report = doctor.examine(subjects.RLlib(example(kind)))
    found = [f.cause for f in report.findings if f.severity == "error"]
    assert found[0] == cause, report.to_text()


def test_a_module_without_state_is_refused_in_one_line():
    class Forgetful(LSTMContainingRLModule):
        def get_initial_state(self):
            return {}

    with pytest.raises(TypeError, match="has no state"):
        subjects.RLlib(example(Forgetful))


def test_a_module_without_a_subject_is_recognized():
    assert isinstance(as_subject(example()), subjects.RLlib)
