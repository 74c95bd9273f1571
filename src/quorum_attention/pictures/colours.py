"""Colours of the tasks: hues of one lightness around a circle, as chunks go round modulo c."""

from __future__ import annotations

from math import cos, pi, sin

Colour = tuple[float, float, float]


def task_colour(path: tuple[int, ...], levels: tuple[int, ...]) -> Colour:
    """A task's colour: the hue is its first owner chunk, the lightness its second."""
    turn = path[0] / levels[0] if path else 0.62
    lightness = 0.72
    if len(path) > 1:
        lightness += 0.22 * ((path[1] + 0.5) / levels[1] - 0.5)
    return oklch(lightness, 0.125, 2 * pi * turn + 0.45)


def oklch(lightness: float, chroma: float, hue: float) -> Colour:
    """The sRGB values of a colour in OKLCH, a perceptually uniform space; ``hue`` in radians."""
    a, b = chroma * cos(hue), chroma * sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        _gamma(4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short),
        _gamma(-1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short),
        _gamma(-0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short),
    )


def _gamma(linear: float) -> float:
    clipped = min(1.0, max(0.0, linear))
    if clipped <= 0.0031308:
        return 12.92 * clipped
    return float(1.055 * clipped ** (1 / 2.4) - 0.055)
