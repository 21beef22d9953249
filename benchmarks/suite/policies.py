"""Policies in Gymnasium's CartPole and Pendulum. Starts and random numbers are in the batch: an episode repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.data.datasets import Split
from benchmarks.suite.task import Prepared


def starts(limits: tuple[float, ...]) -> Split:
    """States as the environment's own reset draws them: uniformly within these limits around zero."""
    drawn = 2 * torch.rand(6000, len(limits), generator=torch.Generator().manual_seed(0)) - 1
    states = drawn * torch.tensor(limits)
    return Split((states[:5000],), (states[5000:],))


def with_chances(batch: tuple[Tensor, ...], generator: torch.Generator, horizon: int) -> Prepared:
    """What the actions are drawn by: a uniform number for every step."""
    (states,) = batch
    return (states, torch.rand(horizon, len(states), generator=generator)), states


# CartPole: REINFORCE.


@torch.no_grad()
def _balance(model: nn.Module, prepared: Prepared) -> tuple[Tensor, Tensor, Tensor]:
    """What was seen and done, and whether the pole was still up: [steps, episodes, ...]."""
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

    states, chances = prepared[0]
    environment: Any = CartPoleVectorEnv(num_envs=len(states), max_episode_steps=len(chances) + 1)
    environment.reset(seed=0)
    environment.state = states.T.double().numpy()
    seen, up = states, torch.ones(len(states), dtype=torch.bool)
    steps = []
    for chance in chances:
        action = (chance < model(seen).squeeze(-1).sigmoid()).long()
        steps.append((seen, action, up))
        found, _, fallen, _, _ = environment.step(action.numpy())
        seen, up = torch.from_numpy(found), up & ~torch.from_numpy(fallen)
        if not up.any():
            break
    observed, actions, standing = (torch.stack(part) for part in zip(*steps, strict=True))
    return observed, actions, standing.float()


def reinforce(model: nn.Module, prepared: Prepared) -> Tensor:
    """The discounted returns, normalised over the batch, are what an action is worth."""
    observed, actions, standing = _balance(model, prepared)
    returns = _discounted(standing, torch.zeros(standing.shape[1]), 0.99)
    worth = _normalised(returns, standing)
    surprise = nn.functional.binary_cross_entropy_with_logits(
        model(observed).squeeze(-1), actions.float(), reduction="none"
    )
    return (surprise * worth * standing).sum() / standing.sum()


def minus_return(model: nn.Module, prepared: Prepared) -> Tensor:
    """Minus the mean return, as a share of the longest episode; NaN if the policy is: it would always push left."""
    observed, _, standing = _balance(model, prepared)
    found = -standing.sum(0).mean() / len(prepared[0][1])
    return found if model(observed).isfinite().all() else torch.tensor(torch.nan)


def _discounted(rewards: Tensor, last: Tensor, discount: float) -> Tensor:
    returns, total = torch.empty_like(rewards), last
    for step in reversed(range(len(rewards))):
        total = rewards[step] + discount * total
        returns[step] = total
    return returns


def _normalised(values: Tensor, weights: Tensor) -> Tensor:
    mean = (values * weights).sum() / weights.sum()
    variance = ((values - mean).square() * weights).sum() / weights.sum()
    return (values - mean) / (variance.sqrt() + 1e-6)


# Pendulum: an actor with a critic.


class ActorCritic(nn.Module):
    """The mean of a normal action, its spread, and what the state is worth."""

    def __init__(self, network: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.actor, self.critic = network(1), network(1)
        self.log_spread = nn.Parameter(torch.zeros(()))

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(seen).squeeze(-1), self.critic(seen).squeeze(-1)


@torch.no_grad()
def _swing(model: Any, prepared: Prepared) -> tuple[Tensor, Tensor, Tensor]:
    """What was seen, the torque before it is limited, and the cost: [steps, episodes, ...]; one more is seen."""
    from gymnasium.envs.classic_control.pendulum import PendulumEnv

    states, chances = prepared[0]
    environment: Any = PendulumEnv()
    environment.state = states.T.double().numpy()  # its arithmetic takes arrays, one column an episode
    spread = model.log_spread.exp()
    seen = [torch.from_numpy(environment._get_obs().T)]
    actions, costs = [], []
    for normal in torch.special.ndtri(chances.clamp(1e-6, 1 - 1e-6)):
        actions.append(model.actor(seen[-1]).squeeze(-1) + spread * normal)
        torque = 2 * actions[-1].clamp(-1, 1)
        found, reward, *_ = environment.step(torque.double().numpy()[None])
        seen.append(torch.from_numpy(found.T))
        costs.append(torch.from_numpy(-np.asarray(reward)).float())
    return torch.stack(seen), torch.stack(actions), torch.stack(costs)


def actor_critic(model: Any, prepared: Prepared) -> Tensor:
    """An action is worth what follows beyond the critic's word (generalised advantage, λ .95, discount .97)."""
    seen, actions, costs = _swing(model, prepared)
    mean, value = model(seen)
    rewards = 1 - costs / 8  # a cost is 16.3 at most
    with torch.no_grad():
        surplus = rewards + 0.97 * value[1:] - value[:-1]
        advantage = _discounted(surplus, torch.zeros(surplus.shape[1]), 0.97 * 0.95)
        worth = _normalised(advantage, torch.ones_like(advantage))
        returns = advantage + value[:-1]
    spread = model.log_spread.exp()
    surprise = 0.5 * ((actions - mean[:-1]) / spread).square() + model.log_spread
    return (surprise * worth).mean() + 0.5 * (value[:-1] - returns).square().mean()


def mean_cost(model: nn.Module, prepared: Prepared) -> Tensor:
    return _swing(model, prepared)[2].mean()
