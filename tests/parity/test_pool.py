"""Work in processes: every answer to its item, whatever dies."""

from pool_work import work

from fp4ep.parity.pool import Failure, run_each


def test_nothing_to_do():
    assert list(run_each(work, [], 2, 60.0)) == []


def test_a_failure_costs_its_own_item_only():
    items = ["a", "raises", "b", "c", "dies", "d", "e", "hangs", "f", "g"]
    assert dict(run_each(work, items, 2, 15.0)) == {
        0: "A",
        1: Failure("ValueError: no such thing"),
        2: "B",
        3: "C",
        4: Failure("the process ended with status -9"),
        5: "D",
        6: "E",
        7: Failure("no answer in 15 s"),
        8: "F",
        9: "G",
    }


def test_more_workers_than_items():
    assert dict(run_each(work, ["a", "b"], 9, 60.0)) == {0: "A", 1: "B"}
