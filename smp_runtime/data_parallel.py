"""Gradients averaged over replicas, and replicas that begin equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from .runtime import Runtime


def average_gradients(
    parameters: Sequence[nn.Parameter], runtime: Runtime, bucket_bytes: int
) -> None:
    """Averages the gradients of this rank's parameters over the data parallel group.

    A parameter that got a gradient on some replicas only counts as zero on the others; one that
    got none anywhere keeps ``grad is None``.
    """
    size = runtime.placement.size("dp")
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if size == 1 or not trained:
        return
    group = runtime.groups.of("dp")
    has_gradient = torch.tensor([parameter.grad is not None for parameter in trained]).int()
    dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=group)
    gradients = []
    for parameter, has in zip(trained, has_gradient.tolist(), strict=True):
        if has:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients, bucket_bytes):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        flat /= size
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def broadcast_state(module: nn.Module, runtime: Runtime) -> None:
    """Gives every replica the parameters and buffers of the first one."""
    if runtime.placement.size("dp") == 1:
        return
    group = runtime.groups.of("dp")
    source = runtime.placement.group("dp", dist.get_rank())[0]
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                dist.broadcast(tensor.data, source, group=group)


def _buckets(gradients: Sequence[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    num_bytes = 0
    for gradient in gradients:
        is_other = bool(bucket) and gradient.dtype != bucket[0].dtype
        if bucket and (is_other or num_bytes + gradient.nbytes > limit):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(gradient)
        num_bytes += gradient.nbytes
    if bucket:
        yield bucket
