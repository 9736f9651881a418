"""What a visitor sees and does, with two workers and one page for all tests."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from celery_redislock.protocol.names import keys_of
from tests.lab.servers import wait_until
from tests.lab.workers import Worker

from .conftest import PHONE, BrowserContext, Page, Scene, address_of, column, fill, hold, number_of, see

#: How many locks there are, and how many messages wait for one of them.
LOCKS, CROWD = 200, 20
PAGES = ("/", "/waiting", "/timeline", "/task?id=none", "/key?key=redislock:{none}")


@pytest.fixture(scope="module")
def workers(scene: Scene) -> list[Worker]:
    return [scene.start_worker("-E"), scene.start_worker("-E")]


@pytest.fixture(scope="module")
def url(scene: Scene) -> str:
    fill(scene.locks, LOCKS)
    return scene.serve()


@pytest.fixture(scope="module")
def crowd(scene: Scene, url: str, workers: list[Worker]) -> tuple[str, list[str]]:
    """The key that a run holds, and the ids of the messages that wait for it, in the order of their line."""
    return scene.gather(CROWD)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The lines that the page has logged."""
    caplog.set_level(logging.INFO, "celery_redislock.web")
    return lambda: [one.getMessage() for one in caplog.records if one.name.startswith("celery_redislock.web")]


def test_a_task_says_why_it_has_not_run_and_leads_to_its_key(crowd, url, visit):
    key, ids = crowd
    page = visit(address_of(url, "/task", id=ids[3]))
    said = page.inner_text(".why")
    assert f"WAITS in line for {key} in worker w" in said
    assert f"3 messages are ahead of it; {CROWD} messages in line in the 2 workers that answered." in said
    page.click("main p.bar a.code")
    page.wait_for_url("**/key?**")
    assert page.inner_text("h1") == key
    page.goto(address_of(url, "/task", id="no such task"))
    assert "No worker, result or lock knows this task." in page.inner_text(".why")


def test_the_page_follows_what_happens_and_without_javascript_a_reload_does(scene, crowd, url, visit):
    page, plain = visit(address_of(url, "/", q="redislock:{late}")), visit(f"{url}/?q=late", java_script_enabled=False)
    assert column(page, 4) == column(plain, 4) == []
    hold(scene.locks, "redislock:{late}", "an-id")
    see(page, lambda: column(page, 4) == ["redislock:{late}"], "the key")
    assert re.match(r"Seen \d+\.\ds ago on ", page.inner_text(".seen"))
    plain.reload()
    assert column(plain, 4) == ["redislock:{late}"]


def test_three_viewers_cost_the_lock_server_and_the_workers_what_one_does(scene, crowd, url, visit):
    def cost(pages: list[Page]) -> dict[str, float]:
        see(pages[0], lambda: number_of(pages[0]) > 0, "a snapshot")
        first = number_of(pages[0])
        see(pages[0], lambda: number_of(pages[0]) > first, "the next one")
        scene.locks.calls()
        first = number_of(pages[0])
        see(pages[0], lambda: number_of(pages[0]) >= first + 3, "three more")
        for page in pages:
            see(page, lambda page=page: number_of(page) >= first + 3, "the same")
        return {name: calls / (number_of(pages[0]) - first) for name, calls in scene.locks.calls().items()}

    one = cost([visit(f"{url}/")])
    three = cost([visit(f"{url}/"), visit(f"{url}/waiting"), visit(f"{url}/timeline")])
    assert one["get"] >= LOCKS
    # The counting begins and ends in the middle of a snapshot.
    assert three["get"] == pytest.approx(one["get"], rel=0.5)


def test_a_worker_that_does_not_answer_is_named_and_when_it_does_again_it_is_not(scene, workers, url, visit):
    holders, ids = {}, []
    for one in range(8):  # one of the two workers has it
        key = f"stuck {one}"
        ids.append(scene.task("work").delay(key, f"holds {key}", 300.0).id)
        wait_until(lambda key=key: f"holds {key}" in scene.ledger.items(), "it runs", 20)
        info = scene.task("work").lock_info(key)
        holders[info.hostname] = info
        if "w1@lab" in holders:
            break
    info = holders["w1@lab"]
    page = visit(f"{url}/")
    workers[1].pause()
    silent = "Its worker w1@lab does NOT ANSWER"
    try:
        see(page, lambda: silent in page.inner_text("main"), "the silent worker")
        page.goto(address_of(url, "/key", key=info.key))
        assert silent in page.inner_text("main")
        page.goto(address_of(url, "/task", id=info.task_id))
        assert "HOLDS a lock, but no worker that answered runs it" in page.inner_text(".why")
        assert silent in page.inner_text(".why")
    finally:
        workers[1].resume()
    page.goto(f"{url}/")
    see(page, lambda: silent not in page.inner_text("main"), "that it answers again")
    scene.app.control.revoke(ids, terminate=True)  # later tests need their processes


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}</title><svg onload=alert(1)>",
    "\u202egnirts\u2066\n[2026-01-01] forged\x1b[2J\0",
    "a/b%2F?c=d&e#f;+ %",
    "javascript:alert(1)",
    "日本語 \U0001f512",
    "\udcff\udc80 bytes",
]


def test_no_name_is_markup_and_every_key_has_its_page_and_can_be_released(scene, url, visit):
    names = {name: f"redislock:{{{name}}}".encode("utf-8", "surrogateescape") for name in HOSTILE}
    for name, raw in names.items():
        hold(scene.locks, raw, name, name, name)
    page = visit(f"{url}/")
    see(page, lambda: number_of(page) > 0, "a snapshot")
    first = number_of(page)
    see(page, lambda: number_of(page) > first + 1, "one that began later")
    for name, raw in names.items():
        page.goto(f"{url}/?{urlencode({'q': name.lower()}, errors='surrogateescape')}")
        link = page.locator("main tbody td:nth-child(4) a")
        shown = link.inner_text()
        assert shown.isprintable()
        link.click()
        page.wait_for_url("**/key?**")
        for select in ("script:not([src^='/static/'])", "img:not([src^='/static/'])", "main svg", "main [onmouseover]"):
            assert page.locator(select).count() == 0, select
        assert page.inner_text("h1") == shown
        assert page.inner_text("main").replace("\n", "").isprintable()
        page.click("text=Why?")
        assert "The task HOLDS a lock" in page.inner_text(".why")
        page.go_back()
        page.click("text=Release…")
        page.click("button")
        is_text = "\udcff" not in name
        assert ("Released." if is_text else "Nothing was done: this name is not UTF-8.") in page.inner_text("main")
        assert scene.locks.client.delete(raw) == (not is_text)


def test_a_release_asks_first_and_only_takes_the_key_from_the_holder_that_was_shown(scene, url, visit, log):
    key = "redislock:{mine}"
    hold(scene.locks, key, "the-first")
    page = visit(address_of(url, "/release", key=key))
    assert "is held by task the-first on w9@lab" in page.inner_text("main")
    assert "The holder is not stopped" in page.inner_text("main")
    assert scene.locks.client.exists(key) == 1
    page.click("text=Cancel")
    page.wait_for_url("**/key?**")
    page.goto(address_of(url, "/release", key=key))
    hold(scene.locks, key, "the-second")
    page.click("button")
    assert "Nothing was released: its holder has changed." in page.inner_text("main")
    assert scene.locks.client.exists(key) == 1
    page.goto(address_of(url, "/release", key=key))
    page.click("button")
    assert "Released." in page.inner_text("main")
    assert scene.locks.client.exists(key) == 0
    page.goto(address_of(url, "/release", key=key))
    assert "is free" in page.inner_text("main")
    assert page.locator("main button").count() == 0
    scene.locks.client.set("counter", "4711")
    page.goto(address_of(url, "/release", key="counter"))
    assert "no key of this app" in page.inner_text("main")
    assert log() == [
        "127.0.0.1 on the web page, release redislock:{mine}: Nothing was released: its holder has changed.",
        "127.0.0.1 on the web page, release redislock:{mine}: Released.",
    ]


def test_a_revoke_ends_a_message_that_waits_and_with_terminate_a_run(scene, crowd, url, visit, log):
    _, ids = crowd
    page = visit(address_of(url, "/task", id=ids[-1]))
    page.click("text=Revoke…")
    page.click("button")
    assert "Revoked: 2 workers answered." in page.inner_text("main")
    wait_until(lambda: scene.app.AsyncResult(ids[-1]).state == "REVOKED", "it has ended")
    run = scene.task("once").delay("r", "to be ended", 300.0)
    wait_until(lambda: "to be ended" in scene.ledger.items(), "it runs")
    page.goto(address_of(url, "/revoke", id=run.id))
    page.check("input[name=terminate]")
    page.click("button")
    wait_until(lambda: run.state == "REVOKED", "it is terminated")
    assert [line.partition(": ")[2] for line in log()] == [
        "Revoked: 2 workers answered.",
        "Terminated: 2 workers answered.",
    ]


def test_the_time_line_shows_what_came_since_the_page_was_started(scene, crowd, url, visit):
    key, _ = crowd
    page = visit(f"{url}/timeline")
    scene.task("once").delay("t", "seen").get(timeout=20)
    ended = scene.task("once").lock_for("t").name
    see(page, lambda: ended in page.inner_text(".lanes"), "the run")
    lane = page.locator(".lanes > div", has_text=ended)
    assert lane.locator("rect.held").count() == 1
    assert "held for" in (lane.locator("title").first.text_content() or "")
    assert page.locator(".lanes > div", has_text=key).locator("rect.waited").count() in range(1, CROWD + 1)
    assert {"acquired", "released"} <= set(column(page, 2))
    page.goto(address_of(url, "/timeline", q=ended, minutes="15"))
    assert page.locator(".lanes .code").all_inner_texts() == [ended]


def test_a_message_that_sleeps_until_it_is_due_is_listed_and_can_be_dropped(scene, crowd, url, visit):
    task = scene.task("debounced_long")
    sleeps, _ = [task.delay("k", item) for item in ("first", "last")]
    key = task.lock_for("k").name
    scene.locks.client.hincrby(keys_of(key).pending, "due", 3_600_000_000)
    page = visit(address_of(url, "/key", key=key))
    see(page, lambda: sleeps.id in page.inner_text("main"), "it is listed")
    page.click("text=Drop…")
    assert "1 message in 1 worker would end as REVOKED" in page.inner_text("main")
    page.click("button")
    wait_until(lambda: sleeps.state == "REVOKED", "it ends")


def test_a_dropped_line_ends_and_its_holder_goes_on(scene, crowd, url, visit, log):
    key, ids = crowd
    waiting = [one for one in map(scene.app.AsyncResult, ids) if not one.ready()]  # another test may have revoked one
    page = visit(address_of(url, "/key", key=key))
    page.click("text=Drop…")
    assert f"{len(waiting)} messages in 2 workers would end as REVOKED" in page.inner_text("main")
    page.click("button")
    assert f"Dropped {len(waiting)} messages." in page.inner_text("main")
    wait_until(lambda: all(one.state == "REVOKED" for one in waiting), "they end")
    page.goto(address_of(url, "/key", key=key))
    see(page, lambda: "0 messages in line" in page.inner_text("main"), "an empty line")
    assert "is held by task" in page.inner_text("main")
    page.goto(address_of(url, "/drop", key=key))
    assert "0 messages in 0 workers would end" in page.inner_text("main")
    assert [line.rpartition(": ")[2] for line in log()] == [f"Dropped {len(waiting)} messages."]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen_and_text_can_be_read_in_both_themes(scene, url, visit, theme):
    long = f"redislock:{{{'a-long-key-' * 30}}}"
    hold(scene.locks, long, "an-id-" * 30, "a-host" * 20, "a.task" * 20)
    page = visit(f"{url}/", color_scheme=theme, viewport=PHONE)
    see(page, lambda: number_of(page) > 0, "a snapshot")
    for path in (
        *PAGES,
        f"/?q={'a-long-key'}",
        f"/key?{urlencode({'key': long})}",
        f"/release?{urlencode({'key': long})}",
    ):
        page.goto(url + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path
        for text in ("body", "main a, header a", ".quiet, header nav a"):
            back, front = (luminance(colour) for colour in page.evaluate(COLOURS, text))
            assert (back < 0.2) is (theme == "dark")
            assert (max(back, front) + 0.05) / (min(back, front) + 0.05) >= 4.5, (path, text)
    scene.locks.client.delete(long)


COLOURS = """selector => [
    getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector(selector)).color
]"""


def luminance(colour: str) -> float:
    """The relative luminance of ``rgb(1, 2, 3)``, as WCAG defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_all_of_it_can_be_used_by_keyboard(url, visit):
    page = visit(f"{url}/")
    see(page, lambda: column(page, 4), "the keys")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    focused, number = page.evaluate("document.activeElement.textContent"), number_of(page)
    see(page, lambda: number_of(page) > number, "the next snapshot")
    assert page.evaluate("document.activeElement.textContent") == focused
    page.keyboard.press("/")
    page.keyboard.type("filled:000007")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=filled**")
    assert column(page, 4) == ["redislock:{lab.filled:000007}"]


def test_no_request_goes_to_another_host(url, context: Callable[..., BrowserContext]):
    visitor = context()
    asked: list[str] = []
    visitor.on("request", lambda request: asked.append(request.url))
    for path in PAGES:
        page = visitor.new_page()
        page.goto(url + path)
        page.close()
    assert {urlsplit(one).netloc for one in asked} == {urlsplit(url).netloc}


def test_a_form_on_another_site_does_nothing(scene, url, context: Callable[..., BrowserContext]):
    key = "redislock:{guarded}"
    hold(scene.locks, key, "an-id")
    visitor = context()
    form = f"<form method=post action='{address_of(url, '/release', key=key)}'><input name=csrf></form>"
    form += "<script>document.forms[0].submit()</script>"
    visitor.route("http://evil.example/", lambda route: route.fulfill(body=form, content_type="text/html"))
    page = visitor.new_page()
    page.goto("http://evil.example/")
    page.wait_for_url(f"{url}/release**")
    assert "sent from another site" in page.inner_text("body")
    assert scene.locks.client.exists(key) == 1


def test_nothing_of_it_may_be_framed_or_kept(url, visit):
    answer: Any = visit(f"{url}/").request.get(f"{url}/")
    assert answer.headers["content-security-policy"].startswith("default-src 'self'; ")
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert (answer.headers["x-content-type-options"], answer.headers["cache-control"]) == ("nosniff", "no-store")
