"""docs/fastapi.md: its endpoints, called in an event loop as a server calls them, and with a worker; its own tests."""

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
import storage
import httpx
from api import api
from celery_redislock import LockConfigError, LockConflict, locked
from celery_redislock.testing import busy
from fastapi import Depends
from shop import celery_app, daily_report, reserve

class Client(httpx.AsyncClient):
    def __init__(self):
        super().__init__(transport=httpx.ASGITransport(api), base_url="http://shop", timeout=30)

async def call(*requests):
    async with api.router.lifespan_context(api), Client() as http:
        return await asyncio.gather(*[http.request(method, path, json=body) for method, path, body in requests])

def text(method, path, body=None):
    (answer,) = asyncio.run(call((method, path, body)))
    return answer.text
"""


def test_the_requests_of_the_page_get_the_answers_that_it_shows(project):
    """The ids and the host differ from one try to the next: here they are numbered."""
    page = (ROOT / "docs" / PAGE).read_text()
    pattern = r"^\$ curl (?:-X (\w+) )?localhost:8000(\S+)(?: --json '(.*)')?\n(.*)$"
    shown = [
        (method or "GET", path, body or "null", answer)
        for method, path, body, answer in re.findall(pattern, page, re.MULTILINE)
    ]
    reports, (_, of_job, *_, stored), stock = shown[:2], shown[2], shown[3:]
    assert (len(reports), len(stock)) == (2, 2)
    said = project.run("-c", f"{SETUP}\nimport json\nfor way, path, body, _ in {reports}: print(text(way, path))")
    assert numbered(said) == numbered("".join(f"{answer}\n" for *_, answer in reports))
    project.start_worker("shop")
    job = re.search(r"[0-9a-f-]{36}", said)[0]
    ask = f"celery_app.AsyncResult({job!r}).get(timeout=20); print(text('GET', '/jobs/{job}'))"
    assert of_job.startswith("/jobs/")
    assert project.run("-c", f"{SETUP}\n{ask}") == f"{stored}\n"
    program = f"""
import json
with busy(reserve.lock_for("7")):
    for way, path, body, _ in {stock}: print(text(way, path, json.loads(body)))
"""
    assert numbered(project.run("-c", SETUP + program)) == numbered("".join(f"{answer}\n" for *_, answer in stock))


def numbered(text):
    found = dict.fromkeys(
        re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<=outside tasks on )[\w.-]+", text)
    )
    for number, name in enumerate(found):
        text = text.replace(name, f"<{number}>")
    return text


def test_orders_and_counts_of_one_shelf_exclude_each_other_in_a_worker_and_a_server(project):
    """Each order takes one from the shelf, and each count finds what the orders before it have left."""
    project.start_worker("shop")
    program = """
async def main():
    await call(("PUT", "/stock/7", {"stock": 20}))
    order, count = ("POST", "/orders", {"sku": "7", "quantity": 1}), ("PUT", "/stock/7", {"stock": 20})
    answers = await call(*[order, count] * 10)
    missing = sum(answer.json()["missing"] for answer in answers[1::2])
    await asyncio.gather(*[ended(answer.json()["id"]) for answer in answers[::2]])
    (left,) = await call(("GET", "/stock/7", None))
    print(20 - left.json()["stock"] - missing)

async def ended(id):
    await asyncio.to_thread(celery_app.AsyncResult(id).get, timeout=20)

asyncio.run(main())
"""
    assert project.run("-c", SETUP + program) == "10\n"


def test_requests_wait_for_each_other_while_the_event_loop_goes_on(project):
    program = """
async def main():
    ticks = 0
    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1
    meanwhile = asyncio.create_task(tick())
    answers = await call(*[("PUT", "/stock/7", {"stock": 3})] * 8)
    meanwhile.cancel()
    return sorted(answer.json()["missing"] for answer in answers), ticks >= 10

print(*asyncio.run(main()), reserve.lock_info("7"))
"""
    assert project.run("-c", SETUP + program) == "[-3, 0, 0, 0, 0, 0, 0, 0] True None\n"


def test_a_request_that_is_cancelled_gives_its_key_back(project):
    program = """
async def main():
    async with Client() as http:
        with busy(reserve.lock_for("7")):
            waits = asyncio.create_task(http.put("/stock/7", json={"stock": 3}))
            while not (await reserve.alock_info("7")).waiting_processes: pass
            waits.cancel()
            await asyncio.wait([waits])
            while (await reserve.alock_info("7")).waiting_processes: pass
    print(waits.cancelled(), await reserve.alock_info("7"))

asyncio.run(main())
"""
    assert project.run("-c", SETUP + program) == "True None\n"


def test_what_the_page_says_of_re_entry_and_of_dependencies(project):
    """A view may take its key again; a coroutine that it starts may not; locks for threads say what to use instead."""
    program = """
async def main():
    async with reserve.alock_for("7"), reserve.alock_for("7") as lock:
        lock.check()
        await asyncio.create_task(other())

async def other():
    try:
        with locked("stock:7"): ...
    except LockConfigError as error:
        print("use celery_redislock.asyncio or the task's alock_for()" in str(error))
    try:
        with locked("stock:7", block_for=0): ...
    except LockConflict:
        print("LockConflict")

asyncio.run(main())

async def shelf(sku: str):
    async with reserve.alock_for(sku) as lock:
        yield lock

@api.post("/depends/{sku}")
async def depends(sku: str, lock=Depends(shelf)):
    await asyncio.sleep(0.01)
    return lock.state

@api.post("/blocks/{sku}")
def blocks(sku: str):
    with reserve.lock_for(sku) as lock:
        return lock.state

answers = asyncio.run(call(*[("POST", "/depends/9", None), ("POST", "/blocks/9", None)] * 4))
print({answer.json() for answer in answers}, reserve.lock_info("9"))
"""
    assert project.run("-c", SETUP + program).splitlines() == ["True", "LockConflict", "{'held'} None"]


def test_a_lock_server_that_is_down_is_an_answer(project):
    project.env["REDIS_URL"] = "redis://127.0.0.1:1/0"
    program = """
async def main():
    async with Client() as http:
        answer = await http.put("/stock/7", json={"stock": 3})
        print(answer.status_code, answer.headers["Retry-After"])

asyncio.run(main())
"""
    assert project.run("-c", SETUP + program) == "503 5\n"


def test_the_tests_of_the_page_pass_and_a_check_finds_nothing(project):
    env = {**project.env, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "REDIS_URL": "redis://nowhere.invalid:6379/0"}
    project.env, with_a_server = env, project.env
    assert "6 passed" in project.run("-m", "pytest", "-p", "anyio", "-p", "no:cacheprovider", "test_api.py")
    project.env = with_a_server
    assert project.run("-m", "celery_redislock", "-A", "shop", "check") == ""


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('lock_scope="job"', 'lock_scop="job"', "shop.daily_report: lock_scop is not known; did you mean lock_scope?"),
        ('lock_scope="job"', 'lock_scope="jobs"', "shop.daily_report: lock_scope = 'jobs' is not allowed"),
        (
            "stock:{sku}",
            "stock:{article}",
            "shop.reserve: lock_key names 'article', which is not one of its parameters",
        ),
    ],
)
def test_a_mistake_is_reported_before_anything_runs(project, right, wrong, said):
    file = project.folder / "shop.py"
    file.write_text(file.read_text().replace(right, wrong))
    command = [sys.executable, "-m", "celery_redislock", "-A", "shop", "check", "--offline"]
    done = subprocess.run(command, cwd=project.folder, env=project.env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"error: {said}" in done.stdout
