"""Write a report: every figure as PNG and SVG, and one HTML page that holds them all."""

from pathlib import Path

from pshard.errors import UserError
from pshard.jsonio import write_text_atomically
from pshard.reports.figures.style import save_figure
from pshard.reports.inputs import ReportInputs
from pshard.reports.page import build_page
from pshard.reports.sections import draw_sections


def write_report(inputs: ReportInputs, folder: Path, origin: str) -> list[Path]:
    """Files written, the page first. Raises UserError when the folder cannot be written."""
    sections = draw_sections(inputs)
    page = folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drawn = [(section, save_figure(section.figure, folder, section.name)) for section in sections]
        write_text_atomically(page, build_page(inputs, drawn, origin))
    except OSError as error:
        raise UserError(
            f"cannot write the report to {folder}: {error.strerror}; choose another folder with -o"
        ) from None
    return [page, *(folder / f"{s.name}.{kind}" for s in sections for kind in ("png", "svg"))]
