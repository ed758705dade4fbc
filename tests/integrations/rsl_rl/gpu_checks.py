"""What rollouts and updates promise on a GPU, where both are CUDA graphs. `test_gpu.py` runs these; they need no pytest."""

from __future__ import annotations

import copy

import torch

from integrations.rsl_rl.arm import Arm, learn, make_runner, play

DEVICE, STEPS = "cuda:0", 12
CORES = ("lstm", "gru", "mingru", "lru", "ffm", "mlstm", "window")


class Falling(Arm):
    """Episodes end at random."""

    def step(self, actions):
        _obs, rewards, dones, extras = super().step(actions)
        ends = torch.rand(self.num_envs, device=self.device, generator=self.generator) < 0.2
        self.episode_length_buf = self.episode_length_buf.masked_fill(ends, 0)
        return self.get_observations(), rewards, dones | ends, extras


def training_replays_captured_rollouts(rnn_type):
    env = Falling(8, device=DEVICE)
    alg = make_runner(rnn_type=rnn_type, env=env, device=DEVICE).alg
    for _ in range(3):
        play(alg, env, STEPS)
        segment = alg._segment()
        with torch.no_grad():
            new = alg._models(segment.obs["groups"], segment.actions, segment.start_state, segment.resets)
        torch.testing.assert_close(new.log_prob, segment.log_prob, atol=1e-3, rtol=0)
        torch.testing.assert_close(new.value, segment.value, atol=1e-3, rtol=1e-3)
        alg.update()
    assert type(alg._acting).__name__ == "GraphActing" and alg._graph is not None


def a_captured_update_moves_weights_as_an_eager_one():
    algorithms = []
    for captured in (True, False):
        env = Falling(8, device=DEVICE)
        alg = make_runner(env=env, device=DEVICE, num_learning_epochs=3).alg
        if not captured:
            alg._graph_for = lambda eager, batch, settings: (eager.load(batch, settings), eager)[1]
        for iteration in range(3):
            torch.manual_seed(iteration)
            play(alg, env, STEPS)
            torch.manual_seed(100 + iteration)  # the order of minibatches
            alg.update()
        algorithms.append(alg)
    a, b = algorithms
    assert a.learning_rate == b.learning_rate, (a.learning_rate, b.learning_rate)
    for (name, p), q in zip(a._models.named_parameters(), b._models.parameters()):
        torch.testing.assert_close(p, q, atol=2e-3, rtol=0, msg=name)


def no_step_and_no_minibatch_waits_for_the_device():
    runner = make_runner(env=Arm(8, device=DEVICE), device=DEVICE)
    learn(runner, 2)
    alg, env = runner.alg, runner.env
    obs = env.get_observations()
    with torch.inference_mode():
        for t in range(STEPS):
            torch.cuda.set_sync_debug_mode("error")
            actions = alg.act(obs)
            torch.cuda.set_sync_debug_mode("default")
            obs, rewards, dones, extras = env.step(actions)
            torch.cuda.set_sync_debug_mode("error" if t else "default")
            alg.process_env_step(obs, rewards, dones, extras)
            torch.cuda.set_sync_debug_mode("default")
        alg.compute_returns(obs)
    engine = alg._engine_for(alg._segment())
    columns = torch.arange(4, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            engine.step(columns, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def a_loaded_checkpoint_is_what_the_next_rollout_and_update_use(folder):
    runner = learn(make_runner(device=DEVICE), 2)
    path = f"{folder}/model.pt"
    torch.save({**runner.alg.save(), "iter": 2, "infos": None}, path)
    saved = copy.deepcopy(runner.alg.save())
    learn(runner, 2)
    runner.load(path)
    for name, weight in runner.alg.actor.state_dict().items():
        assert torch.equal(weight, saved["actor_state_dict"][name])
    play(runner.alg, runner.env, STEPS)
    segment = runner.alg._segment()
    with torch.no_grad():
        new = runner.alg._models(segment.obs["groups"], segment.actions, segment.start_state, segment.resets)
    torch.testing.assert_close(new.log_prob, segment.log_prob, atol=1e-3, rtol=0)
    before = copy.deepcopy(runner.alg.actor.state_dict())
    runner.alg.update()
    assert any(not torch.equal(w, before[n]) for n, w in runner.alg.actor.state_dict().items())
