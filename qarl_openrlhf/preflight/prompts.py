"""Prompt sets in local files: they exist, parse, hold the keys that the flags name, and make at least one rollout."""

import glob
import os

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.paths import looks_local, require_file
from qarl_openrlhf.preflight.directory_files import directory_files
from qarl_openrlhf.preflight.hub import FORMATS
from qarl_openrlhf.preflight.rows import check_read, count_rows


def check_template(flat) -> None:
    """ConfigError unless ``--data.input_template`` puts the prompt where it has ``{}``.

    flat: argparse namespace with dotted names, before OpenRLHF's own checks, which drop a template without ``{}``.
    """
    template, prompt = getattr(flat, "data.input_template"), "a prompt of its own"
    if not template:
        return
    try:
        good = "{}" in template and prompt in template.format(prompt)
    except (IndexError, KeyError, ValueError, AttributeError, TypeError):  # '{} {}', '{name}', '{'
        good = False
    if not good:
        raise ConfigError(
            f"--data.input_template {template!r} needs {{}} just once, where the prompt goes; write all other braces twice: {{{{ and }}}}"
        )


def check_prompts(args) -> None:
    """ConfigError naming flag, file and line."""
    names = args.data.prompt_dataset.split(",")
    _check_weights(args.data.prompt_probs, len(names))
    counts = _sets(args, "data.prompt_dataset", names)
    _sets(args, "eval.dataset", args.eval.dataset.split(",") if args.eval.dataset else [])
    prompts = _prompts_of_an_episode(args, counts)
    if prompts is not None and prompts < args.rollout.batch_size:
        what = "as --data.max_samples lets through" if prompts == args.data.max_samples else "in --data.prompt_dataset"
        raise ConfigError(
            f"{prompts} prompts {what} do not make one rollout of --rollout.batch_size {args.rollout.batch_size}, so nothing would be "
            f"trained: use --rollout.batch_size {prompts} or less, or more prompts"
        )


def prompts_at_most(args) -> int:
    """Prompts of an episode, where local files tell; else, or where they cannot be used, what ``--data.max_samples`` lets through."""
    try:
        prompts = _prompts_of_an_episode(args, _sets(args, "data.prompt_dataset", args.data.prompt_dataset.split(",")))
    except ConfigError:
        prompts = None
    return args.data.max_samples if prompts is None else prompts


def _prompts_of_an_episode(args, counts: list[int | None]) -> int | None:
    # With --data.prompt_probs the sets are repeated; a set that is not a local file has an unknown size.
    if args.data.prompt_probs or None in counts:
        return None
    return min(sum(min(count, args.data.max_samples) for count in counts), args.data.max_samples)


def _check_weights(text: str | None, sets: int) -> None:
    if text is None:
        return
    try:
        good = len([float(word) for word in text.split(",")]) == sets
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"--data.prompt_probs {text}: give one number for each of the {sets} sets of --data.prompt_dataset, with commas between")


def _sets(args, flag: str, names: list[str]) -> list[int | None]:
    """Rows of each set. ConfigError where a key has another type in one file than in another: OpenRLHF makes one set of them."""
    counts, first = [], {}
    for name in (name.strip() for name in names):
        if not name.split("@")[0].strip():
            raise ConfigError(f"--{flag} {','.join(names)} has an empty name: write one between two commas, and none after the last name")
        columns: dict[str, type] = {}
        counts.append(_rows(args, flag, name, columns))
        _require_same(flag, name, columns, first)
    return counts


def _require_same(flag: str, name: str, columns: dict[str, type], first: dict[str, tuple[str, type]]) -> None:
    """ConfigError where a key of ``columns`` has another type than in the file or set that had it ``first``, which is kept there."""
    for key, kind in columns.items():
        other, theirs = first.setdefault(key, (name, kind))
        if theirs is not kind:
            raise ConfigError(
                f"--{flag}: {key!r} is {theirs.__name__} in {other} and {kind.__name__} in {name}, which cannot be put together: "
                "use strings in both, or leave the key out of one"
            )


def _rows(args, flag: str, name: str, columns: dict[str, type]) -> int | None:
    """Rows of a local file; None for what is not one. columns: see ``count_rows``."""
    path = name.split("@")[0].strip()
    extension = os.path.splitext(path)[1]
    if os.path.isdir(path) and not _has_files(path):
        raise ConfigError(f"--{flag} {path} is a directory without a data file: give a file ({', '.join(FORMATS)}), or a directory with some")
    group = flag.partition(".")[0]
    split_flag, split = ("data.prompt_split", args.data.prompt_split) if group == "data" else ("eval.split", args.eval.split)
    if os.path.isdir(path):
        _check_own_pattern(flag, path)
        files = directory_files(flag, path, name.partition("@")[2].strip() or None, split, split_flag)
        if files is None:
            return None
        for file in files.others:
            check_read(f"--{flag} {path}, {os.path.relpath(file, path)}", file)
        return _count(args, flag, path, [(os.path.relpath(file, path), file) for file in files.used], columns)
    if "://" in path:
        return None
    if extension not in FORMATS:
        if os.path.isfile(path) and extension != ".py":
            raise ConfigError(f"--{flag} {path}: files ending in {extension or 'nothing'} are not read; use one of {', '.join(FORMATS)}")
        if glob.has_magic(path):
            raise ConfigError(f"--{flag} {path}: a pattern must end in one of {', '.join(FORMATS)}")
        if looks_local(path) or (extension and "/" not in path):  # the hub has no set of such a name without an owner
            raise ConfigError(f"--{flag} {path} does not exist: give a file ({', '.join(FORMATS)}), a directory, or a name on the hub")
        return None
    files = files_of(flag, path)
    if split not in ("train", "", None):
        raise ConfigError(f"--{split_flag} {split}: a local file such as {path} is all of split train: use train")
    return _count(args, flag, path, [("" if file == path else os.path.relpath(file), file) for file in files], columns)


def _count(args, flag: str, path: str, files: list[tuple[str, str]], columns: dict[str, type]) -> int | None:
    """Rows of a set's files, each with its name in messages ("" for the set's own); None where some are not counted. ConfigError also for labels
    that are text after a file of others: the loader gives all files the first one's types. columns: see ``count_rows``."""
    counts, first, key = [], {}, args.data.label_key
    for shown, file in files:
        here: dict[str, type] = {}
        counts.append(count_rows(f"--{flag} {path}{shown and f', {shown}'}", file, args.data, here))
        if key in here and (not first or here[key] is str):
            _require_same(flag, shown or path, {key: here[key]}, first)
        columns |= here | columns
    if not any(count is None for count in counts) and not sum(counts):
        raise ConfigError(f"--{flag} {path} has no rows: give a file with prompts")
    return None if None in counts else sum(counts)


def files_of(flag: str, path: str) -> list[str]:
    """The local files that the data sets' loader reads for a name that ends like one; ConfigError if there is none."""
    if not glob.has_magic(os.path.abspath(path)):  # the loader's patterns are absolute
        require_file(flag, path, f"a file ({', '.join(FORMATS)}), a directory, or a name on the hub")
        return [path]
    from datasets.data_files import resolve_pattern  # takes a second

    try:
        files = sorted(resolve_pattern(path, os.getcwd()))
    except FileNotFoundError:
        files = []
    except ValueError as error:
        raise ConfigError(f"--{flag} {path}: {error}") from None
    if os.path.isfile(path) and os.path.abspath(path) not in files:
        where = path if glob.has_magic(path) else os.path.abspath(path)
        raise ConfigError(f"--{flag} {path}: the loader takes it for a pattern, which the file's own name does not match: write {glob.escape(where)}")
    if not files:
        raise ConfigError(f"--{flag} {path}: no file matches this pattern (looked in {os.getcwd()})")
    return files


def _check_own_pattern(flag: str, directory: str) -> None:
    """ConfigError for a directory in whose name the loader sees a pattern that matches more than it, or not even that."""
    whole = os.path.abspath(directory)
    saved = any(os.path.isfile(os.path.join(directory, name)) for name in ("state.json", "dataset_dict.json"))  # read without patterns
    if not saved and glob.has_magic(whole) and glob.glob(whole) != [whole]:
        raise ConfigError(
            f"--{flag} {directory}: the loader takes it for a pattern, which does not stand for this directory alone: rename it, or give "
            f"its files, as in {os.path.join(glob.escape(whole), '*.jsonl')}"
        )


def _has_files(directory: str) -> bool:
    """Whether the data sets' loader would find anything at all there, however deep; it passes over hidden files and the README."""
    for place, inner, names in os.walk(directory):
        if any(not name.startswith((".", "__")) and name != "README.md" for name in names):
            return True
        if any(os.path.islink(os.path.join(place, name)) for name in inner):
            return True
    return False
