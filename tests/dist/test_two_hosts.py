"""The two-host example of the how-to between two network namespaces: ranks find each other.

The host's own name means a loopback address in both, as on many real hosts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.namespaces import star, why_not
from tests.tiny_manifest import write_manifest
from tests.tiny_pair import write_pair

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

PORT = 29517
LIMIT_S = 500


def test_stages_on_two_hosts_answer_as_target_only(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, write_pair(tmp_path).manifest())
    command = [sys.executable, "-m", "specctl", "generate", str(manifest), "abcdef"]
    command += ["--max-tokens", "8", "--pp", "2", "--device", "cpu", "--compare"]
    with star(1) as hosts:
        ranks = []
        for rank, namespace in enumerate((hosts.middle, hosts.others[0])):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": hosts.address(0, of_middle=True),
                "MASTER_PORT": str(PORT),
                "OMP_NUM_THREADS": "1",
            }
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", namespace, *command],
                    env=environment,
                    cwd=Path(__file__).parents[2],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            said = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)
    assert "identical: yes" in said[0]
