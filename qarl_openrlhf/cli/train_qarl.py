"""Train with QaRL: ``python -m qarl_openrlhf.cli.train_qarl --actor.model_name_or_path M --quant.scheme w4a16 ...``

It takes every flag of OpenRLHF 0.11.2's ``train_ppo_ray``; ``--help`` shows them with ours. Refused, with the reason: ``--ds.lora.rank``,
``--ds.load_in_4bit``, and ``--ds.tensor_parallel_size`` and ``--ds.ring_attn_size`` above 1.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from qarl_openrlhf import config, runtime
from qarl_openrlhf.checkpoint.find import tags
from qarl_openrlhf.cli.dry_run import check_layers, default_flags, describe, engine_places, flatten, main_memory_problems, offload_notes
from qarl_openrlhf.cli.ending import SignalEnding
from qarl_openrlhf.cli.flags import add_flags, typed_flags
from qarl_openrlhf.cli.help_text import arrange
from qarl_openrlhf.cli.host import HostCommandLine
from qarl_openrlhf.cli.own_errors import own_message
from qarl_openrlhf.metrics.startup import Startup
from qarl_openrlhf.objectives import ObjectiveError, preset_flags
from qarl_openrlhf.planning import numbers, placement, positions
from qarl_openrlhf.planning.architecture import check_heads
from qarl_openrlhf.planning.paths import quantized_directory
from qarl_openrlhf.preflight import hub, preflight
from qarl_openrlhf.preflight.directories import held
from qarl_openrlhf.preflight.finished import already_finished
from qarl_openrlhf.preflight.prompt_lengths import long_prompts
from qarl_openrlhf.preflight.prompts import check_template
from qarl_openrlhf.preflight.resume import choose_checkpoint, how_to_resume
from qarl_openrlhf.preflight.tokenizer_files import endless
from qarl_openrlhf.quant.errors import QuantError


def main(argv: list[str] | None = None) -> None:
    with SignalEnding("train_qarl") as ending:
        _main(argv, ending)


def _main(argv: list[str] | None, ending: SignalEnding) -> None:
    args, notes, resources = resolve(sys.argv[1:] if argv is None else argv)
    for note in notes:
        print(f"note: {note}")
    if args.dry_run or args.dry_run_all:
        dry_run(args, resources)
        return
    with Startup().waiting("files, model and memory are checked", "checked"):
        _refuse(placement.check_placement, args)
        _refuse(positions.check_positions, args)
        _refuse(check_heads, args)
        _end_with(preflight(args) + _refuse(main_memory_problems, args))
        found = _refuse(long_prompts, args) + _refuse(endless, args) + offload_notes(args)
    for note in found:
        print(f"note: {note}")
    found = _refuse(choose_checkpoint, args)
    if complete := already_finished(args):
        print(complete)
        return
    for note in found:
        print(f"note: {note}")
    _refuse(positions.apply, args)
    # vLLM's own logger would fill the terminal; --ray.log_to_driver shows everything.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if args.ray.log_to_driver else "ERROR")
    environment = runtime.set_environment(args.device)
    with ExitStack() as stack:
        _refuse(stack.enter_context, held(args))
        ending.advice = partial(how_to_resume, args)
        run(args, resources, environment, ending)


def dry_run(args, resources) -> None:
    """Print what a run would do; the process ends with status 2 if the run would fail."""
    host = HostCommandLine()
    add_flags(host.parser)
    text, problems = _refuse(describe, args, resources, None if args.dry_run_all else default_flags(host.parser))
    print(text)
    files = preflight(args)
    # Prompts are read and tokenized only where files and model are found good.
    for notes in [choose_checkpoint] if files else [long_prompts, endless, choose_checkpoint]:
        try:
            for note in notes(args):
                print(f"note: {note}")
        except config.ConfigError as error:
            files.append(str(error))
    if not files and (complete := already_finished(args)):
        print(f"note: {complete}")
    here = files if args.dry_run_gpu_gb else []  # a plan for another machine: its files are there, not here
    for problem in here:
        print(f"note: on this machine, {problem}")
    print(flush=True)  # the answer stands apart, also where it goes to stderr
    _end_with(problems + (files if not here else []))
    where = f"a card of {args.dry_run_gpu_gb:g} GiB" if args.dry_run_gpu_gb else "this machine"
    but = f"; on this machine {len(here)} thing{'s' if len(here) > 1 else ''} would, see above" if here else ""
    print(f"dry run: nothing found that would keep this run from starting on {where}{but}")


def _end_with(problems: list[str]) -> None:
    """Nothing if there are none; else all of them and status 2."""
    for problem in problems:
        print(f"train_qarl: error: {problem}", file=sys.stderr)
    if problems:
        sys.exit(2)


def _refuse(check, *args):
    """``check(*args)``; a ConfigError ends the process with its message and status 2."""
    try:
        return check(*args)
    except config.ConfigError as error:
        print(f"train_qarl: error: {error}", file=sys.stderr)
        sys.exit(2)


USAGE = "%(prog)s [flags]   (--help lists them)"  # 200 flags would bury the error message


def resolve(argv: list[str], command: str = "train_qarl", usage: str = USAGE, told: Callable[[Exception | str], str] = str):
    """Command line -> (nested checked arguments, notes, resource plan); wrong flags end the process with status 2.

    command, usage, told: of the command whose flags these were made of, and how it tells an error of theirs.
    """
    host = HostCommandLine()
    host.parser.prog, host.parser.usage = command, usage
    fail = host.parser.error
    host.parser.error = lambda error: fail(told(error))
    argv, preset_notes = _with_preset(argv, host.parser)
    try:
        add_flags(host.parser, own_objective=_own_objective(argv))
    except ObjectiveError as error:
        host.parser.error(error)
    if {"-h", "--help"} & set(argv):
        arrange(host.parser)
    flat = host.parser.parse_args(argv)
    typed = typed_flags(host.parser, argv)
    try:
        config.require(flat)
        numbers.check_numbers(flat)
        check_template(flat)
        # A dry run that names the card's memory plans for a GPU on any machine.
        planned = (flat.dry_run or flat.dry_run_all) and flat.dry_run_gpu_gb and flat.device != "cpu"
        device = "cuda" if planned else runtime.resolve_device(flat.device)
        notes, missing = list(preset_notes), None
        try:
            notes += hub.settle(flat)  # before anything imports the hub's client
        except config.ConfigError as error:
            missing = error
        notes += config.prepare(flat, device, typed)
        args = host.resolve(flat)
        config.check(args, device, typed)
        if missing:  # told last: flags that cannot work are wrong wherever the model is
            raise missing
        if args.quant.scheme != "bf16":
            check_layers(args)
        notes += engine_places(args)
    except (config.ConfigError, runtime.ResourceError, QuantError, ObjectiveError) as error:
        host.parser.error(error)
    return args, notes, runtime.ResourcePlan.of(args)


def run(args, resources, environment: dict[str, str], ending: SignalEnding) -> None:
    """Start Ray, put our components in place, let OpenRLHF train, report."""
    from qarl_openrlhf import patches
    from qarl_openrlhf.patches.ray import own_sigterm_handler

    patches.apply()
    startup = Startup()
    try:
        with startup.waiting("Ray", "Ray is up"), own_sigterm_handler():
            runtime.start_ray(args.device, resources, environment, log_to_driver=args.ray.log_to_driver)
    except runtime.ResourceError as error:
        _end_with([str(error)])
    ending.take()
    from qarl_openrlhf.actors.filtering import NothingTrainedError
    from qarl_openrlhf.actors.install import install
    from qarl_openrlhf.metrics.errors import MetricsError
    from qarl_openrlhf.metrics.progress import follow
    from qarl_openrlhf.metrics.run_directory import open_run_directory

    try:
        earlier = open_run_directory(args.metrics.dir, dict(flatten(args)), resume=args.ckpt.load_enable)
    except MetricsError as error:
        sys.exit(f"train_qarl: error: {error}")
    if earlier:
        print(f"note: {args.metrics.dir} had a run, which is now {earlier}")
    train = install(args, startup)
    stop = threading.Event()
    watcher = threading.Thread(target=follow, args=(args.metrics.dir, stop), kwargs={"codes": args.quant.scheme != "bf16"}, daemon=True)
    watcher.start()
    try:
        train(args)
    except Exception as error:
        if (message := own_message(error)) is None:
            raise
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # actors of the run that follow it into the end have nothing to add
        if args.ray.log_to_driver:
            traceback.print_exc()
        # A fault may be met again: no advice to start anew; and a run at its end has nothing to go on with.
        going_on = tags(Path(args.ckpt.path, "_actor")) and not isinstance(error, NothingTrainedError)
        sys.exit(f"train_qarl: error: {message}{ending.advice() if going_on else ''}")
    except KeyboardInterrupt:
        # Ray would print what the controller says when its engines are taken away, and the signal's line is to be the last.
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        raise
    finally:
        stop.set()
        watcher.join(timeout=5)
        # A head of our own ends with us, or has been ended by the same signal: Ray would look for it for a minute.
        if not ending.received or os.environ.get("RAY_ADDRESS"):
            runtime.release_placement_groups()
    finish(args)


def finish(args) -> None:
    """Report, and say where everything is: what is there is told also where the report cannot be written, as an error and last."""
    from qarl_openrlhf.patches.vllm_cpu import serve_command
    from qarl_openrlhf.report import ReportError, write_report

    problem = None
    try:
        report = write_report({args.quant.scheme: [args.metrics.dir]}, args.metrics.dir)
        print(report.text)
        print(f"run directory: {args.metrics.dir} ({', '.join(path.name for path in report.pictures)})")
    except (OSError, ReportError) as error:
        problem = error
    print(f"model: {args.ckpt.output_dir}")
    if args.quant.scheme != "bf16":
        print(f"quantized checkpoint, to serve it: {serve_command(quantized_directory(args))}")
    if problem:
        again = f"python -m qarl_openrlhf.cli.report {args.metrics.dir} --out DIRECTORY"
        sys.stdout.flush()
        failed = f"its report could not be written to {args.metrics.dir}: {problem}"
        sys.exit(f"train_qarl: error: training is done, but {failed}; {again} writes it elsewhere")


def _own_objective(argv: list[str]) -> str | None:
    """The value of ``--objective.name`` if it is a user's file: its hyperparameters become flags, too."""
    name = _value_of("--objective.name", argv)
    return name if name and ".py" in name else None


def _with_preset(argv: list[str], parser) -> tuple[list[str], list[str]]:
    """Flags of ``--preset NAME`` before the user's own, which win; and a note on what a ``_short`` preset made of the length."""
    name = _value_of("--preset", argv)
    if name is None:
        return argv, []
    sources = ("--preset_length", "--rollout.max_new_tokens", "--data.max_len")
    source = next((flag for flag in sources if _value_of(flag, argv)), None)
    try:
        length = float(_value_of(source, argv)) if source else None
    except ValueError:
        parser.error(f"{source} {_value_of(source, argv)}: give a number of tokens")
    if length is not None and length < 1:
        parser.error(f"{source} {_value_of(source, argv)}: give a number of tokens, 1 or more")
    try:
        flags = preset_flags(name, mean_response_length=length)
    except ObjectiveError as error:
        parser.error(f"--preset: {error}" + ("" if source else f" ({' or '.join(sources[:2])})"))
    notes = []
    if "objective.band_scale" in flags and _value_of("--objective.band_scale", argv) is None:
        notes = [
            f"--preset {name}: --objective.band_scale {flags['objective.band_scale']:g} = sqrt(16384 / {length:g}), {length:g} from {source}"
        ]
        if source != "--preset_length":
            notes[0] += ": the longest response, so the bands may be narrow; --preset_length TOKENS gives the mean length"
    return [*(word for flag, value in flags.items() for word in (f"--{flag}", str(value))), *argv], notes


def _value_of(flag: str, argv: list[str]) -> str | None:
    """The last value of ``flag`` in ``argv``, written ``--flag value`` or ``--flag=value``."""
    found = None
    for word, following in zip(argv, [*argv[1:], None]):
        if word == flag:
            found = following
        elif word.startswith(flag + "="):
            found = word.partition("=")[2]
    return found


if __name__ == "__main__":
    main()
