"""One process looks and writes, all get its answer or its error. With two real processes: test_parallel."""

from __future__ import annotations

import jax
import pytest

from training import hosts


@pytest.fixture
def both(monkeypatch):
    """Run a function as process 0 and then as process 1, which gets what process 0 has sent."""

    def run(function):
        sent, found = [], []
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        for process in (0, 1):
            monkeypatch.setattr(jax, "process_index", lambda process=process: process)
            sender = iter(sent[:])

            def broadcast(array, process=process, sender=sender):
                if process == 0:
                    sent.append(array)
                    return array
                received = next(sender)
                assert array.shape == received.shape  # what a broadcast demands
                return received

            monkeypatch.setattr(hosts.multihost_utils, "broadcast_one_to_all", broadcast)
            try:
                found.append(hosts.on_first(function))
            except Exception as error:
                found.append((type(error), str(error)))
        return found

    return run


def test_the_first_process_answers_for_all(both):
    calls = []

    def look():
        calls.append(1)
        return {"shard": [[1, 2], []], "name": "Größe"}

    first, second = both(look)
    assert first == second == {"shard": [[1, 2], []], "name": "Größe"}
    assert calls == [1]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("wrong"), ValueError),
        (FileNotFoundError("gone"), OSError),
        (OSError("full"), OSError),
        (ModuleNotFoundError("no such package"), ImportError),
        (FloatingPointError("nan"), FloatingPointError),
        (NotImplementedError("not yet"), RuntimeError),
    ],
)
def test_its_error_is_everyone_s(both, error, kind):
    def fail():
        raise error

    assert both(fail) == [(kind, str(error))] * 2


def test_an_error_of_any_other_kind_leaves_nobody_waiting(both):
    assert both(lambda: {}["key"]) == [(RuntimeError, "KeyError: 'key'")] * 2
    message = "TypeError: Object of type set is not JSON serializable"
    assert both(lambda: {1}) == [(RuntimeError, message)] * 2
