"""The report on an evaluation's folder: a page and a Markdown file, made of the folder's files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zaya_hf.atomic import write_text
from zaya_hf.evaluation.comparison import compare
from zaya_hf.reporting.evaluation_markdown import markdown
from zaya_hf.reporting.evaluation_page import page

__all__ = ["PAGE", "build_report", "write_report"]

PAGE = "report.html"


def build_report(folder: Path) -> tuple[str, str]:
    """The page as HTML and the tables as Markdown, of what is finished so far.

    Raises:
        ValueError: the folder is no evaluation's, has no finished run, or has a file that cannot be read.
        OSError: a file cannot be read.
    """
    file = folder / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} has no manifest.json: it is not the folder of an evaluation") from None
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    comparison = compare(folder, baseline=manifest.get("baseline"))
    return page(comparison, manifest), markdown(comparison)


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page to `out`, by default report.html in the folder, and the Markdown beside it with the ending .md.

    Returns:
        where the page is.

    Raises:
        ValueError: as of `build_report`, or `out` ends in .md.
        OSError: a file cannot be read or written.
    """
    out = folder / PAGE if out is None else out
    beside = out.with_suffix(".md")
    if beside == out:
        raise ValueError(f"{out}: the page cannot end in .md, which is the ending of the tables beside it")
    html, tables = build_report(folder)
    write_text(out, html)
    write_text(beside, tables)
    return out
