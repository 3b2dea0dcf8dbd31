"""The optimizers of `smp.optimizers`, which SMP took from apex; not supported yet."""

from __future__ import annotations

from typing import Any

import torch

from .errors import NotSupportedError


class FusedLAMB(torch.optim.Optimizer):
    """apex's LAMB; not supported yet.

    Raises:
        NotSupportedError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotSupportedError(
            "smp.optimizers.FusedLAMB is not supported yet: use torch.optim.AdamW(fused=True)"
        )


class FusedNovoGrad(torch.optim.Optimizer):
    """apex's NovoGrad; not supported yet.

    Raises:
        NotSupportedError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotSupportedError(
            "smp.optimizers.FusedNovoGrad is not supported yet: use torch.optim.AdamW(fused=True)"
        )
