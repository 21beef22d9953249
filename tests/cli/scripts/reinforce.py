"""REINFORCE on a corridor: walk right to the goal before time is up."""

import argparse
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--episodes", type=int, default=120)
parser.add_argument("--gamma", type=float, default=0.95)
args = parser.parse_args()
torch.manual_seed(543)
random.seed(543)

LENGTH = 6


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.affine2 = nn.Linear(LENGTH, 32), nn.Linear(32, 2)

    def forward(self, place):
        return F.softmax(self.affine2(F.relu(self.affine1(F.one_hot(place, LENGTH).float()))), dim=-1)


def run_episode(policy):
    place, log_probs, rewards = 0, [], []
    while place < LENGTH - 1 and len(rewards) < 30:
        chosen = Categorical(policy(torch.tensor(place)))
        action = chosen.sample()
        log_probs.append(chosen.log_prob(action))
        slips = random.random() < 0.1
        place = max(0, place + (1 if (action.item() == 1) != slips else -1))
        rewards.append(1.0 if place == LENGTH - 1 else -0.1)
    return log_probs, rewards


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr, maximize=True)
totals = []
for episode in range(args.episodes):
    log_probs, rewards = run_episode(policy)
    returns, value = [], 0.0
    for reward in reversed(rewards):
        value = reward + args.gamma * value
        returns.insert(0, value)
    objective = (torch.stack(log_probs) * torch.tensor(returns)).sum()
    optimizer.zero_grad()
    objective.backward()
    optimizer.step()
    totals.append(sum(rewards))
    if episode % 20 == 0:
        print(f"Episode {episode}\tobjective: {objective.item()!r}\tlength: {len(rewards)}")
print("final", -sum(totals[-40:]) / 40)
