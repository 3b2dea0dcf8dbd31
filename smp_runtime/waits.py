"""The main thread's waits for other ranks, each bounded by the setting `timeout`.

A wait looks again and again whether what it waits for can still come: a peer that failed, left,
ended the step or took another path is an error at once, not at the timeout.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from .errors import PeerError, SMPError, WaitTimeoutError
from .failure import drawn
from .paths import Paths, describe
from .runs import Run
from .transport import Address, Transport
from .turns import Turns

MAX_AHEAD = 2
"""How many steps a rank may be ahead of another one."""

_SUSPICION = 0.2
_GLANCE = 0.05


class Waits:
    """The waits of one rank.

    Args:
        transport: to the other ranks of the pipeline group.
        paths: what is known of their paths.
        timeout: seconds that a wait may take.
    """

    def __init__(self, transport: Transport, paths: Paths, timeout: float) -> None:
        self._transport = transport
        self._paths = paths
        self._timeout = timeout

    def for_step(self, step: int) -> None:
        """Waits for ranks that are more than two steps behind: what is sent would pile up there.

        Raises:
            PeerError: such a rank failed or left.
            WaitTimeoutError: it did not come on in time.
        """
        transport = self._transport
        deadline = time.monotonic() + self._timeout
        for peer in transport.peers:
            with transport.arrived:
                while transport.ended.get(peer, 0) < step - MAX_AHEAD:
                    transport.check()
                    if peer in transport.gone:
                        raise PeerError(
                            f"rank {peer} ended its program, but rank {transport.rank} begins "
                            f"step {step}; every rank must call the step equally often",
                            rank=peer,
                        )
                    if time.monotonic() > deadline:
                        raise WaitTimeoutError(
                            f"rank {transport.rank} waited {self._timeout:g} s (setting "
                            f"`timeout`) for rank {peer} to end step {step - MAX_AHEAD}"
                        )
                    transport.arrived.wait(0.5)

    def for_news(self, turns: Turns, runs: Sequence[Run]) -> None:
        """Waits until a body can run; after a while lets ready bodies run out of turn.

        Raises:
            PeerError: another rank failed or left.
            PathMismatchError: what a body waits for will never come.
            WaitTimeoutError: nothing came in time.
        """
        begun = time.monotonic()
        while turns.choose() is None:
            waiting = [run for run in runs if run.state == "waiting"]
            needed = [a for run in waiting for a in run.addresses if not self._transport.has(a)]
            waited = time.monotonic() - begun
            if (waited > turns.patience or not needed) and turns.let_pass():
                return
            if not needed:
                raise SMPError("no body can run and none waits for another rank")
            self._paths.check_coming(needed)
            if waited > _SUSPICION:
                for run in waiting:
                    self._paths.check_order(run)
            if waited > self._timeout:
                drawing = drawn(turns.plan, waiting[0], self._transport.rank)
                raise WaitTimeoutError(f"{self._explain(needed)}\n{drawing}")
            self._transport.wait_any(needed, _GLANCE)

    def for_message(self, address: Address) -> None:
        """Waits until a message is there, outside the bodies.

        Raises:
            PeerError: another rank failed or left.
            WaitTimeoutError: it did not come in time.
        """
        deadline = time.monotonic() + self._timeout
        while not self._transport.wait_any([address], 0.5):
            self._paths.check_coming([address])
            if time.monotonic() > deadline:
                raise WaitTimeoutError(self._explain([address]))

    def _explain(self, needed: Sequence[Address]) -> str:
        waits = ", ".join(sorted({describe(address) for address in needed}))
        return (
            f"rank {self._transport.rank} waited {self._timeout:g} s (setting `timeout`) for "
            f"{waits}"
        )
