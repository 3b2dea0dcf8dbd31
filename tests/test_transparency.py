"""The contract: a pipeline trains a model as one plain process does.

Losses, gradients after the first step and parameters after the third, for plain models of every
kind. Models of transformers are in `test_transparency_transformers.py`.
"""

from collections.abc import Callable, Mapping

import pytest
from torch import nn

from smp_runtime.errors import NotSupportedError, PartitionError
from tests.parameter_subjects import PARAMETER_SUBJECTS
from tests.subjects import (
    SUBJECTS,
    ResNet,
    Subject,
    TiedHead,
    classification,
    images,
    token_prediction,
    tokens,
)
from tests.transparency import Case, check
from tests.unruly_subjects import (
    UNRULY_SUBJECTS,
    LateStatistic,
    LayersInFunction,
    MomentumEncoder,
    OneMemory,
    RunningStatistic,
)

pytestmark = pytest.mark.world

# Each degree meets both schedules, and each number of microbatches meets some degree.
CASES = {
    2: (Case(1, "simple"), Case(3, "interleaved")),
    3: (Case(2, "interleaved"), Case(5, "simple")),
    4: (Case(8, "interleaved"), Case(2, "simple")),
}
ALL_CASES = [Case(m, name) for name in ("interleaved", "simple") for m in (1, 2, 3, 5, 8)]

ALL_SUBJECTS = (*SUBJECTS, *PARAMETER_SUBJECTS, *UNRULY_SUBJECTS)


@pytest.mark.parametrize(
    ("subject", "degree"),
    [(subject, degree) for subject in ALL_SUBJECTS for degree in subject.degrees],
    ids=str,
)
def test_trains_as_one_process_does(subject: Subject, degree: int) -> None:
    check(subject, degree, CASES[degree])


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize(
    "subject",
    [
        Subject("tied_head", TiedHead, tokens, token_prediction),
        Subject("residual_net", ResNet, images, classification),
    ],
    ids=str,
)
def test_any_number_of_microbatches(subject: Subject, degree: int) -> None:
    check(subject, degree, ALL_CASES)


@pytest.mark.parametrize("build", [RunningStatistic, MomentumEncoder, LateStatistic])
def test_state_between_stages_is_right_or_refused(build: Callable[[], nn.Module]) -> None:
    subject = Subject(build.__name__, build)
    check(subject, 2, [Case(1)])
    # The next microbatch would see another state than one process has there.
    with pytest.raises(NotSupportedError, match="in place"):
        check(subject, 2, [Case(3)])


def test_parameters_in_one_memory_stay_together_or_are_refused() -> None:
    def together(model: nn.Module, num_partitions: int) -> Mapping[str, int]:
        return {"first": 1, "middle": 0, "last": 1}

    def apart(model: nn.Module, num_partitions: int) -> Mapping[str, int]:
        return {"first": 0, "middle": 1, "last": 1}

    check(Subject("one_memory", OneMemory, pins=together), 2, [Case(2)])
    with pytest.raises(PartitionError, match="two parameters in one memory"):
        check(Subject("one_memory_apart", OneMemory, pins=apart), 2, [Case(2)])


def test_layers_inside_an_autograd_function_stay_together_or_are_refused() -> None:
    subject = Subject("layers_in_autograd_function", LayersInFunction)
    check(subject, 2, [Case(2)])
    check(subject, 3, [Case(2)])

    def apart(model: nn.Module, num_partitions: int) -> Mapping[str, int]:
        return {"first": 0, "encoder.layers.0": 0, "encoder": 1, "last": 1}

    with pytest.raises(NotSupportedError, match="inside a function that runs on one rank"):
        check(Subject("layers_apart", LayersInFunction, pins=apart), 2, [Case(1)])
