"""What ``--help`` looks like: our flags first, then OpenRLHF's by what they are about, each with its default."""

import argparse

from qarl_openrlhf.cli.flags import OURS

# Order and title of OpenRLHF's groups, by the first part of a flag's name.
THEIRS = {
    "actor": "the policy's model, loss, optimizer, GPUs",
    "data": "prompts",
    "rollout": "rollouts",
    "reward": "reward",
    "train": "training, placement",
    "algo": "advantages, KL, corrections",
    "vllm": "engines",
    "ds": "DeepSpeed",
    "ref": "reference model",
    "critic": "critic",
    "eval": "evaluation",
    "ckpt": "checkpoints and output",
    "logger": "loggers",
    "": "other",
}
METAVARS = {int: "N", float: "X", str: "TEXT"}


def arrange(parser: argparse.ArgumentParser) -> None:
    """Group, order and complete the help of ``parser``, to which :func:`add_flags` has added ours. Parsing is not changed."""
    options = parser._optionals  # argparse puts what has no group of its own here; there is no public way to move it
    ours = [group for group in parser._action_groups if (group.title or "").startswith(OURS)]
    kept, theirs = [], {}
    for action in options._group_actions:
        if isinstance(action, argparse._HelpAction):
            kept.append(action)
        else:
            head, dot, _ = action.dest.partition(".")
            theirs.setdefault(head if dot and head in THEIRS else "", []).append(action)
    options._group_actions = kept
    groups = []
    for head in (head for head in THEIRS if head in theirs):
        group = parser.add_argument_group(f"OpenRLHF{f', --{head}.*' if head else ''}: {THEIRS[head]}")
        group._group_actions = theirs[head]
        groups.append(group)
    parser._action_groups = [options, *ours, *groups]
    for action in parser._actions:
        action.help = with_default(action)
        if action.metavar is None and action.choices is None and action.nargs != 0:
            action.metavar = METAVARS.get(action.type, "TEXT")
    needed = "--actor.model_name_or_path M --data.prompt_dataset P --reward.remote_url R --vllm.num_engines N"
    parser.usage = f"%(prog)s {needed} [flags]"
    parser.description = (
        "Trains M with QaRL. Only these four must be given; in place of --reward.remote_url it takes --reward.model_name_or_path or "
        "--train.agent_func_path, too. The flags of OpenRLHF 0.11.2's train_ppo_ray are all here. Not supported, and refused: "
        "--ds.lora.rank, --ds.load_in_4bit, and --ds.tensor_parallel_size and --ds.ring_attn_size above 1."
    )


def with_default(action: argparse.Action) -> str | None:
    """The help of a flag with its default, where that is a value and the text does not speak of it."""
    text, default = action.help or "", action.default
    if any(default is nothing for nothing in (None, False, argparse.SUPPRESS)) or default == "" or "default" in text:
        return text
    if isinstance(action, argparse._StoreFalseAction):  # the other half of a switch that is on
        return text
    if isinstance(default, (list, tuple)):
        default = " ".join(map(str, default))
    elif default is True:
        default = "on"
    return f"{text} (default: {default})".lstrip()
