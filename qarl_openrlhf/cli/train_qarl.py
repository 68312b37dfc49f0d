"""Train with QaRL: ``python -m qarl_openrlhf.cli.train_qarl --actor.model_name_or_path M --quant.scheme w4a16 ...``

Every flag of OpenRLHF 0.11.2's ``train_ppo_ray`` works here; ``--help`` shows them with ours.
"""

import os
import sys
import threading

from qarl_openrlhf import config, runtime
from qarl_openrlhf.cli.flags import add_flags, typed_flags
from qarl_openrlhf.cli.host import HostCommandLine
from qarl_openrlhf.objectives.base import ObjectiveError
from qarl_openrlhf.quant.errors import QuantError


def main(argv: list[str] | None = None) -> None:
    args, notes, resources = resolve(sys.argv[1:] if argv is None else argv)
    for note in notes:
        print(f"note: {note}")
    if args.dry_run:
        from qarl_openrlhf.cli.dry_run import describe

        print(describe(args, resources))
        return
    environment = runtime.set_environment(args.device)
    run(args, resources, environment)


def resolve(argv: list[str]):
    """Command line -> (nested checked arguments, notes, resource plan); wrong flags end the process with status 2."""
    host = HostCommandLine()
    argv = _with_preset(argv, host.parser)
    add_flags(host.parser, own_objective=_own_objective(argv))
    flat = host.parser.parse_args(argv)
    typed = typed_flags(host.parser, argv)
    try:
        device = runtime.resolve_device(flat.device)
        notes = config.prepare(flat, device, typed)
        args = host.resolve(flat)
        config.check(args, device, typed)
        if args.quant.scheme != "bf16":
            from qarl_openrlhf.cli.dry_run import check_layers

            check_layers(args)
    except (config.ConfigError, runtime.ResourceError, QuantError, ObjectiveError) as error:
        host.parser.error(str(error))
    return args, notes, runtime.ResourcePlan.of(args)


def run(args, resources, environment: dict[str, str]) -> None:
    """Start Ray, put our components in place, let OpenRLHF train, report."""
    from qarl_openrlhf import patches

    patches.apply()
    runtime.start_ray(args.device, resources, environment, log_to_driver=getattr(args.ray, "log_to_driver"))
    from qarl_openrlhf.actors.install import install
    from qarl_openrlhf.metrics.progress import follow
    from qarl_openrlhf.report.summary import write_report

    train = install(args)
    stop = threading.Event()
    watcher = threading.Thread(target=follow, args=(args.metrics.dir, stop), daemon=True)
    watcher.start()
    try:
        train(args)
    finally:
        stop.set()
        watcher.join(timeout=5)
    write_report([args.metrics.dir], args.metrics.dir)


def _own_objective(argv: list[str]) -> str | None:
    """The value of ``--objective.name`` if it is a user's file: its hyperparameters become flags, too."""
    for i, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name == "--objective.name":
            value = value or (argv[i + 1] if i + 1 < len(argv) else "")
            return value if ".py" in value else None
    return None


def _with_preset(argv: list[str], parser) -> list[str]:
    """Flags of ``--preset NAME`` before the user's own, which win."""
    from qarl_openrlhf.objectives.presets import PRESETS

    for i, word in enumerate(argv):
        flag, _, value = word.partition("=")
        if flag == "--preset":
            name = value or (argv[i + 1] if i + 1 < len(argv) else "")
            if name not in PRESETS:
                parser.error(f"--preset {name!r} does not exist; there are {', '.join(sorted(PRESETS))}")
            flags = []
            for key, setting in PRESETS[name].items():
                flags += [f"--{key}", *([] if setting is True else [str(setting)])]
            return flags + argv
    return argv


if __name__ == "__main__":
    main()
