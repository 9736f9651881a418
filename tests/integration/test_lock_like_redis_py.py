"""`client.lock(name, lock_class=Lock)` does what redis-py's own lock does: every check runs with both."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis.exceptions import LockError, LockNotOwnedError
from redis.lock import Lock as RedisPyLock

from celery_redislock import Lock
from tests.lab.servers import wait_until

NAME = "stock"
HOST, KNOWN = "host", b"known"


@pytest.fixture(params=[RedisPyLock, Lock], ids=["redis-py", "ours"])
def kind(request):
    return request.param


@pytest.fixture
def make(locks, kind):
    """Makes locks on one name, of one kind unless told otherwise."""
    client = locks.client

    def make(kind=kind, **options):
        return client.lock(NAME, lock_class=kind, **options)

    return make


@pytest.fixture
def client(locks):
    return locks.client


def test_it_is_the_class_that_was_asked_for(make, kind):
    assert type(make()) is kind


def test_it_locks_exactly_the_name(make, client):
    lock = make()
    assert lock.acquire(blocking=False)
    assert client.keys() == [NAME.encode()]
    assert client.get(NAME) == lock.local.token
    assert client.ttl(NAME) == -1
    lock.release()
    assert client.keys() == []


def test_a_timeout_ends_it(make, client):
    lock = make(timeout=10)
    assert lock.acquire(blocking=False)
    assert 5000 < client.pttl(NAME) <= 10000


@pytest.mark.parametrize("timeout", [10.05, 10])
def test_a_timeout_may_be_a_float(make, client, timeout):
    make(timeout=timeout).acquire()
    assert 0 < client.pttl(NAME) <= timeout * 1000


def test_the_same_object_is_refused_too(make):
    lock = make(timeout=10)
    assert lock.acquire()
    assert not lock.acquire(blocking=False)


@pytest.mark.parametrize("holder", [RedisPyLock, Lock], ids=["of redis-py", "of ours"])
def test_both_kinds_exclude_each_other(make, holder):
    first, second = make(kind=holder), make()
    assert first.acquire()
    assert not second.acquire(blocking=False)
    assert not second.owned()
    first.release()
    assert second.acquire(blocking=False)
    second.release()


@pytest.mark.parametrize("holder", [RedisPyLock, Lock], ids=["of redis-py", "of ours"])
def test_a_waiter_gets_it_after_the_release_of_either_kind(make, holder):
    first, second = make(kind=holder), make(sleep=0.01, blocking_timeout=10)
    first.acquire()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(second.acquire)
        time.sleep(0.1)
        assert not waiting.done()
        first.release()
        assert waiting.result(15)


@pytest.mark.parametrize("given_at", ["construction", "acquire"])
def test_a_blocking_timeout_ends_the_wait(make, given_at):
    make().acquire()
    lock = make(sleep=0.01, blocking_timeout=0.1 if given_at == "construction" else None)
    assert not lock.acquire(blocking_timeout=None if given_at == "construction" else 0.1)


def test_a_lock_made_not_to_block_does_not(make):
    make().acquire()
    assert not make(blocking=False).acquire()
    assert make(blocking=False).acquire(blocking=True, blocking_timeout=0.05) is False


def test_a_pause_between_checks_that_is_no_number_is_an_error_of_its_caller(make):
    make().acquire()
    with pytest.raises((TypeError, ValueError)):
        make(sleep="a moment").acquire(blocking_timeout=1)


def test_a_block_releases_also_after_an_error(make, client):
    with make():
        assert client.exists(NAME)
    assert not client.exists(NAME)
    with pytest.raises(ZeroDivisionError), make():
        1 / 0  # noqa: B018
    assert not client.exists(NAME)


def test_a_block_that_cannot_have_it_raises_lock_error(make):
    make(timeout=10).acquire()
    with pytest.raises(LockError) as caught, make(blocking_timeout=0.05, sleep=0.01):
        pass
    assert not isinstance(caught.value, LockNotOwnedError)
    assert caught.value.lock_name == NAME


def test_locked_and_owned(make, client):
    lock, other = make(timeout=10), make(timeout=10)
    assert (lock.locked(), lock.owned()) == (False, False)
    lock.acquire()
    assert (lock.locked(), lock.owned()) == (True, True)
    assert (other.locked(), other.owned()) == (True, False)
    client.delete(NAME)
    assert (lock.locked(), lock.owned()) == (False, False)


@pytest.mark.parametrize("verb", ["release", "reacquire", "extend"])
def test_what_is_not_held_is_a_lock_error_but_not_a_lost_lock(make, verb):
    lock = make(timeout=10)
    with pytest.raises(LockError) as caught:
        getattr(lock, verb)(*[10] if verb == "extend" else [])
    assert not isinstance(caught.value, LockNotOwnedError)
    assert caught.value.lock_name == NAME


def test_a_second_release_is_a_lock_error(make):
    lock = make()
    lock.acquire()
    lock.release()
    with pytest.raises(LockError, match="not owned or is already unlocked"):
        lock.release()


@pytest.mark.parametrize("thief", [None, "thief"])
@pytest.mark.parametrize("verb", ["release", "reacquire", "extend"])
def test_what_was_lost_is_not_owned_and_the_thief_keeps_it(make, client, verb, thief):
    lock = make(timeout=10)
    lock.acquire()
    client.set(NAME, thief) if thief else client.delete(NAME)
    with pytest.raises(LockNotOwnedError):
        getattr(lock, verb)(*[10] if verb == "extend" else [])
    assert client.get(NAME) == (thief and thief.encode())


@pytest.mark.parametrize("verb", ["reacquire", "extend"])
def test_without_a_timeout_there_is_nothing_to_extend(make, verb):
    lock = make()
    lock.acquire()
    with pytest.raises(LockError, match=f"Cannot {verb} a lock with no timeout"):
        getattr(lock, verb)(*[10] if verb == "extend" else [])


@pytest.mark.parametrize(
    ("arguments", "least", "most"),
    [((100,), 180, 200), ((100, False), 180, 200), ((50, True), 30, 50), ((25.5,), 105, 125.5)],
)
def test_extend_adds_to_the_time_that_is_left_or_replaces_it(make, client, arguments, least, most):
    lock = make(timeout=100)
    lock.acquire()
    assert lock.extend(*arguments) is True
    assert least < client.pttl(NAME) / 1000 <= most


def test_reacquire_gives_the_whole_timeout_again(make, client):
    lock = make(timeout=60)
    lock.acquire()
    client.pexpire(NAME, 30_000)
    assert lock.reacquire() is True
    assert 30_000 < client.pttl(NAME) <= 60_000


@pytest.mark.parametrize("token", ["known", b"known", b"\xff\xfe", "two words", "a b 1 c d", "^sent", 5])
def test_a_given_token_is_stored_as_it_is(make, client, token):
    lock = make(timeout=10)
    assert lock.acquire(token=token)
    expected = token if isinstance(token, bytes) else str(token).encode()
    assert client.get(NAME) == lock.local.token == expected
    assert lock.owned()
    assert lock.extend(5)
    assert client.get(NAME) == expected
    lock.release()
    assert not client.exists(NAME)


def test_an_equal_token_of_another_does_not_own_the_lock(make, client):
    """Tokens that are no secret, such as host names, still exclude each other."""
    make(timeout=10).acquire(token=HOST)
    other = make()
    assert not other.acquire(token=HOST, blocking=False)
    assert not other.acquire(token=HOST, blocking_timeout=0.05, sleep=0.01)
    assert client.exists(NAME)


@pytest.mark.parametrize("other", [f"{HOST} 2", f"{HOST}2", f"{HOST} 1 h t", f"&{HOST}", f"&{HOST} 2"])
@pytest.mark.parametrize("state", ["", ">"])
def test_a_given_token_with_which_another_begins_does_not_own_its_lock(make, client, state, other):
    lock = make(timeout=10)
    lock.acquire(token=state + HOST)
    client.set(NAME, state + other)  # it has expired, and another took the key
    assert not lock.owned()
    with pytest.raises(LockError):
        lock.extend(5)
    with pytest.raises(LockError):
        lock.release()
    assert client.get(NAME) == (state + other).encode()


def test_who_knows_the_token_releases_by_it(make, client):
    """Taken in one process, released in another, as with redis-py: by the token in `local`."""
    make(timeout=10).acquire(token=KNOWN)
    other = make(timeout=10)
    other.local.token = KNOWN
    assert other.owned()
    assert other.reacquire()
    other.release()
    assert not client.exists(NAME)


def test_another_thread_does_not_hold_what_is_thread_local(make):
    lock = make(timeout=10)
    lock.acquire()
    with ThreadPoolExecutor() as pool, pytest.raises((LockError, AttributeError)):  # redis-py has no token there at all
        pool.submit(lock.release).result()
    assert lock.owned()


def test_another_thread_releases_what_is_not_thread_local(make, client):
    lock = make(timeout=10, thread_local=False)
    lock.acquire()
    with ThreadPoolExecutor() as pool:
        pool.submit(lock.release).result()
    assert not client.exists(NAME)


def test_an_old_owners_thread_does_not_release_the_new_owners_lock(make, client):
    """redis-py's own account of why the token is thread-local."""
    lock = make(timeout=10)
    lock.acquire()
    client.delete(NAME)  # as an expiry does
    released = threading.Event()

    def take():
        assert lock.acquire(blocking=False)
        released.wait()
        return lock.owned()

    with ThreadPoolExecutor() as pool:
        other = pool.submit(take)
        wait_until(lambda: client.exists(NAME), "the other thread has it")
        with pytest.raises(LockNotOwnedError):
            lock.release()
        released.set()
        assert other.result()


def test_the_end_of_a_block_whose_lock_was_lost_raises_or_logs(make, client, caplog):
    with pytest.raises(LockNotOwnedError), make(timeout=10):
        client.delete(NAME)
    with make(timeout=10, raise_on_release_error=False):
        client.delete(NAME)
    assert "lock" in caplog.text


def test_its_settings_are_attributes(make):
    lock = make(timeout=7, sleep=0.2, blocking_timeout=3)
    assert (lock.name, lock.timeout, lock.sleep, lock.blocking, lock.blocking_timeout) == (NAME, 7, 0.2, True, 3)
    assert (lock.thread_local, lock.raise_on_release_error) == (True, True)
    assert lock.redis is not None
