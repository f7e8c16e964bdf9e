"""Writes amounts and times as text."""

from typing import Final

_PREFIXES: Final = ("", "k", "M", "G", "T", "P", "E", "Z")
_WORDS: Final = ("", " thousand", " million", " billion", " trillion", "e15", "e18", "e21")


def amount(number: float, unit: str = "") -> str:
    """Returns a number with three digits: `13.5 GB` with a unit, `6.74 billion` without."""
    step = 0
    while abs(number) >= 999.5 and step < len(_PREFIXES) - 1:
        number /= 1000
        step += 1
    digits = f"{number:.3g}"
    return f"{digits} {_PREFIXES[step]}{unit}" if unit else f"{digits}{_WORDS[step]}"


def milliseconds(seconds: float) -> str:
    """Returns a time in ms with three digits, or in seconds from 10 s on."""
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
