"""The lines to change for a cause, before and after, in the words of the framework at hand.

A patch is text: lines that go begin with `-`, lines that come with `+`, others stay. The names in it are examples.
`Subject.framework` chooses the table; a cause that a framework's table lacks is looked up under "torch". To add a
framework, add its table to `PATCHES` with the causes that are written differently there.
"""

from __future__ import annotations


def patch_for(cause: str, framework: str) -> str:
    """The patch for this cause; empty if there is none."""
    return PATCHES.get(framework, {}).get(cause) or PATCHES["torch"].get(cause, "")


def _table(text: str) -> dict[str, str]:
    """Blocks separated by empty lines: a line of causes, then the lines of their patch."""
    table: dict[str, str] = {}
    for block in text.strip().split("\n\n"):
        causes, _, patch = block.partition("\n")
        table.update(dict.fromkeys(causes.split(), patch))
    return table


# A script of one's own: `h [B, H]`, `done = terminated | truncated` came with `obs`.
_TORCH = _table("""
random-training-leg
- nn.Sequential(nn.Linear(n, m), nn.Dropout(0.1), nn.Tanh())
+ nn.Sequential(nn.Linear(n, m), nn.Tanh())

batch-statistics
- nn.Sequential(nn.Linear(n, m), nn.BatchNorm1d(m), nn.Tanh())
+ nn.Sequential(nn.Linear(n, m), nn.LayerNorm(m), nn.Tanh())

normaliser-moved
  for t in range(num_steps):
-     normalizer.update(obs)
      action, h = policy(normalizer(obs), h)
  train(rollout)
+ normalizer.update(rollout.obs)

not-repeatable
  def reset_memory(self):
      self.h = None
+     self.mean, self.count = 0.0, 0  # whatever else a step changes

training-moves-memory
- log_prob = policy.evaluate(batch.obs, batch.actions)  # reads and writes policy.h
+ log_prob = policy.evaluate(batch.obs, batch.actions, state=batch.start_state)

memoryless
- y, _ = lstm(x, (h, c))
+ y, (h, c) = lstm(x, (h, c))

missing-flags-reset
- def act(self, obs, done=True):
+ def act(self, obs, done=False):

never-resets
- h = cell(obs, h)
+ h = cell(obs, torch.where(done[:, None], 0.0, h))

truncation-ignored
- h = torch.where(terminated[:, None], 0.0, h)
+ h = torch.where((terminated | truncated)[:, None], 0.0, h)

termination-ignored
- h = torch.where(truncated[:, None], 0.0, h)
+ h = torch.where((terminated | truncated)[:, None], 0.0, h)

late-by-one
- h = cell(obs, h)
- h = torch.where(done[:, None], 0.0, h)
+ h = torch.where(done[:, None], 0.0, h)  # done came with this obs
+ h = cell(obs, h)

early-by-one
+ buffer.done[t] = done  # came with the obs of step t
  obs, reward, terminated, truncated, _ = env.step(action)
- buffer.done[t] = terminated | truncated
+ done = terminated | truncated

partial-reset
- h = torch.where(done[:, None], 0.0, h)
+ h, c = (torch.where(done[:, None], 0.0, s) for s in (h, c))

index-not-mask
- h[done.long()] = 0
+ h = torch.where(done.bool()[:, None], 0.0, h)

resets-everybody
- if done.any():
-     h = torch.zeros_like(h)
+ h = torch.where(done[:, None], 0.0, h)

reset-does-nothing
  def reset_memory(self):
-     h = torch.zeros_like(self.h)
+     self.h = torch.zeros_like(self.h)

nan-survives
- h = h * (1 - done)[:, None]
+ h = torch.where(done.bool()[:, None], 0.0, h)

starts-from-zeros
+ buffer.start_state = h.clone()  # before the first step of the segment
  for t in range(num_steps):
      action, h = policy.act(obs, h)
  ...
- h = torch.zeros(batch_size, hidden_size)
+ h = batch.start_state

reset-dropped-in-training
- y, h = rnn(x, h)  # x [T, B, I], through every episode end
+ for x_t, done_t in zip(x, done):
+     y_t, h = rnn(x_t[None], torch.where(done_t[None, :, None], 0.0, h))

boundary-lost-at-segment-start
  h = batch.start_state
+ h = torch.where(done[0][:, None], 0.0, h)
  for t in range(num_steps):

start-state-aliased
- buffer.start_state = self.h
+ buffer.start_state = self.h.clone()

wrong-start-state
- h = buffer.states[-1]
+ h = buffer.states[0]  # before the first step of the segment

legs-differ eval-differs
  def act(self, obs, h):
-     features = self.encode(obs.clamp(-5, 5))
+     features = self.encode(obs)  # the same in act, in training and in evaluation

depends-on-chunking
- y, h = self.short_path(x) if len(x) < 8 else self.rnn(x, h)
+ y, h = self.short_path(x, h) if len(x) < 8 else self.rnn(x, h)

state-of-another-step
- return y, states[0]
+ return y, states[-1]

flags-not-bool
- done = terminated.long() | truncated.long()
+ done = terminated | truncated

wrong-environment
- h = memory[: len(env_ids)]
+ h = memory[env_ids]

layout-swapped
- x = x.reshape(T, B, -1)  # x is [B, T, I]
+ x = x.transpose(0, 1)

sees-the-future
- nn.LSTM(n, m, bidirectional=True)
+ nn.LSTM(n, m)

padding-leaks
- y, h = rnn(x, h)
+ y, h = rnn(pack_padded_sequence(x, lengths, enforce_sorted=False), h)

shared-between-agents
- action = net.act(obs)  # the network keeps one h
+ action, h[agent] = net.act(obs, h[agent])

gradient-crosses-reset
- h = h - h.detach() * done[:, None]
+ h = torch.where(done[:, None], 0.0, h)

over-detached
  for x_t in x:
-     h = cell(x_t, h.detach())
+     h = cell(x_t, h)

gradients-severed
- with torch.no_grad():
-     log_prob = policy.evaluate(batch)
+ log_prob = policy.evaluate(batch)

graph-kept
- self.h = h
+ self.h = h.detach()

batch-size-baked-in
- self.h = torch.zeros(num_envs, hidden_size)  # in __init__
+ self.h = obs.new_zeros(len(obs), hidden_size)  # at the first step

inference-tensor-state
- with torch.inference_mode():
+ with torch.no_grad():
      h = torch.zeros(num_envs, hidden_size)

dtype-baked-in
- h = torch.zeros(num_envs, hidden_size, dtype=torch.float32)
+ h = cell.weight_hh.new_zeros(num_envs, hidden_size)

bootstrap-after-reset
- h = torch.where(done[:, None], 0.0, h)
  final_value = policy.value(final_obs, h)
+ h = torch.where(done[:, None], 0.0, h)

bootstrap-of-another-step
- final_value = values[t]  # of the observation before
+ final_value, _ = policy.value(final_obs, h)

bootstrap-moves-memory
- next_value, self.h = self.value(obs, self.h)
+ next_value, _ = self.value(obs, self.h)

eval-never-resets
  action, h = policy.act(obs, h)
  obs, reward, terminated, truncated, _ = env.step(action)
+ h = torch.where((terminated | truncated)[:, None], 0.0, h)

eval-memoryless
- action, _ = policy.act(obs, None)
+ action, h = policy.act(obs, h)

memory-in-state-dict
- self.register_buffer("h", torch.zeros(num_envs, hidden_size))
+ self.register_buffer("h", torch.zeros(num_envs, hidden_size), persistent=False)

memory-lost-on-resume
- torch.save({"policy": policy.state_dict()}, path)
+ torch.save({"policy": policy.state_dict(), "memory": h}, path)
""")

_HOLDFAST = _table("""
never-resets truncation-ignored termination-ignored late-by-one
- step = policy.act(obs)
+ step = policy.act(obs, resets=terminated | truncated)  # the flags that came with obs

reset-dropped-in-training
- ev = policy.evaluate(obs, actions, start_state, torch.zeros_like(resets))
+ ev = policy.evaluate(obs, actions, start_state, resets)

starts-from-zeros wrong-start-state start-state-aliased
+ start_state = policy.memory.read()  # before the first step of the segment
  ...
- ev = policy.evaluate(obs, actions, policy.initial_state(B), resets)
+ ev = policy.evaluate(obs, actions, start_state, resets)

wrong-environment
- step = policy.act(obs, resets)
+ step = policy.act(obs, resets, env_ids)

shared-between-agents
- step = policy.act(obs, resets)  # both agents
+ step = policy.act(obs, resets, memory=memory_of[agent])  # hf.Memory(policy.core) for each

bootstrap-moves-memory bootstrap-after-reset
- value = policy.act(final_obs).value
+ value = policy.peek_value(final_obs)  # before the step that resets

memory-lost-on-resume
- torch.save(policy.state_dict(), path)
+ torch.save({"policy": policy.state_dict(), "memory": policy.memory.state_dict()}, path)

over-detached
- for t in range(T):
-     ev = policy.evaluate(obs[t : t + 1], actions[t : t + 1], policy.detach_state(state), resets[t : t + 1])
+ ev = policy.evaluate(obs, actions, state, resets)
""")

_CLEANRL = _table("""
never-resets reset-dropped-in-training
  def get_states(self, x, lstm_state, done):
      ...
-     hidden, lstm_state = self.lstm(hidden, lstm_state)
+     for h, d in zip(hidden, done):
+         keep = ~d.bool().view(1, -1, 1)
+         h, lstm_state = self.lstm(h[None], tuple(torch.where(keep, s, 0.0) for s in lstm_state))

truncation-ignored
- next_done = torch.Tensor(terminated).to(device)
+ next_done = torch.Tensor(np.logical_or(terminated, truncated)).to(device)

partial-reset
- state = (torch.where(d, 0.0, lstm_state[0]), lstm_state[1])
+ state = tuple(torch.where(d, 0.0, s) for s in lstm_state)

starts-from-zeros wrong-start-state start-state-aliased
+ initial_lstm_state = (next_lstm_state[0].clone(), next_lstm_state[1].clone())  # before each rollout
  ...
- agent.get_action_and_value(b_obs[i], agent.initial_state(), b_dones[i], b_actions[i])
+ agent.get_action_and_value(b_obs[i], (initial_lstm_state[0][:, envs], initial_lstm_state[1][:, envs]), b_dones[i], b_actions[i])

early-by-one
- dones[step] = torch.logical_or(terminated, truncated)  # after env.step
+ dones[step] = next_done  # before env.step

late-by-one
- dones[step + 1] = next_done
+ dones[step] = next_done

layout-swapped
- hidden = hidden.reshape(batch_size, -1, self.lstm.input_size)
+ hidden = hidden.reshape(-1, batch_size, self.lstm.input_size)  # time first

nan-survives
- tuple((1.0 - d).view(1, -1, 1) * s for s in lstm_state)
+ tuple(torch.where(d.bool().view(1, -1, 1), 0.0, s) for s in lstm_state)

bootstrap-after-reset
- next_value = agent.get_value(next_obs, zero_state, next_done)
+ next_value = agent.get_value(next_obs, next_lstm_state, next_done)
""")

_STATEFUL = _table("""
never-resets truncation-ignored
  obs, reward, terminated, truncated, _ = env.step(action)
+ policy.reset(terminated | truncated)  # clears those rows of self.lstm_hidden

graph-kept
- self.lstm_hidden = state
+ self.lstm_hidden = tuple(s.detach() for s in state)

over-detached
  def forward(self, obs, done):
-     y, state = self.lstm(obs[None], tuple(s.detach() for s in self.lstm_hidden))
+     y, state = self.lstm(obs[None], self.lstm_hidden)  # and detach between segments only

partial-reset
- self.lstm_hidden[0][:, done] = 0
+ self.lstm_hidden = tuple(torch.where(done.view(1, -1, 1), 0.0, s) for s in self.lstm_hidden)

batch-size-baked-in
- self.lstm_hidden = tuple(torch.zeros(1, num_envs, size) for _ in range(2))  # in __init__
+ if self.lstm_hidden is None or self.lstm_hidden[0].shape[1] != len(obs):
+     self.lstm_hidden = tuple(obs.new_zeros(1, len(obs), size) for _ in range(2))

reset-does-nothing
  def forget(self):
-     lstm_hidden = None
+     self.lstm_hidden = None

layout-swapped
- y, state = self.lstm(obs, state)  # [B, I] is one sequence of B steps
+ y, state = self.lstm(obs.unsqueeze(0), state)
""")

_TORCHRL = _table("""
memoryless
- env = TransformedEnv(env, InitTracker())
+ env = TransformedEnv(env, Compose(InitTracker(), lstm.make_tensordict_primer()))

reset-dropped-in-training never-resets
- env = TransformedEnv(env, lstm.make_tensordict_primer())
+ env = TransformedEnv(env, Compose(InitTracker(), lstm.make_tensordict_primer()))

over-detached
- loss = loss_module(batch)
+ with set_recurrent_mode(True):
+     loss = loss_module(batch)

flags-not-bool
- td["is_init"] = done.long()
+ td["is_init"] = done.bool()

starts-from-zeros
- policy(td.exclude("recurrent_state_h", "recurrent_state_c"))
+ policy(td)  # with the states that the collector stored
""")

_SB3 = _table("""
eval-memoryless
- action, _ = model.predict(obs)
+ action, state = model.predict(obs, state=state, episode_start=episode_start)

eval-never-resets
  action, state = model.predict(obs, state=state, episode_start=episode_start)
  obs, reward, done, info = env.step(action)
+ episode_start = done

reset-dropped-in-training
- values, log_prob, entropy = self.policy.evaluate_actions(obs, actions, lstm_states, torch.zeros_like(starts))
+ values, log_prob, entropy = self.policy.evaluate_actions(obs, actions, lstm_states, starts)

starts-from-zeros
- self.policy.evaluate_actions(obs, actions, zero_states, starts)
+ self.policy.evaluate_actions(obs, actions, rollout_data.lstm_states, rollout_data.episode_starts)

nan-survives
- lstm_states = (1.0 - episode_start).view(1, n_seq, 1) * lstm_states
+ lstm_states = torch.where(episode_start.bool().view(1, n_seq, 1), 0.0, lstm_states)
""")

_PUFFER = _table("""
never-resets truncation-ignored
  def forward_eval(self, observations, state):
+     done = state["done"][:, None]
+     h, c = (torch.where(done, 0.0, state[key]) for key in ("lstm_h", "lstm_c"))
-     h, c = self.cell(hidden, (state["lstm_h"], state["lstm_c"]))
+     h, c = self.cell(hidden, (h, c))

reset-dropped-in-training late-by-one
  def forward(self, observations, state):
-     hidden, (h, c) = self.lstm(hidden, (h, c))  # [T, B, H], through every episode end
+     for t in range(T):
+         fresh = state["done"][:, t, None]  # came with the observation of step t
+         h, c = self.cell(hidden[t], (torch.where(fresh, 0.0, h), torch.where(fresh, 0.0, c)))

starts-from-zeros
- state = dict(action=actions, lstm_h=None, lstm_c=None)
+ state = dict(action=actions, lstm_h=start_h, lstm_c=start_c)  # stored before the segment's first step

layout-swapped
- hidden = hidden.reshape(T, B, -1)  # hidden is [B, T, H]
+ hidden = hidden.transpose(0, 1)
""")

_MODULE = _table("""
reset-dropped-in-training never-resets
- y, state = lstm(x, state)  # through every episode end
+ core = hf.LSTM(input_size, hidden_size)  # loads the same weights
+ y, state = core(x, state, resets)

starts-from-zeros
- y, _ = lstm(x)
+ y, state = lstm(x, state)
""")

_TENSORDICT = _table("""
never-resets
- td = TensorDict({"env_obs": obs}, [B])
+ td = TensorDict({"env_obs": obs, "dones": terminated, "truncateds": truncated}, [B])

starts-from-zeros wrong-start-state
- td = policy(td, action=actions)
+ td = policy(td, state=start_state, action=actions)  # policy.start_state(td) before the segment's first step

wrong-environment
- td = TensorDict({"env_obs": obs}, [B])
+ td = TensorDict({"env_obs": obs, "training_env_ids": env_ids}, [B])
""")

#: framework (`Subject.framework`): cause: patch
PATCHES: dict[str, dict[str, str]] = {
    "torch": _TORCH,
    "holdfast": _HOLDFAST,
    "cleanrl": _CLEANRL,
    "stateful": _STATEFUL,
    "torchrl": _TORCHRL,
    "sb3": _SB3,
    "puffer": _PUFFER,
    "module": _MODULE,
    "tensordict": _TENSORDICT,
}
