"""Models of transformers, untouched, train on a pipeline as in one plain process."""

import pytest

from tests.subjects import Subject
from tests.transformer_subjects import TRANSFORMERS
from tests.transparency import Case, check

pytestmark = pytest.mark.world

CASES = {
    2: (Case(1, "simple"), Case(5, "interleaved")),
    3: (Case(3, "interleaved"),),
    4: (Case(2, "simple"),),
}


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("subject", TRANSFORMERS, ids=str)
def test_trains_as_one_process_does(subject: Subject, degree: int) -> None:
    check(subject, degree, CASES[degree])
