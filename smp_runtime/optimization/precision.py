"""Training in float16 or bfloat16: what is converted, what stays, and how gradients add up.

Parameters are 16-bit; the optimizer steps on float32 master weights (`substitutes`). Gradients are
added up over microbatches in float32: torch casts each one when it adds it, if a parameter says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ..config import Config
from ..creation.pending_values import recording
from ..errors import NotSupportedError
from ..trees import map_tensors


class Precision:
    """The types of one job.

    Args:
        config: its settings.

    Attributes:
        dtype: the type of parameters and activations; None leaves the model as it is.
    """

    def __init__(self, config: Config) -> None:
        self.dtype = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None
        self._adds_in_float32 = config.fp32_grad_accumulation

    def convert(self, module: nn.Module) -> None:
        """Makes a model 16-bit, in place.

        Batch norms stay in float32, and so do buffers of modules without parameters, such as the
        frequencies of rotary embeddings, which are too coarse in 16 bits.
        """
        if self.dtype is None:
            return
        # Values that are still to come are converted when they do.
        is_delayed = any(map(recording.knows, module.parameters()))
        with recording.active() if is_delayed else nullcontext():
            self._convert(module, self.dtype)

    def _convert(self, module: nn.Module, dtype: torch.dtype) -> None:
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._NormBase):
                continue
            parameters = list(part.parameters(recurse=False))
            for parameter in parameters:
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
            for name, buffer in part.named_buffers(recurse=False):
                if parameters and buffer.is_floating_point():
                    setattr(part, name, buffer.to(dtype))

    def prepare_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Makes gradients of 16-bit parameters float32.

        Raises:
            NotSupportedError: this torch can't.
        """
        if self.dtype is None or not self._adds_in_float32:
            return
        for parameter in parameters:
            if parameter.dtype != self.dtype:
                continue
            if not hasattr(parameter, "grad_dtype"):
                raise NotSupportedError(
                    f"torch {torch.__version__} can't add up gradients in float32: use torch 2.10 "
                    "or newer, or set fp32_grad_accumulation to False"
                )
            if parameter.grad_dtype != torch.float32 and parameter.grad is None:
                parameter.grad_dtype = torch.float32

    def to_model(self, arguments: Any) -> Any:
        """Returns arguments of the model with float32 tensors in its type."""
        return _cast(arguments, torch.float32, self.dtype) if self.dtype else arguments

    def from_model(self, results: Any) -> Any:
        """Returns results of the model with tensors of its type in float32."""
        return _cast(results, self.dtype, torch.float32) if self.dtype else results


def _cast(tree: Any, source: torch.dtype, target: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(target) if tensor.dtype == source else tensor, tree)
