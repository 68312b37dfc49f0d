"""Is this machine ready? ``python -m qarl_openrlhf.cli.doctor [--model M --scheme S --tp N]``

Prints one line a check: ok, warn (runs, but not as tested) or FAIL, with the command that mends it. Exit status 1 if training would
fail. ``train_qarl --dry_run`` checks a whole command line, memory of the cards included.
"""

import argparse
import os
import sys

from qarl_openrlhf.doctor.finding import Finding, Level, fail, ok
from qarl_openrlhf.doctor.machine import Machine
from qarl_openrlhf.doctor.resources import check_resources
from qarl_openrlhf.doctor.versions import check_versions


def main(argv: list[str] | None = None) -> None:
    args = parse(sys.argv[1:] if argv is None else argv)
    machine = Machine.probe(args.path)
    device = args.device
    if device == "auto":
        device = "cuda" if machine.gpus or machine.driver else "cpu"
    findings = examine(machine, device, model=args.model, scheme=args.scheme, tp=args.tp)
    for finding in findings:
        print(finding)
    count = {level: sum(f.level is level for f in findings) for level in Level}
    print(f"{count[Level.OK]} ok, {count[Level.WARN]} warnings, {count[Level.FAIL]} failures ({device})")
    if count[Level.FAIL]:
        sys.exit(1)


def examine(machine: Machine, device: str, *, model: str | None = None, scheme: str = "w4a16", tp: int = 1) -> list[Finding]:
    """All checks of a machine for a run on ``device`` ("cpu" or "cuda"), in the order in which they are printed."""
    findings = check_versions(machine, device)
    parameters = None
    parsed, about_model = _parse(scheme)
    if model is not None and parsed is not None:
        parameters, about_model = _about_model(machine, device, model, parsed, tp)
    return findings + check_resources(machine, device, parameters) + about_model


def _parse(scheme: str):
    """(the scheme, nothing to say), or (None, what is wrong with it)."""
    try:
        from qarl_openrlhf.quant.errors import QuantError
        from qarl_openrlhf.quant.scheme import QuantScheme
    except (ImportError, OSError):  # by torch, which does not load: a finding of its own
        return None, []
    try:
        return QuantScheme.parse(scheme), []
    except QuantError as error:
        return None, [fail("scheme", str(error), "--scheme w4a16")]


def _about_model(machine: Machine, device: str, model: str, scheme, tp: int):
    from qarl_openrlhf.config import ConfigError
    from qarl_openrlhf.doctor.layers import check_layers, network_of
    from qarl_openrlhf.preflight import hub

    try:
        hub.settle_names(hub.model_on_hub("--model", model), [model])
    except ConfigError as error:
        message, _, fix = str(error).rpartition(": ")
        return None, [fail("model", message, fix)]
    try:
        network, config, parameters = network_of(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        fix = "a directory with a config.json, or a name on the hub (HF_HUB_OFFLINE unset, or in the cache)"
        return None, [fail("model", f"{model}: {reason}", fix)]
    return parameters, _about_files(model) + check_layers(network, config, scheme, tp, device, machine)


def _about_files(model: str) -> list[Finding]:
    """Weights and tokenizer of a directory, as a run checks them; nothing for a name on the hub, or where there is a config.json alone."""
    from qarl_openrlhf.config import ConfigError
    from qarl_openrlhf.preflight import tokenizer_files
    from qarl_openrlhf.preflight.model_files import check_model

    if not os.path.isdir(model) or not any(name.endswith((".safetensors", ".bin")) for name in os.listdir(model)):
        return []
    group = argparse.Namespace
    try:
        check_model(
            group(
                actor=group(model_name_or_path=model),
                model=group(max_positions=None, rope_theta=None),
                vllm=group(tensor_parallel_size=1),  # whether the layers divide is the layers' finding
                data=group(apply_chat_template=False),
            )
        )
    except ConfigError as error:
        message = str(error).replace("--actor.model_name_or_path ", "")
        what, _, fix = message.rpartition(": ")
        if (known := tokenizer_files.problem(model)) and fix == known[1]:
            return [fail("files", what, fix)]
        return [fail("files", message, "download or save the model there again, tokenizer included")]
    return [ok("files", "weights and tokenizer are whole")]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="hub name or directory: also check its layers and the disk for it")
    parser.add_argument("--scheme", default="w4a16", help="as --quant.scheme of train_qarl")
    parser.add_argument("--tp", type=int, default=1, help="as --vllm.tensor_parallel_size")
    parser.add_argument("--path", default="runs", help="where checkpoints will go")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args(argv)
    if args.tp < 1:
        parser.error(f"--tp {args.tp}: at least 1")
    return args


if __name__ == "__main__":
    main()
