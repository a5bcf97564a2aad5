"""What a model's files are, as one hash: part of the key of every run, found without loading the model."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from zaya_hf.atomic import write_json
from zaya_hf.other_formats import other_format

__all__ = ["fingerprint", "hub_config", "hub_error"]

# Every file at the top of a folder that can move a score. Not the card, nor what a training leaves beside a model.
_WEIGHTS = re.compile(r".*\.safetensors|pytorch_model.*\.bin")
_OTHERS = re.compile(
    r".*\.(safetensors|bin)\.index\.json|(config|generation_config|tokenizer|tokenizer_config)\.json|tokenizer\.model|"
    r"(special_tokens_map|added_tokens|vocab|chat_template|tekken)\.json|(merges|vocab)\.txt|spiece\.model|"
    r".*\.jinja|.*\.py"
)
_BLOCK = 8 << 20  # bytes read at a time
_BAR_FROM = 1 << 30  # bytes; hashing fewer takes no time worth a bar
_CACHE, _ENTRIES = "file_hashes.json", 4096
# A file that is written again within the clock tick of its file system keeps its times. Git has the same problem and
# the same answer: trust no times that are this young, in seconds.
_SETTLED = 2.0
_SHA256 = re.compile(r"[0-9a-f]{64}")


def fingerprint(path: str, revision: str | None = None) -> dict[str, Any]:
    """A hash of a model's files.

    Args:
        path: a folder, or the id of a repository on the Hub.
        revision: branch, tag or commit on the Hub; None is the main branch. Of no use with a folder.

    Returns:
        For a folder {"kind": "folder", "sha256", "files": [{"name", "size", "sha256"}]}: over the names and contents of
        weights, configs, code and tokenizer, wherever the folder is. For a repository {"kind": "hub", "id", "commit",
        "sha256"}: a commit stands for its files. Without a network the commit is the one in the local cache.

    Raises:
        ValueError: there is no such model, or it cannot be reached; one line that says what to do.
    """
    if not Path(path).is_dir():
        _, commit = hub_config(path, revision)
        return {"kind": "hub", "id": path, "commit": commit, "sha256": hashlib.sha256(commit.encode()).hexdigest()}
    folder = Path(path)
    found = sorted(one for one in folder.iterdir() if one.is_file() and _counts(one.name))
    found += sorted(one for one in folder.glob("additional_chat_templates/*") if one.is_file())
    names = [one.relative_to(folder).as_posix() for one in found]
    if "config.json" not in names or not any(_WEIGHTS.fullmatch(name) for name in names):
        raise ValueError(f"{folder} {other_format(folder) or 'holds no saved model: no config.json or no weights'}")
    hashes = _hashes(found)
    files = [
        {"name": name, "size": one.stat().st_size, "sha256": sha}
        for name, one, sha in zip(names, found, hashes, strict=True)
    ]
    digest = hashlib.sha256(json.dumps([[file["name"], file["sha256"]] for file in files]).encode()).hexdigest()
    return {"kind": "folder", "sha256": digest, "files": files}


def hub_config(path: str, revision: str | None) -> tuple[Path, str]:
    """The config.json of a repository on the Hub, fetched into the local cache if need be, and its commit.

    Raises:
        ValueError: it cannot be reached; one line that says what to do.
    """
    try:
        file = Path(hf_hub_download(path, "config.json", revision=revision))
    except (OSError, ValueError, HfHubHTTPError) as error:  # of the first kind are what the network raises, too
        raise hub_error(path, revision, error) from None
    return file, file.parent.name


def hub_error(path: str, revision: str | None, error: BaseException) -> ValueError:
    """What went wrong with a repository on the Hub, in one line with what to do."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__

    def among(kind: type[BaseException]) -> bool:
        return any(isinstance(one, kind) for one in chain)

    at = "" if revision is None else f" at {revision}"
    if among(GatedRepoError):
        return ValueError(
            f"{path} is gated: accept its terms at https://huggingface.co/{path}, then set HF_TOKEN to a token of that "
            "account"
        )
    if among(HFValidationError):
        return ValueError(f"there is no folder {path}, and a Hub id has the form org/name")
    if among(RevisionNotFoundError):
        return ValueError(f"{path} has no revision {revision}: see https://huggingface.co/{path}/tree/main for them")
    if among(RepositoryNotFoundError):
        return ValueError(
            f"there is no folder {path}, and the Hub has no such repository; if it is private, set HF_TOKEN"
        )
    if among(LocalEntryNotFoundError) or constants.HF_HUB_OFFLINE:
        offline = "the Hub is off (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        wanted = "" if revision is None else f" --revision {revision}"
        return ValueError(
            f"{path}{at} is no folder and not in the local cache, and {offline}: fetch it once where there is a "
            f"network with `hf download {path}{wanted}`"
        )
    if among(EntryNotFoundError):
        return ValueError(f"{path}{at} on the Hub has no config.json: it is no model of transformers")
    return ValueError(f"{path}{at} cannot be read from the Hub: {' '.join(str(error).split())}")


def _counts(name: str) -> bool:
    return bool(_WEIGHTS.fullmatch(name) or _OTHERS.fullmatch(name))


# --- hashes, kept between runs ----------------------------------------------------------------------------------------


def _hashes(files: Sequence[Path]) -> list[str]:
    """SHA-256 of each file; of one that has not changed since an earlier call, the one found then."""
    cache_file = _cache_file()
    known = _read_cache(cache_file)
    keys = [_state(file) for file in files]
    found = {key: known[key] for key in keys if key in known}
    missing = [(file, key) for file, key in zip(files, keys, strict=True) if key not in found]
    total = sum(file.stat().st_size for file, _ in missing)
    quiet = total < _BAR_FROM or not sys.stderr.isatty()
    added: dict[str, str] = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc="hashing weights", leave=False, disable=quiet) as bar:
        for file, key in missing:
            found[key] = _sha256(file, bar.update)
            if _state(file) != key:
                raise ValueError(f"{file} changed while it was read: wait until nothing writes to it, then start again")
            if time.time() - file.stat().st_mtime > _SETTLED:
                added[key] = found[key]
    if added:
        with suppress(OSError):  # no place to keep them: they are found anew each time
            # Read again: another process may have added its own meanwhile. What is lost to one that writes at this very
            # moment is computed again.
            latest = _read_cache(cache_file) | added
            write_json(cache_file, dict(list(latest.items())[-_ENTRIES:]))
    return [found[key] for key in keys]


def _sha256(file: Path, on_bytes: Callable[[int], Any]) -> str:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as content:
        while block := content.read(_BLOCK):
            digest.update(block)
            on_bytes(len(block))
    return digest.hexdigest()


def _state(file: Path) -> str:
    """What changes when a file's content does. The time of the last change of its inode (`ctime`) is in it because the
    other one can be set back, and copying programs do."""
    real = file.resolve()
    about = real.stat()
    return f"{about.st_size}:{about.st_mtime_ns}:{about.st_ctime_ns}:{about.st_ino}:{real}"


def _cache_file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "zaya_hf" / _CACHE


def _read_cache(file: Path) -> dict[str, str]:
    """What earlier calls have left. Whatever is not as they leave it counts as nothing."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, Mapping):
        return {}
    return {key: sha for key, sha in content.items() if isinstance(sha, str) and _SHA256.fullmatch(sha)}
