"""Pages as one file: a template, its styles and its one script, with nothing that is loaded from elsewhere.

The template inherits from `page.html.jinja`, which has the styles, the light and dark colours (of the system, or of
the button, which needs the script) and a content security policy that allows this file's style sheet and this script
and nothing else: not even a mistake here could fetch anything or run what a result says.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from zaya_hf.reporting.formats import FILTERS, visible

_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **context: Any) -> str:
    """The page that a template of this package makes of `context`. Text in it is escaped, and what neither HTML nor
    UTF-8 can hold is made visible; a chart, which is markup already, is passed as `Markup`.

    Raises:
        jinja2.UndefinedError: the template asks for what `context` does not have.
    """
    return _environment().get_template(template).render(context)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= FILTERS
    script = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals |= {
        "page_style": Markup((_TEMPLATES / "page.css").read_text(encoding="utf-8")),
        "page_script": Markup(script),
        "page_script_hash": f"sha256-{digest}",
    }
    return environment


def _finalize(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
