"""A small training job that goes wrong in one way: what `test_fault_table.py` runs.

As a script, for launchers: `python tests/faults.py FAULT DEGREE`.
"""

import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import smp_runtime as smp
from tests.subjects import Block

STEPS = 4
TIMEOUT = 2.0
BAD_STEP = 3
VICTIM = 1  # the rank where things go wrong


class Stage(Block):
    """A block that may fail in its forward or backward."""

    fault: Callable[[], None] | None = None
    backward_fault: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fault is not None:
            self.fault()
        y = super().forward(x)
        if self.backward_fault is not None and y.requires_grad:
            fault = self.backward_fault
            y.register_hook(lambda gradient: fault())
        return y


def boom() -> None:
    raise ValueError("boom")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate 80.00 GiB")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    # A stopped process can't end itself; by then the others have ended long ago.
    subprocess.Popen(["sh", "-c", f"sleep 9; kill -KILL {os.getpid()}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def fill_disk() -> None:
    """Lets this process find the disk full from now on."""

    def flush(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = flush


def exit_at_once() -> None:
    os._exit(7)


def is_victim() -> bool:
    """Whether this is the rank where things go wrong."""
    return smp.rank() == VICTIM


def start(degree: int, fault: str) -> Any:
    """Initializes the runtime and places one block on each partition."""
    settings: dict[str, Any] = {
        "pipeline_parallel_degree": degree,
        "microbatches": 2,
        "auto_partition": False,
        "default_partition": 0,
        "ddp": True,
        "timeout": TIMEOUT,
        "debug": fault == "nan",
        "shard_optimizer_state": fault.startswith("sharded"),
    }
    if fault == "config" and os.environ["RANK"] == "1":
        settings["microbatches"] = 4
    smp.init(settings)
    model = smp.DistributedModel(nn.Sequential(*[Stage() for _ in range(degree)]))
    for rank, block in enumerate(model.get_module()):
        smp.set_partition(block, degree if fault == "partition" and rank == 1 else rank)
    return model


@smp.step
def train(model: Any, x: Tensor, fault: str) -> Tensor:
    """A step whose body or loss fails on the victim."""
    now = is_victim() and fault.endswith("!")
    if now and fault == "body!":
        boom()
    out = model(x)
    if now and fault == "path!":
        out = out * 2
    loss = out.square().mean()
    if now and fault == "loss!":
        boom()
    if now and fault == "item!":
        out.sum().item()
    if fault == "nan!":
        loss = loss * float("nan")
    model.backward(loss)
    return loss


IN_MODULE: dict[str, Callable[[], None]] = {
    "forward": boom,
    "memory": run_out_of_memory,
    "exit": exit_at_once,
    "kill": kill,
    "stop": stop,
    "slow": lambda: time.sleep(60),
}


def fragile_allreduce(state: Any, bucket: Any) -> Any:
    """Averages a bucket of gradients; fails on the victim in the bad step."""
    fragile_allreduce.calls += 1
    if fragile_allreduce.calls == BAD_STEP and is_victim():
        boom()
    return default_hooks.allreduce_hook(state, bucket)


fragile_allreduce.calls = 0


def batches(fault: str) -> Any:
    """Yields the batches; the loader may fail or end early."""
    for step in range(1, STEPS + 1):
        if step == BAD_STEP and is_victim():
            if fault == "loader":
                boom()
            if fault == "short loader":
                return
            if fault == "never":
                time.sleep(60)
        yield step, torch.ones(4, 8)
    if fault == "once more" and is_victim():
        yield STEPS + 1, torch.ones(4, 8)


def prepare(fault: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Makes the victim ready to fail in the coming step, or after it."""
    block = model.get_module()[smp.pp_rank()]
    if fault in IN_MODULE:
        block.fault = IN_MODULE[fault]
    if fault == "backward":
        block.backward_fault = boom
    if fault == "hook":
        block.register_forward_hook(lambda *_: boom())
    if fault == "gradient hook":
        next(block.parameters()).register_post_accumulate_grad_hook(lambda _: boom())
    if fault in ("optimizer", "sharded optimizer"):
        optimizer.register_step_pre_hook(lambda *_: boom())
    if fault == "after optimizer":
        optimizer.register_step_post_hook(lambda *_: boom())
    if fault == "disk":
        fill_disk()
    if fault == "state":
        Stage.get_extra_state = lambda _: boom()


def job(degree: int, fault: str, folder: str = "") -> None:
    """Trains until the fault strikes; with a folder, saves a checkpoint after each step."""
    model = start(degree, fault)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    if fault == "comm hook":
        model.register_comm_hook(None, fragile_allreduce)
    for step, x in batches(fault):
        if step == BAD_STEP and is_victim():
            prepare(fault, model, optimizer)
        train(model, x, fault + "!" if step == BAD_STEP else fault)
        optimizer.step()
        optimizer.zero_grad()
        if folder:
            smp.save_checkpoint(folder, f"step{step}", num_kept_partial_checkpoints=1)
        if step == BAD_STEP and fault == "save" and is_victim():
            model.state_dict()
        if step == BAD_STEP and fault == "barrier" and is_victim():
            smp.barrier()


def main() -> None:
    """Runs the job as a script."""
    die_with_parent = 1  # PR_SET_PDEATHSIG: a stopped rank must not outlive a killed launcher
    ctypes.CDLL(None).prctl(die_with_parent, signal.SIGKILL)
    *_, fault, degree = sys.argv
    job(int(degree), fault)


if __name__ == "__main__":
    main()
