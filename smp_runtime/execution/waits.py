"""The main thread's waits for other ranks, each bounded by the setting `timeout`.

A wait looks again and again whether what it waits for can still come: a peer that failed, left,
ended the step, took another path, or waits for this rank in turn is an error at once, not at the
timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..errors import PathMismatchError, PeerError, SMPError, WaitTimeoutError
from ..messages.standing import stuck_ranks
from ..messages.transport import Address, Transport
from .failure import user_line
from .paths import ADVICE, Paths, describe
from .runs import Run
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

    Attributes:
        explain: says what every rank of the job is doing, where a wait took too long.
    """

    def __init__(self, transport: Transport, paths: Paths, timeout: float) -> None:
        self._transport = transport
        self._paths = paths
        self.explain: Callable[[], str] = lambda: ""
        self._timeout = timeout

    def for_step(self, step: int) -> None:
        """Waits for ranks that are more than two steps behind: what is sent would pile up there.

        Raises:
            PeerError: such a rank failed or left.
            WaitTimeoutError: it did not come on in time.
        """
        transport = self._transport
        deadline = time.monotonic() + self._timeout
        mine = transport.name(transport.rank)
        for peer in transport.peers:
            name = transport.name(peer)
            with transport.arrived:
                while transport.ended.get(peer, 0) < step - MAX_AHEAD:
                    transport.check()
                    if peer in transport.gone:
                        raise PeerError(
                            f"rank {name} ended its program, but rank {mine} begins "
                            f"step {step}; every rank must call the step equally often",
                            rank=name,
                        )
                    if time.monotonic() > deadline:
                        raise WaitTimeoutError(
                            f"rank {mine} waited {self._timeout:g} s (setting `timeout`) for "
                            f"rank {name} to end step {step - MAX_AHEAD}\n{self.explain()}"
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
                self._check_standings(turns, waiting)
            if waited > self._timeout:
                raise WaitTimeoutError(self._say(needed))
            self._transport.wait_any(needed, _GLANCE)

    def for_message(self, address: Address) -> None:
        """Waits until a message is there, outside the bodies.

        Raises:
            PeerError: another rank failed or left.
            WaitTimeoutError: it did not come in time.
        """
        deadline = time.monotonic() + self._timeout
        while not self._transport.wait_any([address], _SUSPICION):
            self._paths.check_coming([address])
            self._transport.tell_standing(
                [[address]], f"waits for {describe(address, self._transport)}"
            )
            self._check_stuck()
            if time.monotonic() > deadline:
                raise WaitTimeoutError(self._say([address]))

    def _check_standings(self, turns: Turns, waiting: Sequence[Run]) -> None:
        """Tells the peers what the bodies of this rank wait for, and looks at what they wait for.

        Raises:
            PathMismatchError: this rank and others wait for each other.
        """
        has = self._transport.has
        missing = {id(run): [a for a in run.addresses if not has(a)] for run in waiting}
        # A body that only waits for another body of this rank is no way to go on.
        able = [run for run in waiting if missing[id(run)] or turns.may_pass(run)]
        texts = [
            f"waits for {describe(missing[id(run)][0], self._transport)}, after "
            f"{run.body.last_origin}{user_line(run.thread)}"
            for run in able
            if missing[id(run)]
        ]
        self._transport.tell_standing([run.addresses for run in able], texts[0] if texts else "")
        self._check_stuck()

    def _check_stuck(self) -> None:
        transport = self._transport
        with transport.arrived:
            standings = dict(transport.standings)
        stuck = stuck_ranks(standings)
        if transport.rank in stuck:
            lines = [f"  rank {transport.name(rank)} {standings[rank].text}" for rank in stuck]
            raise PathMismatchError(
                "these ranks wait for each other, so they took different paths:\n"
                + "\n".join(lines)
                + f"\n{ADVICE}"
            )

    def _say(self, needed: Sequence[Address]) -> str:
        transport = self._transport
        waits = ", ".join(sorted({describe(address, transport) for address in needed}))
        return (
            f"rank {transport.name(transport.rank)} waited {self._timeout:g} s (setting "
            f"`timeout`) for {waits}\n{self.explain()}"
        )
