"""Kills a job at random moments while it saves, again and again, and looks at what is left.

    python -m tests.killed_saves 50

Every tensor of a checkpoint holds the number of its save, so that a mixture of two is seen.
"""

import contextlib
import io
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smp_runtime as smp
from smp_runtime.errors import CheckpointIncompleteError, CheckpointNotFoundError
from smp_runtime.saving.checkpoint_index import find
from smp_runtime.saving.checkpoint_reader import Checkpoint
from tests.worlds import forked

WIDTH = 256
TAGS = ("odd", "even")  # each save replaces the one before the last
LONGEST_LIFE = 1.5  # seconds from the start of saving


@smp.step
def train_step(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    model.backward(loss)
    return loss


def job(path: Path, begun: Path) -> None:
    """Resumes, checks what it got, and saves for ever; half of the saves in the background."""
    smp.init({"pipeline_parallel_degree": 2, "timeout": 30.0})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.0, momentum=0.9))
    number = 0
    if (path / "newest").exists():
        number = smp.resume_from_checkpoint(path)["number"]
        for parameter in model.parameters():
            assert set(parameter.unique().tolist()) == {float(number)}
    train_step(model, torch.ones(1, WIDTH))
    optimizer.step()
    while True:
        number += 1
        with torch.no_grad():
            for parameter in model.local_parameters():
                parameter.fill_(number)
                optimizer.state[parameter]["momentum_buffer"].fill_(number)
        begun.touch()
        tag = TAGS[number % 2]
        content = {"number": number}
        smp.save_checkpoint(path, tag, user_content=content, async_save=number % 4 > 1)


def number_in(path: Path) -> int:
    """Returns the number of the newest checkpoint, all of which has to have it; 0 for none."""
    if not (path / "newest").exists():
        return 0
    checkpoint = Checkpoint(find(path, None))
    number: int = checkpoint.user_content(None)["number"]
    shapes = checkpoint.shapes()
    assert len(shapes) == 4
    for name, state in checkpoint.optimizer_state(shapes).items():
        for tensor in (checkpoint.model_tensor(name), state["momentum_buffer"]):
            assert set(tensor.unique().tolist()) == {float(number)}, (name, number)
    for tag in TAGS:  # complete, or named as what it is
        try:
            Checkpoint(find(path, tag))
        except (CheckpointIncompleteError, CheckpointNotFoundError) as error:
            assert tag in str(error)
    return number


def kill_and_look(path: Path, num_kills: int, seed: int) -> list[int]:
    """Returns the number of the newest checkpoint after each kill; it never goes back."""
    generator = random.Random(seed)
    found = [0]
    for kill in range(num_kills):
        begun = path.with_name(f"begun{kill}")
        with forked(2, job, (path, begun), 60.0, linger=False) as (ranks, _):
            deadline = time.monotonic() + 60.0
            while not begun.exists():
                failed = [rank for rank in ranks if rank.process.exitcode]
                assert not failed and time.monotonic() < deadline, [r.text("err") for r in failed]
                time.sleep(0.002)
            time.sleep(generator.uniform(0.0, LONGEST_LIFE))
            for rank in ranks:
                assert rank.process.exitcode is None, rank.text("err")
            for rank in ranks:
                rank.process.kill()
        found.append(number_in(path))
        assert found[-1] >= found[-2]
    return found[1:]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        numbers = kill_and_look(Path(folder) / "saved", int(sys.argv[1]), seed=int(time.time()))
    print(f"killed {len(numbers)} times; the newest checkpoint was save {numbers}")
