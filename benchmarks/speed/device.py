"""A device to measure on: its clock, its memory, and what it is. A CPU stands in for a GPU where a test runs this."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = ["mechanic", "torch", "numpy", "prodigyopt", "dadaptation", "mechanic-pytorch", "schedulefree"]
WARM_UP = 3


@dataclass(frozen=True)
class Device:
    """Where to measure, and how much."""

    torch_device: torch.device
    tiny: bool
    rounds: int

    @property
    def is_gpu(self) -> bool:
        return self.torch_device.type == "cuda"

    def about(self) -> dict[str, Any]:
        """The device and the versions of everything."""
        about: dict[str, Any] = {"device": platform.machine(), "tiny": self.tiny, "rounds": self.rounds}
        if self.is_gpu:
            properties = torch.cuda.get_device_properties(self.torch_device)
            about["device"] = torch.cuda.get_device_name(self.torch_device)
            about |= {"memory_gb": round(properties.total_memory / 1e9, 1), "cuda": torch.version.cuda}
            about |= {"rocm": torch.version.hip, "processors": properties.multi_processor_count}
        about["python"] = platform.python_version()
        return {**about, "versions": {name: found for name in PACKAGES if (found := _version(name))}}

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)

    def times(self, run: Callable[[], Any]) -> dict[str, float]:
        """Medians in ms: until the device has done it, by its own events, and until the host can go on."""
        for _ in range(1 if self.tiny else WARM_UP):
            run()
        self.wait()
        of_device, of_host = zip(*(self._once(run) for _ in range(self.rounds)), strict=True)
        return {"ms": _rounded(statistics.median(of_device)), "host_ms": _rounded(statistics.median(of_host))}

    def _once(self, run: Callable[[], Any]) -> tuple[float, float]:
        if not self.is_gpu:
            began = time.perf_counter()
            run()
            return (milliseconds := 1e3 * (time.perf_counter() - began)), milliseconds
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        began = time.perf_counter()
        run()
        of_host = 1e3 * (time.perf_counter() - began)
        last.record()
        last.synchronize()
        return first.elapsed_time(last), of_host

    def allocated(self) -> int:
        """Bytes that are in use now; 0 on a CPU, where nobody counts them."""
        return torch.cuda.memory_allocated(self.torch_device) if self.is_gpu else 0

    @contextmanager
    def peak(self) -> Iterator[list[int]]:
        """A list that has the largest number of bytes in use meanwhile; an empty one on a CPU."""
        found: list[int] = []
        if self.is_gpu:
            self.wait()
            torch.cuda.reset_peak_memory_stats(self.torch_device)
        yield found
        if self.is_gpu:
            self.wait()
            found.append(torch.cuda.max_memory_allocated(self.torch_device))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
