"""A slow cable between two network namespaces: a rate, a delay, and it can be cut. Each end is a device of its own, and
this process carries the packets, so that the kernel needs no module for it."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from two_machines import AWAY, HOME, NotPermitted

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
QUEUE_S = 0.05
"""Packets that would wait longer for the line are dropped, as by a switch."""


class SlowLink:
    """The cable; `words` run a command on each side, and `devices` are its two ends."""

    def __init__(self, bits_per_s: float, delay_s: float):
        self.bits_per_s, self.delay_s, self.is_cut, self.num_bytes = bits_per_s, delay_s, False, 0
        self.names = [f"offbeat-{side}-{os.getpid()}" for side in ("near", "far")]
        self.devices = [f"obl{side}{os.getpid()}"[:15] for side in (0, 1)]
        self.words = [["ip", "netns", "exec", name] for name in self.names]
        self._files: list[int] = []
        self._over = threading.Event()

    def connect(self) -> None:
        for name, device, address in zip(self.names, self.devices, (HOME, AWAY), strict=True):
            _ip("netns", "add", name)
            try:
                file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                self._files.append(file)
                fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
            except OSError as error:
                raise NotPermitted(f"/dev/net/tun: {error}") from error
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "mtu", str(MTU), "up")
            _ip("-n", name, "link", "set", "lo", "up")
        self._carrier = threading.Thread(target=self._carry, daemon=True)
        self._carrier.start()

    def remove(self) -> None:
        self._over.set()
        if len(self._files) == 2 and hasattr(self, "_carrier"):
            self._carrier.join(10)
        for file in self._files:
            os.close(file)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)

    def _carry(self) -> None:
        under_way: list[deque[tuple[float, bytes]]] = [deque(), deque()]
        free_s = [0.0, 0.0]
        while not self._over.is_set():
            due = min((queue[0][0] for queue in under_way if queue), default=time.monotonic() + 0.1)
            ready = select.select(self._files, [], [], max(due - time.monotonic(), 0.0))[0]
            now = time.monotonic()
            for side, file in enumerate(self._files):
                if file in ready:
                    packet = os.read(file, 65536)
                    free_s[side] = max(free_s[side], now)
                    if not self.is_cut and free_s[side] - now < QUEUE_S:
                        free_s[side] += 8 * len(packet) / self.bits_per_s
                        under_way[side].append((free_s[side] + self.delay_s, packet))
            for side, queue in enumerate(under_way):
                while queue and queue[0][0] <= now:
                    _, packet = queue.popleft()
                    if not self.is_cut:
                        self.num_bytes += len(packet)
                        os.write(self._files[1 - side], packet)


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        raise NotPermitted("the command ip is missing; install iproute2") from None
    if done.returncode:
        raise NotPermitted(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def slow_link(bits_per_s: float, delay_s: float) -> Iterator[SlowLink]:
    link = SlowLink(bits_per_s, delay_s)
    try:
        link.connect()
        yield link
    finally:
        link.remove()
