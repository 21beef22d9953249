"""A variational autoencoder of digits; the class is imported by name, and takes its fused form."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description="VAE on digits")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()
torch.manual_seed(1)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.fc3, self.fc4 = nn.Linear(8, 64), nn.Linear(64, 64)

    def forward(self, x):
        hidden = F.relu(self.fc1(x))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


model = VAE()
optimizer = Adam(model.parameters(), lr=args.lr, fused=True)
images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
for epoch in range(1, args.epochs + 1):
    total = 0.0
    for data in DataLoader(images, batch_size=128, shuffle=True):
        optimizer.zero_grad()
        loss = loss_function(*model(data)[:1], data, *model(data)[1:])
        loss.backward()
        total += loss.item()
        optimizer.step()
    print(f"====> Epoch: {epoch} Average loss: {total / len(images)!r}")
print("final", total / len(images))
