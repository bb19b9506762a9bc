"""Advantage actor-critic (A3C, Mnih et al. 2016) in PyTorch, on Gymnasium's CartPole-v1.

    tools/gradq up --actors 2 --actor 'python3 actors/python/examples/cartpole.py' \\
        --target-return 475

The networks have the names, shapes and order of gradq-actor's dense net, so that actors of both
kinds train one model: start `tools/gradq up` as ever, and this with GRADQ_ADDRESS set to its
address.  The run decides about the rule and its learning rate.
"""
import os
import signal
import sys

import gymnasium
import torch
from torch.nn.functional import log_softmax

from gradq.torch import RemoteOptimizer
from metrics import Metrics

ROLLOUT, GAMMA, VALUE_WEIGHT, HIDDEN = 20, 0.99, 0.5, 64


class ActorCritic(torch.nn.Module):
    """Separate policy and value nets of two tanh layers each."""

    def __init__(self, inputs: int, actions: int):
        super().__init__()
        self.pi1, self.pi2 = torch.nn.Linear(inputs, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
        self.pi = torch.nn.Linear(HIDDEN, actions)
        self.v1, self.v2 = torch.nn.Linear(inputs, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
        self.v = torch.nn.Linear(HIDDEN, 1)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.v(torch.tanh(self.v2(torch.tanh(self.v1(x)))))[..., 0]

    def forward(self, x: torch.Tensor) -> tuple:
        """(logits, value) of observations."""
        return self.pi(torch.tanh(self.pi2(torch.tanh(self.pi1(x))))), self.value(x)


class Player:
    """Plays rollouts across episodes, and writes down those that end."""

    def __init__(self, env, model: ActorCritic, metrics: Metrics, seed: int):
        self.env, self.model, self.metrics = env, model, metrics
        self.observation, _ = env.reset(seed=seed)
        self.total_reward, self.length = 0.0, 0

    def rollout(self, version: int) -> tuple:
        """(observations (T, I), actions (T), returns (T)) of T = ROLLOUT steps."""
        observations, actions, rewards, beyond = [], [], [], {}
        for step in range(ROLLOUT):
            observations.append(torch.as_tensor(self.observation, dtype=torch.float32))
            with torch.no_grad():
                logits, _ = self.model(observations[-1])
            actions.append(int(torch.multinomial(torch.softmax(logits, 0), 1)))
            self.observation, reward, ended, cut, _ = self.env.step(actions[-1])
            rewards.append(float(reward))
            self.total_reward += rewards[-1]
            self.length += 1
            if ended or cut or step == ROLLOUT - 1:
                beyond[step] = 0.0 if ended else self.value_here()
            if ended or cut:
                self.metrics.episode(self.total_reward, self.length, version)
                self.observation, _ = self.env.reset()
                self.total_reward, self.length = 0.0, 0
        following, returns = 0.0, []
        for step in reversed(range(ROLLOUT)):
            following = rewards[step] + GAMMA * beyond.get(step, following)
            returns.append(following)
        return torch.stack(observations), torch.tensor(actions), torch.tensor(returns[::-1])

    @torch.no_grad()
    def value_here(self) -> float:
        return float(self.model.value(torch.as_tensor(self.observation, dtype=torch.float32)))


def loss(model: ActorCritic, observations, actions, returns) -> torch.Tensor:
    logits, values = model(observations)
    advantages = (returns - values).detach()
    chosen = log_softmax(logits, 1).gather(1, actions[:, None])[:, 0]
    return (-chosen * advantages + VALUE_WEIGHT * 0.5 * (values - returns) ** 2).mean()


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # leaves the `with` below in order
    number = os.environ.get("GRADQ_ACTOR")
    env = gymnasium.make(os.environ.get("GRADQ_ENV", "CartPole-v1"))
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ.get("GRADQ_SEED", "1")) * 10_007 + int(number or 0))
    model = ActorCritic(env.observation_space.shape[0], int(env.action_space.n))
    with RemoteOptimizer(model.named_parameters(), samples=ROLLOUT,
                         actor=None if number is None else int(number)) as optimizer:
        actor = optimizer.client.actor
        player = Player(env, model, Metrics(actor), seed=torch.initial_seed() % (1 << 31))
        while True:
            played = player.rollout(optimizer.version)
            optimizer.zero_grad()
            loss(model, *played).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
