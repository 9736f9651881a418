"""Nobody waits for an answer that the proxy has lost; and what it has passed on before is read."""

from __future__ import annotations

import time

import pytest

from celery_redislock.connection.connect import disconnect
from celery_redislock.protocol import commands
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.replies import Granted
from celery_redislock.protocol.scripts import RELEASE
from celery_redislock.protocol.tokens import Attempt
from tests.lab.asking import acquire

from .clients import TIME_OUT, Client
from .machine import KEY

ONE = Demand(KEY)


@pytest.mark.parametrize("fault", ["silent", "command lost"])
def test_a_lost_answer_is_a_time_out_at_once_and_the_one_before_is_read(stage, fault):
    stage.server.client.script_load(RELEASE.text)
    client, told = Client(stage.proxy, ONE), []
    one, other = client.mint(Attempt("a", 0, 0)), client.mint(Attempt("b", 0, 0))
    assert isinstance(acquire(client.store, ONE, one, 60.0), Granted)
    with stage.struck_by("none"):
        client.store.send_late(commands.release(ONE, one.owner), told.append, lambda: told.append("in doubt"))
        stage.struck.wait()
    began = time.monotonic()
    with stage.struck_by(fault):
        assert isinstance(acquire(client.store, ONE, other, 60.0), Granted)
    assert stage.struck.struck == 1
    assert time.monotonic() - began < TIME_OUT / 2
    assert told == [True]
    disconnect(client.client)
