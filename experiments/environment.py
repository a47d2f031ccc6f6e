"""What a figure was made with: hardware, versions, commit and command."""

from __future__ import annotations

import functools
import gc
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax

MAPS = Path("/proc/self/maps")  # Linux only
LIMIT = Path("/proc/sys/vm/max_map_count")
MANY = 30_000


@functools.cache
def _current() -> dict[str, str]:
    versions = [f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib", "numpy")]
    device = jax.devices()[0]
    devices = f"{jax.device_count()} x {device.device_kind} ({device.platform})"
    return {
        "hardware": f"{_processor()}, {_cores()} cores; {devices}",
        "versions": ", ".join([f"python {platform.python_version()}", *versions]),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "commit": _commit(),
        "command": shlex.join(["python", "-m", "experiments", *sys.argv[1:]]),
    }


def current() -> dict[str, str]:
    """The environment of this process, as it was at the first call: what is committed while a long
    experiment runs is not the code that it runs. The command line therefore calls this first."""
    return dict(_current())


def machine() -> dict[str, str]:
    """What a timing depends on, besides the code: processor, cores, devices and JAX."""
    return {"hardware": _current()["hardware"], "jax": metadata.version("jax")}


def listing(values: dict[str, str]) -> str:
    """As a Markdown list.

    >>> listing({"commit": "abc", "system": "Linux"})
    '* commit: abc\\n* system: Linux'
    """
    return "\n".join(f"* {name}: {value}" for name, value in values.items())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (" with local changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "not in a git repository"


def make_room(most: int = MANY) -> None:
    """Forget compiled programs if they fill the process's memory mappings: a tiny generation leaves some 700
    behind, Linux grants a process 65,530, and XLA's compiler crashes at the last one."""
    if _mappings() > most:
        jax.clear_caches()
        gc.collect()


def check_room(share: float = 0.9) -> None:
    """Refuse to compile on where the programs that are needed together fill the mappings that there are.

    Raises:
        OSError: more than ``share`` of them are taken.
    """
    if LIMIT.exists() and (taken := _mappings()) > share * (limit := int(LIMIT.read_text())):
        raise OSError(
            f"compiled programs take {taken} of the {limit} memory mappings that Linux grants a process; "
            "expected fewer rows in a table, or sysctl -w vm.max_map_count=1048576"
        )


def _mappings() -> int:
    return MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0
