"""What a launcher says about this process: which of how many it is, and where they meet.

A launcher is `torchrun`, or this program's own start of processes on one host. It speaks through
environment variables; nothing else is read from them. Invariant: what is returned can be.
*Source:* the variables are those of torch.distributed's `env://` start.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from runtime.parallel.layout import ParallelLayout
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

_MAX_PORT = 65535
_SIOCGIFADDR = 0x8915
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a launcher says about this process.

    Args:
        rank: in the world.
        world_size: processes.
        local_rank: among those of this host.
        local_world_size: processes of this host.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def launch_of(environment: Mapping[str, str] | None = None) -> Launch | None:
    """Return what a launcher said; None: nobody launched this process as one of several.

    Raises:
        DiagnosticError: SD832 for each variable that cannot be.
    """
    values = os.environ if environment is None else environment
    if "RANK" not in values or "WORLD_SIZE" not in values:
        return None
    problems: list[Diagnostic] = []
    world_size = _number(values, "WORLD_SIZE", problems, low=1)
    rank = _number(values, "RANK", problems, high=world_size - 1)
    launch = Launch(
        rank=rank,
        world_size=world_size,
        local_rank=_number(values, "LOCAL_RANK", problems, otherwise=rank),
        local_world_size=_number(
            values, "LOCAL_WORLD_SIZE", problems, otherwise=world_size, low=1, high=world_size
        ),
    )
    if world_size > 1:
        if not values.get("MASTER_ADDR"):
            problems.append(_refused("MASTER_ADDR", "", "the address of rank 0"))
        _number(values, "MASTER_PORT", problems, low=1, high=_MAX_PORT)
    if problems:
        raise DiagnosticError(problems)
    return launch


def launch_environment(
    launch: Launch, *, address: str, port: int, threads: str = "1"
) -> dict[str, str]:
    """Return the variables that `launch_of` and the store of a started process read."""
    return {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
    }


def name_interface(environment: MutableMapping[str, str]) -> None:
    """Have gloo use the interface towards rank 0, unless the environment names one.

    Without a name it takes the address of this host's own name, which on many hosts is one that
    reaches nobody else (127.0.1.1).
    """
    if _INTERFACE in environment or not environment.get("MASTER_ADDR"):
        return
    found = interface_towards(environment["MASTER_ADDR"])
    if found is not None:
        environment[_INTERFACE] = found


def interface_towards(address: str) -> str | None:
    """Return the interface through which this host reaches an IPv4 address, or has it itself.

    None: it is this host's loopback, or cannot be told.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # no packet is sent
            own = probe.getsockname()[0]
            if ipaddress.ip_address(own).is_loopback:
                return None
            names = (name for _, name in socket.if_nameindex())
            return next((name for name in names if _address_of(probe, name) == own), None)
    except OSError:
        return None


def _address_of(probe: socket.socket, name: str) -> str | None:
    request = struct.pack("256s", name.encode()[:15])
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:  # an interface without an IPv4 address
        return None
    return socket.inet_ntoa(answer[20:24])


def refuse_another_size(layout: ParallelLayout, launch: Launch) -> None:
    """Refuse a layout of another number of processes than were launched.

    Raises:
        DiagnosticError: SD832.
    """
    if launch.world_size == layout.world_size:
        return
    raise DiagnosticError(
        diagnose(
            "SD832",
            where="--pp",
            message=f"{layout.pipeline_parallel} stages of {layout.tensor_parallel} ranks "
            f"are {layout.world_size} processes, {launch.world_size} were launched",
            expected=layout.world_size,
            found=launch.world_size,
            help="Launch as many processes as `--pp` times `--tp`, on all hosts together",
        )
    )


def _number(
    values: Mapping[str, str],
    name: str,
    problems: list[Diagnostic],
    *,
    otherwise: int | None = None,
    low: int = 0,
    high: int | None = None,
) -> int:
    """Return a variable as a number from `low` to `high`; `low` and a problem when it is none."""
    text = values.get(name)
    if text is None and otherwise is not None:
        return otherwise
    try:
        number = int(text or "")
    except ValueError:
        number = low - 1
    if number < low or (high is not None and number > max(low, high)):
        bound = f"{low} or more" if high is None else f"{low} to {max(low, high)}"
        problems.append(_refused(name, text or "", bound))
        return low
    return number


def _refused(name: str, found: str, expected: str) -> Diagnostic:
    return diagnose(
        "SD832",
        where=name,
        message=f"the environment variable `{name}` of the launcher cannot be",
        expected=expected,
        found=found or "not set",
        help="Start every process with `torchrun`, or unset `RANK` and `WORLD_SIZE` to start one",
    )
