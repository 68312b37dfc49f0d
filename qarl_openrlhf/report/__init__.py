"""Tables and pictures from the metrics.jsonl of one or more runs.

    from qarl_openrlhf.report import write_report
    print(write_report({"w4a16": ["runs/a"], "bf16": ["runs/b"]}, "runs/report").text)
"""

from qarl_openrlhf.report.report import Report, write_report
from qarl_openrlhf.report.runs import ReportError, Run, load_run

__all__ = ["Report", "ReportError", "Run", "load_run", "write_report"]
