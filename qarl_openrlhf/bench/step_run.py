"""The pieces of bench_step in the order in which they are measured, and what is made of them."""

import os
import re
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial

import torch

from qarl_openrlhf import runtime
from qarl_openrlhf.bench import step_learner, step_profile, sync
from qarl_openrlhf.bench import step_table as tables
from qarl_openrlhf.bench.step_learner import recipe_flags, resolve, samples_for
from qarl_openrlhf.bench.step_plan import (
    SCHEMES,
    Model,
    depths,
    engine_scheme,
    kv_bytes,
    learner_problem,
    learner_scheme,
    runnable,
)
from qarl_openrlhf.bench.step_results import Budget, Results
from qarl_openrlhf.bench.step_workload import Workload
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.model_shape import kv_bytes_per_token
from qarl_openrlhf.planning.parts import GIB

# Of a card, for depths that are chosen here: several models one after the other leave the allocator's memory in pieces (13 to 18 of
# 140 GiB were reserved and could not be given out).
ROOM = 0.85


@dataclass
class Job:
    """A checked command line: what to measure, in which schemes, at which depths, on what."""

    args: object
    device: str
    world: int
    workload: Workload
    schemes: list[str]
    full: int
    layers: list[int]
    rollout_layers: list[int]
    card: str
    card_bytes: int | None
    transport: str
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, args, device: str, world: int) -> "Job":
        """ConfigError or QuantError, before anything starts, for what cannot be measured."""
        planned = args.dry_run and args.card
        if planned:
            schemes, notes = args.schemes or list(SCHEMES), []
        else:
            schemes, notes = runnable(args.schemes, device)
        workload = Workload(args.prompt, args.response, args.prompts, args.samples, args.update_samples)
        on_card = device == "cuda" and not planned
        card = args.card if planned else torch.cuda.get_device_name() if on_card else "CPU"
        memory = torch.cuda.get_device_properties(0).total_memory if on_card else None
        if args.card_gb:
            memory = int(args.card_gb * GIB)
        full = sync.config_of(args.shape, None).num_hidden_layers
        job = cls(
            args, device, world, workload, schemes, full, args.layers or [full], args.rollout_layers or [full], card, memory,
            _transport(args, device), notes,
        )  # fmt: skip
        job._check()
        return job

    def _check(self) -> None:
        if too_deep := [n for n in (*self.layers, *self.rollout_layers) if n > self.full]:
            raise ConfigError(f"{self.args.shape} has {self.full} layers, not {too_deep[0]}")
        if "learner" in self.args.only:
            problems = []
            for scheme in dict.fromkeys(map(learner_scheme, self.schemes)):
                arguments = self.learner_args(scheme)
                problems.append(
                    lambda n, card=self.card_bytes, a=arguments, s=scheme: learner_problem(a, Model.of(self.args.shape, n, s), card, n)
                )
            if not self.args.layers:
                room = self.card_bytes and int(self.card_bytes * ROOM)
                chosen = [depths(self.args.shape, partial(problem, card=room), room) for problem in problems]
                self.layers = min(chosen, key=max)  # the same depths for all schemes
            for problem in problems:
                if found := problem(max(self.layers)):
                    raise ConfigError(found)
        for name, given in (("layers", self.layers), ("rollout_layers", self.rollout_layers)):
            if len(given) < 3 and self.full not in given:
                raise ConfigError(
                    f"--{name} {_list(given)}: to say what all {self.full} layers take, measure them, or three or more "
                    "other depths (a line through two has no residual)"
                )
        if self.card_bytes and {"rollout", "push"} & set(self.args.only):
            for scheme in dict.fromkeys(map(engine_scheme, self.schemes)):
                for layers in self.rollout_layers:
                    self._note_cache(scheme, layers)

    @property
    def update_samples(self) -> int:
        """Responses of one GPU in a measured optimizer step."""
        return samples_for(self.workload, self.args.tokens)

    def learner_args(self, scheme: str):
        """train_qarl's arguments for the learner (of a directory with the shape's config.json, which is made and kept)."""
        flags = recipe_flags(self.workload, tokens=self.args.tokens, samples=self.update_samples, world=self.world)
        return resolve(self.directory(None), scheme, self.device, flags, self.args.extra)

    def directory(self, layers: int | None) -> str:
        return sync.write_config(tempfile.mkdtemp(prefix="qarl-step-"), self.args.shape, layers)

    def _note_cache(self, scheme: str, layers: int) -> None:
        """ConfigError if no response fits the KV cache, a note if not all do: the others then wait, which takes time."""
        bytes_ = self.kv_bytes(scheme, layers)
        if bytes_ is None:
            return
        w = self.workload
        each = kv_bytes_per_token(Model.of(self.args.shape, layers, scheme).shape, self.args.tp)
        at_once = bytes_ // (each * (w.prompt + w.response))
        if at_once < w.sequences:
            self.notes.append(
                f"{scheme}: the KV cache of {bytes_ / GIB:.1f} GiB holds {at_once} of {w.sequences} responses of the longest kind; "
                "the others wait for room"
            )

    def kv_bytes(self, scheme: str, layers: int) -> int | None:
        if self.card_bytes is None or self.device == "cpu":
            return None
        model = Model.of(self.args.shape, layers, scheme)
        return kv_bytes(model, scheme, self.workload, self.card_bytes, tp=self.args.tp, alone=self.transport == "nccl")

    @property
    def short_card(self) -> str:
        name = next((name for name in ("H200", "H100", "A100") if name in self.card), self.card)
        return re.sub(r"\W+", "-", name).lower()

    def settings(self) -> dict:
        """What must be the same for two pieces to be of one measurement."""
        names = ("shape", "prompt", "response", "prompts", "samples", "update_samples", "tp")
        return {name: getattr(self.args, name) for name in names} | {"transport": self.transport}

    def learner_settings(self) -> dict:
        """The same for pieces of the learner, which rollouts and pushes do not depend on."""
        return {"tokens": self.args.tokens, "flags": self.args.extra, "world": self.world}

    def describe(self) -> str:
        w, a = self.workload, self.args
        lines = [
            f"{a.shape} on {self.card}: {', '.join(self.schemes)}",
            f"one GPU's share of a step: {w.prompts} prompts of {w.prompt} tokens x {w.samples} responses of at most "
            f"{w.response}; {w.updates:g} updates of {w.update_samples} responses",
            f"engine: tensor parallel {a.tp}, {_list(self.rollout_layers)} of {self.full} layers; transport {self.transport}",
            f"learner: world size {self.world}, {_list(self.layers)} of {self.full} layers, "
            f"micro-batches of {a.tokens} tokens, gradient checkpointing",
        ]
        return "\n".join(lines)


def _list(layers: list[int]) -> str:
    return ", ".join(map(str, layers))


def _transport(args, device: str) -> str:
    fitting = ("gloo",) if device == "cpu" else ("ipc", "nccl")
    if args.transport not in ("auto", *fitting):
        raise ConfigError(f"--transport {args.transport} does not work on a {device.upper()}: use {' or '.join(fitting)}")
    transport = fitting[0] if args.transport == "auto" else args.transport
    if transport == "ipc" and args.tp > 1:
        raise ConfigError(f"--tp {args.tp} with transport ipc: one GPU is shared by one engine rank; use --transport nccl")
    need, there = 1 + args.tp, torch.cuda.device_count()
    if transport == "nccl" and not args.dry_run and there < need:
        raise ConfigError(f"--transport nccl with --tp {args.tp} needs {need} GPUs, this machine has {there}")
    return transport


def run_engines(job: Job, results: Results, budget: Budget, environment: dict) -> None:
    """Start an engine a scheme and depth, push into it, make its rollouts."""
    from qarl_openrlhf.bench.step_engine import EnginePair

    started = False
    for layers in job.rollout_layers:
        for scheme in dict.fromkeys(map(engine_scheme, job.schemes)):
            pieces = [f"rollout/{scheme}/{kind}/{layers}" for kind in job.args.lengths if "rollout" in job.args.only]
            pieces += [f"push/{scheme}/{layers}"] if "push" in job.args.only else []
            missing = [name for name in pieces if name not in results]
            if not missing or not budget.allows("engine", ", ".join(missing)):
                continue
            if not started:
                need = 1 + job.args.tp if job.transport == "nccl" else 1
                runtime.start_ray(job.device, runtime.ResourcePlan({"bench": need}), environment, log_to_driver=False)
                started = True
            began = time.perf_counter()
            pair = None
            try:
                pair = EnginePair(
                    job.directory(layers), job.args.shape, layers, scheme, job.workload,
                    device=job.device, transport=job.transport, tp=job.args.tp, kv_bytes=job.kv_bytes(scheme, layers),
                )  # fmt: skip
                print(f"{scheme}, {layers} layers: engine up in {time.perf_counter() - began:.0f} s", flush=True)
                for name in missing:
                    _engine_piece(job, pair, name, layers, scheme, results, budget)
            except Exception as error:  # noqa: BLE001 - one scheme's engine must not cost the others' figures
                _failed(results, missing, error)
            finally:
                if pair is not None:
                    pair.close()
            budget.took("engine", time.perf_counter() - began)


def _engine_piece(job: Job, pair, name: str, layers: int, scheme: str, results: Results, budget: Budget) -> None:
    part, _, rest = name.partition("/")
    kind = rest.split("/")[-2] if part == "rollout" else part
    if not budget.allows(kind, name):
        return
    began = time.perf_counter()
    figures = pair.push(job.args.pushes) if part == "push" else pair.rollout(kind)
    figures |= {"layers": layers, "kv_cache_gib": (job.kv_bytes(scheme, layers) or 0) / GIB, "kernels": pair.kernels()}
    results.put(name, figures)
    budget.took(kind, time.perf_counter() - began)
    shown = f"{figures['total_ms']:.1f} ms" if part == "push" else f"{figures['seconds']:.2f} s, {figures['tok_per_s']:.0f} tok/s"
    print(f"{name}: {shown}", flush=True)


def run_learners(job: Job, results: Results, budget: Budget) -> None:
    """Train at each depth in each scheme that the learner computes in."""
    step_learner.one_rank_environment()
    if job.device == "cpu":
        torch.set_num_threads(1)  # threads that wait for each other on shared cores take a hundred times as long
    rank = int(os.environ["RANK"])
    for scheme in dict.fromkeys(map(learner_scheme, job.schemes)):
        for layers in job.layers:
            names = {kind: f"learner/{scheme}/{kind}/{layers}" for kind in job.args.lengths}
            missing = {kind: name for kind, name in names.items() if name not in results}
            if not missing or not _all_ranks(job, budget.allows("learner", ", ".join(missing.values()))):
                continue
            began = time.perf_counter()
            learner = None
            try:
                learner = step_learner.StepLearner(job.learner_args(scheme), sync.config_of(job.args.shape, layers), job.device)
                count = job.update_samples * step_learner.UPDATES
                for kind, name in missing.items():
                    lengths = job.workload.lengths(kind, count * job.world)[rank :: job.world]
                    figures = learner.measure(job.workload.prompt, lengths, job.args.repeats, profile=job.args.profile)
                    results.put(name, figures | {"layers": layers})
                    if rank == 0:
                        print(f"{name}: {_learner_line(figures)}", flush=True)
                        if job.args.profile:
                            print("\n".join(step_profile.lines(figures["profile"])), flush=True)
            except Exception as error:  # noqa: BLE001 - see above
                if job.world > 1:
                    raise  # the other ranks would wait for this one
                _failed(results, list(missing.values()), error)
            finally:
                if learner is not None:
                    learner.close()
                learner = None
            budget.took("learner", time.perf_counter() - began)


def _all_ranks(job: Job, willing: bool) -> bool:
    """Whether all ranks will begin a piece: one that does not would leave the others waiting."""
    if job.world == 1 or not torch.distributed.is_initialized():
        return willing
    votes = torch.tensor(int(willing), device=job.device)
    torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN)
    return bool(votes)


def _learner_line(figures: dict) -> str:
    seconds = "  ".join(f"{name} {value:.3f} s" for name, value in figures["runs"][-1].items())
    memory = f"  peak {figures['peak_gib']:.1f} GiB" if figures["peak_gib"] else ""
    return f"{figures['tokens']} tokens: {seconds}{memory}"


def _failed(results: Results, names: list[str], error: Exception) -> None:
    # The last lines of a remote traceback are the cause.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {' '.join(lines[-3:])[-500:]}"
    for name in names:
        if name not in results:
            results.fail(name, reason)
    print(f"failed: {', '.join(names)}: {reason}", flush=True)


def summarize(job: Job, pieces: dict, learner: dict) -> dict:
    """Print the tables of what there is; {kind: {steps, ratios, roofline, fits}}. learner: its settings."""
    summary: dict = {"formula": tables.FORMULA}
    optimizer = "adam" if {"adam", "--actor.optim=adam"} & set(learner["flags"]) else "muon"
    sharded = "the optimizer unsharded on one" if learner["world"] == 1 else f"ZeRO over {learner['world']}"
    for kind in job.args.lengths:
        steps = {s: tables.assemble(pieces, s, kind, job.workload, job.full) for s in job.schemes}
        bounds = {}
        for scheme in job.schemes:
            model = Model.of(job.args.shape, None, scheme)
            bounds[scheme] = tables.bound(model, scheme, kind, job.card, job.workload, optimizer)
        lines = {
            scheme: found
            for scheme in dict.fromkeys(map(learner_scheme, job.schemes))
            if (found := tables.learner_at_full_depth(pieces, scheme, kind, job.full))
        }
        lengths = job.workload.lengths(kind)
        title = (
            f"{job.args.shape} on {job.card}, {kind} lengths (mean response {sum(lengths) / len(lengths):.0f}): seconds of one "
            f"GPU's step of {len(lengths)} responses; in brackets the least the card allows. Engine: tensor parallel {job.args.tp}; "
            f"learner: {learner['world']} GPU(s), {sharded}"
        )
        if any(bounds.values()) or pieces:
            tables.show(tables.step_table(title, steps, bounds))
        if lines:
            tables.show(tables.fit_table(f"learner, {kind} lengths, all {job.full} layers", lines))
        summary[kind] = {
            "steps": steps,
            "faster than bf16": {name: tables.ratios(steps, name) for name in ("colocated", "async", *tables.COLUMNS)},
            "roofline": bounds,
            "lines": {
                scheme: {
                    phase: {"at_full_depth": value} | (vars(line) if line else {}) for phase, (value, line) in found.items()
                }
                for scheme, found in lines.items()
            },
        }
        if lost := _lost(steps):
            print(lost)
    print(tables.FORMULA)
    return summary


def _lost(steps: dict[str, dict]) -> str:
    """What the aligned learner costs beside the same engine with a BF16 learner."""
    aligned, rollout = (steps.get(name, {}).get("colocated") for name in ("w4a16", "w4a16:rollout"))
    if not aligned or not rollout:
        return ""
    return f"w4a16 takes {aligned / rollout - 1:+.1%} of the time of w4a16:rollout (target: at most +3 %)"
