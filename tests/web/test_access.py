"""Who may see the page, and what a visitor may do; and what it shows while a server is down."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import urlencode

import httpx
import pytest

from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import keys_of
from celery_redislock.web.pages import link
from celery_redislock.web.timeline import Timeline
from tests.lab.app import make_app
from tests.lab.proxy import Proxy
from tests.lab.servers import Valkey, free_port, running, wait_until
from tests.lab.web import page as serve
from tests.lab.workers import ROOT

from .conftest import Page, Scene, hold, see

KEY = "redislock:{guarded}"
RELEASE = f"/release?{urlencode({'key': KEY})}"
SECRET = "a token that nobody guesses"  # noqa: S105


@pytest.fixture(scope="module")
def url(scene: Scene) -> str:
    return scene.serve()


@pytest.fixture
def held(scene: Scene) -> Callable[[], bool]:
    """A key is held; tells whether it still is."""
    hold(scene.locks, KEY, "an-id")
    return lambda: scene.locks.client.exists(KEY) == 1


def csrf_of(text: str) -> dict[str, str]:
    """The hidden fields of a form."""
    parts = text.split('<input type="hidden" name="')[1:]
    return {part.split('"')[0]: part.split('value="')[1].split('"')[0] for part in parts}


def test_a_post_needs_the_forms_token_and_an_origin_of_its_own(url, held):
    origin = {"origin": url}
    form = csrf_of(httpx.get(url + RELEASE).text)
    assert form.keys() == {"csrf", "holder"}
    for fields, headers in [
        (form, {}),
        (form, {"origin": "null"}),
        (form, {"origin": "http://evil.example"}),
        ({**form, "csrf": "guessed"}, origin),
        ({"holder": form["holder"]}, origin),
    ]:
        assert httpx.post(url + RELEASE, data=fields, headers=headers).status_code == 403
    assert httpx.post(url + RELEASE, data={**form, "csrf": "x" * 20_000}, headers=origin).status_code == 413
    assert httpx.get(url + RELEASE, params=form).status_code == 200
    assert held()
    assert "Released." in httpx.post(url + RELEASE, data=form, headers=origin).text
    assert not held()


def test_it_writes_nothing_to_the_lock_server_and_sends_read_only_commands_alone(scene, url, held):
    room = tokens.of_room(tokens.mint_nonce(), "a-host")
    scene.locks.client.zadd(keys_of(KEY).line, {room.value: 1})
    before = sorted(scene.locks.client.scan_iter())
    scene.locks.calls()
    for path in (
        "/",
        "/waiting",
        "/timeline",
        "/task?id=an-id",
        f"/key?{urlencode({'key': KEY})}",
        "/key?key=x",
        RELEASE,
    ):
        assert httpx.get(url + path, timeout=20).status_code == 200
    calls = scene.locks.calls()
    assert calls["get"] > 0
    assert calls.keys() <= {"get", "pttl", "zrange", "hmget", "hello"}
    assert sorted(scene.locks.client.scan_iter()) == before
    scene.locks.client.delete(keys_of(KEY).line)


def test_half_a_character_in_a_name_does_not_break_a_page():
    assert link("/task", id="\ud800", q="", key="\udcff") == "/task?id=%3F&amp;key=%FF"


def test_on_loopback_it_answers_to_no_other_name(url):
    for host in ("evil.example", "127.0.0.1.evil.example", "", "localhost@evil.example"):
        assert httpx.get(url, headers={"host": host}).status_code in {400, 421}, host
    for host in ("localhost:99", "127.0.0.1", "[::1]:80", "LOCALHOST"):
        assert httpx.get(url, headers={"host": host}).status_code == 200, host


def test_a_host_header_that_looks_like_an_open_path_opens_no_page(scene):
    with serve(scene.app, token=SECRET) as url:
        for host in ("127.0.0.1/login?", "127.0.0.1/static/?", "127.0.0.1/login#"):  # starlette below 1.0 believes it
            for path in ("/", "/waiting", RELEASE, "/live"):
                assert httpx.get(url + path, headers={"host": host}).status_code in {303, 401, 421}, (host, path)


def test_headers_and_addresses_that_are_nonsense_are_refused_and_do_not_fail(scene):
    with serve(scene.app, token=SECRET) as url:
        assert httpx.get(url, headers={"host": "["}).status_code == 421
        assert httpx.post(url + RELEASE, headers={"origin": "http://["}).status_code == 403
        wrong = httpx.post(f"{url}/login?next=%FF", data={"token": "guessed"}, headers={"origin": url})
        assert wrong.headers["location"] == "/login?wrong=1&next=%FF"


def test_an_event_whose_times_are_nonsense_breaks_no_page(scene):
    with serve(scene.app) as url, scene.app.events.default_dispatcher() as events:

        def is_shown():
            events.send("redislock-acquired", uuid="a-good-id", key=KEY, waited=0.1)
            return "a-good-id" in httpx.get(f"{url}/timeline").text

        wait_until(is_shown, "the page hears events")
        for times in ({"timestamp": math.nan}, {"timestamp": 1e300}, {"held": math.inf}, {"held": "nan"}):
            for what in ("acquired", "released"):
                events.send(f"redislock-{what}", uuid="a-bad-id", key=KEY, **times)
        events.send("redislock-skipped", uuid="the-last-id", key=KEY)
        wait_until(lambda: "the-last-id" in httpx.get(f"{url}/timeline").text, "it shows what came after them")
        assert httpx.get(f"{url}/key?{urlencode({'key': KEY})}").status_code == 200


def test_a_key_that_was_lost_is_not_shown_as_held_until_its_run_ends(scene):
    timeline = Timeline(scene.app)
    timeline.start()
    with scene.app.events.default_dispatcher() as events:

        def is_heard():
            events.send("redislock-waiting", uuid="0", key=KEY)
            return timeline.heard

        wait_until(is_heard, "it hears events")
        for what, at, seconds in (("acquired", 10.0, 0.0), ("lost", 12.0, 2.0), ("released", 20.0, 10.0)):
            events.send(f"redislock-{what}", uuid="1", key="k", timestamp=at, held=seconds)
        wait_until(lambda: [one for one in timeline.heard if one.what == "released"], "it has heard all")
    timeline.stop()
    (bars,) = timeline.lanes(25.0, 60.0, (), "k").values()
    assert [(bar.what, bar.begin, bar.end) for bar in bars] == [("held", 10.0, 12.0), ("lost", 12.0, 12.0)]


def test_a_read_only_page_has_no_buttons_and_refuses_forms(scene, held):
    with serve(scene.app, read_only=True) as url:
        page = httpx.get(f"{url}/key?{urlencode({'key': KEY})}").text
        assert "is held by task an-id" in page
        assert "Release" not in page
        assert httpx.get(url + RELEASE).status_code == 403
        assert httpx.post(url + RELEASE, data={}, headers={"origin": url}).status_code == 403
        assert "Revoke" not in httpx.get(f"{url}/task?id=1").text
    assert held()


def test_with_a_token_every_page_asks_for_it_once_and_no_log_has_it(scene, held, visit, caplog):
    caplog.set_level(logging.DEBUG)
    with serve(scene.app, token=SECRET) as url:
        for path in ("/", "/task?id=1", RELEASE):
            answer = httpx.get(url + path)
            assert (answer.status_code, answer.headers["location"].split("?")[0]) == (303, "/login")
        assert httpx.get(f"{url}/live").status_code == 401
        assert httpx.post(url + RELEASE, headers={"origin": url}).status_code == 401
        assert httpx.get(f"{url}/static/page.css").status_code == 200
        for cookie in ("", "guessed", SECRET, "\xff"):
            cookies = {"cookie": f"redislock_{url.rpartition(':')[2]}={cookie}".encode("latin-1")}
            assert httpx.get(url, headers=cookies).status_code == 303

        page: Page = visit(f"{url}/key?{urlencode({'key': KEY})}")
        page.fill("input[name=token]", "guessed")
        page.click("button")
        assert "That is not the token." in page.inner_text("main")
        page.fill("input[name=token]", SECRET)
        page.click("button")
        page.wait_for_url("**/key?**")
        see(page, lambda: "is held by task an-id" in page.inner_text("main"), "the key")
        (cookie,) = page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert SECRET not in cookie["value"]
        page.click("text=Release…")
        page.click("button")
        assert "Released." in page.inner_text("main")
        for away in ("//evil.example", "https://evil.example", "/\\evil.example", "evil"):
            form = {"data": {"token": SECRET}, "headers": {"origin": url}}
            assert httpx.post(f"{url}/login?{urlencode({'next': away})}", **form).headers["location"] == "/"
    assert not held()
    assert "release redislock:{guarded}: Released." in caplog.text
    assert SECRET not in caplog.text


def test_without_events_the_time_line_says_how_to_get_them(scene, visit):
    scene.start_worker()
    with serve(scene.app) as url:
        page = visit(f"{url}/timeline")
        see(
            page,
            lambda: "No worker that answered sends events. Start your workers with -E." in page.inner_text("main"),
            "it",
        )
        assert "Nothing was heard in this time." in page.inner_text("main")


def test_while_redis_is_down_the_last_snapshot_stays_with_its_age_and_it_comes_back_by_itself(scene, tmp_path, visit):
    with Valkey(tmp_path, free_port()).serve() as locks, Proxy(locks.url()).serve() as proxy:
        app = make_app(replace(scene.config, locks=proxy.url))
        hold(locks, KEY, "an-id")
        with serve(app) as url:
            page = visit(f"{url}/")
            see(page, lambda: KEY in page.inner_text("main"), "the key")
            for fails, comes_back in ((proxy.refuse, proxy.mend), (proxy.blackhole, proxy.mend)):
                fails()
                see(page, lambda: "could not reach the lock server" in page.inner_text("main"), "what is wrong")
                assert "This is what was last seen" in page.inner_text("main")
                assert KEY in page.inner_text("main")
                page.goto(f"{url}/task?id=an-id")
                assert "could not reach the lock server" in page.inner_text(".why")
                page.goto(f"{url}/")
                assert KEY in page.inner_text("main")
                comes_back()
                see(page, lambda: "could not reach" not in page.inner_text("main"), "that it is back")
        app.close()


def test_without_a_broker_it_says_that_the_workers_cannot_be_asked(scene, tmp_path, visit):
    with Valkey(tmp_path, free_port()).serve() as broker:
        app = make_app(replace(scene.config, broker=broker.url(), backend=broker.url(1)))
        hold(scene.locks, KEY, "an-id")
        with serve(app) as url:
            page = visit(f"{url}/timeline")
            broker.kill()
            see(page, lambda: "Could not ask the workers" in page.inner_text("main"), "it")
            see(page, lambda: "No events are heard:" in page.inner_text("main"), "it of the events", 30)
            page.goto(f"{url}/")
            assert KEY in page.inner_text("main")
            broker.restart()
            see(page, lambda: "Could not ask the workers" not in page.inner_text("main"), "that it is back")
        app.close()


@pytest.fixture
def program(scene: Scene) -> Callable[..., subprocess.CompletedProcess[str]]:
    env = {**os.environ, "LAB_CONFIG": scene.config.dump(), "LAB_READY": str(scene.folder / "ready")}
    env["PYTHONPATH"] = str(ROOT)

    def run(*options: str, before: str = "") -> subprocess.CompletedProcess[str]:
        command = ["-A", "tests.lab.worker", "web", "--port", "0", *options]
        code = f"import sys; sys.argv[1:] = {command!r}; {before}\nimport celery_redislock.__main__"
        program = [sys.executable, "-c", code]
        return subprocess.run(program, env=env, capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--host", "0.0.0.0"], "set REDISLOCK_WEB_TOKEN to a token that they must enter"),  # noqa: S104
        (["--token", "short"], "the token has 5 characters, and needs at least 16"),
        (["--host", "192.0.2.1", "--token", "x" * 16], "cannot listen on 192.0.2.1:0"),
    ],
)
def test_the_command_refuses_what_is_not_safe_or_does_not_work(program, options, says):
    done = program(*options)
    assert done.returncode != 0
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "jinja2"])
def test_without_its_packages_the_command_says_what_to_install(program, package):
    done = program(before=f"sys.modules[{package!r}] = None")
    assert 'pip install "celery-redislock[web]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_serves_until_it_is_interrupted(scene, tmp_path):
    env = {"LAB_CONFIG": scene.config.dump(), "LAB_READY": str(tmp_path / "ready"), "PYTHONPATH": str(ROOT)}
    log, port = tmp_path / "web.log", free_port()
    command = [sys.executable, "-m", "celery_redislock", "-A", "tests.lab.worker", "web", "--port", str(port)]
    with running(command, log, env) as process:
        wait_until(lambda: "The page is at http://127.0.0.1:" in log.read_text(), "it is served", 60)
        with httpx.stream("GET", f"http://127.0.0.1:{port}/live", timeout=20) as live:  # a viewer does not keep it
            assert next(live.iter_lines()).startswith("data: ")
            process.send_signal(2)
            process.wait(20)
    assert "Traceback" not in log.read_text()
