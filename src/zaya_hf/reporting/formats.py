"""Numbers and untrusted text as people read them. All of it is also there as filters of the templates."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

# C0 and C1 controls but tab and newline, lone surrogates, and two code points that are no characters
_NOT_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_SPACE = "\u00a0"  # between a number and its unit, where no line may break
# What changes the direction of the text around it, or hides: it would make a page show what is not there.
_INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\u061c]")


def visible(text: str) -> str:
    """The text with its control characters as pictures, with the code points of what would turn or hide text, and with
    U+FFFD for what UTF-8 cannot hold. Tabs and newlines stay."""
    text = re.sub(r"\r\n?", "\n", text)
    text = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda match: chr(0x2400 + ord(match[0])), text).replace("\x7f", "\u2421")
    text = _INVISIBLE.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)
    return _NOT_TEXT.sub("\ufffd", text)


def distinct(names: Sequence[str]) -> list[str]:
    """Names of which the second and later equal ones have a number: a, a (2). No number makes a name that is there."""
    found: list[str] = []
    for place, name in enumerate(names):
        number, unlike = 1, name
        while unlike in found or (number > 1 and unlike in names[place:]):
            number += 1
            unlike = f"{name} ({number})"
        found.append(unlike)
    return found


def count(number: float) -> str:
    """A number of things, exactly: 1024 -> 1,024."""
    return f"{number:,}" if isinstance(number, int) else f"{number:,.0f}"


def short_count(number: float) -> str:
    """A number of things with three digits: 2034696 -> 2.03 M."""
    size, unit = abs(number), ""
    for above, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= above * 0.9995:
            number, unit = number / above, _SPACE + name
            break
    if not unit and float(number).is_integer():
        return f"{number:.0f}"
    digits = 2 - math.floor(math.log10(abs(number)) + 2e-3) if number else 0
    return f"{number:.{max(0, digits)}f}{unit}"


def tick(number: float) -> str:
    """A number at an axis, as short as it can be: 2000000 -> 2 M, 0.25 -> 0.25."""
    for above, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= above:
            return f"{number / (1e3 if above == 1e4 else above):.6g}{_SPACE}{name}".replace("-", "\u2212")
    return f"{number:.6g}".replace("-", "\u2212")


def scientific(number: float) -> str:
    """A small number with its power of ten: 2.4e-6."""
    mantissa, exponent = f"{number:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}" if number else "0"


def duration(seconds: float) -> str:
    """A time in the two units that matter: 101.2 -> 1 min 41 s."""
    if seconds < 9.95:
        return f"{seconds:.1f}{_SPACE}s"
    whole = round(seconds)
    if whole < 60:
        return _units(whole, "s")
    if whole < 3600:
        return _units(whole // 60, "min", whole % 60, "s")
    minutes = round(seconds / 60)
    return _units(minutes // 60, "h", minutes % 60, "min")


def _units(first: int, unit: str, second: int = 0, smaller: str = "") -> str:
    return f"{first}{_SPACE}{unit}" + (f"{_SPACE}{second}{_SPACE}{smaller}" if second else "")


def size(number: float) -> str:
    """A number of bytes: 9412345 -> 9.41 MB."""
    text = short_count(number)
    return f"{text}B" if _SPACE in text else f"{text} bytes"


def score(value: float, kind: str) -> str:
    """An accuracy with three decimals, bits per byte with two."""
    return f"{value:.3f}" if kind == "choice" else f"{value:.2f}"


def interval(ends: Sequence[float], kind: str) -> str:
    """Both ends of an interval of scores, with an en dash."""
    low, high = ends
    return f"{score(low, kind)}\u2013{score(high, kind)}"


def plain(value: Any) -> str:
    """A setting of any type on one line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(plain(entry) for entry in value)
    if isinstance(value, dict):
        return ", ".join(f"{words(str(key))} {plain(entry)}" for key, entry in value.items())
    return "none" if value is None else str(value)


def words(name: str) -> str:
    """The name of a key as words: hidden_size -> hidden size."""
    return name.replace("_", " ")


def date(text: str) -> str:
    """An ISO time as people read it; what is none is shown as it is."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return text
    zone = " UTC" if time.utcoffset() is not None and not time.utcoffset() else ""
    return f"{time.day} {time.strftime('%B %Y, %H:%M')}{zone}"


def joined(parts: list[str]) -> str:
    """Parts as a list in a sentence: a, b and c."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def number_word(number: int) -> str:
    """Small numbers as words, for the beginning of a sentence as well once capitalised."""
    small = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return small[number] if 0 <= number < len(small) else count(number)


FILTERS: dict[str, Callable[..., str]] = {
    "count": count,
    "short_count": short_count,
    "duration": duration,
    "size": size,
    "plain": plain,
    "scientific": scientific,
    "words": words,
}
