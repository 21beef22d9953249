"""A GAN on a ring of eight Gaussians: two optimizers."""

import argparse
import math

import torch
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--steps", type=int, default=150)
opt = parser.parse_args()
torch.manual_seed(0)


def real(count):
    angle = torch.randint(8, (count,)) * math.pi / 4
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)


netG = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
netD = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(0.5, 0.999))

for i in range(opt.steps):
    netD.zero_grad()
    fake = netG(torch.randn(64, 4))
    errD = criterion(netD(real(64)), torch.ones(64, 1)) + criterion(netD(fake.detach()), torch.zeros(64, 1))
    errD.backward()
    optimizerD.step()
    netG.zero_grad()
    errG = criterion(netD(fake), torch.ones(64, 1))
    errG.backward()
    optimizerG.step()
    if i % 20 == 0:
        print(f"[{i}/{opt.steps}] Loss_D: {errD.item()!r} Loss_G: {errG.item()!r}")

with torch.no_grad():  # how far the radii are from those of the ring
    print("final", (netG(torch.randn(512, 4)).norm(dim=1) - 1).abs().mean().item())
