"""The Hugging Face hub: not asked at all where everything is local, and asked once, briefly, before a run depends on it.

transformers, datasets and vLLM ask the hub about local directories, too, and retry each question for seconds where there is no
network; a model that cannot be had is then noticed by a Ray worker, minutes later.
"""

import json
import os
import urllib.error
import urllib.request

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.paths import looks_local

MODELS = ("actor.model_name_or_path", "critic.model_name_or_path", "reward.model_name_or_path")
DATASETS = ("data.prompt_dataset", "eval.dataset")
TIMEOUT_S = 5.0


def settle(flat) -> list[str]:
    """Decide whether this run may ask the hub, before anything imports its client. Sets ``HF_HUB_OFFLINE`` for this process and
    its workers where it may not; returns notes.

    flat: argparse namespace with dotted names. ConfigError naming the flag for a model or data set that is neither here nor in
    the cache, when the hub cannot be reached.
    """
    if flat.use_ms:  # ModelScope's names
        return []
    remote = hub_names(flat)
    if not remote:
        if not any(_has_remote_code(getattr(flat, flag)) for flag in MODELS):
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        return []
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    if not offline and reachable(endpoint()):
        return []
    why = "HF_HUB_OFFLINE is set" if offline else f"{endpoint()} is not reachable"
    for flag, kind, name in remote:
        if not is_cached(kind, name):
            here = "directory" if kind == "models" else "file or directory"
            raise ConfigError(
                f"--{flag} {name} is no {here} here and not in the cache of the hub, and {why}: name a local {here}, or download it first"
            )
    os.environ["HF_HUB_OFFLINE"] = "1"
    return [f"{', '.join(name for *_, name in remote)}: from the cache of the hub, since {why}"]


def hub_names(flat) -> list[tuple[str, str, str]]:
    """(flag, "models" or "datasets", name) of everything that can only come from the hub."""
    found = []
    for kind, flags in (("models", MODELS), ("datasets", DATASETS)):
        for flag in flags:
            for name in (getattr(flat, flag) or "").split(","):
                name = name.split("@")[0].strip()
                local = not name or looks_local(name) or os.path.exists(name) or "://" in name or name.count("/") > 1
                if not local and not (kind == "datasets" and os.path.splitext(name)[1]):
                    found.append((flag, kind, name))
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
    """Whether the hub's cache on this machine has any version of a model or data set."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = os.environ.get("HF_HOME") or os.path.join(caches, "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    snapshots = os.path.join(cache, f"{kind}--{name.replace('/', '--')}", "snapshots")
    return os.path.isdir(snapshots) and bool(os.listdir(snapshots))


def _has_remote_code(name: str | None) -> bool:
    """Whether a local model's config.json names code of another repository ("owner/name--file.Class"), which the hub has."""
    try:
        with open(os.path.join(name or "", "config.json"), encoding="utf-8") as file:
            return "--" in json.dumps(json.load(file).get("auto_map") or {})
    except (OSError, ValueError, AttributeError):
        return False
