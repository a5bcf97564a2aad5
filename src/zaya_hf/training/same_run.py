"""Whether a checkpoint is of the run that is to go on from it: same settings, same data, versions that are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..hints import near_hint
from .config import TrainingConfig
from .data.rows import check_same
from .state import versions

__all__ = ["RunIdentity"]

# Settings that decide no number, or none beyond rounding. Which documents the sources hold is the data's identity.
FREE = (
    "out",
    "accept_changes*",
    "logging.*",
    "checkpoint.*",
    "evaluation.*",
    "guard.wall_clock_minutes",
    "data.workers",
    "data.cache",
    "data.build_processes",
    "data.held_out*",
    "data.sources.*.path",
    "batch.micro_rows",
    "activation_checkpointing",
)
NAMED = 5  # differences that an error names; of more it tells the number


class RunIdentity:
    """What decides the numbers of a run, for its checkpoints; see `state.RunCheckpoints`.

    Args:
        config: of the run that saves, or wants to go on.
        data: `TrainingData.identity()`.
        others: digests of what else decides the numbers, by what it is.
        say: is told of versions that differ, which may move the last digits.
    """

    def __init__(
        self,
        config: TrainingConfig,
        data: dict[str, Any],
        say: Callable[[str], None] | None = None,
        others: Mapping[str, str] | None = None,
    ):
        self._config, self._data, self._say, self._others = config, data, say, dict(others or {})

    def facts(self) -> dict[str, Any]:
        """JSON values for the description of a checkpoint."""
        return {"config": self._config.model_dump(mode="json"), "data": self._data, "others": self._others}

    def accepts(self, description: dict[str, Any]) -> bool:
        """True for the description of a checkpoint of the same run.

        `accept_changes` may name settings, sections of them, or "data".

        Raises:
            ValueError: of another one; names the settings that differ, or what of the data does. Also where
                `accept_changes` names something that neither has.
        """
        differences = self._differences(description["config"])
        if differences:
            if len(differences) > NAMED:
                differences = [*differences[:NAMED], f"{len(differences) - NAMED} more"]
            raise ValueError(
                f"the run in {self._config.out} has other settings: {'; '.join(differences)}. Give it the old ones, "
                "name those that may change in accept_changes, or choose another out."
            )
        for what, digest in self._others.items():
            if description["others"].get(what) != digest:
                raise ValueError(
                    f"the run in {self._config.out} began with another {what}: put that back, or choose another out."
                )
        if "data" not in self._config.accept_changes:
            check_same(description["data"], self._data)
        if self._say is not None:
            for name, version in versions().items():
                if (before := description["versions"].get(name)) != version:
                    self._say(f"{name} was {before} and is {version}: from here on the last digits may differ")
        return True

    def _differences(self, saved: dict[str, Any]) -> list[str]:
        before, now = _flat(saved), _flat(self._config.model_dump(mode="json"))
        before |= {"steps": _steps(saved), "tokens": None}
        now |= {"steps": self._config.total_steps, "tokens": None}
        self._check_accepted({*before, *now, "data"})
        found = []
        for key in sorted(before.keys() | now.keys()):
            old, new = before.get(key), now.get(key)
            if old != new and not any(fnmatchcase(key, pattern) for pattern in FREE) and not self._accepted(key):
                found.append(f"{key} was {old!r} and is {new!r}")
        return found

    def _check_accepted(self, keys: set[str]) -> None:
        known = {
            ".".join(parts[:size]) for parts in (key.split(".") for key in keys) for size in range(1, 1 + len(parts))
        }
        for name in self._config.accept_changes:
            if name not in known:
                raise ValueError(f"accept_changes: there is no setting {name}{near_hint(name, known)}")

    def _accepted(self, key: str) -> bool:
        return any(key == accepted or key.startswith(f"{accepted}.") for accepted in self._config.accept_changes)


def _steps(config: dict[str, Any]) -> int:
    """Of a run whose length may be given in tokens."""
    return TrainingConfig.model_validate(config).total_steps


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """Single values by dotted key; places in lists are numbers."""
    return dict(_walk(value, key))


def _walk(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    items: Any = None
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and value:
        items = enumerate(value)
    if items is None:
        yield key, value
        return
    for name, inner in items:
        yield from _walk(inner, f"{key}.{name}" if key else str(name))
