"""The HTML page of a report: figures embedded, tables, where everything came from. Nothing is fetched to read it."""

import base64
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from pshard.collectives import describe_sums
from pshard.plan import Variant
from pshard.reports.inputs import ReportInputs
from pshard.reports.interactive.explore_plans import explore_plans
from pshard.reports.sections import Section
from pshard.reports.summary import summarise
from pshard.reports.tables.load_table import list_loads
from pshard.reports.tables.report_tables import tabulate_environments, tabulate_measurements, tabulate_plan

SUMMARY = "in-short"  # the section that the page begins with

if TYPE_CHECKING:
    from pandas import DataFrame


def build_page(inputs: ReportInputs, drawn: Sequence[tuple[Section, str]], origin: str) -> str:
    """HTML of the report. `drawn` are sections with their SVG text; `origin` says when and by what it was made."""
    parts, said = [], ""
    if not any(section.name == SUMMARY for section, _ in drawn) and (short := summarise(inputs)):
        parts.append(f"<h2>In short</h2>\n<p>{escape(' '.join(short))}</p>")
    for section, svg in drawn:
        text = _introduce(section)
        parts += [] if text == said else [text]
        parts += [_format_figure(section, svg), section.live]
        said = text
        if section.name == SUMMARY:
            parts += explore_plans(inputs.plans)
    if inputs.measurements:
        parts += ["<h2>Measurements</h2>", _format_frame(tabulate_measurements(inputs.measurements))]
        parts += ["<h2>Where they were made</h2>", _format_frame(tabulate_environments(inputs.measurements))]
    if inputs.loads:
        from pandas import DataFrame

        headings, rows = list_loads(inputs.loads)
        parts += ["<h2>Loads of servers</h2>", "<p>Times are those that 50 / 95 / 99 of a hundred do not exceed.</p>"]
        parts += [_format_frame(DataFrame(rows, columns=headings))]
    for model, variant in inputs.plans:
        parts += [f"<h2>{escape(_name_plan(model, variant))}</h2>", *_describe_split(variant)]
        parts += [_format_frame(tabulate_plan(variant))]
    models = dict.fromkeys([m.model for m in inputs.measurements] + [model for model, _ in inputs.plans])
    title = "pshard report" + (f": {', '.join(models)}" if models else "")
    made_from = f"{origin} from {', '.join(inputs.sources)}"
    pieces = {
        name: files("pshard.reports").joinpath(f"page.{name}").read_text(encoding="utf-8") for name in ("css", "js")
    }
    template = Template(files("pshard.reports").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(pieces, title=escape(title), origin=escape(made_from), body="\n".join(parts))


def _introduce(section: Section) -> str:
    return f"<h2>{escape(section.heading)}</h2>\n<p>{escape(section.caption)}</p>"


def _format_figure(section: Section, svg: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<p class="figure"><img alt="{escape(section.alt)}" src="data:image/svg+xml;base64,{data}"></p>'


def _format_frame(frame: "DataFrame") -> str:
    table = frame.to_html(index=False, border=0, escape=True, justify="left")
    return f'<div class="scroll">{table}</div>'


def _describe_split(variant: Variant) -> list[str]:
    """How the model is spread over ranks, and in which type their parts are summed; nothing for one rank."""
    if len(variant.ranks) < 2:
        return []
    text = variant.way
    if variant.workload.split_mode == "tensor":
        text += f"; ranks' parts are summed in {describe_sums(variant.workload.reduce_dtype)}"
    return [f"<p>{escape(text)}.</p>"]


def _name_plan(model: str, variant: Variant) -> str:
    w = variant.workload
    budget = " + ".join(f"{mib} MiB" for mib in w.vram_mib)
    return f"Plan of {model} within {budget}, context {w.context}, {w.sequences} sequences at most"
