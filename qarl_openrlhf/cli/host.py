"""OpenRLHF's own command line, without a copy of it.

``openrlhf.cli.train_ppo_ray`` builds its parser and checks its arguments under ``if __name__ == "__main__"``. Its source is
read as it is installed and split at the two statements that matter: ``args = parser.parse_args()`` and ``train(args)``.
What lies before the first builds the parser, what lies between checks and completes the arguments. So every OpenRLHF
flag, default and check is OpenRLHF's, and a version with another structure is refused with a clear message.
Nothing of OpenRLHF, Ray or vLLM is imported for that.
"""

import argparse
import ast
import importlib.util
from types import SimpleNamespace

from qarl_openrlhf.patches.versions import PatchError, require_version

MODULE = "openrlhf.cli.train_ppo_ray"


class HostCommandLine:
    """OpenRLHF's parser (``.parser``) and its argument checks (``.resolve``)."""

    def __init__(self):
        require_version("openrlhf")
        source = _source()
        before, after = _split(ast.parse(source))
        self._after = compile(ast.Module(after, []), MODULE, "exec")
        self._namespace = {"argparse": argparse, "os": __import__("os"), "datetime": __import__("datetime").datetime}
        exec(compile(ast.Module(before, []), MODULE, "exec"), self._namespace)
        self.parser: argparse.ArgumentParser = self._namespace["parser"]
        self.parser.prog = "train_qarl"
        # An abbreviation passes for a flag here and is missed by presets and ablations, which look for whole names.
        self.parser.allow_abbrev = False

    def resolve(self, args: argparse.Namespace) -> SimpleNamespace:
        """Parsed flat arguments -> OpenRLHF's nested ones, completed and checked by OpenRLHF itself.

        Its ``assert`` statements become ``SystemExit`` with the message, as for any wrong flag.
        """
        namespace = self._namespace | {"args": args}
        try:
            exec(self._after, namespace)
        except AssertionError as error:
            self.parser.error(f"OpenRLHF refuses these flags: {error}")
        return namespace["args"]


def _source() -> str:
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise PatchError(f"{MODULE} not found: is openrlhf 0.11.2 installed?")
    with open(spec.origin, encoding="utf-8") as file:
        return file.read()


def _split(tree: ast.Module) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Body of the main guard -> (statements that build the parser, statements that check the arguments)."""
    guards = [node for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
    texts = [ast.unparse(node) for node in guards[0].body] if len(guards) == 1 else []
    if "args = parser.parse_args()" not in texts or texts[-1] != "train(args)":
        raise PatchError(f"{MODULE} is not built as in OpenRLHF 0.11.2; install openrlhf==0.11.2")
    cut = texts.index("args = parser.parse_args()")
    return guards[0].body[:cut], guards[0].body[cut + 1 : -1]
