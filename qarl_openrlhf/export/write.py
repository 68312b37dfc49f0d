"""Write published tensors as a Hugging Face checkpoint directory that `vllm serve DIR` loads unchanged."""

import copy
import json
import os
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn

from qarl_openrlhf.export.replace import MARKER, check_target, put_in_place
from qarl_openrlhf.files import let_umask_rule, scratch_directory
from qarl_openrlhf.quant import expert_names, finite
from qarl_openrlhf.quant.convert import published_tensors
from qarl_openrlhf.quant.scheme import QuantScheme

INDEX_NAME = "model.safetensors.index.json"


def export_checkpoint(
    source: nn.Module | Iterable[tuple[str, Tensor]],
    config,
    out_dir: str,
    scheme: QuantScheme,
    tokenizer=None,
    max_shard_size: str = "5GB",
    generation_config=None,
) -> None:
    """Write safetensors, config.json (with ``quantization_config``), generation_config.json and the tokenizer to ``out_dir``.

    source: a converted model, or its :func:`published_tensors`. config: the model's Hugging Face config (not changed).
    generation_config: of a model that is given as its tensors.
    Everything is written to a directory beside ``out_dir`` that then takes its place, so a crash leaves no half-written one.
    QuantError if something other than an earlier export is there, and for a tensor with NaN or infinities.
    """
    target = check_target(out_dir)
    model = source if isinstance(source, nn.Module) else None
    tensors = dict(expert_names.to_checkpoint(published_tensors(model, scheme) if model is not None else source))
    finite.require(tensors.items())
    config = copy.deepcopy(config)
    if model is not None:
        config.architectures = [type(model).__name__]
    if scheme.quantized:
        config.quantization_config = scheme.quantization_config(unquantized_linears(tensors))

    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_directory(target.parent, f".{target.name}.export-") as scratch:
        written = scratch / "export"
        written.mkdir()  # with the mode that umask gives, which the scratch directory does not have
        _write_tensors(tensors, written, max_shard_size)
        config.save_pretrained(written)
        if generation_config := getattr(model, "generation_config", generation_config):
            generation_config.to_json_file(Path(written, "generation_config.json"))  # save_pretrained refuses what some models come with
        if tokenizer is not None:
            tokenizer.save_pretrained(written)
        Path(written, MARKER).write_text(f"{scheme}\n", encoding="utf-8")
        put_in_place(written, target)


def unquantized_linears(names_and_tensors: dict[str, Tensor]) -> list[str]:
    """The ``ignore`` list: modules whose 2-D ``weight`` has no scale beside it, embeddings apart, and always lm_head."""
    plain = {
        name.removesuffix(".weight")
        for name, tensor in names_and_tensors.items()
        if name.endswith(".weight") and tensor.dim() == 2 and f"{name}_scale" not in names_and_tensors
    }
    return sorted({name for name in plain if not name.endswith("embed_tokens")} | {"lm_head"})


def _write_tensors(tensors: dict[str, Tensor], directory: str, max_shard_size: str) -> None:
    tensors = {name: _own_storage(tensor.detach().cpu().contiguous()) for name, tensor in tensors.items()}
    plan = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    for filename, names in plan.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, os.path.join(directory, filename), metadata={"format": "pt"})
    let_umask_rule(directory)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        with open(os.path.join(directory, INDEX_NAME), "w") as file:
            json.dump(index, file, indent=2, sort_keys=True)


def _own_storage(tensor: Tensor) -> Tensor:
    """Safetensors refuses views of shared storage, such as one expert of a stacked weight."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
