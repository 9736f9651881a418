"""docs/fastapi.md: its endpoints, called in an event loop as a server calls them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.lab.workers import ROOT

pytest.importorskip("fastapi")

PAGE = "fastapi.md"

SETUP = """
import asyncio
import threading
import anyio
import httpx
from anyio.to_thread import run_sync
from api import api, held
from celery_redislock import Lock, LockConfigError, LockConflict, locked
from celery_redislock.app import server_of
from celery_redislock.testing import busy
from fastapi import Depends
from redis.exceptions import LockError
from shop import celery_app, daily_report, reserve

def client():
    return httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://shop", timeout=30)

async def post(*paths):
    async with client() as http:
        answers = await asyncio.gather(*[http.post(path) for path in paths])
    return [(answer.status_code, answer.json()) for answer in answers]

async def text(path):
    async with client() as http:
        return (await http.post(path)).text
"""


def test_the_requests_of_the_page_get_the_answers_that_it_shows(project):
    """The ids and the host differ from one try to the next: here they are numbered."""
    page = (ROOT / "docs" / PAGE).read_text()
    shown = re.findall(r"^\$ curl -X POST localhost:8000(\S+)\n(.*)$", page, re.MULTILINE)
    reports, stock = shown[:2], shown[2:]
    program = f"""
print(*[asyncio.run(text(path)) for path, _ in {reports}], sep="\\n")
with busy(reserve.lock_for("7")):
    print(*[asyncio.run(text(path)) for path, _ in {stock}], sep="\\n")
"""
    answers = project.run("-c", SETUP + program)
    assert (len(reports), len(stock)) == (2, 1)
    assert numbered(answers) == numbered("".join(f"{answer}\n" for _, answer in shown))


def numbered(text):
    found = dict.fromkeys(
        re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<=outside tasks on )[\w.-]+", text)
    )
    for number, name in enumerate(found):
        text = text.replace(name, f"<{number}>")
    return text


def test_endpoints_of_both_kinds_publish_once(project):
    program = """
print([body["duplicate"] for _, body in asyncio.run(post("/reports/monday"))])
print([body["duplicate"] for _, body in asyncio.run(post("/reports/monday", "/async/reports/monday"))])
"""
    assert project.run("-c", SETUP + program).splitlines() == ["[False]", "[True, True]"]


def test_requests_wait_for_each_other_while_the_event_loop_goes_on(project):
    program = """
async def main():
    ticks = 0
    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1
    beside = asyncio.create_task(tick())
    answers = await post(*["/stock/7", "/async/stock/7"] * 4)
    beside.cancel()
    return answers == [(200, {"counted": "7"})] * 8, ticks >= 10

print(*asyncio.run(main()), reserve.lock_info("7"))
"""
    assert project.run("-c", SETUP + program).split() == ["True", "True", "None"]


def test_a_key_that_stays_held_is_a_conflict_to_both(project):
    program = """
with busy(reserve.lock_for("7")):
    for status, body in asyncio.run(post("/stock/7", "/async/stock/7")):
        print(status, "is held by a lock outside tasks on" in body["detail"])
"""
    assert project.run("-c", SETUP + program).splitlines() == ["409 True"] * 2


def test_a_request_that_is_cancelled_gives_its_key_back(project):
    program = """
async def hold(then):
    async with held(reserve.lock_for("7")):
        then()
        await anyio.sleep(60)

def hold_until(is_held, is_over):
    with reserve.lock_for("7"):
        is_held.set()
        is_over.wait()

async def main():
    async with anyio.create_task_group() as group:  # cancelled while it holds the key
        group.start_soon(hold, group.cancel_scope.cancel)
    print(reserve.lock_info("7"))

    is_held, is_over = threading.Event(), threading.Event()
    other = threading.Thread(target=hold_until, args=(is_held, is_over))
    other.start()
    is_held.wait()
    async with anyio.create_task_group() as group:  # cancelled while its thread waits for the key
        group.start_soon(hold, lambda: None)
        while not (await run_sync(reserve.lock_info, "7")).waiting_processes: pass
        group.cancel_scope.cancel()
        is_over.set()
    print(reserve.lock_info("7"))
    other.join()

asyncio.run(main())
"""
    assert project.run("-c", SETUP + program).splitlines() == ["None", "None"]


def test_what_the_page_says_of_locks_across_await(project):
    """`locked` belongs to its thread, in a dependency too; a lock that the code around holds is a conflict."""
    program = """
async def main():
    block = locked("stock:8", block_for=0)
    await run_sync(block.__enter__)
    try:
        block.__exit__(None, None, None)
    except LockError:
        print("LockError")
    of_no_thread = Lock(server_of(celery_app).client, "report", timeout=30, renew=True, thread_local=False)
    async with held(of_no_thread):
        print(of_no_thread.state)
    async with held(reserve.lock_for("7")):
        try:
            with locked("stock:7"): ...
        except LockConfigError as error:
            print("LockConfigError", "waiting for it here would block the asyncio event loop" in str(error))
        try:
            with locked("stock:7", block_for=0): ...
        except LockConflict:
            print("LockConflict")

asyncio.run(main())

def with_stock(sku: str):
    with reserve.lock_for(sku) as lock:
        yield lock

@api.post("/depends/{sku}")
async def depends(sku: str, lock=Depends(with_stock)):
    await anyio.sleep(0.01)
    return {"counted": sku, "state": lock.state}

print(asyncio.run(post(*["/depends/9"] * 6)) == [(200, {"counted": "9", "state": "held"})] * 6, reserve.lock_info("9"))
"""
    assert project.run("-c", SETUP + program).splitlines() == [
        "LockError",
        "held",
        "LockConfigError True",
        "LockConflict",
        "True None",
    ]


def test_the_tests_of_the_page_pass_and_a_check_finds_nothing(project):
    project.env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    of_starlette = "ignore:Using `httpx` with `starlette.testclient` is deprecated"
    assert "4 passed" in project.run("-m", "pytest", "-p", "no:cacheprovider", "-W", of_starlette, "test_api.py")
    assert project.run("-m", "celery_redislock", "-A", "shop", "check") == ""


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('lock_scope="job"', 'lock_scop="job"', "shop.daily_report: lock_scop is not known; did you mean lock_scope?"),
        ('lock_scope="job"', 'lock_scope="jobs"', "shop.daily_report: lock_scope = 'jobs' is not allowed"),
        ("stock:{sku}", "stock:{article}", "shop.reserve: lock_key names 'article', which is not a parameter"),
    ],
)
def test_a_mistake_is_reported_before_anything_runs(project, right, wrong, said):
    file = project.folder / "shop.py"
    file.write_text(file.read_text().replace(right, wrong))
    command = [sys.executable, "-m", "celery_redislock", "-A", "shop", "check", "--offline"]
    done = subprocess.run(command, cwd=project.folder, env=project.env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"error: {said}" in done.stdout
