"""Every line that a rank writes, whole, behind the rank's name, as soon as it is written.

torch's own tee follows log files: it prints half a line where it finds one, and the files stay
behind. Here a rank writes into named pipes, which one thread of the launcher reads.
"""

import os
import re
import selectors
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

# A line ends with "\n", or with the "\r" of a progress bar, which is no end before a "\n".
LINE_END = re.compile(rb"(?<=\n)|(?<=\r)(?=[^\n])")


class Stream:
    """One output of one rank: the pipe that it writes to and where its lines go."""

    def __init__(self, path: Path, prefix: str, target: TextIO) -> None:
        os.mkfifo(path)
        # Opened for writing too: a pipe without a writer would count as ended before the rank has
        # opened it, and a rank's own children may keep it open after the rank's end.
        self.descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self.path = path
        self.prefix = prefix
        self.target = target
        self.rest = b""

    def read(self) -> None:
        """Passes on the lines that have come."""
        *lines, self.rest = LINE_END.split(self.rest + os.read(self.descriptor, 1 << 16))
        self.write(lines)

    def write(self, lines: list[bytes]) -> None:
        """Writes lines behind the prefix."""
        for line in lines:
            self.target.write(self.prefix + line.decode(errors="replace"))
        self.target.flush()

    def close(self) -> None:
        """Passes on a last line that has no end."""
        if self.rest:
            self.write([self.rest.rstrip(b"\r") + b"\n"])
        os.close(self.descriptor)


class PrefixedOutput(LogsSpecs):
    """Tells torch's launcher where ranks write, and prints it.

    A context manager: at its end everything written has been printed, and the pipes are gone.
    """

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="smprun_")
        super().__init__(log_dir=self.folder.name)
        self.selector = selectors.DefaultSelector()
        self.ended = threading.Event()
        self.num_attempts = 0
        self.reader = threading.Thread(target=self.read_all, name="rank output", daemon=True)

    @property
    def root_log_dir(self) -> str:
        """The folder of the pipes."""
        return self.folder.name

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Makes the pipes of the ranks that are about to start, for the first time or again."""
        self.num_attempts += 1
        places = LogsDest()
        for local_rank, environ in envs.items():
            rank = environ["RANK"]
            folder = Path(self.folder.name, f"attempt{self.num_attempts}", rank)
            folder.mkdir(parents=True)
            places.stdouts[local_rank] = self.add(folder / "stdout", rank, sys.stdout)
            places.stderrs[local_rank] = self.add(folder / "stderr", rank, sys.stderr)
            places.error_files[local_rank] = str(folder / "error.json")
        if self.num_attempts == 1:
            self.reader.start()
        return places

    def add(self, path: Path, rank: str, target: TextIO) -> str:
        """Adds one output to those that are read."""
        stream = Stream(path, f"[rank {rank}] ", target)
        self.selector.register(stream.descriptor, selectors.EVENT_READ, stream)
        return str(path)

    def read_all(self) -> None:
        """Reads until the ranks have ended and nothing is left."""
        try:
            while (ready := self.selector.select(timeout=0.05)) or not self.ended.is_set():
                for key, _ in ready:
                    key.data.read()
        except BrokenPipeError:
            # Nobody reads the launcher's own output any more: end as `| head` ends a program.
            os.kill(os.getpid(), signal.SIGTERM)

    def __enter__(self) -> "PrefixedOutput":
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended.set()
        if self.reader.ident is not None:
            self.reader.join()
        for key in list(self.selector.get_map().values()):
            key.data.close()
        self.selector.close()
        self.folder.cleanup()
