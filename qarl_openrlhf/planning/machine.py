"""What this machine has, asked without PyTorch."""

import os


def machine_bytes() -> int:
    """Memory of this machine, or of the container this process is in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return total
