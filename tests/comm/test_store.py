"""The ranks' store, asked with a limit."""

from __future__ import annotations

import threading

import pytest

from onefold.comm.store import within


def waiting() -> int:
    return sum(thread.name == "onefold-store" for thread in threading.enumerate())


def test_a_store_that_does_not_answer_costs_one_thread_until_it_does() -> None:
    store, answers, others = object(), threading.Event(), waiting()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="rank 0, which keeps the ranks' store, does not"):
            within(0.05, answers.wait, store)
    assert waiting() == others + 1
    assert within(60.0, lambda: "another one answers", object()) == "another one answers"
    answers.set()
    while waiting() > others:
        threading.Event().wait(0.01)
    assert within(60.0, lambda: "again", store) == "again"


def test_an_error_of_the_store_is_the_callers() -> None:
    def ask() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        within(60.0, ask, object())
