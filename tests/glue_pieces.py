"""Pieces of glue that must compute over two ranks what they compute in one process.

Each takes a model with a module `first` on rank 0 and a module `last` on rank 1, and an input of
2 samples of width 4.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Two(nn.Module):
    """One module on each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


Glue = Callable[[Two, Tensor], Any]


class Cube(torch.autograd.Function):
    """A function of the user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


# -- changes in place -------------------------------------------------------------------------


def set_items(model: Two, x: Tensor) -> Tensor:
    out = torch.zeros(2, WIDTH)
    out[:, 1:] = model.first(x)[:, 1:]
    out[0, 0] = model.last(x).sum()
    return out


def set_masked_items(model: Two, x: Tensor) -> Tensor:
    h = model.first(x).clone()
    h[x > 0] = model.last(x)[x > 0]
    h[h < -1] = 0
    return h


def change_input(model: Two, x: Tensor) -> Tensor:
    h = model.first(x)
    h += x
    h.mul_(2)[0].zero_()
    return model.last(h)


def change_views(model: Two, x: Tensor) -> Tensor:
    h = model.first(x).clone()
    h[0] += 1
    h.t()[1].zero_()
    flat = h.view(-1)
    flat += 1
    return model.last(h) + flat.view_as(h)


def change_replicated(model: Two, x: Tensor) -> Tensor:
    out = torch.zeros(2, WIDTH)
    out.copy_(model.first(x))
    out.index_add_(0, torch.tensor([0]), model.last(x)[:1])
    filled = x.clone()
    filled.fill_(model.first(x).sum())
    filled[model.last(x) > 0] = 1.5
    return out + filled


def change_detached(model: Two, x: Tensor) -> Tensor:
    h = model.first(x)
    shared = h.detach()
    shared += 1
    return model.last(h)


def swap_columns(model: Two, x: Tensor) -> Tensor:
    a, b = model.first(x), model.last(x)
    a, b = b, a
    a[:, 0], b[:, 1] = b[:, 0], a[:, 1]
    return torch.einsum("ij,ij->i", a, b)


def rectify_in_place(model: Two, x: Tensor) -> Tensor:
    return model.last(F.relu(model.first(x), inplace=True))


def write_to_out(model: Two, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.add(model.first(x), 1, out=torch.empty(2, WIDTH))


# -- results of all kinds ---------------------------------------------------------------------


def named_results(model: Two, x: Tensor) -> Tensor:
    best = model.first(x).max(dim=1)
    low, index = model.last(x).min(dim=0)
    values, order = model.first(x).sort(dim=1)
    return best.values + best.indices + low[:2] + index[:2] + values.gather(1, order).sum(1)


def parts(model: Two, x: Tensor) -> Tensor:
    a, b = model.first(x)
    c, d = model.last(x).chunk(2, dim=-1)
    e, f = torch.split(model.last(x), [1, 3], dim=1)
    return torch.stack([a[:2] + c[0], b[:2] * d[1]]) * e + f[:, :2]


def loops(model: Two, x: Tensor) -> Tensor:
    rows = list(model.first(x))
    assert len(model.first(x)) == 2
    return torch.stack([model.last(row) for row in rows][::-1])


def the_operand_itself(model: Two, x: Tensor) -> Tensor:
    h = model.first(x).contiguous().float()
    assert h.contiguous() is h
    return model.last(h)


def new_tensors_alike(model: Two, x: Tensor) -> Tensor:
    h = model.first(x)
    more = h.new_zeros(2, WIDTH) + torch.zeros_like(h) + torch.full_like(h, 2.0)
    return model.last(h + more).type_as(x).to(x.device)


def shapes_in_arithmetic(model: Two, x: Tensor) -> Tensor:
    h = model.first(x)
    samples, width = h.size()
    flat = h.reshape(samples * width).view(samples, width)
    return model.last(flat) / math.sqrt(h.shape[-1]) + h.nelement()


def transposed_data(model: Two, x: Tensor) -> Tensor:
    h = model.first(x)
    return model.last(h) + h.data * h.T.T + h.mT.mT


# -- decisions and questions ------------------------------------------------------------------


def chosen_by_data(model: Two, x: Tensor) -> Tensor:
    h = model.first(x)
    chosen = h[h > 0]
    index = (model.last(x) > 0).nonzero()
    return torch.cat([chosen, index.float().flatten()]).sum()


def branches(model: Two, x: Tensor) -> Tensor:
    h = model.first(x)
    if h.sum() > 1e6 or (h > 1e5).any() or not torch.isfinite(h).all() or 1e9 in h:
        return x
    assert torch.allclose(h, h)
    assert torch.equal(h, h)
    return model.last(h) * len(h.flatten().tolist())


def python_numbers(model: Two, x: Tensor) -> Tensor:
    h = model.last(x)
    total = sum([h, model.first(x)])
    root = math.sqrt(abs(float(h.sum())))
    return total * root + 2**h - (-h) + max(h.sum(), h.mean())


def values_of_the_other_rank(model: Two, x: Tensor) -> Tensor:
    h = model.first(x)
    return torch.tensor([h.sum().item(), 1.0, 2.0, 3.0]) + model.last(x)


def indices_of_the_other_rank(model: Two, x: Tensor) -> Tensor:
    index = model.first(x).argmax(-1)
    return x[torch.arange(2), index] + model.last(x)[index % 2].sum(-1)


def arrays(model: Two, x: Tensor) -> Tensor:
    return model.last(x) + torch.from_numpy(np.asarray(model.first(x).detach()))


def text(model: Two, x: Tensor) -> Tensor:
    assert str(model.first(x)).startswith("tensor(")
    assert f"{model.last(x).sum():.3f}" != ""
    return model.first(x)


# -- gradients and modes ----------------------------------------------------------------------


def masked(model: Two, x: Tensor) -> Tensor:
    mask = torch.zeros(2, WIDTH, dtype=torch.bool)
    mask[0] = model.first(x)[0] > 0
    return model.last(x).masked_fill(mask, 0.5)


def own_function(model: Two, x: Tensor) -> Tensor:
    return Cube.apply(model.last(Cube.apply(model.first(x))))


def parameters_of_modules(model: Two, x: Tensor) -> Tensor:
    return F.linear(model.last(x), model.first.weight, model.last.bias)


def gradient_hook(model: Two, x: Tensor) -> Tensor:
    h = model.first(x)
    h.register_hook(lambda gradient: gradient * 2)
    return model.last(h)


def without_gradients(model: Two, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = model.first(x)
    return model.last(h)


def mixed_precision(model: Two, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = model.first(x)
        out = model.last(h)
    return out.float() * h.float()


def deep_copy(model: Two, x: Tensor) -> Tensor:
    return model.last(copy.deepcopy(model.first(x).detach()))


def checkpoint_of_a_module(model: Two, x: Tensor) -> Tensor:
    return checkpoint(model.last, model.first(x), use_reentrant=False)


def reentrant_checkpoint_of_a_module(model: Two, x: Tensor) -> Tensor:
    return checkpoint(model.last, model.first(x), use_reentrant=True)


def checkpoint_across_ranks(model: Two, x: Tensor) -> Tensor:
    def there_and_back(h: Tensor) -> Tensor:
        return model.first(torch.tanh(model.last(h)))

    return model.last(checkpoint(there_and_back, model.last(x), use_reentrant=False))


PIECES: tuple[Glue, ...] = (
    set_items,
    set_masked_items,
    change_input,
    change_views,
    change_replicated,
    change_detached,
    swap_columns,
    rectify_in_place,
    write_to_out,
    named_results,
    parts,
    loops,
    the_operand_itself,
    new_tensors_alike,
    shapes_in_arithmetic,
    transposed_data,
    chosen_by_data,
    branches,
    python_numbers,
    values_of_the_other_rank,
    indices_of_the_other_rank,
    arrays,
    text,
    masked,
    own_function,
    parameters_of_modules,
    gradient_hook,
    without_gradients,
    mixed_precision,
    deep_copy,
    checkpoint_of_a_module,
    reentrant_checkpoint_of_a_module,
    checkpoint_across_ranks,
)
