"""The report: one self-contained HTML page of a run, which opens offline.

    metrics.jsonl            ─► loss, throughput
    observed.json            ─► the recipe, the plan
    observed-rank*.json      ─► memory and timeline of a step, traffic, predicted against measured, imbalance

If a file or figure is missing, the page says so, and how to get it.
"""

from onefold.observe.report.page import Report, build, save, write_report

__all__ = ["Report", "build", "save", "write_report"]
