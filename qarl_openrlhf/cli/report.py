"""Table and pictures of finished or running runs: `python -m qarl_openrlhf.cli.report [NAME=]DIR ... [--out DIR]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from qarl_openrlhf.report import ReportError, write_report


def arms_of(arguments: list[str]) -> dict[str, list[Path]]:
    """['w4a16=runs/a', 'runs/b'] -> {'w4a16': [runs/a], 'b': [runs/b]}. Equal names are seeds of one arm; directories given
    without a name that would be called alike get their parents' names in front."""
    named = [text.partition("=")[::2] if "=" in text and not Path(text).exists() else ("", text) for text in arguments]
    bare = [Path(path).resolve() for name, path in named if not name]
    arms: dict[str, list[Path]] = {}
    for name, path in named:
        resolved = Path(path).resolve()
        alike = sum(other.name == resolved.name for other in set(bare)) > 1
        arms.setdefault(name or (f"{resolved.parent.name}/{resolved.name}" if alike else resolved.name), []).append(Path(path))
    return arms


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m qarl_openrlhf.cli.report",
        description="Prints the summary table of runs and writes their pictures. One curve an arm; runs given the same NAME are "
        "seeds of one arm.",
    )
    parser.add_argument("runs", nargs="+", metavar="[NAME=]DIR", help="run directory with metrics.jsonl")
    parser.add_argument("--out", default=None, help="where to write (default: into the run directory, or ./report for several)")
    args = parser.parse_args(argv)
    arms = arms_of(args.runs)
    directories = [directory for group in arms.values() for directory in group]
    out = Path(args.out) if args.out else directories[0] if len(directories) == 1 else Path("report")
    try:
        report = write_report(arms, out)
    except ReportError as error:
        raise SystemExit(f"report: {error}") from None
    print(report.text)
    for note in report.notes:
        print(f"note: {note}")
    print("pictures: " + ", ".join(str(path) for path in report.pictures))


if __name__ == "__main__":
    main()
