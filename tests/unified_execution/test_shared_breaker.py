"""One breaker in many processes: stores that play them here, and real ones in ``crash``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.breaker import CircuitBreaker
from maestro_hive.engine.errors import CircuitBreakerOpen
from maestro_hive.kernel.errors import CorruptionError
from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.records import Breaker
from maestro_hive.maestro.state.shared_records import BREAKERS
from tests.contract.stores import EVERY_STORE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.maestro.state.store import Store
    from tests.contract.stores import Stores


@pytest.fixture(params=EVERY_STORE, ids=lambda kind: kind.__name__.removesuffix("Stores").lower())
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    made: Stores = request.param(tmp_path)
    yield made
    made.close()


def refused(breaker: CircuitBreaker) -> CircuitBreakerOpen:
    with pytest.raises(CircuitBreakerOpen) as raised:
        breaker.acquire()
    return raised.value


def opened(breaker: CircuitBreaker) -> CircuitBreaker:
    for _ in range(breaker.threshold):
        breaker.record_failure()
    assert breaker.state == "open"
    return breaker


def pair(stores: Stores, *args: Any, **options: Any) -> tuple[CircuitBreaker, CircuitBreaker]:
    """Two processes' breakers of one name."""
    one, two = (CircuitBreaker(*args, store=stores.open(), **options) for _ in range(2))
    return one, two


def test_what_one_process_opens_is_open_for_all(stores: Stores) -> None:
    one, two = pair(stores, 2, 60, name="anthropic")
    one.record_failure()
    two.record_failure()
    assert one.state == two.state == "open"
    assert two.is_open()
    elsewhere = CircuitBreaker(2, 60, name="openai", store=stores.open())
    assert not elsewhere.is_open()


def test_an_open_breaker_survives_its_process(stores: Stores) -> None:
    store = stores.open()
    opened(CircuitBreaker(1, 60, store=store))
    keeper = stores.open()
    store.close()
    stores.clock.advance(20)
    assert refused(CircuitBreaker(1, 60, store=keeper)).cooldown_seconds == 40


def test_who_opened_it_says_for_how_long(stores: Stores) -> None:
    one, two = (CircuitBreaker(1, wait, store=stores.open()) for wait in (60, 600))
    opened(one)
    assert refused(two).cooldown_seconds == 60


def test_one_probe_in_all_processes_together(stores: Stores) -> None:
    one, two = pair(stores, 1, 60)
    opened(one)
    stores.clock.advance(60)
    probe = one.acquire()
    error = refused(two)
    assert "being probed by process" in str(error)
    assert error.context["probe_in_flight"]
    probe.succeeded()
    assert not two.acquire().probe


def test_one_probe_for_two_breakers_of_one_name_in_one_process(stores: Stores) -> None:
    store = stores.open()
    one, two = (CircuitBreaker(1, 60, store=store) for _ in range(2))
    opened(one)
    stores.clock.advance(60)
    probe = one.acquire()
    stores.clock.advance(10_000)  # longer than any lease: its process lives, and so does the probe
    refused(two)
    probe.release()
    assert two.acquire().probe


def test_a_dead_process_leaves_the_probe_to_another(stores: Stores, tmp_path: Path) -> None:
    dying, heir = stores.open(), stores.open()
    opened(CircuitBreaker(1, 60, store=dying))
    stores.clock.advance(60)
    probe = CircuitBreaker(1, 60, store=dying).acquire()
    assert CircuitBreaker(1, 60, store=heir).is_open()
    getattr(dying, "abandon", dying.close)()
    again = CircuitBreaker(1, 60, store=heir).acquire()
    assert again.probe
    again.succeeded()
    del probe


@pytest.mark.parametrize("moment", ["lease taken", "probe begun", "success told", "failure told"])
def test_wherever_a_probing_process_dies_one_more_probe_is_made(
    stores: Stores, moment: str
) -> None:
    store = stores.open()
    dying, heir = CircuitBreaker(1, 60, store=store), CircuitBreaker(1, 60, store=stores.open())
    opened(dying)
    stores.clock.advance(60)
    if moment == "lease taken":
        dying._record.acquire_probe()
    else:
        probe = dying.acquire()
        dying._record.release_probe = lambda probe: None  # type: ignore[method-assign] # too late
        if moment != "probe begun":
            (probe.succeeded if moment == "success told" else probe.failed)()
    getattr(store, "abandon", store.close)()
    if moment == "success told":
        assert not heir.acquire().probe
        return
    if moment == "failure told":
        assert refused(heir).cooldown_seconds == 60
        stores.clock.advance(60)
    again = heir.acquire()
    assert again.probe
    refused(heir)
    again.succeeded()
    assert heir.state == "closed"


def test_a_probe_that_was_replaced_has_nothing_more_to_say(stores: Stores) -> None:
    hanging, other = pair(stores, 1, 60)
    opened(hanging)
    stores.clock.advance(60)
    late = hanging.acquire()
    stores.clock.advance(4000)  # past its lease, not renewed
    current = other.acquire()
    assert current.probe
    late.succeeded()
    assert other.state == "half_open"
    refused(hanging)  # and the current one still has its lease
    current.failed()
    assert hanging.state == "open"


def test_who_hung_between_lease_and_record_makes_no_second_probe(stores: Stores) -> None:
    hanging, other = pair(stores, 1, 60)
    opened(hanging)
    stores.clock.advance(60)
    ticket = hanging._record.acquire_probe()
    stores.clock.advance(4000)
    current = other.acquire()
    assert current.probe
    moment = hanging._moment()
    after = hanging._record.change(
        lambda record: hanging.rules.probe_started(record, ticket.fence, moment)
    )
    assert after.probe > ticket.fence


def test_no_failure_is_lost_between_threads_and_processes(stores: Stores) -> None:
    breakers = [CircuitBreaker(10_000, store=stores.open()) for _ in range(2)] * 2

    def fail(breaker: CircuitBreaker) -> None:
        for _ in range(15):
            breaker.acquire().failed()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fail, breakers))
    assert breakers[0].consecutive_failures == 60


def version(store: Store) -> int:
    document = store.document("circuit_breakers", "default")
    return document.version if document else 0


def test_a_success_that_changes_nothing_writes_nothing(stores: Stores) -> None:
    store = stores.open()
    breaker = CircuitBreaker(store=store)
    breaker.acquire().succeeded(0.1)
    breaker.record_success()
    assert version(store) == 0
    assert breaker.last_success_time == stores.clock.now()
    breaker.record_failure()
    breaker.record_success()
    assert version(store) == 2
    breaker.record_success()
    assert version(store) == 2


def test_a_full_window_of_good_calls_is_not_written_again(stores: Stores) -> None:
    store = stores.open()
    breaker = CircuitBreaker(store=store, failure_rate=0.5, window=3)
    for _ in range(10):
        breaker.record_success()
    assert version(store) == 3


def test_a_refusal_writes_nothing(stores: Stores) -> None:
    store = stores.open()
    breaker = opened(CircuitBreaker(1, 60, store=store))
    before = version(store)
    for _ in range(3):
        refused(breaker)
    assert version(store) == before


def test_a_document_of_an_older_version_is_read(stores: Stores) -> None:
    store = stores.open()
    now = stores.clock.now()
    fields = asdict(Breaker(name="default", state="open", consecutive_failures=5, opened_at=now))
    old = {name: fields[name] for name in ("name", "state", "consecutive_failures", "opened_at")}
    store.update_document("circuit_breakers", "default", lambda _: encode(old))
    stores.clock.advance(100)
    breaker = CircuitBreaker(store=store)
    assert refused(breaker).cooldown_seconds == 200
    stores.clock.advance(200)
    breaker.acquire().succeeded()
    assert breaker.state == "closed"


def test_a_document_that_is_no_breaker_is_named(stores: Stores) -> None:
    store = stores.open()
    BREAKERS.update(store, "default", lambda _: Breaker(name="default", state="ajar"))
    with pytest.raises(CorruptionError, match=r"circuit_breakers/default.*'ajar'"):
        CircuitBreaker(store=store).acquire()


def test_its_clock_is_the_stores(stores: Stores) -> None:
    breaker = opened(CircuitBreaker(1, 60, store=stores.open()))
    assert breaker.last_failure_time == stores.clock.now()
    assert stores.clock.now() - breaker.last_failure_time < timedelta(seconds=1)
