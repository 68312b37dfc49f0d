"""Which kernels the learner ran on its GPU: how often in the last rollout, and why these."""

from qarl_openrlhf.kernels import dispatch


class KernelReport:
    """``kernels/<name>_calls`` since the last call; on a CPU nothing. ``kernel``: the value of --quant.kernel."""

    def __init__(self, kernel: str):
        self.kernel = kernel
        self.before: dict[str, int] = {}
        self.told = False

    def metrics(self) -> dict:
        """Counts and, the first time under ``auto``, ``kernels/choices``: a table of shapes, kernels and reasons."""
        calls = dispatch.kernel_calls()
        counts = {f"kernels/{name}_calls": float(n - self.before.get(name, 0)) for name, n in calls.items()}
        self.before = calls
        choices = dispatch.kernel_choices()
        if self.kernel == "auto" and choices and not self.told:
            self.told = True
            counts["kernels/choices"] = choices
        return counts
