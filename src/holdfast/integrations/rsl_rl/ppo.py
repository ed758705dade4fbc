"""`PPO`: rsl_rl's algorithm for `OnPolicyRunner`, with Holdfast's update.

Settings, loss, learning-rate schedule, checkpoints and multi-GPU training are rsl_rl's. What differs is how it runs:
sequences keep their length and reset inside, where rsl_rl splits and pads them; one start state per rollout is stored,
not one per step; no minibatch waits for the device; on a GPU rollout steps and minibatches are CUDA graphs. Timeouts are
bootstrapped with V(final observation) if the environment gives `extras["final_obs"]`, with rsl_rl's V(s_t) otherwise;
`timeout_bootstrap` says which.
"""

from __future__ import annotations

from typing import Any

import rsl_rl.algorithms
import torch
from rsl_rl.models import RNNModel as RslRlRNNModel
from torch import Tensor

from holdfast import state as state_ops
from holdfast.algorithms.ppo import ClippedLoss
from holdfast.engines.graph_update import GraphMinibatches
from holdfast.envs.rsl_rl import FINAL_OBS
from holdfast.integrations.rsl_rl.acting import Acting, addresses, make_acting
from holdfast.integrations.rsl_rl.minibatches import (
    ActorAndCritic,
    MinibatchSettings,
    RslRlMinibatches,
    loss_settings,
    make_optimizer,
    reads_rate,
)
from holdfast.rollout.advantages import gae
from holdfast.rollout.segment import Segment
from holdfast.state import State


class PPO(rsl_rl.algorithms.PPO):
    """The constructor takes what rsl_rl's `PPO` takes. RND works; symmetry augmentation is refused, as rsl_rl does."""

    def __init__(self, actor: Any, critic: Any, storage: Any, **settings: Any) -> None:
        for role, model in (("actor", actor), ("critic", critic)):
            if isinstance(model, RslRlRNNModel):
                raise ValueError(
                    f"{role}.class_name is rsl_rl's RNNModel, which cannot reset inside a sequence; with this algorithm use "
                    "holdfast.integrations.rsl_rl:RNNModel"
                )
        if settings.get("symmetry_cfg"):
            raise ValueError(
                "algorithm.symmetry_cfg: symmetry augmentation is not supported for recurrent policies; set it to None"
            )
        super().__init__(actor, critic, storage, **settings)
        if not 1 <= self.num_mini_batches <= storage.num_envs:
            raise ValueError(
                f"algorithm.num_mini_batches is {self.num_mini_batches}; a minibatch holds whole environments, so expected 1 to "
                f"{storage.num_envs}, the number of environments"
            )
        if self.rnd and not hasattr(self.rnd, "compute_loss"):
            raise ValueError("algorithm.rnd_cfg needs rsl_rl 5.1 or newer; set it to None, or upgrade rsl-rl-lib")
        self.timeout_bootstrap: str | None = None  # how timeouts are bootstrapped; None until one was seen
        rate = float(settings.get("learning_rate", 0.001))
        self._rate = torch.tensor(rate, device=self.device)
        self.optimizer = make_optimizer(settings.get("optimizer", "adam"), self._parameters(), self._rate)
        self._models = ActorAndCritic(self.actor, self.critic)
        self._acting: Acting = make_acting(self._models, self.device, self.gamma)
        self._eager: RslRlMinibatches | None = None
        self._graph: GraphMinibatches | None = None
        self._graph_of: Any = None
        self._start: tuple[State, Tensor] | None = None  # states and pending resets before the first step of a rollout

    def _parameters(self) -> list[torch.nn.Parameter]:
        return list(dict.fromkeys([*self.actor.parameters(), *self.critic.parameters()]))

    # --- rollout ------------------------------------------------------------------------------------------------------

    def act(self, obs: Any) -> Tensor:
        if self.storage.step == 0:
            self._start = self._begin(len(obs))
            self._acting.begin(self.storage)
        step = self._acting.act(obs)
        transition = self.transition
        transition.actions, transition.values = step.action, step.value
        transition.actions_log_prob, transition.distribution_params = step.log_prob, step.params
        transition.observations = obs
        return step.action

    def process_env_step(self, obs: Any, rewards: Tensor, dones: Tensor, extras: dict[str, Any]) -> None:
        transition = self.transition
        if self._acting.stores and not self.rnd:
            time_outs = extras["time_outs"].to(self.device) if "time_outs" in extras else None
            assert transition.values is not None
            value = transition.values.reshape(-1) if time_outs is None else self._value_at_timeout(extras)
            self._acting.store(rewards, dones, time_outs, value)
            transition.clear()
            return
        transition.rewards, transition.dones = rewards.clone(), dones
        if self.rnd:
            self.intrinsic_rewards = self.rnd.get_intrinsic_reward(obs)
            transition.rewards += self.intrinsic_rewards
        if "time_outs" in extras:
            time_outs = extras["time_outs"].to(self.device)
            transition.rewards += self.gamma * self._value_at_timeout(extras) * time_outs
        self.storage.add_transition(transition)
        transition.clear()
        self.actor.reset(dones)
        self.critic.reset(dones)

    def _value_at_timeout(self, extras: dict[str, Any]) -> Tensor:
        """[B]: V(final observation) from the states before the reset, or V(s_t)."""
        key = next((key for key in FINAL_OBS if extras.get(key) is not None), None)
        if self.timeout_bootstrap is None:
            self.timeout_bootstrap = "V(final observation)" if key else "V(s_t)"
            why = f"extras[{key!r}]" if key else "the environment gives no extras['final_obs']"
            if self.gpu_global_rank == 0:
                print(f"holdfast: timeouts are bootstrapped with {self.timeout_bootstrap} ({why})")
        if key is None:
            assert self.transition.values is not None
            return self.transition.values.reshape(-1)
        final = {group: part.to(self.device) for group, part in extras[key].items()}
        return self._peek_value(final, fresh=False)

    def _peek_value(self, obs: Any, *, fresh: bool) -> Tensor:
        """[B]; the states stay as they are. fresh: pending resets apply."""
        critic = self.critic
        out = critic.peek(obs, fresh=fresh) if critic.is_recurrent else critic.mlp(critic.get_latent(obs))
        return out.reshape(-1)

    def _begin(self, batch: int) -> tuple[State, Tensor]:
        """Copies of the states before a rollout, and which environments begin an episode with its first step."""
        states: dict[str, State] = {"actor": {}, "critic": {}}
        resets = torch.zeros(batch, dtype=torch.bool, device=self.device)
        for name, model in (("actor", self.actor), ("critic", self.critic)):
            if model.is_recurrent:
                model.rnn.start(batch)
                if model.rnn.pending is not None:
                    resets = model.rnn.pending
                states[name] = model.rnn.state
        with torch.inference_mode(False):  # what is made here is used in backward
            return state_ops.clone(states), resets.clone()

    def compute_returns(self, obs: Any) -> None:
        self._acting.conclude(obs, self._write_returns)

    def _write_returns(self, obs: Any) -> None:
        st = self.storage
        last = self._peek_value(obs, fresh=True)
        rewards, values, dones = st.rewards.squeeze(-1), st.values.squeeze(-1), st.dones.squeeze(-1).bool()
        next_values = torch.cat([values[1:], last.unsqueeze(0)]).masked_fill(dones, 0.0)
        advantage, returns = gae(rewards, values, next_values, dones, self.gamma, self.lam)
        if not self.normalize_advantage_per_mini_batch:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        st.returns.copy_(returns.unsqueeze(-1))
        st.advantages.copy_(advantage.unsqueeze(-1))

    # --- update -------------------------------------------------------------------------------------------------------

    def update(self) -> dict[str, float]:
        batch = self._segment()
        engine = self._engine_for(batch)
        sums, rnd_loss, steps = torch.zeros(7, device=self.device), torch.zeros((), device=self.device), 0
        size = self.storage.num_envs // self.num_mini_batches
        order = torch.arange(size * self.num_mini_batches, device=self.device)  # rsl_rl's: the same in every epoch
        for _ in range(self.num_learning_epochs):
            for columns in order.split(size):
                sums += engine.step(columns, 1.0)
                steps += 1
                if self.rnd:
                    rnd_loss += self._train_rnd(columns)
        self._update_normalizers()
        *numbers, rnd, rate = torch.cat([sums, rnd_loss.view(1), self._rate.view(1)]).tolist()
        found = dict(zip(engine.names, numbers))
        self.learning_rate, skipped = rate, found["skipped"]
        taken = max(1.0, steps - skipped)
        losses = {
            "value": 2 * found["value_loss"] / taken,
            "surrogate": found["policy_loss"] / taken,
            "entropy": found["entropy"] / taken,
        }
        if self.rnd:
            losses["rnd"] = rnd / steps
        if skipped:
            losses["skipped_steps"] = skipped
        self.storage.clear()
        return losses

    def _segment(self) -> Segment:
        """The rollout in storage, as training sequences."""
        st = self.storage
        assert self._start is not None and st.distribution_params is not None
        state, first = self._start
        dones = st.dones.squeeze(-1).bool()
        old = tuple(st.distribution_params)
        return Segment(
            obs={"groups": {name: st.observations[name] for name in self._groups()}, "old": old},
            actions=st.actions,
            resets=torch.cat([first.unsqueeze(0), dones[:-1]]),
            rewards=st.rewards.squeeze(-1),
            log_prob=st.actions_log_prob.squeeze(-1),
            value=st.values.squeeze(-1),
            terminated=dones,
            truncated=torch.zeros_like(dones),
            advantage=st.advantages.squeeze(-1),
            returns=st.returns.squeeze(-1),
            valid=torch.ones_like(dones),
            start_state=state,
        ).mark_all_valid()

    def _groups(self) -> list[str]:
        """The observation groups that a model reads."""
        models = (self.actor, self.critic)
        kinds = ("obs_groups", "obs_groups_2d")  # the second: images, which rsl_rl's CNNModel keeps apart
        return list(dict.fromkeys(group for model in models for kind in kinds for group in getattr(model, kind, ())))

    def _engine_for(self, batch: Segment) -> Any:
        """What executes the minibatches: a CUDA graph on one GPU, autograd step by step elsewhere."""
        own = MinibatchSettings(
            max_grad_norm=self.max_grad_norm,
            desired_kl=self.desired_kl if self.schedule == "adaptive" else None,
            normalize_advantage=self.normalize_advantage_per_mini_batch,
            mixed_precision=bool(getattr(self, "use_mixed_precision", False)),
            ranks=self.gpu_world_size,
        )
        eager = self._eager
        if eager is None or eager.own != own or eager.optimizer is not self.optimizer:
            eager = self._eager = RslRlMinibatches(self._models, own, self.optimizer, self._rate)
        loss = ClippedLoss(loss_settings(self))
        if self._rate.is_cuda and self.gpu_world_size == 1 and reads_rate(self.optimizer):
            return self._graph_for(eager, batch, loss)
        eager.load(batch, loss)
        return eager

    def _graph_for(self, eager: RslRlMinibatches, batch: Segment, loss: ClippedLoss) -> GraphMinibatches:
        """The captured minibatch; captured again when anything that the capture has fixed is another one."""
        size = batch.num_envs // self.num_mini_batches
        if self._graph is None or self._graph_of != self._fixed(eager) or not self._graph.fits(batch, loss, size):
            rate = self._rate.clone()
            self._graph = GraphMinibatches(eager, batch, loss, size)
            self._rate.copy_(rate)  # warming up before the capture moved it
            self._graph_of = self._fixed(eager)
        self._graph.load(batch, loss)
        return self._graph

    def _fixed(self, eager: RslRlMinibatches) -> Any:
        """What a capture fixes besides shapes and the loss: settings, and where weights and the optimizer's moments are."""
        moments = [t.data_ptr() for state in self.optimizer.state.values() for t in state.values()]
        return eager.own, addresses(self._models), moments

    def _train_rnd(self, columns: Tensor) -> Tensor:
        """One step of RND's predictor on these environments; its loss."""
        loss = self.rnd.compute_loss(self.storage.observations[:, columns].flatten(0, 1))
        self.rnd.optimizer.zero_grad()
        loss.backward()
        if self.is_multi_gpu:
            self.reduce_parameters()
        self.rnd.optimizer.step()
        return loss.detach()

    def _update_normalizers(self) -> None:
        """With all observations of the rollout, after the update on it. In place, since captured graphs read them."""
        obs = self.storage.observations.flatten(0, 1)
        for model in (self.actor, self.critic, *([self.rnd] if self.rnd else [])):
            before = {part: dict(part.named_buffers(recurse=False)) for part in model.modules()}
            model.update_normalization(obs)
            for part, buffers in before.items():
                for name, new in part.named_buffers(recurse=False):
                    if name in buffers and new is not buffers[name]:
                        setattr(part, name, buffers[name].copy_(new))

    # --- rsl_rl's checkpoints and options --------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        saved = super().save()
        for group in saved["optimizer_state_dict"]["param_groups"]:
            group["lr"] = float(group["lr"])  # rsl_rl's own PPO reads a number
        return saved

    def load(self, loaded_dict: dict[str, Any], load_cfg: dict[str, Any] | None, strict: bool) -> bool:
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        result = super().load(loaded_dict, load_cfg, strict)
        if load_cfg is None or load_cfg.get("optimizer"):
            rate = float(self.optimizer.param_groups[0]["lr"])
            for group, own in zip(self.optimizer.param_groups, options):
                group.update(own)  # the rate is a tensor that captured steps read
            self._rate.fill_(rate)
            self.learning_rate = rate
        return result

    def compile(self, mode: str | None = None) -> None:
        if mode is not None:
            raise ValueError(
                f"torch_compile_mode={mode!r} is not needed: rollout and update run on Holdfast's kernels; set it to None"
            )
