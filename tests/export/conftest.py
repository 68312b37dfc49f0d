"""The same for tests of exports: bits do not depend on how many tests share the machine."""

from tests.quant.conftest import one_thread  # noqa: F401
