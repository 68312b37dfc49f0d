"""The BF16 tensors of a training checkpoint: DeepSpeed's directories (ZeRO 0 to 3) as OpenRLHF writes them.

    CKPT/_actor/latest                                   the tag of the last one
    CKPT/_actor/global_step40/mp_rank_00_model_states.pt              ZeRO 0 to 2: the BF16 parameters themselves
    CKPT/_actor/global_step40/*_zero_pp_rank_*_optim_states.pt        ZeRO 3: the float32 master copy, in pieces

What the learner ran, and published, are the BF16 parameters; under ZeRO 3 they are the float32 copy rounded, as DeepSpeed does.
The files are pickles: read only checkpoints of your own.
"""

from __future__ import annotations

import re
from glob import glob
from pathlib import Path

import torch
from torch import Tensor

from qarl_openrlhf.checkpoint import manifest
from qarl_openrlhf.checkpoint.find import step_of
from qarl_openrlhf.quant.errors import QuantError
from qarl_openrlhf.quant.scheme import QuantScheme


def is_huggingface(directory: Path) -> bool:
    return (directory / "config.json").is_file()


def find_deepspeed(directory: str | Path, tag: str | None = None) -> Path:
    """The directory with the files of one step: `directory` may be OpenRLHF's --ckpt.path, its _actor, or the step itself."""
    directory = Path(directory)
    root = directory / "_actor" if (directory / "_actor").is_dir() else directory
    if tag is None and _holds_states(root):
        return root
    tags = _tags(root)
    if not tags:
        raise QuantError(_without_checkpoint(directory))
    named = ""
    if tag is None and (root / "latest").is_file():
        tag = (root / "latest").read_text(encoding="utf-8").strip()
        named = ", which its file `latest` names"
    if tag in tags:
        return root / tag
    lacks = f"checkpoint {tag}{named}" if tag else "file `latest`, which names the newest checkpoint"
    raise QuantError(f"{directory} has no {lacks}: its checkpoints are {', '.join(tags)}; choose one with --tag")


def which(source: str | Path, step: Path, tag: str | None) -> str:
    """'from global_step3 (newest; --tag chooses another)': what `find_deepspeed` took of a source, for a user who did not say."""
    chosen = tag is not None or Path(source).resolve() == step.resolve()
    return f"from {step.name}" + ("" if chosen else " (newest; --tag chooses another)")


def trained_in(step: Path) -> QuantScheme | None:
    """The scheme of the run that wrote it, with its `:rollout`; None of a checkpoint that is not one of ours and does not say."""
    try:
        return QuantScheme.parse((manifest.read(step) or {})["scheme"])
    except (KeyError, AttributeError, QuantError):  # the last two: of a file that is not ours, or of another version
        return None


def _tags(root: Path) -> list[str]:
    """In the order of their steps: global_step9 before global_step10."""
    entries = root.iterdir() if root.is_dir() else []
    found = [path.name for path in entries if path.suffix != manifest.PARTIAL and path.is_dir() and _holds_states(path)]
    return sorted(found, key=lambda name: (step_of(name) or 0, name))


def _without_checkpoint(directory: Path) -> str:
    """A run's own directory has its checkpoints in one below: that is the usual mistake."""
    below = sorted(path for path in directory.iterdir() if path.is_dir() and (_tags(path / "_actor") or _tags(path))) if directory.is_dir() else []
    if below:
        return f"{directory} holds no checkpoint itself: give {' or '.join(map(str, below))}, which does"
    return (
        f"{directory} holds no checkpoint: give a Hugging Face directory (config.json), OpenRLHF's --ckpt.path, its _actor, "
        "or one global_stepN of it"
    )


def _holds_states(directory: Path) -> bool:
    return bool(glob(str(directory / "*_model_states.pt")))


def read_deepspeed(step: Path) -> dict[str, Tensor]:
    """{parameter name: BF16 tensor on the CPU} of one step's directory; names as in the Hugging Face model in memory."""
    whole = step / "mp_rank_00_model_states.pt"
    tensors = _module_states(whole) if whole.is_file() else None
    if tensors is None or any(tensor.numel() == 0 for tensor in tensors.values()):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        try:
            tensors = get_fp32_state_dict_from_zero_checkpoint(str(step.parent), tag=step.name)
        except Exception as error:  # files that are missing, cut off or of something else: many classes
            raise QuantError(f"{step}: {error} Every rank's files of one step are needed") from None
    if any("lora_" in name for name in tensors):
        raise QuantError(f"{step} holds LoRA weights; merge them (openrlhf.cli.lora_combiner) and export the result")
    return {re.sub(r"^module\.", "", name): tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def _module_states(path: Path) -> dict[str, Tensor]:
    try:
        return torch.load(path, map_location="cpu", weights_only=False)["module"]
    except Exception as error:  # cut off, or no pickle of DeepSpeed's: many classes
        raise QuantError(f"{path} is broken, or not DeepSpeed's ({type(error).__name__}): choose another step with --tag") from None
