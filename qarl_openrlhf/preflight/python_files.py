"""Reward and agent files: there, compile, import what exists, define what OpenRLHF calls, and load. Those that load are not called."""

import ast
import importlib.util
import os
from collections.abc import Iterator

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.paths import looks_local, require_file
from qarl_openrlhf.preflight.loading import check_loads
from qarl_openrlhf.rewards import math_options


def check_reward(args) -> None:
    """ConfigError unless ``--reward.remote_url`` names URLs or a file whose ``reward_func`` takes queries, prompts and labels."""
    if args.train.agent_func_path:
        return
    entries = args.reward.remote_url or []
    for entry in entries:
        if entry.startswith(("http://", "https://")):
            continue
        if not entry.endswith(".py"):
            raise ConfigError(f"--reward.remote_url {entry}: give a Python file with reward_func, or a URL that begins with http://")
        if len(entries) > 1:
            raise ConfigError(f"--reward.remote_url {entry}: a Python file stands alone, only URLs may be several")
        _check_file("reward.remote_url", entry, "reward_func", "def reward_func(queries, prompts, labels, **kwargs)", positional=3)
        if os.path.samefile(entry, os.path.join(os.path.dirname(math_options.__file__), "math.py")):
            try:
                math_options.MathOptions.from_environment()
            except ValueError as error:
                raise ConfigError(str(error)) from None
    name = args.reward.model_name_or_path
    if not entries and name and looks_local(name):
        if not os.path.isdir(name):
            raise ConfigError(f"--reward.model_name_or_path {name} does not exist: give a directory, or a name on the hub")


def check_agent(args) -> None:
    """ConfigError unless ``--train.agent_func_path`` is a file with a class ``AgentExecutor``."""
    if path := args.train.agent_func_path:
        if not path.endswith(".py"):
            raise ConfigError(f"--train.agent_func_path {path}: give a Python file with a class AgentExecutor")
        _check_file("train.agent_func_path", path, "AgentExecutor", "class AgentExecutor(AgentExecutorBase)")


def _check_file(flag: str, path: str, name: str, signature: str, positional: int = 0) -> None:
    require_file(flag, path, f"a Python file with {signature}")
    with open(path, "rb") as file:
        source = file.read()
    try:
        tree = ast.parse(source, path)
        compile(source, path, "exec")  # finds what the parser alone does not, such as a return outside a function
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if getattr(error, "lineno", None) else ""
        raise ConfigError(f"--{flag} {path}{line} does not compile: {type(error).__name__}: {error}") from None
    _check_imports(flag, path, tree)
    found = [value for bound, value in _bindings(tree.body) if bound in (name, "*")]
    if not found:
        raise ConfigError(f"--{flag} {path} defines no {name}: it needs `{signature}`")
    last = found[-1]
    if isinstance(last, ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.Set):
        raise ConfigError(f"--{flag} {path}: {name} is {ast.unparse(last)[:40]}, which cannot be called: it needs `{signature}`")
    if positional and isinstance(last, ast.FunctionDef | ast.AsyncFunctionDef):
        takes = last.args
        given, needed = len(takes.posonlyargs + takes.args), len(takes.posonlyargs + takes.args) - len(takes.defaults)
        if (given < positional and not takes.vararg) or needed > positional:
            raise ConfigError(f"--{flag} {path}: {name}({ast.unparse(takes)}) is called with {positional} arguments: write `{signature}`")
    check_loads(flag, path, name)


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """(name, what it is bound to) at the level of the module, ``if``, ``try`` and ``with`` blocks included."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for leaf in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(leaf, ast.Name):
                        yield leaf.id, node if isinstance(target, ast.Tuple) else node.value
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, node
        else:
            for block in ("body", "orelse", "handlers", "finalbody"):
                for child in getattr(node, block, []):
                    yield from _bindings(child.body if isinstance(child, ast.ExceptHandler) else [child])


def _check_imports(flag: str, path: str, tree: ast.Module) -> None:
    """Modules that the file imports at its top level exist; imports inside ``try`` or ``if`` have another way out."""
    for node in tree.body:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            if node.level:
                raise ConfigError(f"--{flag} {path}, line {node.lineno}: a relative import cannot work, the file is loaded alone")
            names = [node.module]
        for module in (name.partition(".")[0] for name in names):
            try:
                missing = importlib.util.find_spec(module) is None
            except ValueError:  # a module without a spec, __main__ for one
                missing = False
            if missing:
                raise ConfigError(f"--{flag} {path}, line {node.lineno} imports {module}, which is not installed: install it")
