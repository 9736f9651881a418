"""What the tests do about a result of which Celery's client never hears."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from celery.exceptions import TimeoutError as CeleryTimeoutError

from tests.lab.app import make_app
from tests.lab.proxy import Proxy


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's
def test_a_result_that_is_stored_between_the_look_and_the_subscription_is_found(config, app):
    with Proxy(config.backend).serve() as proxy:
        late = make_app(replace(config, backend=proxy.url))
        subscription = proxy.hold(b"SUBSCRIBE", before=True)

        def store():
            subscription.wait()
            app.backend.store_result("it", "stored", "SUCCESS")
            subscription.let_go()

        storing = threading.Thread(target=store)
        storing.start()
        assert late.AsyncResult("it").get(timeout=1) == "stored"
        storing.join()
        late.close()


def test_a_result_that_is_not_stored_is_waited_for_in_vain(app):
    with pytest.raises(CeleryTimeoutError):
        app.AsyncResult("none").get(timeout=0.1)
