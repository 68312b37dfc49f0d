"""Which checkpoint a run with ``--ckpt.load_enable`` goes on from is settled before anything starts."""

import os
from pathlib import Path

from qarl_openrlhf.checkpoint import flags, manifest
from qarl_openrlhf.checkpoint.errors import CheckpointError
from qarl_openrlhf.checkpoint.facts import facts_of
from qarl_openrlhf.checkpoint.find import choose, tags
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.positions import load_config
from qarl_openrlhf.preflight.prompts import prompts_at_most


def choose_checkpoint(args) -> list[str]:
    """Set ``args.ckpt.load_tag`` (or turn ``load_enable`` off where there is nothing to load); returns notes on what was found.

    ConfigError if checkpoints are there but none can be used.
    """
    if not args.ckpt.load_enable:
        if args.ckpt.load_tag:
            raise ConfigError(f"--ckpt.load_tag {args.ckpt.load_tag} without --ckpt.load_enable has no effect: add it")
        return []
    models = ["_actor"]
    if args.critic.model_name_or_path and os.path.isdir(os.path.join(args.ckpt.path, "_critic")):
        models.append("_critic")
    own = {model: _facts(args, model.removeprefix("_")) for model in models}
    try:
        choice = choose(args.ckpt.path, models, facts={"zero_stage": args.ds.zero_stage}, own=own, tag=args.ckpt.load_tag)
    except CheckpointError as error:
        raise ConfigError(f"--ckpt.load_enable: {error}") from None
    args.ckpt.load_tag = choice.tag
    if choice.tag is None:
        # OpenRLHF looks for the directory, not for a checkpoint in it: an interrupted first one would be loaded.
        args.ckpt.load_enable = False
        return [f"--ckpt.load_enable: no checkpoint under {args.ckpt.path} yet; the run starts anew"]
    directory = os.path.join(args.ckpt.path, models[0], choice.tag)
    notes = [*choice.notes, f"resuming from {directory}"]
    written = manifest.read(Path(directory))
    before = written.get("flags") or flags.of_run(args.metrics.dir)  # older checkpoints have none
    _check_position(args, directory, written.get("prompts") or {}, before)
    now = flags.deciding(dict(flags.flatten(args)))
    if now.get("train.enable_ema") and before.get("train.enable_ema") is False:
        notes.append("--train.enable_ema: the checkpoint was written without; the moving average starts from its weights")
    if changed := flags.changes(before, now):
        notes.append(f"resumed with other flags than before: {', '.join(changed)}; the run may not go on bit for bit")
    return notes


def _check_position(args, directory: str, position: dict, before: dict) -> None:
    """ConfigError if the run has fewer prompts than OpenRLHF passes over before the next: its loader would end in StopIteration.

    It passes over as many in an episode that has ended, too, but over none if no episode is left. position: see ``checkpoint.prompts``.
    """
    if not position or position["episode"] >= args.train.num_episodes:
        return
    has = prompts_at_most(args)
    if has >= position["drawn"]:
        return
    now = {f"data.{name}": getattr(args.data, name) for name in ("max_samples", "prompt_dataset")}
    changed = ", ".join(flags.changes(before, now)) or "its files have fewer rows than then"
    raise ConfigError(
        f"--ckpt.load_enable: {directory} was written after {position['drawn']} prompts of its episode, and this run has {has} "
        f"({changed}): give it the prompts that the run began with, or another --ckpt.path to start anew"
    )


def how_to_resume(args) -> str:
    """What goes on from where an ended run is now: the end of its last line, with a colon before it."""
    directory = Path(args.ckpt.path, "_actor")
    if saved := tags(directory):
        return f": the same command with --ckpt.load_enable goes on from checkpoint {directory / saved[0]}"
    return f": no checkpoint had been written to {args.ckpt.path} (--ckpt.save_steps N); the same command starts anew"


def _facts(args, role: str) -> dict:
    """What the run has of a model's facts; its processes are those of its own group."""
    group = getattr(args, role)
    return facts_of(args, role, load_config(args, role)) | {"world_size": group.num_nodes * group.num_gpus_per_node}
