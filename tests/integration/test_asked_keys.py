"""What the worker's main process hears of the keys that its children ask for, through a real pipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from celery_redislock.message.delivery import AskedKeys
from celery_redislock.protocol.tokens import mint_nonce


def in_a_child(do: Callable[[], None]) -> None:
    if not (pid := os.fork()):
        try:
            do()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[AskedKeys]:
    """Those of a main process."""
    ends, keys = os.pipe(), AskedKeys()
    monkeypatch.setattr(os, "pipe", lambda: ends)
    keys.open()
    yield keys
    for end in ends:
        os.close(end)


def test_what_a_child_has_told_outlives_it_until_it_is_forgotten(keys: AskedKeys) -> None:
    nonce = mint_nonce()
    assert keys.of(nonce) == ()
    in_a_child(lambda: keys.asks(nonce, "redislock:{shop.bill:7}"))
    assert keys.of(nonce) == ("redislock:{shop.bill:7}",)
    keys.forget(nonce)
    assert keys.of(nonce) == ()


def test_a_child_whose_main_process_reads_nothing_tells_what_fits_and_goes_on(keys: AskedKeys) -> None:
    nonces = [mint_nonce() for _ in range(3000)]
    names = {nonce: f"redislock:{{shop.bill:{'ü' * (number % 70)}{number}}}" for number, nonce in enumerate(nonces)}

    def tell_all() -> None:
        for nonce, name in names.items():
            keys.asks(nonce, name)

    in_a_child(tell_all)
    told = {nonce: name for nonce in nonces if (name := next(iter(keys.of(nonce)), None))}
    assert 100 < len(told) < len(nonces)
    assert told.items() <= names.items()
    in_a_child(lambda: keys.asks(nonces[-1], names[nonces[-1]]))
    assert keys.of(nonces[-1]) == (names[nonces[-1]],)


def test_a_key_too_long_for_one_write_is_not_told(keys: AskedKeys) -> None:
    nonce, other = mint_nonce(), mint_nonce()
    in_a_child(lambda: [keys.asks(nonce, "k" * 100_000), keys.asks(other, "k")])  # type: ignore[arg-type, return-value]
    assert keys.of(nonce) == ()
    assert keys.of(other) == ("k",)


def test_a_run_in_this_very_process_needs_no_pipe(keys: AskedKeys) -> None:
    nonce = mint_nonce()
    keys.asks(nonce, "k" * 100_000)
    assert keys.of(nonce) == ("k" * 100_000,)
