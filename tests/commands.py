"""Runs `zaya` in the process of a test."""

from __future__ import annotations

import json
from typing import Any

import pytest

import zaya_cli


def zaya(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    try:
        code = zaya_cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def generated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code, out, err = zaya(capsys, "generate", *arguments, "--json")
    assert (code, err) == (0, "")
    report: dict[str, Any] = json.loads(out)
    return report


def error_line(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The single line of an error that makes the command fail with exit code 1 and print nothing else."""
    code, out, err = zaya(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1, err
    assert err.startswith(f"zaya {arguments[0]}: error: ")
    return err
