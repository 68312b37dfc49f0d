"""A directory as a set of prompts: the files that the data sets' loader takes from it, by the loader's own rules."""

import os
from typing import NamedTuple

from qarl_openrlhf.config import ConfigError

READ = ("json", "csv", "parquet")  # the loader's kinds whose files are looked into


class DirectoryFiles(NamedTuple):
    """used: absolute paths of the split that is trained on; others: of the other splits, which the loader reads, too."""

    used: list[str]
    others: list[str]


def directory_files(flag: str, path: str, inner: str | None, split: str | None, split_flag: str) -> DirectoryFiles | None:
    """None for what is not looked into: a saved data set, a README that lists configurations, text, pictures, archives.

    Args:
        flag: that named ``path``, without its dashes; inner: the folder after an ``@``; split: the value of ``split_flag``.

    Raises:
        ConfigError: where the loader finds no files, or none of the split.
    """
    if any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json")):
        return None
    from datasets.load import LocalDatasetModuleFactory  # takes seconds

    try:
        module = LocalDatasetModuleFactory(path, data_dir=inner).get_module()
    except Exception as error:  # no files, names that contradict each other, a README that is no YAML
        raise ConfigError(f"--{flag} {path}: the loader finds no set of prompts there: {' '.join(str(error).split())}") from None
    configurations = module.builder_configs_parameters.builder_configs or []
    files = module.builder_kwargs.get("data_files") or (configurations[0].data_files if len(configurations) == 1 else None)
    if module.module_path.rpartition(".")[2] not in READ or not isinstance(files, dict) or module.builder_configs_parameters.metadata_configs:
        return None
    if split and str(split) not in map(str, files):
        raise ConfigError(f"--{split_flag} {split}: {path} has {', '.join(map(str, files))} instead: name one of them")
    used = [name for key, names in files.items() if not split or str(key) == split for name in names]
    return DirectoryFiles(used, [name for names in files.values() for name in names if name not in used])
