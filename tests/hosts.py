"""Machines made of network namespaces: `hosts(2)` yields two that see each other over a hub.

Each has a name, a network of its own with one address, and an /etc/hosts in which it finds the
others, and itself at 127.0.1.1 as Debian writes it. The hub is a thread of this process at the
other end of their links, so that a link can be slow or cut without help from the kernel. Needs
root, the command ip and /dev/net/tun.
"""

import fcntl
import heapq
import itertools
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LINK = "eth0"
TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MOST_WAITING = 500  # frames; a real switch drops what is more


def run(*command: str) -> None:
    """Runs a command that must succeed."""
    subprocess.run(command, check=True, capture_output=True)


def why_not() -> str:
    """Says why there can't be any hosts here, "" if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for name in ("ip", "unshare"):
        if shutil.which(name) is None:
            return f"there is no command {name}"
    space = f"probe-{os.getpid()}"
    try:
        run("ip", "netns", "add", space)
        run("ip", "netns", "del", space)
        os.close(open_tap(space))
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces are not allowed here: {error}"
    return ""


def open_tap(name: str) -> int:
    """Makes a network link whose other end is the returned file."""
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    name_and_flags = struct.pack("16sH", name[:15].encode(), IFF_TAP | IFF_NO_PI)
    fcntl.ioctl(descriptor, TUNSETIFF, name_and_flags)
    return descriptor


class Host:
    """One machine, and what is wrong with its link.

    Attributes:
        delay: seconds that what it sends is under way.
        rate: bytes per second that it can send, 0 for any number.
        is_cut: nothing goes in or out.
    """

    def __init__(self, index: int) -> None:
        self.name = f"host{index}"
        self.space = f"smp{os.getpid()}-{index}"
        self.address = f"10.77.0.{index + 1}"
        self.etc = Path("/etc/netns") / self.space
        self.delay, self.rate, self.is_cut = 0.0, 0.0, False
        self.free_at = 0.0
        self.tap = open_tap(self.space)

    def set_up(self, others: Sequence["Host"]) -> None:
        """Makes its network."""
        run("ip", "netns", "add", self.space)
        run("ip", "link", "set", self.space[:15], "netns", self.space, "name", LINK)
        run("ip", "-n", self.space, "address", "add", f"{self.address}/24", "dev", LINK)
        for link in ("lo", LINK):
            run("ip", "-n", self.space, "link", "set", link, "up")
        self.etc.mkdir(parents=True)
        known = [f"{other.address} {other.name}" for other in others if other is not self]
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {self.name}", *known, ""]
        (self.etc / "hosts").write_text("\n".join(lines))

    def processes(self) -> set[int]:
        """Returns the processes that run on it."""
        command = ["ip", "netns", "pids", self.space]
        found = subprocess.run(command, check=False, capture_output=True, text=True).stdout
        return {int(pid) for pid in found.split()}

    def take_down(self) -> None:
        """Leaves nothing behind."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(self.tap)
        with suppress(subprocess.CalledProcessError):
            run("ip", "netns", "del", self.space)
        shutil.rmtree(self.etc, ignore_errors=True)

    def start(self, command: Sequence[str], environ: dict[str, str]) -> "subprocess.Popen[str]":
        """Starts a command on this machine; its output is text on one pipe."""
        inside = f'hostname {self.name} && exec "$@"'
        return subprocess.Popen(
            ["ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c", inside, "sh"]
            + [*command],
            env={**os.environ, "GLOO_SOCKET_IFNAME": LINK, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def arrival(self, size: int) -> float:
        """Returns when a frame that it sends now is there."""
        begun = max(time.monotonic(), self.free_at)
        self.free_at = begun + (size / self.rate if self.rate else 0.0)
        return self.free_at + self.delay


class Hub:
    """Passes every frame of one machine on to all others."""

    def __init__(self, machines: Sequence[Host]) -> None:
        self.machines = machines
        self.is_closed = False
        self.waiting: list[tuple[float, int, Host, bytes]] = []
        self.numbers = itertools.count()
        self.thread = threading.Thread(target=self.forward, name="hub", daemon=True)
        self.thread.start()

    def forward(self) -> None:
        """Works until the hub is closed."""
        senders = {host.tap: host for host in self.machines}
        while not self.is_closed:
            patience = self.waiting[0][0] - time.monotonic() if self.waiting else 0.05
            ready, _, _ = select.select(list(senders), [], [], min(max(patience, 0.0), 0.05))
            for tap in ready:
                frame, host = os.read(tap, 65536), senders[tap]
                if len(self.waiting) < MOST_WAITING:
                    due = host.arrival(len(frame)), next(self.numbers), host, frame
                    heapq.heappush(self.waiting, due)
            while self.waiting and self.waiting[0][0] <= time.monotonic():
                _, _, host, frame = heapq.heappop(self.waiting)
                for other in self.machines:
                    if other is not host and not (host.is_cut or other.is_cut):
                        with suppress(OSError):  # its queue is full, or it isn't up yet
                            os.write(other.tap, frame)

    def close(self) -> None:
        """Ends the thread."""
        self.is_closed = True
        self.thread.join()


@contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """Yields some machines on one hub, and takes them down after."""
    machines = [Host(index) for index in range(number)]
    try:
        for host in machines:
            host.set_up(machines)
        hub = Hub(machines)
        try:
            yield machines
        finally:
            hub.close()
    finally:
        for host in machines:
            host.take_down()
