"""A training checkpoint as a directory that `vllm serve` loads: `python -m qarl_openrlhf.cli.export SOURCE --out DIR ...`.

SOURCE: a DeepSpeed checkpoint of any ZeRO stage (OpenRLHF's --ckpt.path, its _actor, or one global_stepN; needs --model), a
Hugging Face directory (OpenRLHF's --ckpt.output_dir, a *_hf directory), or a hub name. Every tensor written is read back and
compared, byte for byte, with what a learner of these weights publishes; --verify also compares log-probs with an engine.
"""

from __future__ import annotations

if __name__ == "__main__":
    from qarl_openrlhf.cli.ending import end_at_signals

    end_at_signals("export")

import argparse
import math
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError

from qarl_openrlhf.cli.ending import SignalEnding, own_process
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.engine.offline import ENGINES, choose_engine, open_engine
from qarl_openrlhf.export.directory import bf16_directory, deepspeed_step, export_directory, load_learner
from qarl_openrlhf.export.replace import check_target
from qarl_openrlhf.export.training_checkpoint import trained_in, which
from qarl_openrlhf.files import scratch_directory, why_unwritable
from qarl_openrlhf.patches.vllm_cpu import serve_command
from qarl_openrlhf.preflight import hub
from qarl_openrlhf.quant import QuantError, QuantScheme


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m qarl_openrlhf.cli.export", description="Writes a training checkpoint as a directory that `vllm serve` loads."
    )
    parser.add_argument("source", metavar="SOURCE", help="DeepSpeed checkpoint, Hugging Face directory, or hub name")
    parser.add_argument("--out", required=True, help="directory to write: a new or empty one; an earlier export there is replaced once the new one is complete")
    parser.add_argument("--scheme", default="bf16", help="bf16 (default), w4a16[:gN], w8a8, fp8, w4a8; of a checkpoint of quantized training bf16 or its own")
    parser.add_argument("--model", default=None, help="of a DeepSpeed checkpoint: the model it was trained from (config, tokenizer)")
    parser.add_argument("--tag", default=None, help="of a DeepSpeed checkpoint: which one, e.g. global_step40 (default: the newest)")
    parser.add_argument("--skip", nargs="*", default=[], metavar="PATTERN", help="layers to leave unquantized (names or fnmatch patterns)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size the groups must fit; also of --verify's engine")
    parser.add_argument("--verify", action="store_true", help="load it in vLLM and compare log-probs with the learner's forward")
    parser.add_argument("--engine", default="auto", choices=ENGINES, help="--verify: vLLM's own kernels or our method for CPUs")
    parser.add_argument("--tolerance", type=float, default=None, help="--verify: largest mean |difference| in nats (default: 0.1)")
    return parser


def check(args) -> QuantScheme:
    """The scheme; SystemExit-worthy errors before anything slow begins."""
    scheme = QuantScheme.parse(args.scheme.removesuffix(":rollout"))
    if args.skip and args.engine == "qarl":
        raise QuantError("--skip with --engine qarl: that engine quantizes every decoder layer; leave --engine out")
    if args.verify:
        import torch

        chosen = choose_engine(args.engine, scheme, "cuda" if torch.cuda.is_available() else "cpu")
        if args.skip and chosen == "qarl":
            raise QuantError(f"--verify: {scheme} with --skip needs vLLM's own kernels (a GPU, or a CPU with AVX512)")
    if args.tp < 1:
        raise QuantError(f"--tp {args.tp}: give 1 or more")
    if args.tolerance is not None and not 0 <= args.tolerance < math.inf:
        raise QuantError(f"--tolerance {args.tolerance:g}: give a number of nats, 0 or more")
    target = check_target(args.out, (args.source, *([args.model] if args.model else [])))
    if reason := why_unwritable(target.parent):
        raise QuantError(f"--out {args.out}: {reason}: name a directory that can be written to")
    models = {"SOURCE": args.source, "--model": args.model}
    hub.settle_names([wanted for flag, name in models.items() for wanted in hub.model_on_hub(flag, name)], models.values())
    return scheme


def run(args) -> None:
    scheme = check(args)
    step = deepspeed_step(args.source, args.tag)
    trained = trained_in(step) if step else None
    check_trained(step, trained, scheme)
    if step:
        print(which(args.source, step, args.tag), flush=True)
    with scratch_directory(_beside(args.out), ".export-") as scratch:
        source = bf16_directory(args.source, scratch / "bf16", model=args.model, tag=args.tag)
        # The text that --verify samples takes a forward a token: dequantizing in each of them is most of its time on a CPU.
        cache = "dequant" if args.verify else "packed"
        model, report = load_learner(source, scheme, skip=tuple(args.skip), tp=args.tp, cache=cache)
        print(report.table())
        count = export_directory(model, source, args.out, scheme)
    print(f"{args.out}: {count} tensors, {what_it_is(args, step, trained, scheme)}")
    has_tokenizer = any(Path(args.out).glob("tokenizer*"))
    if not has_tokenizer:
        print(f"note: {args.model or args.source} has no tokenizer that could be read; to serve {args.out}, name one")
    if args.verify:
        verify(args, model)
    print(f"to serve it: {serve_command(args.out)}{'' if has_tokenizer else ' --tokenizer NAME'}")


def check_trained(step: Path | None, trained: QuantScheme | None, scheme: QuantScheme) -> None:
    """QuantError for another quantized scheme than the weights were trained in: they have learned the errors of theirs, and the
    result would be a model that nobody has trained."""
    if trained is not None and trained.aligned and scheme.quantized and scheme != trained:
        raise QuantError(
            f"--scheme {scheme}: {step} was trained in {trained}, and only in that is the export what was trained: "
            f"give --scheme {trained}, or leave --scheme out for its BF16 weights"
        )


def what_it_is(args, step: Path | None, trained: QuantScheme | None, scheme: QuantScheme) -> str:
    """What the tensors were compared with, and no more: 'the learner' is one that ran, in this scheme."""
    if step is not None and not scheme.quantized:
        other = trained is not None and trained.quantized
        return "byte for byte the learner's" + (f" BF16 parameters (the run's scheme: {trained})" if other else "")
    if not scheme.quantized:
        return f"byte for byte those of {args.source} in BF16"
    if trained == scheme and not args.skip:
        return "byte for byte the learner's"
    if trained == replace(scheme, rollout_only=True) and not args.skip:
        return "byte for byte what the run's engines had (its learner's forward was in BF16)"
    left = " but for the layers of --skip" if args.skip else ""
    how = {True: f"which were trained with {trained}", False: "whose training is not known here"}[trained is not None]
    return f"byte for byte what {scheme}{left} makes of the weights of {step or args.source}, {how}"


def _beside(out: str) -> str:
    parent = Path(out).resolve().parent
    parent.mkdir(parents=True, exist_ok=True)
    return str(parent)


def verify(args, model) -> None:
    """QuantError where the engine's log-probs are further from the learner's than the tolerance."""
    from qarl_openrlhf.export import verify as v

    tolerance = v.TOLERANCE if args.tolerance is None else args.tolerance
    length = min(v.LENGTH, model.config.get_text_config().max_position_embeddings - 1)
    print(f"--verify: the learner samples {v.TEXTS} texts of {length} tokens", flush=True)
    ids = v.learner_text(model, length)
    mine = v.learner_log_probs(model, ids)
    print("--verify: starting an engine for them", flush=True)
    llm, engine = open_engine(args.out, engine=args.engine, max_model_len=length + 1, tp=args.tp, options={"skip_tokenizer_init": True})
    comparison = v.compare(v.engine_log_probs(llm, ids), mine)
    name = {"vllm": "vLLM's own kernels", "qarl": "vLLM with our CPU method"}[engine]
    print(f"{name}: {comparison}")
    if not comparison.mean <= tolerance:
        raise QuantError(f"{args.out}: the engine's log-probs are not the learner's ({comparison}; --tolerance {tolerance:g})")


def main(argv: list[str] | None = None) -> None:
    with SignalEnding("export"):
        _main(argv)


def _main(argv: list[str] | None) -> None:
    args = make_parser().parse_args(argv)
    try:
        run(args)
    except (QuantError, ConfigError, OSError, SafetensorError) as error:  # the last two: of a full disk
        raise SystemExit(f"export: error: {error}") from None


if __name__ == "__main__":
    own_process(main)
