"""The memory table of ``--dry_run``, and whether it fits the card."""

import torch

from qarl_openrlhf.planning.host_memory import host_report
from qarl_openrlhf.planning.machine import machine_bytes
from qarl_openrlhf.planning.memory import complete, estimate
from qarl_openrlhf.planning.model_shape import ModelShape
from qarl_openrlhf.planning.parts import GIB, Estimate, gib


def card_bytes(args) -> int | None:
    """Memory of the card to plan for: ``--dry_run_gpu_gb``, else the smallest visible one, else None."""
    if args.dry_run_gpu_gb:
        return int(args.dry_run_gpu_gb * GIB)
    if args.device == "cuda" and torch.cuda.is_available():
        return min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return None


def memory_report(args, shape: ModelShape, critic: ModelShape | None = None) -> tuple[str, list[str]]:
    """(table, problems): bytes a GPU by part and phase, or of main memory on a CPU; critic: its model, of a run that has one.

    Every problem names the part to lower and the flag for it.
    """
    if args.device == "cpu":
        return host_report(args, shape, critic)
    card = card_bytes(args)
    estimates = estimate(args, shape, critic)
    problems = complete(estimates, args, shape, card)
    lines = []
    for one in estimates:
        lines += [*table(one), *(f"{note}" for note in one.notes)]
        if one.host:
            lines.append(f"main memory a node, for what is offloaded: about {gib(one.host)}")
            lines += main_memory_notes(one.host)
        if card is None:
            lines.append("no card to compare with: --dry_run_gpu_gb GIB names its memory")
        elif problem := one.problem(card):
            problems.append(problem)
            lines.append(f"{one.role} does NOT fit a card of {gib(card)}: about {gib(one.total(one.peak))} at the peak, '{one.peak}'")
        else:
            lines.append(f"{one.role} fits a card of {gib(card)}: about {gib(one.total(one.peak))} at the peak, '{one.peak}'")
    return "\n".join(lines), problems


def main_memory_notes(offloaded: int) -> list[str]:
    """A warning where this machine has less than will be offloaded to it: the kernel kills without a word. None on a machine without
    a GPU, where the run is another machine's."""
    total = machine_bytes()
    if not torch.cuda.is_available() or total >= offloaded:
        return []
    return [f"this machine has {gib(total)} of main memory, and about {gib(offloaded)} will be offloaded to it: the kernel may kill the run"]


def table(one: Estimate) -> list[str]:
    """Rows of parts, columns of phases, GiB."""
    phases = one.phases
    width = max(len(part.name) for part in one.parts)
    width = max(width, len(one.role) + 5)
    rows = [f"{one.role}, GiB".ljust(width) + _cells(phases, phases)]
    for part in one.parts:
        if part.bytes:
            cells = (f"{part.bytes / GIB:.1f}" if phase in part.phases else "-" for phase in phases)
            rows.append(part.name.ljust(width) + _cells(cells, phases))
    rows.append("total".ljust(width) + _cells((f"{one.total(phase) / GIB:.1f}" for phase in phases), phases))
    return rows


def _cells(cells, phases: list[str]) -> str:
    return "".join(f"  {cell:>{max(9, len(phase))}}" for cell, phase in zip(cells, phases, strict=True))
