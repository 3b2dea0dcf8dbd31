"""A client: trains a small convolutional network on pictures of digits, with manual bookkeeping."""

import argparse
import os
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR

import smdistributed.modelparallel.torch as smp

history = []


class Net1(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        return torch.flatten(x, 1)


class Net2(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(256, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), 1)


class GroupedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = Net1()
        self.net2 = Net2()

    def forward(self, x):
        return self.net2(self.net1(x))


class Digits(torch.utils.data.Dataset):
    """Pictures whose class can be told from their brightest row."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(3)
        self.targets = torch.randint(0, 10, (size,), generator=generator)
        self.data = torch.randn(size, 1, 12, 12, generator=generator)
        self.data[torch.arange(size), 0, self.targets] += 2

    def __getitem__(self, index):
        return self.data[index], self.targets[index]

    def __len__(self):
        return len(self.data)


@smp.step
def train_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="mean")
    model.backward(loss)
    return output, loss


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        _, loss_mb = train_step(model, data, target)
        loss = loss_mb.reduce_mean()
        optimizer.step()
        history.append(loss.item())
        if smp.rank() == 0 and batch_idx % args.log_interval == 0:
            print(f"Train epoch: {epoch} [{batch_idx * len(data)}] loss: {loss.item():.6f}")


@smp.step
def test_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()
    pred = output.argmax(dim=1, keepdim=True)
    correct = pred.eq(target.view_as(pred)).sum().item()
    return loss, correct


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            loss_batch, correct_batch = test_step(model, data, target)
            test_loss += sum(loss_batch)
            correct += sum(correct_batch)
    test_loss /= len(test_loader.dataset)
    if smp.mp_rank() == 0:
        print(f"Test: average loss {test_loss:.4f}, accuracy {correct}/{len(test_loader.dataset)}")
    return test_loss, correct


def main():
    if not torch.cuda.is_available():
        raise ValueError("The script requires CUDA support, but CUDA not available")
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--num-partitions", type=int, default=1)
    parser.add_argument("--num-microbatches", type=int, default=4)
    parser.add_argument("--model-dir", type=str, default=None)
    parser.add_argument("--ddp", type=int, default=0)
    parser.add_argument("--pipeline", type=str, default="interleaved")
    args = parser.parse_args()
    use_ddp = args.ddp > 0

    np.random.seed(args.seed)
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.cuda.manual_seed_all(args.seed)
    torch.backends.cudnn.deterministic = True
    cfg = {
        "microbatches": args.num_microbatches,
        "placement_strategy": "spread",
        "pipeline": args.pipeline,
        "optimize": "speed",
        "partitions": args.num_partitions,
        "horovod": 0,
        "ddp": use_ddp,
    }
    smp.init(cfg)
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda")
    smp.barrier()
    dataset1 = Digits(96)
    if use_ddp and smp.dp_size() > 1:
        dataset1 = torch.utils.data.Subset(
            dataset1, list(range(smp.dp_rank(), len(dataset1), smp.dp_size()))
        )
    kwargs = {"batch_size": args.batch_size, "num_workers": 0, "pin_memory": True}
    train_loader = torch.utils.data.DataLoader(dataset1, shuffle=False, drop_last=True, **kwargs)
    test_loader = torch.utils.data.DataLoader(Digits(32), drop_last=True, **kwargs)

    model = GroupedNet()
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        history.extend(test(model, device, test_loader))
        scheduler.step()

    if args.model_dir:
        if smp.dp_rank() == 0:
            model_dict = model.local_state_dict()
            opt_dict = optimizer.local_state_dict()
            smp.save(
                {"model_state_dict": model_dict, "optimizer_state_dict": opt_dict},
                os.path.join(args.model_dir, "pt_mnist_checkpoint.pt"),
                partial=True,
            )
        smp.barrier()
        checkpoint = smp.load(os.path.join(args.model_dir, "pt_mnist_checkpoint.pt"), partial=True)
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        history.extend(test(model, device, test_loader))


if __name__ == "__main__":
    main()
