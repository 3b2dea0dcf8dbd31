"""A thread beside the program that sees when nothing happens, and says what everybody is doing.

It is there for what the main thread can't do while it waits in torch or computes for ever: to
hear that a rank of another pipeline failed, to answer roll calls, to print a table of all ranks on
SIGUSR1, and to end this rank when nothing has happened for the setting `timeout`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ..errors import PeerError
from ..messages.bulletin import END, FAILURE, ROLL_CALL, Bulletin, News
from ..messages.pauses import pauses
from .situation import Observer, Situation, table

_TICK = 0.25
_LONGEST_PAUSE = 0.05
_MARGIN = 2.0  # the main thread's own waits end first: they know more
_GRACE = 4.0  # for the main thread to fail by itself once another rank has
_ANSWER_PATIENCE = 1.5
_SAME_CALL = 3.0
_LAST_LOOK = 5.0  # for the thread to come back from the store at the end


class Watchdog:
    """Watches one rank.

    Args:
        bulletin: the board of the job.
        observer: looks at this rank.
        size: number of ranks of the job.
        timeout: seconds without progress after which this rank ends.
        hear: told of another rank's failure; returns whether this rank knows and deals with it.

    Attributes:
        size: number of ranks of the job.
        failure: the first failure of another rank that was heard of.
        ended: the ranks that have ended their programs, and when in words.
    """

    def __init__(
        self,
        bulletin: Bulletin,
        observer: Observer,
        size: int,
        timeout: float,
        hear: Callable[[PeerError], bool],
    ) -> None:
        self.failure: PeerError | None = None
        self.ended: dict[int, str] = {}
        self._bulletin = bulletin
        self._observer = observer
        self.size = size
        self._timeout = timeout
        self._hear = hear
        self._reading = threading.Lock()
        self._last_call = (0, 0.0)  # number, when it was heard of
        self._is_stopped = False
        self._has_signal = False
        self._has_wakeup = False
        self._heard_at = 0.0
        self._bell, self._pull = socket.socketpair()
        for end in (self._bell, self._pull):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="smp-watchdog")

    def start(self) -> None:
        """Begins to watch; prints the table on SIGUSR1 from now on."""
        with suppress(ValueError):  # not the main thread: signals are somebody else's affair
            if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
                signal.signal(signal.SIGUSR1, self._ring)
                self._has_signal = True
                # Python's handlers wait for the main thread, which may be stuck; this does not.
                previous = signal.set_wakeup_fd(self._pull.fileno(), warn_on_full_buffer=False)
                self._has_wakeup = previous == -1
                if not self._has_wakeup:
                    signal.set_wakeup_fd(previous)
        self._thread.start()

    def stop(self) -> None:
        """Ends watching: from now on nothing ends this rank but itself.

        Waits for the thread: if the interpreter ended while it asks the store, it would be
        unwound through torch's C++, which aborts the process, after all its work was done.
        """
        self._is_stopped = True
        with suppress(ValueError):  # as above
            if self._has_wakeup:
                signal.set_wakeup_fd(-1)
            if self._has_signal:
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        if self._thread.is_alive():
            with suppress(BlockingIOError):
                self._pull.send(b"\0")
            self._thread.join(_LAST_LOOK)
        if not self._thread.is_alive():
            for end in (self._bell, self._pull):
                end.close()

    def take_leave(self, patience: float) -> None:
        """Tells all ranks that the program of this one ends, and waits a little for theirs.

        A rank that still needs this one will say so.
        """
        deadline, until_next = time.monotonic() + patience, pauses(_LONGEST_PAUSE)
        with suppress(Exception):
            self._bulletin.post(END, f"after step {self._observer.step}")
            while self.failure is None and time.monotonic() < deadline:
                self._read_news()
                if len(self.ended) == self.size:
                    return
                time.sleep(next(until_next))

    def ask_all(self) -> dict[int, Situation]:
        """Asks all ranks what they are doing; returns the answers of those that answer soon."""
        mine = self._observer.situation()
        answers = {mine.rank: mine}
        with suppress(Exception):  # the store may be gone: then this rank's own is all there is
            number, heard = self._last_call
            if time.monotonic() - heard > _SAME_CALL:
                number = self._bulletin.post(ROLL_CALL, "")
            self._bulletin.answer(number, mine)
            found = self._bulletin.answers(number, self.size, _ANSWER_PATIENCE)
            answers |= {rank: Situation(*answer) for rank, answer in found.items()}
        return answers

    def explain(self) -> str:
        """Returns a table of what all ranks are doing, and where this one is."""
        answers = self.ask_all()
        mine = answers[self._observer.rank]
        everyone = table(answers, self.ended, self.size)
        parts = [everyone, mine.schedule, f"rank {mine.rank}, {mine.stack}"]
        return "\n".join(part for part in parts if part)

    def await_failure(self, patience: float) -> PeerError | None:
        """Waits a little for the news that another rank failed, and returns them."""
        deadline, until_next = time.monotonic() + patience, pauses(_LONGEST_PAUSE)
        self._read_news()
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(next(until_next))
            self._read_news()
        return self.failure

    def _ring(self, *_: object) -> None:
        if not self._has_wakeup:
            with suppress(BlockingIOError):
                self._pull.send(bytes([signal.SIGUSR1]))

    def _watch(self) -> None:
        while not self._is_stopped:
            ready, _, _ = select.select([self._bell], [], [], _TICK)
            if ready and signal.SIGUSR1 in self._bell.recv(4096):
                _say(f"smp_runtime: {signal.SIGUSR1.name}\n{self.explain()}")
            if self._is_stopped:
                return
            self._read_news()
            is_idle = self._observer.idle_seconds() > self._timeout + _MARGIN
            if is_idle and self._observer.activity and self.failure is None:
                self._end_hang()
            if self._heard_at and time.monotonic() > self._heard_at + _GRACE:
                assert self.failure is not None
                if not self._hear(self.failure):
                    self._end(str(self.failure))

    def _read_news(self) -> None:
        with suppress(Exception), self._reading:  # a store that is gone has no news
            for news in self._bulletin.read():
                if news.kind == ROLL_CALL:
                    self._last_call = (news.number, time.monotonic())
                    self._bulletin.answer(news.number, self._observer.situation())
                elif news.kind == END:
                    self.ended[news.rank] = news.text
                elif news.kind == FAILURE:
                    self._note_failure(news)

    def _note_failure(self, news: News) -> None:
        if self.failure is None and not self._bulletin.is_mine(news):
            self.failure = PeerError(news.text, news.rank, is_told=True)
            if not self._hear(self.failure):
                self._heard_at = time.monotonic()

    def _end_hang(self) -> None:
        text = (
            f"rank {self._observer.rank}, {self._observer.activity}: nothing has happened for "
            f"{self._timeout:g} s (setting `timeout`)\n{self.explain()}"
        )
        with suppress(Exception):
            self._bulletin.post(FAILURE, text)
        self._end(text)

    def _end(self, text: str) -> None:
        if not self._is_stopped:
            _say(f"smp_runtime: {text}")
            # The main thread is stuck: it can't be made to end by an exception.
            os._exit(1)


def _say(text: str) -> None:
    with suppress(Exception):
        print(text, file=sys.stderr, flush=True)
