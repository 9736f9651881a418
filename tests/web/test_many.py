"""10,000 locks and 1,000 messages that wait for one of them."""

from __future__ import annotations

import re

import pytest

from .conftest import Scene, address_of, column, fill, see

LOCKS, CROWD = 10_000, 1000


@pytest.fixture(scope="module")
def url(scene: Scene) -> str:
    fill(scene.locks, LOCKS)
    return scene.serve()


def test_ten_thousand_keys_are_paged_searched_and_sorted(scene, url, visit):
    page = visit(f"{url}/")
    see(page, lambda: f"{LOCKS}" in page.inner_text(".totals"), "all of them")
    assert len(column(page, 4)) == 50
    page.click("text=Next")
    assert "page 2 of" in page.inner_text(".pager")
    page.fill("input[type=search]", "FILLED:00420")
    page.press("input[type=search]", "Enter")
    page.wait_for_url("**q=FILLED**")
    assert sorted(column(page, 4)) == [f"redislock:{{lab.filled:{one:06}}}" for one in range(4200, 4210)]
    page.click("nav[aria-label='Sort by'] >> text=key")
    page.wait_for_url("**sort=key**")
    assert column(page, 4) == sorted(column(page, 4))
    task_id = column(page, 5)[0].split()[0]
    page.goto(address_of(url, "/", q=task_id))
    assert column(page, 4) == ["redislock:{lab.filled:004200}"]
    page.goto(address_of(url, "/", q="nothing like it", page="7", sort="upwards", show="?"))
    assert "Nothing matches" in page.inner_text("main")


def test_a_thousand_waiting_messages_are_listed_in_their_order_with_their_workers(scene, url, visit):
    scene.start_worker()
    scene.start_worker()
    key, ids = scene.gather(CROWD)
    page = visit(address_of(url, "/waiting", q=key))
    see(page, lambda: f"{CROWD} messages, page 1 of 20" in page.inner_text("main"), "all of them")
    assert column(page, 1) == [str(place) for place in range(1, 51)]
    assert [text.split()[0] for text in column(page, 3)] == ids[:50]
    assert set(column(page, 5)) <= {"w0@lab", "w1@lab"}
    page.goto(address_of(url, "/key", key=key))
    see(page, lambda: f"{CROWD} messages in line" in page.inner_text("main"), "the line")
    assert [text.split()[0] for text in column(page, 3)] == ids[:500]
    assert re.search(r"is held by task [\w-]+ on w\d@lab, since ", page.inner_text("main"))
    page.goto(address_of(url, "/waiting", q=ids[700]))
    assert column(page, 1) == ["701"]


def test_more_waiting_messages_than_are_listed_are_counted_and_can_be_dropped(scene, url, visit, monkeypatch):
    monkeypatch.setattr("celery_redislock.web.snapshot.MOST_LISTED", CROWD - 1)
    key = scene.task("work").lock_for("crowd").name
    page = visit(f"{url}/waiting")
    see(page, lambda: "None is listed" in page.inner_text("main"), "that there are too many")
    assert f"{CROWD} messages or processes wait" in page.inner_text("main")
    assert "No message waits" not in page.inner_text("main")
    page.goto(address_of(url, "/waiting", q=key))
    assert "Nothing matches" not in page.inner_text("main")
    page.goto(address_of(url, "/key", key=key))
    page.click("text=Drop…")
    assert f"{CROWD} messages in 2 workers would end as REVOKED" in page.inner_text("main")
