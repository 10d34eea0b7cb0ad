"""Where a benchmark ran, and on which sources."""

from __future__ import annotations

import hashlib
import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import runtime
from runtime.bench.raw import Environment
from runtime.kernels.gemm_table import gemm_table_digest

DIGESTED_PACKAGES = ("engine", "graphs", "kernels", "models", "spec")
"""Packages of `runtime` whose sources decide what a figure means."""


def environment_of(device: torch.device, command: str) -> Environment:
    """Describe this machine, its packages and the runtime's sources."""
    is_cuda = device.type == "cuda"
    sources = source_digests()
    return Environment(
        command=command,
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        specctl=_version("specctl") or "not installed",
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=_version("triton"),
        cuda=torch.version.cuda if is_cuda else None,
        device_name=torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        device_memory_bytes=torch.cuda.get_device_properties(device).total_memory
        if is_cuda
        else None,
        platform=platform.platform(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        torch_threads=torch.get_num_threads(),
        gemm_table=gemm_table_digest(),
        sources=sources,
        sources_digest=_joined(sources),
    )


def source_digests(root: Path | None = None) -> dict[str, str]:
    """Return package -> digest over the names and contents of its Python files.

    Args:
        root: directory of the `runtime` package; None: the one that runs.
    """
    root = Path(runtime.__file__).parent if root is None else root
    return {name: _package_digest(root / name) for name in DIGESTED_PACKAGES}


def _package_digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.py"), key=lambda path: path.as_posix()):
        name = path.relative_to(directory).as_posix()
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{name} {content}\n".encode())
    return "sha256:" + digest.hexdigest()


def _joined(sources: dict[str, str]) -> str:
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(sources.items()))
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


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
