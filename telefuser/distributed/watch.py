"""Ends all processes of a job when one of them ends early; `Job` keeps one, and no part of a computation goes this way.

Process 0 listens and every other holds one connection to it. The kernel closes the connection of a killed process at
once and gives up a silent host after 5 s. Heartbeats would take a process for dead that holds the interpreter for as
long, as loading and compiling do on a busy machine; the kernel answers for it meanwhile.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass

logger = logging.getLogger(__name__)

# Seconds. Reports of one failure come from several processes; the first is often its consequence, so wait for the rest.
# The first process may meanwhile be keeping the latents of a video that all of them failed to decode.
SETTLE = 2.0
# After that (or after a signal) the main thread may clean up for this long; then the process is ended from here. Below
# 10 s together with the 5 s after which a silent host is given up.
GRACE = 3.0
_START_LIMIT = 300.0
_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 5000}


@dataclass(frozen=True)
class Failure:
    """Why a job ends. weight: 0 a process died, 1 an error of its own, 2 one that another's end may have caused."""

    rank: int
    text: str
    code: int = 1
    weight: int = 1
    trace: str = ""


class Connection:
    """Lines of JSON over a socket, each a dict."""

    def __init__(self, sock: socket.socket):
        self.sock, self.buffer, self.name = sock, b"", "?"
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: dict) -> None:
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            # The other side is gone: its closed connection says so to the reader, who decides what that means.
            logger.debug("message not sent: %s", error)

    def receive(self) -> list[dict] | None:
        """The messages that have come; None once the connection is closed."""
        try:
            data = self.sock.recv(65536)
        except OSError:
            data = b""
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None


class Watch:
    """One process's end of the watch. `start` on all processes; then `finish` or `leave`, once, on the main thread."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.failure: Failure | None = None
        self.failed, self.released = threading.Event(), threading.Event()
        self._left = threading.Event()  # the main thread knows and will say it itself
        self._finished: set[int] = set()
        self._reports: list[Failure] = []
        self._connections: dict[int, Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._ends_at: tuple[float, str, int] | None = None
        self._settles_at: float | None = None
        self._signalled: Failure | None = None
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._wakeup, self.signals = socket.socketpair()
        for end in (self._wakeup, self.signals):
            end.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        self.interrupts = False  # set where SIGTERM may be used to wake the main thread

    def start(self, store, host: str, is_one_host: bool) -> None:
        """Connect. store: of torch.distributed, tells the port. RuntimeError where a process does not come."""
        if self.rank == 0:
            self._listen(store, is_one_host)
        else:
            port, token = json.loads(store.get("watch"))
            sock = socket.create_connection(("127.0.0.1" if is_one_host else host, port), timeout=60)
            sock.settimeout(None)
            self._add(0, Connection(sock), "process 0")
            name = f"process {self.rank} (pid {os.getpid()} on {socket.gethostname()})"
            self._connections[0].send({"rank": self.rank, "token": token, "name": name})
        self._thread = threading.Thread(target=self._run, name="telefuser-watch", daemon=True)
        self._thread.start()

    def _listen(self, store, is_one_host: bool) -> None:
        # Only what knows the token from the store may connect; on one host nothing else can reach the port at all.
        token, deadline = secrets.token_hex(16), time.monotonic() + _START_LIMIT
        with socket.create_server(("127.0.0.1" if is_one_host else "", 0)) as server:
            store.set("watch", json.dumps([server.getsockname()[1], token]))
            while len(self._connections) + 1 < self.size:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    connection = Connection(server.accept()[0])
                except TimeoutError as error:
                    came = len(self._connections) + 1
                    raise RuntimeError(
                        f"{came} of {self.size} processes came within {_START_LIMIT:.0f} s: see why the others did not "
                        "start, and whether they reach this host"
                    ) from error
                hello = self._hello(connection)
                if hello.get("token") == token:
                    self._add(hello["rank"], connection, hello["name"])
                else:
                    connection.sock.close()

    @staticmethod
    def _hello(connection: Connection) -> dict:
        connection.sock.settimeout(5)
        messages: list[dict] | None = []
        while messages == []:
            try:
                messages = connection.receive()
            except ValueError:
                return {}
        connection.sock.settimeout(None)
        return messages[0] if messages and isinstance(messages[0], dict) else {}

    def _add(self, rank: int, connection: Connection, name: str) -> None:
        connection.name = name
        self._connections[rank] = connection
        self._selector.register(connection.sock, selectors.EVENT_READ, rank)

    # The main thread's calls

    def finish(self) -> bool:
        """Say that this process is through, and wait until all are: they end together however long one still writes.

        False where one of them failed.
        """
        if self.rank:
            self._connections[0].send({"finished": True})
        else:
            self._note_finished(0)
        while not self.released.wait(0.1):
            if self.failed.is_set():
                return False
        return True

    def leave(self, own: Failure | None) -> Failure:
        """Tell the others why this process ends; returns what ended the job, which may be another's failure.

        own: None where the main thread was interrupted by the watch.
        """
        self.interrupts = False
        if own is not None and self.rank:
            # torchrun ends all once one has ended, so process 0 comes first. It answers, or its connection closes.
            with self._lock:
                self._reports.append(own)
            self._connections[0].send({"failure": asdict(own)})
            self.failed.wait(SETTLE + GRACE)
        elif own is not None:
            self._report(own)
            if own.weight == 2:
                self.failed.wait(SETTLE + 1.0)
        with self._lock:
            if self.failure is None:
                self._decide()
            self._left.set()
            self._end_in(GRACE, "", self.failure.code)
        if self.rank == 0:
            self._tell_all({"end": asdict(self.failure)})
        return self.failure

    def close(self) -> None:
        """End the thread and the connections, after `finish` has returned True."""
        self._closed.set()
        self._thread.join()
        for connection in self._connections.values():
            connection.sock.close()
        self._selector.close()
        self._wakeup.close()
        self.signals.close()

    def is_speaker(self) -> bool:
        """Whether this process says why the job ends: process 0, or where that one is gone the first on each host."""
        died = self.failure is not None and self.failure.weight == 0 and self.failure.rank == 0
        return self.rank == 0 or (died and (self.rank == 1 or os.environ.get("LOCAL_RANK") == "0"))

    # The thread

    def _run(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(timeout=0.2):
                if key.data is None:
                    self._on_signals(self._wakeup.recv(64))
                    continue
                connection = self._connections[key.data]
                messages = connection.receive()
                for message in messages or ():
                    self._on_message(key.data, message)
                if messages is None:
                    self._selector.unregister(connection.sock)
                    self._on_closed(key.data, connection)
            self._check_time()

    def _on_signals(self, numbers: bytes) -> None:
        # Written by the C handler, so they come through while the main thread waits in a collective.
        for number in numbers:
            if number in (signal.SIGINT, signal.SIGTERM) and not self.failed.is_set():
                word = "interrupted" if number == signal.SIGINT else "terminated"
                self._signalled = Failure(self.rank, f"process {self.rank} was {word}", code=128 + number)
                self._end_in(GRACE, f"{word}; no unfinished file is left", 128 + number)

    def _on_message(self, rank: int, message: dict) -> None:
        if "finished" in message:
            self._note_finished(rank)
        elif "failure" in message:
            self._finished.add(rank)
            self._report(Failure(**message["failure"]))
        elif "end" in message:
            self._report(Failure(**message["end"]), settle=0)
        elif "released" in message:
            self.released.set()

    def _on_closed(self, rank: int, connection: Connection) -> None:
        if self.released.is_set() or rank in self._finished or self.failed.is_set():
            return
        text = f"{connection.name} ended without a word: killed, out of memory, or its host is gone; the job ends"
        self._report(Failure(rank, text, weight=0), settle=0.2)

    def _note_finished(self, rank: int) -> None:
        with self._lock:
            self._finished.add(rank)
            if len(self._finished) == self.size and not self._reports:
                self._tell_all({"released": True})
                self.released.set()

    def _report(self, failure: Failure, settle: float = SETTLE) -> None:
        with self._lock:
            self._reports.append(failure)
            at = time.monotonic() + settle
            self._settles_at = at if self._settles_at is None else min(self._settles_at, at)

    def _decide(self) -> None:
        # Process 0's own error rather than the same one of another: its traceback is at hand.
        with self._lock:
            self.failure = min(self._reports, key=lambda found: (found.weight, found.rank != 0))
            self.failed.set()

    def _check_time(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self._settles_at is not None and now >= self._settles_at and not self.failed.is_set():
                self._decide()
                self._end_in(GRACE, f"error: {self.failure.text}", self.failure.code)
                if self.rank == 0:
                    self._tell_all({"end": asdict(self.failure)})
                if self.interrupts and not self._left.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)
        if self._ends_at is not None and now >= self._ends_at[0]:
            _, line, code = self._ends_at
            if line and not self._left.is_set() and self.is_speaker() and (self.rank == 0 or not self._signalled):
                say(line)
            if self.rank and self._signalled:
                self._connections[0].send({"failure": asdict(self._signalled)})
            # Not sys.exit: the main thread waits in a collective that nobody will answer.
            os._exit(code)

    def _end_in(self, seconds: float, line: str, code: int) -> None:
        with self._lock:
            if self._ends_at is None:
                self._ends_at = (time.monotonic() + seconds, line, code)

    def _tell_all(self, message: dict) -> None:
        for connection in self._connections.values():
            connection.send(message)


def say(line: str) -> None:
    """A line on the process's own stderr, whatever sys.stderr is at the moment."""
    stream = sys.__stderr__
    if stream is not None:
        stream.write(f"{line}\n")
        stream.flush()
