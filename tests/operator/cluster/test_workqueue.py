"""The queue of what to look at: each key once, no key twice at a time."""

from eyrie_operator.cluster.workqueue import FIRST_DELAY_S, LONGEST_DELAY_S, Workqueue


class StepContext:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_ten_events_for_one_key_are_one_look() -> None:
    queue: Workqueue[str] = Workqueue(StepContext())
    for _ in range(10):
        queue.add("a")
    queue.add("b")
    assert [queue.take(), queue.take()] == ["a", "b"]
    assert len(queue) == 2


def test_a_key_that_changes_while_it_is_looked_at_is_looked_at_again_afterwards() -> None:
    queue: Workqueue[str] = Workqueue(StepContext())
    queue.add("a")
    assert queue.take() == "a"
    queue.add("a")
    queue.add("b")
    assert queue.take() == "b"
    queue.done("a")
    assert queue.take() == "a"


def test_failures_come_back_after_delays_that_double_up_to_a_bound() -> None:
    queue: Workqueue[str] = Workqueue(StepContext())
    delays = [queue.failed("a") for _ in range(20)]
    assert delays[:3] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert delays[-1] == LONGEST_DELAY_S
    queue.forget("a")
    assert queue.failed("a") == FIRST_DELAY_S


def test_what_is_due_later_comes_when_its_time_has_come_and_the_earlier_time_wins() -> None:
    clock = StepContext()
    queue: Workqueue[str] = Workqueue(clock)
    queue.add_after("late", 10.0)
    queue.add_after("late", 5.0)
    queue.add_after("late", 20.0)
    clock.now = 5.0
    assert queue.take() == "late"
    queue.done("late")
    clock.now = 30.0
    queue.add("other")
    assert queue.take() == "other"
    assert len(queue) == 1, "looked at once, not once per time it was asked for"


def test_a_closed_queue_lets_its_workers_go() -> None:
    queue: Workqueue[str] = Workqueue(StepContext())
    queue.close()
    assert queue.take() is None
