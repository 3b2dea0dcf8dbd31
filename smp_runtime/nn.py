"""SMP's modules under its names: a layer norm, and those of tensor parallelism, not yet."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from .errors import NotSupportedError

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
]


class FusedLayerNorm(nn.LayerNorm):
    """torch's layer norm, whose kernel is fused already; replaced apex's in SMP."""


class DistributedModule(nn.Module):
    """Base of the modules that tensor parallelism cuts. They exist by name only.

    Raises:
        NotSupportedError: always, when one is made.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse(type(self).__name__)


class DistributedLinear(DistributedModule):
    """A linear layer cut along its inputs; not supported yet."""


class DistributedEmbedding(DistributedModule):
    """An embedding cut along its dimensions; not supported yet."""


class DistributedTransformerLMHead(DistributedModule):
    """A language model cut over tensor ranks; not supported yet."""


class DistributedTransformer(DistributedModule):
    """A stack of transformer layers cut over tensor ranks; not supported yet."""


class DistributedTransformerLayer(DistributedModule):
    """A transformer layer cut over tensor ranks; not supported yet."""


class DistributedAttentionLayer(DistributedModule):
    """An attention layer cut over tensor ranks; not supported yet."""


class DistributedTransformerOutputLayer(DistributedModule):
    """A transformer's feed-forward layer cut over tensor ranks; not supported yet."""


class FlashAttentionLayer(DistributedModule):
    """SMP's attention kernel; not supported yet."""


def _refuse(name: str) -> NoReturn:
    raise NotSupportedError(
        f"smp.nn.{name} is not supported yet: build the module from torch's or transformers' own "
        "layers, whose attention is torch's fused one"
    )
