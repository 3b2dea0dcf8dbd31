"""A client: a detector placed by hand, with batch norm, its own image list and many losses."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

import smdistributed.modelparallel.torch as smp

history = []


class ImageList:
    """Images in one tensor, with their true sizes; knows how to be cut into microbatches."""

    def __init__(self, tensors, image_sizes):
        self.tensors, self.image_sizes = tensors, image_sizes

    def smp_slice(self, num_mb, mb, axis):
        size = self.tensors.size(axis) // num_mb
        return ImageList(
            self.tensors.narrow(axis, mb * size, size),
            self.image_sizes[mb * size : (mb + 1) * size],
        )


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.stage = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8))

    def forward(self, x):
        x = self.stem(x)
        return {"0": x, "1": F.max_pool2d(x + self.stage(x), 2)}


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls = nn.Conv2d(8, 4, 1)
        self.box = nn.Conv2d(8, 4, 1)

    def forward(self, features):
        pooled = [feature.mean(dim=(2, 3), keepdim=True) for feature in features.values()]
        scores = sum(self.cls(p) for p in pooled).flatten(1)
        boxes = sum(self.box(p) for p in pooled).flatten(1)
        return scores, boxes


class Detector(nn.Module):
    def __init__(self, last):
        super().__init__()
        with smp.partition(0):
            self.backbone = Backbone()
        with smp.partition(last):
            self.heads = Heads()

    def forward(self, images, targets):
        scores, boxes = self.heads(self.backbone(images.tensors))
        labels = torch.stack([target["label"] for target in targets])
        wanted = torch.stack([target["box"] for target in targets])
        return {
            "loss_classifier": F.cross_entropy(scores, labels),
            "loss_box_reg": F.smooth_l1_loss(boxes, wanted),
        }


class Target(dict):
    """What is in one image; travels whole with its image."""


@smp.step
def train_step(model, images, labels, boxes):
    targets = [Target(label=label, box=box) for label, box in zip(labels, boxes, strict=True)]
    loss_dict = model(images, targets)
    losses = sum(loss for loss in loss_dict.values())
    model.backward(losses)
    return loss_dict, losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    smp.init(
        {
            "partitions": args.partitions,
            "microbatches": 2,
            "auto_partition": False,
            "default_partition": 0,
            "ddp": True,
        }
    )
    if smp.rank() == 0:
        seed = 11
        smp.broadcast(seed, smp.WORLD)
    else:
        seed = smp.recv_from(0, smp.RankType.WORLD_RANK)
    torch.manual_seed(seed)
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda")
    model = smp.DistributedModel(Detector(smp.pp_size() - 1))
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2], gamma=0.1)
    model.train()
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * step + smp.dp_rank())
        images = ImageList(
            torch.randn(args.batch, 3, 8, 8, generator=generator).to(device),
            [(8, 8)] * args.batch,
        )
        labels = torch.randint(0, 4, (args.batch,), generator=generator).to(device)
        boxes = torch.rand(args.batch, 4, generator=generator).cuda(non_blocking=True)
        loss_dict, losses = train_step(model, images, labels, boxes)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        reduced = {name: loss.reduce_mean().item() for name, loss in loss_dict.items()}
        assert abs(sum(reduced.values()) - losses.reduce_mean().item()) < 1e-5
        history.append(losses.reduce_mean().item())
    buffers = dict(model.local_named_buffers())
    if "backbone.stem.1.running_mean" in buffers:
        sums = buffers["backbone.stem.1.running_mean"].sum().item()
        assert sums != 0


if __name__ == "__main__":
    main()
