"""torch.distributed under the name of SageMaker's data parallel library."""

from typing import Any

import torch.distributed as dist
from torch.distributed import get_rank, get_world_size

from smp_runtime.messages.groups import start_distributed
from smp_runtime.runtime import local_rank as get_local_rank

__all__ = ["get_local_rank", "get_rank", "get_world_size", "init_process_group"]


def init_process_group(*args: Any, **kwargs: Any) -> None:
    """Starts torch.distributed from the launcher's variables, unless it runs already."""
    if not dist.is_initialized():
        start_distributed(1800.0, None)
