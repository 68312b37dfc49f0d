"""What is said of a disk without room."""

import errno

import pytest

from qarl_openrlhf.planning.disk import size, why_not_written


SIZES = {23.5 * 2**20: "23.5 MiB", 1023 * 2**20: "1023.0 MiB", 2**30: "1.00 GiB", 5.25 * 2**30: "5.25 GiB", 0: "0.0 MiB"}


@pytest.mark.parametrize("number", SIZES)
def test_sizes_below_a_gib_are_in_mib(number):
    assert size(number) == SIZES[number]


def test_a_full_disk_has_the_flag_and_anything_else_its_own_words(tmp_path):
    full = why_not_written(OSError(errno.ENOSPC, "No space left on device"), tmp_path, "ckpt.path")
    assert full.startswith("the disk is full (") and full.endswith("are free on its disk); free some or name another disk with --ckpt.path")
    assert why_not_written(RuntimeError("torn"), tmp_path / "none", "ckpt.path") == "RuntimeError: torn (no such directory)"
