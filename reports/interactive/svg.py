"""Small pictures as text: rectangles whose titles browsers show under the mouse, and readers aloud."""

from html import escape


def draw_svg(width: float, height: float, label: str, parts: list[str]) -> str:
    """An SVG element of that many units; `label` is what it shows, for those who do not see it."""
    return (
        f'<svg class="live" role="img" aria-label="{escape(label)}" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}">{"".join(parts)}</svg>'
    )


def draw_box(x: float, y: float, width: float, height: float, sort: str, title: str) -> str:
    """A rectangle of class `sort`, with its title."""
    box = f'<rect class="{escape(sort)}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}">'
    return f"{box}<title>{escape(title)}</title></rect>"


def write_text(x: float, y: float, text: str) -> str:
    """A line of text that begins there."""
    return f'<text x="{x:g}" y="{y:g}">{escape(text)}</text>'
