"""Folders of one process that lie where others see them: removed in the end, or, if the process is killed, by the next.

Their names are ``<kind>-<host>-<pid>-*``. Whoever makes one first removes those of the same kind whose processes have
ended on this host; those of other hosts may be in use.
"""

import os
import re
import shutil
import socket
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

# Names of the folders that this process is using. A container restarts with the same host name and process id, so its
# own id alone does not say that a folder is still in use.
_IN_USE: set[str] = set()
_LOCK = threading.Lock()


def make_temporary(folder: Path, kind: str) -> Path:
    """A new, empty folder in `folder`, which exists. Raises OSError from the disk."""
    with _LOCK:
        _remove_abandoned(folder, kind)
        place = Path(tempfile.mkdtemp(prefix=f"{host_prefix(kind)}{os.getpid()}-", dir=folder))
        _IN_USE.add(place.name)
    return place


def remove_temporary(place: Path) -> None:
    """Remove a folder that `make_temporary` made; nothing happens where it is gone."""
    shutil.rmtree(place, ignore_errors=True)
    _IN_USE.discard(place.name)


def keep_while_alive(model: Any, place: Path) -> None:
    """Remove `place` once no module of `model`, and no copy of one, is left, or when the process ends."""
    keeper = _Keeper()
    weakref.finalize(keeper, _remove_if_ours, place, os.getpid())
    for module in model.modules():
        module._temporary_folder = keeper


class _Keeper:
    """What the modules that read from a folder share. A copy of a module reads from the same one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Keeper":
        return self


def _remove_if_ours(place: Path, pid: int) -> None:
    if os.getpid() == pid:  # a fork ends before its parent does
        remove_temporary(place)


def host_prefix(kind: str) -> str:
    """How the names of this host's folders of a kind begin."""
    return f"{kind}-{re.sub(r'[^A-Za-z0-9_.]', '_', socket.gethostname())}-"


def _remove_abandoned(folder: Path, kind: str) -> None:
    pattern = re.compile(re.escape(host_prefix(kind)) + r"(\d+)-[^-]+")
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match is not None and path.name not in _IN_USE and not _runs_elsewhere(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _runs_elsewhere(pid: int) -> bool:
    """Whether a process other than this one has this id (or whether that cannot be told)."""
    if pid == os.getpid():
        return False
    if os.name != "posix":
        return True  # elsewhere, asking with signal 0 would end the process
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


__all__ = ["host_prefix", "keep_while_alive", "make_temporary", "remove_temporary"]
