"""Table and pictures of finished or running runs: `python -m qarl_openrlhf.cli.report [NAME=]DIR ... [--out DIR] [--until STEP] [--tokens]`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from qarl_openrlhf.files import why_unwritable
from qarl_openrlhf.metrics.records import TOKENS
from qarl_openrlhf.report import ReportError, comparison, report, write_report
from qarl_openrlhf.report.discover import Entry, Identity, arms, entries_below, entry
from qarl_openrlhf.report.tokens_html import write_tokens_page

DEFAULT = Path("report")  # of several runs
MAX_COLUMNS = 6  # runs that the terminal's table, a column each, has room for


def split_name(argument: str) -> tuple[str, Path]:
    """'NAME=DIR' -> (NAME, DIR); a path that exists is one, even with a "=" in it."""
    name, _, path = argument.partition("=") if "=" in argument and not Path(argument).exists() else ("", "", argument)
    if not path:
        raise ReportError(f"{argument!r} names no directory: give DIR or NAME=DIR")
    return name, Path(path)


def arms_of(arguments: list[str]) -> dict[str, list[Path]]:
    """['w4a16=runs/a', 'runs/b'] -> {'w4a16': [runs/a], 'b': [runs/b]}. Equal names are seeds of one arm; directories given
    without a name that would be called alike get their parents' names in front. A directory of runs stands for all of them: with a
    name they are all seeds of that arm, else each is called by what ran. Runs without a step are left out; ReportError if there
    are no others."""
    named = [split_name(text) for text in arguments]
    bare = [path.resolve() for name, path in named if not name]
    found: dict[str, list[Path]] = {}
    for name, path in named:
        resolved = path.resolve()
        if not (path / "metrics.jsonl").exists():
            for arm, directories in arms(entries_below(path)).items():
                found.setdefault(name or arm, []).extend(directories)
            continue
        if entry(path).run is None:
            continue
        alike = sum(other.name == resolved.name for other in set(bare)) > 1
        found.setdefault(name or (f"{resolved.parent.name}/{resolved.name}" if alike else resolved.name), []).append(path)
    if not found:
        raise ReportError(f"{' '.join(arguments)}: no run has a step yet")
    return found


def entries_of(arguments: list[str]) -> list[Entry]:
    """The same runs one by one, for the comparison; also those that failed before their first step."""
    found = []
    for name, path in map(split_name, arguments):
        here = [entry(path)] if (path / "metrics.jsonl").exists() else entries_below(path)
        for each in here:
            if name:
                each.identity = Identity(name, each.identity.scheme, each.identity.seed)
        found += here
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m qarl_openrlhf.cli.report",
        description="Prints the summary table of runs and writes their pictures. One curve an arm; runs given the same NAME are "
        "seeds of one arm. A directory of runs stands for all of them, with a NAME as seeds of that arm; several runs also get "
        "summary.csv, summary.md and pictures by objective and by scheme.",
    )
    parser.add_argument("runs", nargs="+", metavar="[NAME=]DIR", help="run directory with metrics.jsonl, or a directory of such, or of an ablation")
    where = "where to write (default: into the directory given, or for several into ./report, which holds the newest report alone)"
    parser.add_argument("--out", default=None, help=where)
    parser.add_argument("--tokens", action="store_true", help="write tokens.html instead: recorded responses token by token")
    parser.add_argument("--steps", type=int, nargs="+", default=None, help="--tokens: which steps (default: up to 12 over the run)")
    parser.add_argument("--until", type=int, default=None, metavar="STEP", help="leave out later steps, and runs without earlier ones")
    args = parser.parse_args(argv)
    if args.until is not None and args.tokens:
        parser.error("--until leaves out steps of tables and pictures: with --tokens, give --steps")
    if args.steps and not args.tokens:
        parser.error("--steps chooses responses to show: it needs --tokens")
    try:
        if args.out and (reason := why_unwritable(args.out)):
            raise ReportError(f"--out {args.out}: {reason}: name a directory that can be written to")
        if args.tokens:
            _tokens(args)
        else:
            _report(args)
    except (ReportError, OSError) as error:
        raise SystemExit(f"report: error: {error}") from None


def _tokens(args) -> None:
    for name, path in map(split_name, args.runs):
        directories = [path] if (path / TOKENS).exists() else [each.directory for each in entries_below(path)]
        if len(directories) > 1:  # one that has just begun has none yet
            directories = [directory for directory in directories if (directory / TOKENS).exists()] or directories
        for directory in directories:
            parts = directory.parts[-3:] if not name else [name] if len(directories) == 1 else [name, *directory.parts[-2:]]
            page = "-".join(parts).replace("/", "-")
            print(write_tokens_page(directory, Path(args.out) / f"tokens-{page}.html" if args.out else None, args.steps))


def _report(args) -> None:
    runs = arms_of(args.runs)
    out = Path(args.out) if args.out else split_name(args.runs[0])[1] if len(args.runs) == 1 else DEFAULT
    if args.until is not None and not args.out:  # the whole run's pictures stay
        out /= f"until-{args.until}"
    earlier = _earlier_report(out) if not args.out and len(args.runs) > 1 else []
    made = write_report(runs, out, until=args.until)
    entries, written = entries_of(args.runs), list(made.pictures)
    if args.until is not None:  # what begins later is among the report's notes
        entries = [each.cut(args.until) for each in entries if each.run is None or each.run.steps[0] <= args.until]
    if len(entries) <= MAX_COLUMNS:
        print(made.text)
    if len(entries) > 1:
        written += comparison.write_comparison(entries, out)
        print((out / "summary.md").read_text(encoding="utf-8"))
    for note in made.notes + [note for each in entries for note in each.notes]:
        print(f"note: {note}")
    if earlier:
        for path in set(earlier) - {*written, out / "report.txt"}:  # of other runs, it would pass for these runs'
            path.unlink()
        print(f"note: the earlier report in {out} is replaced: --out DIR keeps one")
    print("written: " + ", ".join(str(path) for path in written))


def _earlier_report(out: Path) -> list[Path]:
    """Files of the report that is in ``out``, which nobody has named; ReportError where anything else is."""
    there = sorted(out.iterdir()) if out.is_dir() else []
    other = [path.name for path in there if path.name not in (*report.FILES, *comparison.FILES) and not re.fullmatch(r"until-\d+", path.name)]
    if other:
        raise ReportError(f"{out} holds other files than a report's ({', '.join(other[:3])}): name a directory with --out")
    return [path for path in there if path.is_file()]


if __name__ == "__main__":
    main()
