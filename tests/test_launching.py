"""The end of a process, and its port."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from zaya_hf.launching import end_process, reserved_port


def test_ending_takes_nothing_apart() -> None:
    """Neither what is in a cycle, though an exit handler collects, nor what a module refers to; handlers run."""
    source = f"""
import atexit, gc
from {end_process.__module__} import end_process

class Group:
    def __del__(self):
        print("taken apart")

cycle, kept = Group(), Group()
cycle.itself = cycle
del cycle
atexit.register(lambda: print("handler", gc.collect()))
end_process(3)
"""
    ended = subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout.split()[0]) == (3, "handler")
    assert "taken apart" not in ended.stdout


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_a_reserved_port_is_the_stores_alone() -> None:
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert dist.TCPStore("127.0.0.1", port, is_master=False).get("key") == b"value"
