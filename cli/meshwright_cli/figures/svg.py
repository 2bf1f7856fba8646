"""SVG elements. Text and attributes are escaped by the XML library, so that a name of a node or a job is only text."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

Element = ElementTree.Element
NAMESPACE = "http://www.w3.org/2000/svg"

LIGHT = {
    "ink": "#1b2330",
    "muted": "#566070",
    "line": "#c9d0da",
    "paper": "#ffffff",
    "forward": "#a9cdf5",
    "forward2": "#d3e5fa",
    "backward": "#a5d9b4",
    "backward2": "#d2eeda",
    "input": "#f6cf94",
    "input2": "#fbe7c8",
    "weight": "#d6bdf0",
    "weight2": "#eadff8",
    "idle": "#f1f3f6",
    "other": "#c3cad6",
    "accent": "#1f5fbf",
    "warn": "#b3261e",
}
DARK = {
    "ink": "#e8ecf2",
    "muted": "#a7b1c0",
    "line": "#3c4655",
    "paper": "#12171f",
    "forward": "#234f80",
    "forward2": "#1a3555",
    "backward": "#20613a",
    "backward2": "#184329",
    "input": "#7a5210",
    "input2": "#543a10",
    "weight": "#57358a",
    "weight2": "#3c2761",
    "idle": "#1d2430",
    "other": "#4b5870",
    "accent": "#7fb2f5",
    "warn": "#ff8f85",
}
"""Colors of figures by name. Text on each fill has a contrast of at least 4.5 in its scheme."""


def element(tag: str, *children: Element | str, **attributes: object) -> Element:
    """Return an SVG element.

    Args:
        tag: the element's name.
        children: elements, or one text.
        attributes: `_` in a name becomes `-`, and a trailing `_` is dropped (`class_`). Floats have two decimals.
    """
    made = Element(tag, {_name(key): _value(value) for key, value in attributes.items() if value is not None})
    for child in children:
        if isinstance(child, str):
            made.text = child
        else:
            made.append(child)
    return made


def group(children: Iterable[Element], **attributes: object) -> Element:
    """Return a `g` element."""
    return element("g", *children, **attributes)


def text(content: str, x: float, y: float, **attributes: object) -> Element:
    """Return a `text` element."""
    return element("text", content, x=x, y=y, **attributes)


def legend(entries: Iterable[tuple[str, str]], top: float) -> list[Element]:
    """Return swatches with names in one line. Entries are (class, name)."""
    made, left = [], 0.0
    for color, name in entries:
        made.append(element("rect", x=left, y=top, width=12, height=12, class_=color))
        made.append(text(name, left + 17, top + 10.5, class_="muted"))
        left += 36 + 6.6 * len(name)
    return made


def drawing(width: float, height: float, title: str, children: Iterable[Element]) -> Element:
    """Return an `svg` element that a page can contain. `title` describes it to people who do not see it."""
    return element(
        "svg",
        element("title", title),
        *children,
        viewBox=f"0 0 {_value(width)} {_value(height)}",
        width=width,
        height=height,
        role="img",
        aria_label=title,
    )


def to_markup(svg: Element) -> str:
    """Return an element as markup inside an HTML page."""
    return ElementTree.tostring(svg, encoding="unicode")


def to_file(svg: Element) -> str:
    """Return an element as the content of an SVG file, with the styles of a light and a dark scheme."""
    copy = Element(svg.tag, {"xmlns": NAMESPACE, **svg.attrib})
    copy.append(element("style", stylesheet()))
    copy.append(element("rect", width="100%", height="100%", class_="paper"))
    copy.extend(list(svg))
    ElementTree.indent(copy, "")
    return ElementTree.tostring(copy, encoding="unicode") + "\n"


def stylesheet() -> str:
    """Return the rules of a figure in a separate file."""
    dark = " ".join(_rules(DARK))
    return "\n".join([*_COMMON, *_rules(LIGHT), f"@media (prefers-color-scheme: dark) {{ {dark} }}"])


_COMMON = (
    "text { font: 12px system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif; }",
    ".small { font-size: 10px; }",
    ".bold { font-weight: 600; }",
    ".line { fill: none; stroke-width: 1; }",
    ".curve { fill: none; stroke-width: 2; }",
)


def _rules(colors: dict[str, str]) -> list[str]:
    fills = [f".{name} {{ fill: {color}; }}" for name, color in colors.items() if name not in ("ink", "muted", "line")]
    return [
        f"text {{ fill: {colors['ink']}; }}",
        f".muted {{ fill: {colors['muted']}; }}",
        f".line {{ stroke: {colors['line']}; }}",
        f".curve {{ stroke: {colors['accent']}; }}",
        *fills,
    ]


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-") if key != "viewBox" else key


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)
