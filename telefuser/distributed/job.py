"""`Job`: the processes that `torchrun` started for one program, from their start to their common end."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import traceback
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from telefuser import platforms
from telefuser.distributed.watch import Failure, Watch, say

# All processes of a program start its jobs in the same order.
_numbers = itertools.count()


class JobError(RuntimeError):
    """Another process of the job failed or died; the message names it."""


class _Remote(Exception):
    """Carries another process's traceback as the cause of a `JobError`."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _JobEnded(BaseException):
    """Raised in the main thread when the watch ends the job; no `except Exception` takes it."""


def announced() -> tuple[int, int]:
    """(rank, number of processes) as a launcher such as torchrun puts them into the environment; (0, 1) without one."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def own_device(device: str | torch.device | None = None) -> torch.device:
    """The device of this process: `resolve_device` for a lone one, of several each the one that LOCAL_RANK counts to.

    Raises ValueError for a device with an index where there are several processes, and for more of them than devices.
    """
    if announced()[1] == 1:
        return platforms.resolve_device(device)
    wanted = platforms.resolve_device(device)
    platform = platforms.platform_of(wanted)
    if wanted.type == "cpu":
        return wanted
    local, count = int(os.environ.get("LOCAL_RANK", "0")), platform.device_count()
    if local >= count > 1:
        raise ValueError(
            f"process {local} of this host has no device: {count} {platform.vendor_device}s are visible; start "
            f"`torchrun --nproc-per-node {count}`"
        )
    # A launcher may also have left each process a single visible device.
    index = local if local < count else 0
    if device not in (None, "auto") and torch.device(device).index not in (None, index):
        raise ValueError(f"device {str(device)!r}: {announced()[1]} processes cannot share one; give {wanted.type!r}")
    return torch.device(wanted.type, index)


class Job:
    """`with Job() as job:` around a program that torchrun starts in several processes; does nothing for a lone one.

    It takes this process's device (`job.device`), starts the process group on its backend (NCCL, RCCL, HCCL, gloo),
    and closes it when all processes are through. A process that fails, is killed or loses its host ends the others
    within 10 s, wherever they wait; so do SIGINT and SIGTERM. One process says why, the first: an error of another
    reaches its program as `JobError`. The others leave by SystemExit, without a word.

    Args:
        device: as for `own_device`.
        timeout: seconds that a collective waits for the other processes.

    Attributes:
        rank, size: of this process and of the job. is_first: whether this process prints and writes.

    Raises ValueError for a device that is not there or a process group that was started before, RuntimeError where not
    all processes come.
    """

    def __init__(self, device: str | torch.device | None = "auto", timeout: int = 600):
        self.rank, self.size = announced()
        self.timeout = timeout
        self.device = own_device(device)
        self._watch: Watch | None = None
        self._restore: list[tuple] = []
        self._leaving = False

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def __enter__(self) -> Job:
        if self.size == 1:
            return self
        if dist.is_initialized():
            raise ValueError("Job starts the process group itself: leave out torch.distributed.init_process_group")
        limit = timedelta(seconds=self.timeout)
        store, _, _ = next(dist.rendezvous("env://", timeout=limit))
        # What an earlier job of this program left in the store is not for this one.
        store = dist.PrefixStore(f"telefuser/{next(_numbers)}", store)
        watch = Watch(self.rank, self.size)
        watch.start(store, os.environ["MASTER_ADDR"], os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"])
        self._watch = watch
        self._take_signals(watch)
        try:
            platform = platforms.platform_of(self.device)
            platform.set_device(self.device)
            own = {"store": dist.PrefixStore("group", store), "rank": self.rank, "world_size": self.size}
            dist.init_process_group(platform.dist_backend, timeout=limit, **own)
        except BaseException as error:
            self._end_early(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving = True
        if self._watch is None:
            return
        if error is None:
            try:
                if self._watch.finish():
                    dist.destroy_process_group()
                    self._return_signals()
                    self._watch.close()
                    return
                error = _JobEnded()
            except BaseException as ended:
                error = ended
                self._end_early(ended)
                raise
        self._end_early(error)

    def _end_early(self, error: BaseException) -> None:
        """Raises what this process leaves with; returns where that is `error` itself."""
        if self._watch.interrupts:
            # torchrun sends SIGTERM to all as soon as one process has ended; this one is on its way.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        own = None if isinstance(error, _JobEnded) else _describe(self.rank, error)
        failure = self._watch.leave(own)
        if self.is_first and own is not None and failure.rank == 0:
            return
        if self.is_first:
            raise JobError(failure.text) from (_Remote(failure.trace) if failure.trace else None)
        if self._watch.is_speaker():
            say(f"error: {failure.text}")
        raise SystemExit(failure.code) from None

    def _take_signals(self, watch: Watch) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGTERM)

        def on_sigterm(number, frame):
            # On its way out the main thread knows already, from its first instruction on; the watch limits its time.
            if self._leaving or frame.f_code is Job.__exit__.__code__:
                return
            # The watch's thread may be about to learn why: the system closes a connection before torchrun can notice.
            if watch.failed.wait(0.3):
                raise _JobEnded
            if callable(previous):
                previous(number, frame)
            else:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        self._restore = [(signal.signal, signal.SIGTERM, previous)]
        signal.signal(signal.SIGTERM, on_sigterm)
        self._restore.append((signal.set_wakeup_fd, signal.set_wakeup_fd(watch.signals.fileno())))
        watch.interrupts = True

    def _return_signals(self) -> None:
        for call, *arguments in self._restore:
            call(*arguments)
        self._restore = []
        self._watch.interrupts = False


def _describe(rank: int, error: BaseException) -> Failure:
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank, f"process {rank} was interrupted", code=130)
    if isinstance(error, SystemExit):
        # `sys.exit("text")` is Python's way to say the text and leave with 1.
        if error.code is not None and not isinstance(error.code, int):
            return Failure(rank, f"process {rank}: {error.code}")
        return Failure(rank, f"process {rank} left with code {error.code or 0}", code=error.code or 0)
    if not isinstance(error, Exception):
        return Failure(rank, f"process {rank} was terminated", code=143)
    text = " ".join(str(error).split())
    trace = "".join(traceback.format_exception(error))
    code = getattr(error, "exit_code", 1)
    is_collective = isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "NCCL", "HCCL"))
    return Failure(rank, f"process {rank}: {type(error).__name__}: {text}", code, 2 if is_collective else 1, trace)
