"""Times of single calls on the current device: cold cache, device events, medians."""

import statistics
import time
from collections.abc import Callable

import torch

# Larger than any GPU's level-2 cache (H200: 60 MB), so that no input is found there from the call before.
FLUSH_BYTES = 256 << 20


class Timer:
    """Median time of a call on `device`; on a CPU the clock's, without flushing, for trying a benchmark out."""

    def __init__(self, device: torch.device, repeats: int = 20):
        self.device, self.repeats = device, repeats
        self.module = None if device.type == "cpu" else torch.get_device_module(device)
        self.flush = None if device.type == "cpu" else torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Median over the repeats, after two calls that compile and allocate."""
        for _ in range(2):
            call()
        if self.module is None:
            return statistics.median(self._clock(call) for _ in range(3))
        self.module.synchronize()
        events = []
        for _ in range(self.repeats):
            # While the cache is overwritten the host runs ahead, so that its launches cost the measured call nothing.
            self.flush.zero_()
            start, end = (self.module.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            events.append((start, end))
        self.module.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events)

    @staticmethod
    def _clock(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def host_microseconds(self, call: Callable[[], object], calls: int = 200) -> float:
        """Time the host spends on one call of many in a row, as they are issued; the device is not waited for."""
        runs = []
        for _ in range(5):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            runs.append((time.perf_counter() - start) / calls * 1e6)
        self.synchronize()
        return statistics.median(runs)

    def synchronize(self) -> None:
        if self.module is not None:
            self.module.synchronize()

    def copy_ceiling(self, megabytes: int = 2048) -> float:
        """TB/s of a device-to-device copy, bytes read and bytes written counted."""
        source = torch.empty(megabytes << 20, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        return 2 * source.numel() / self.milliseconds(lambda: target.copy_(source)) / 1e9
