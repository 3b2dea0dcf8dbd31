"""Where a step failed, in words and on the drawn schedule. Allocates nothing large."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import torch

from ..planning.schedule import Plan, draw
from .runs import Run

_MOST_CELLS = 200
_NOT_THE_USERS = (
    *(str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)),
    *(threading.__file__, "<frozen"),
)


def locate(
    error: BaseException,
    run: Run | None,
    plan: Plan | None,
    rank: int,
    name: int,
    step: str,
    module_names: Mapping[int, str],
) -> str:
    """Says where an error happened: rank, step, microbatch, module path, schedule position.

    Args:
        error: the error, with its traceback.
        run: the body that failed, None if none did.
        plan: the plan of the step.
        rank: this rank in its pipeline.
        name: this rank, globally.
        step: which step it is in, in words.
        module_names: names of the model's modules by identity.
    """
    place = f"rank {name}, {step}"
    if run is None:
        return place
    path = run.body.last_origin
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = module_names.get(id(frame.f_locals.get("self")), path)
    place += f", microbatch {run.body.microbatch}, at {path}"
    return "\n".join(line for line in (place, drawn(plan, run, rank)) if line)


def report(error: BaseException, place: str) -> str:
    """Returns what the other ranks are told: where and what in the first line, then all of it.

    Args:
        error: the error, with its traceback.
        place: what `locate` says.
    """
    first, _, rest = place.partition("\n")
    what = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
    trace = "".join(traceback.format_exception(error))
    return "\n".join(part for part in (f"{first}: {what}", rest, trace) if part)


def drawn(plan: Plan | None, run: Run | None, rank: int) -> str:
    """Draws the schedule with the action marked that a body was at."""
    if plan is None or run is None or not run.path:
        return ""
    action = run.path[min(run.num_done, len(run.path) - 1)]
    if len(plan.actions(rank)) > _MOST_CELLS:
        return f"at action {action} of the schedule"
    with contextlib.suppress(Exception):  # drawing must not cover the failure
        return draw(plan, mark=(rank, action))
    return ""


def user_line(thread: threading.Thread | None) -> str:
    """Says at which line of the user's code a thread is; "" if that can't be told."""
    frame: FrameType | None = None
    if thread is not None and thread.ident is not None:
        frame = sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    if frame is None:
        return ""
    return f", at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
