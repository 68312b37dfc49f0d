"""A resume that would find nothing to do is told at once: Ray, engines and learner take minutes to find out."""

import json
from pathlib import Path

from qarl_openrlhf.checkpoint import flags, manifest
from qarl_openrlhf.checkpoint.find import step_of, tags
from qarl_openrlhf.export.replace import MARKER
from qarl_openrlhf.planning.paths import quantized_directory
from qarl_openrlhf.preflight.prompts import prompts_at_most
from qarl_openrlhf.preflight.safetensors_headers import tensor_shapes


def already_finished(args) -> str | None:
    """One line if the chosen checkpoint (``choose_checkpoint``) is a run's last and all that the run writes after it is there.

    None where that is not certain; the resume is then what finds out. So it is for asynchronous runs, whose checkpoints may hold
    responses that are still to be trained on, and for a run that was killed after its last step and before its last file.
    """
    if not args.ckpt.load_enable or args.train.async_enable or args.critic.model_name_or_path:
        return None
    models = Path(args.ckpt.path, "_actor")
    last = models / args.ckpt.load_tag
    written = manifest.read(last) or {}
    position, before = written.get("prompts"), written.get("flags")
    newest = tags(models)[0]
    if not position or not before or before.get("train.async_enable") is not False or step_of(newest) != step_of(last.name):
        return None
    if flags.changes(before, flags.deciding(dict(flags.flatten(args)))):
        return None
    left, more = args.train.num_episodes - position["episode"], ""
    if left == 1:  # a checkpoint does not know yet that its episode has no more prompts
        has = prompts_at_most(args)
        left -= position["drawn"] >= has
        more = " or --data.max_samples" if has == args.data.max_samples else ""
    if left > 0 or not _all_written(args, last / manifest.NAME):
        return None
    step = step_of(last.name)
    return f"{args.metrics.dir} is complete: step {step} of {step}; to train on, give a larger --train.num_episodes{more}"


def _all_written(args, checkpoint: Path) -> bool:
    """Whether model, export and report are whole and newer than the checkpoint: older ones are of an earlier, shorter run.

    The weights are written first, the tokenizer after them, then the export, which appears at once, and the report last.
    """
    model = Path(args.ckpt.output_dir)
    files = [model / "config.json", model / "tokenizer_config.json", *model.glob("*.safetensors"), Path(args.metrics.dir, "report.txt")]
    if args.quant.scheme != "bf16":
        files.append(Path(quantized_directory(args), MARKER))
    try:
        weights = tensor_shapes(str(model), str(model))
        for name in ("config.json", "tokenizer_config.json"):
            json.loads((model / name).read_text(encoding="utf-8"))
        return bool(weights) and all(file.stat().st_mtime_ns > checkpoint.stat().st_mtime_ns for file in files)
    except (OSError, ValueError):  # ConfigError is one: files that are cut short
        return False
