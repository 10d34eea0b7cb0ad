"""Where a benchmark ran."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from runtime.bench.report import Environment
from runtime.kernels.gemm_table import gemm_table_digest


def environment_of(device: torch.device) -> Environment:
    """Describe this machine and the packages that decide speed."""
    is_cuda = device.type == "cuda"
    return Environment(
        specctl=_version("specctl") or "not installed",
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=_version("triton"),
        cuda=torch.version.cuda if is_cuda else None,
        device_name=torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        platform=platform.platform(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        torch_threads=torch.get_num_threads(),
        gemm_table=gemm_table_digest(),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown CPU"
