"""In the manner of timm's training script: groups with and without decay, warm-up, cosine, a moving average."""

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def param_groups_weight_decay(model, weight_decay):
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": weight_decay}]


def create_optimizer(args, model):
    groups = param_groups_weight_decay(model, args.weight_decay)
    groups[0]["lr"] = args.lr / 2  # biases and norms move less
    classes = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    options = {"momentum": 0.9, "nesterov": True} if args.opt == "sgd" else {}
    return classes[args.opt](groups, lr=args.lr, **options)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt", default="sgd")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--weight-decay", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(42)
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))
    optimizer = create_optimizer(args, model)
    per_epoch, batch = len(targets) // 64, 64
    total, warmup = args.epochs * per_epoch, 10

    def shape(step):
        return (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * step / total))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(args.epochs):
        order, running = torch.randperm(len(targets)), []
        for index in range(per_epoch):
            rows = order[index * batch : (index + 1) * batch]
            loss = criterion(model(inputs[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)
            running.append(loss.item())
        print(f"Train: {epoch} Loss: {sum(running) / len(running)!r} LR: {scheduler.get_last_lr()}")
    ema.eval()
    with torch.no_grad():
        print("final", criterion(ema(inputs), targets).item())


if __name__ == "__main__":
    main()
