"""Names and shapes of a model's safetensors files from their headers, and whether the files are whole. No weights are read."""

import json
import os

from qarl_openrlhf.config import ConfigError


def tensor_shapes(owner: str, directory: str) -> dict[str, tuple[int, ...]] | None:
    """Tensor name -> shape, of all files; None for a model in PyTorch's own format. ConfigError names a broken file."""
    names = sorted(os.listdir(directory))
    files = [name for name in names if name.endswith(".safetensors")]
    if "model.safetensors.index.json" in names:
        files = _listed(owner, os.path.join(directory, "model.safetensors.index.json"))
    elif "model.safetensors" in names:
        files = ["model.safetensors"]
    if not files:
        if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
            return None
        raise ConfigError(f"{owner} has no weights: no .safetensors file is there")
    shapes = {}
    for name in files:
        shapes |= _header(f"{owner}: {name}", os.path.join(directory, name))
    return shapes


def _listed(owner: str, index: str) -> list[str]:
    try:
        with open(index, encoding="utf-8") as file:
            return sorted(set(json.load(file)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{owner}: {os.path.basename(index)} cannot be read ({type(error).__name__}: {error}): download it again") from None


def _header(owner: str, path: str) -> dict[str, tuple[int, ...]]:
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            header = json.loads(file.read(length)) if 8 + length <= size else None
    except OSError as error:
        raise ConfigError(f"{owner} cannot be read ({error.strerror}): download the model again") from None
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ConfigError(f"{owner} is no safetensors file, or cut short: download it again")
    header.pop("__metadata__", None)
    try:
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (KeyError, TypeError, IndexError):
        raise ConfigError(f"{owner} has a broken header: download it again") from None
    if 8 + length + end != size:
        raise ConfigError(f"{owner} has {size} bytes, its header says {8 + length + end}: download it again")
    return shapes
