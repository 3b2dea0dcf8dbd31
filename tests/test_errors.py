"""Tests of the errors."""

import copy
import pickle

import pytest

from smp_runtime import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.PartitionError, ValueError),
        (errors.MicrobatchError, ValueError),
        (errors.NotSupportedError, NotImplementedError),
        (errors.WaitTimeoutError, TimeoutError),
        (errors.ConnectionLostError, ConnectionError),
    ],
)
def test_are_also_what_plain_code_would_catch(
    error: type[errors.SMPError], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin, match="^the message$"):
        raise error("the message")


def test_have_one_base() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(kinds) == 20
    assert all(issubclass(kind, errors.SMPError) for kind in kinds)


def test_a_peer_error_keeps_its_rank_between_processes() -> None:
    error = errors.PeerError("rank 3 failed", rank=3)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(twin), str(twin), twin.rank) == (errors.PeerError, "rank 3 failed", 3)
