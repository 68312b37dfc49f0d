"""The Hugging Face hub: not asked at all where everything is local, and asked once, briefly, before a run depends on it.

transformers, datasets and vLLM ask the hub about local directories, too, and retry each question for seconds where there is no
network; a model that cannot be had is then noticed by a Ray worker, minutes later.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import NamedTuple

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.paths import looks_local

MODELS = ("actor.model_name_or_path", "critic.model_name_or_path", "reward.model_name_or_path")
DATASETS = ("data.prompt_dataset", "eval.dataset")
FORMATS = (".json", ".jsonl", ".csv", ".parquet", ".arrow")  # what OpenRLHF reads as a file; other names go to the hub
TIMEOUT_S = 5.0


class Wanted(NamedTuple):
    """A name that can only come from the hub. flag: what named it, as the user wrote it; kind: "models" or "datasets".

    remedy: what works without the hub, where it is not a local path in the name's place; shown: what was written, where it is not
    the hub's name.
    """

    flag: str
    kind: str
    name: str
    remedy: str = ""
    shown: str = ""

    def missing(self, why: str) -> str:
        """What is wrong and what would work, as one line."""
        absent = f"not in the cache of the hub, and {why}"
        if self.remedy:
            return f"{self.flag} {self.shown or self.name}: {self.name} is {absent}: {self.remedy}"
        here = "directory" if self.kind == "models" else "file or directory"
        enough = " (for --dry_run --dry_run_gpu_gb GB one with its config.json is enough)" if self.flag == f"--{MODELS[0]}" else ""
        return f"{self.flag} {self.name} is no {here} here and {absent}: name a local {here}{enough}, or download it first"


def settle(flat) -> list[str]:
    """Decide whether this run may ask the hub, before anything imports its client. Sets ``HF_HUB_OFFLINE`` for this process and
    its workers where it may not; returns notes.

    flat: argparse namespace with dotted names. ConfigError naming the flag for a model or data set that is neither here nor in
    the cache, when the hub cannot be reached.
    """
    if flat.use_ms:  # ModelScope's names
        return []
    return settle_names(hub_names(flat), [getattr(flat, flag) for flag in MODELS])


def settle_names(remote: Iterable[Wanted], models: Iterable[str | None] = ()) -> list[str]:
    """As `settle`, of all names on the hub that a command needs, and its models wherever they are."""
    remote = list(remote)
    if not remote:
        if not any(_has_remote_code(model) for model in models):
            _go_offline()
        return []
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    if not offline and reachable(endpoint()):
        return []
    why = "HF_HUB_OFFLINE is set" if offline else f"{endpoint()} is not reachable"
    for wanted in remote:
        if not is_cached(wanted.kind, wanted.name):
            raise ConfigError(wanted.missing(why))
    _go_offline(always=True)
    return [f"{', '.join(wanted.name for wanted in remote)}: from the cache of the hub, since {why}"]


def model_on_hub(flag: str, name: str | None) -> list[Wanted]:
    """[the model], where it can only come from the hub; [] for a path and for None."""
    return [] if is_local(name or "") else [Wanted(flag, "models", name)]


def _go_offline(*, always: bool = False) -> None:
    if always:
        os.environ["HF_HUB_OFFLINE"] = "1"
    else:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if os.environ["HF_HUB_OFFLINE"] == "1" and (constants := sys.modules.get("huggingface_hub.constants")):
        constants.HF_HUB_OFFLINE = True  # it read the variable when it was imported


def is_local(name: str) -> bool:
    """Whether a name is, or can only have been meant as, a path of this machine (or a URL)."""
    return not name or looks_local(name) or os.path.exists(name) or "://" in name


def hub_names(flat) -> list[Wanted]:
    """Everything that can only come from the hub."""
    found = []
    for kind, flags in (("models", MODELS), ("datasets", DATASETS)):
        for flag in flags:
            for name in (getattr(flat, flag) or "").split(","):
                name = name.split("@")[0].strip()
                if not is_local(name) and not (kind == "datasets" and name.endswith(FORMATS)):  # a file, which preflight looks for
                    found.append(Wanted(f"--{flag}", kind, name))
    return found


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def reachable(url: str) -> bool:
    """Whether anything answers there (through the proxies of the environment), be it with an error."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError) as error:  # no route, no name, refused, timed out; a certificate is something that answered
        return "CERTIFICATE" in str(error)
    return True


def is_cached(kind: str, name: str) -> bool:
    """Whether the hub's caches on this machine have any version of a model or data set."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = os.environ.get("HF_HOME") or os.path.join(caches, "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    snapshots = os.path.join(cache, f"{kind}--{name.replace('/', '--')}", "snapshots")
    if os.path.isdir(snapshots) and os.listdir(snapshots):
        return True
    prepared = os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")  # OWNER___a_name of OWNER/AName
    if kind != "datasets" or not os.path.isdir(prepared):
        return False
    return name.replace("/", "").replace("_", "").lower() in (folder.replace("_", "").lower() for folder in os.listdir(prepared))


def _has_remote_code(name: str | None) -> bool:
    """Whether a local model's config.json names code of another repository ("owner/name--file.Class"), which the hub has."""
    try:
        with open(os.path.join(name or "", "config.json"), encoding="utf-8") as file:
            return "--" in json.dumps(json.load(file).get("auto_map") or {})
    except (OSError, ValueError, AttributeError):
        return False
