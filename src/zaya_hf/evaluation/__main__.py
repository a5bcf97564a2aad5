"""One of the processes of `zaya eval --processes N`: ``python -m zaya_hf.evaluation SETTINGS``, which is JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from zaya_hf import launching
from zaya_hf.evaluation.runs import Settings, evaluate

# A process waits for the others at the end of a task; a single long answer, or the tests of programs, may take hours.
PATIENCE = timedelta(hours=24)


class _Stopped(KeyboardInterrupt):
    """SIGTERM, which otherwise would end the process without closing its files."""


def main(argv: Sequence[str]) -> int:
    """Evaluate together with the other processes, and return the exit code; errors are one line on standard error."""
    launching.end_with_launcher()
    signal.signal(signal.SIGTERM, _stop)
    told: dict[str, Any] = json.loads(argv[0])
    rank = int(os.environ["RANK"])
    try:
        dist.init_process_group("gloo", timeout=PATIENCE)
        loud = evaluate(Settings(**told | {"models": tuple(told["models"])}))
        for line in loud:
            print(f"zaya eval: warning: {line}", file=sys.stderr)
    except _Stopped:
        return 143
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("ZAYA_DEBUG") == "1":
            raise
        text = " ".join(str(error).split())
        text = text if text and isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"
        if isinstance(error, dist.DistError) or "/gloo/" in text or "another process failed" in text:
            text = f"another process has ended or cannot be reached; see what it says itself ({text})"
        print(f"zaya eval: error (process {rank}): {text}", file=sys.stderr)
        return 1
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stopped


if __name__ == "__main__":
    launching.end_process(main(sys.argv[1:]))
