"""Task options and settings: defaults, precedence and checks."""

from __future__ import annotations

import math
import re
from ast import AnnAssign, ClassDef, Expr, parse
from inspect import getsource
from typing import Any

import pytest

from celery_redislock.app import check_lease
from celery_redislock.errors import LockConfigError
from celery_redislock.options import (
    ATTRIBUTES,
    CONFLICT_POLICIES,
    KEY_OPTIONS,
    OPTIONS,
    PER_CALL,
    SETTINGS,
    Also,
    LockOptions,
    LockSettings,
    allowed_of_call,
    check_limit,
    check_of_call,
    may_have_several,
    resolve_options,
    resolve_settings,
    shares_of,
)
from celery_redislock.task.plan import LockAttributes

from .wire import SECRET

#: Options with which those of merged calls are allowed.
MERGING: dict[str, Any] = {"scope": "queue", "args": ["sku"], "arguments": "latest"}
DURATIONS = ["lease", "max_hold", "wait_for", "queue_ttl"]
NO_DURATIONS = [0, 0.0, -1, math.nan, math.inf, -math.inf, "10", True, [10]]


def options(own: dict[str, Any] | None = None, **app_wide: Any) -> LockOptions:
    return resolve_options("shop.bill", own or {}, app_wide)


def refusal(own: dict[str, Any] | None = None, **app_wide: Any) -> str:
    """The message that refuses these options of the task ``shop.bill``."""
    with pytest.raises(LockConfigError) as refused:
        options(own, **app_wide)
    message = str(refused.value)
    assert message.startswith("shop.bill: ")
    return message


def setting_refusal(**app_wide: Any) -> str:
    with pytest.raises(LockConfigError) as refused:
        resolve_settings(app_wide)
    return str(refused.value)


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert options() == LockOptions(
        args=None,
        key=None,
        also=(),
        fair=None,
        weight=1,
        scope="run",
        on_conflict="skip",
        lease=30.0,
        max_hold=None,
        wait_for=None,
        block_for=10.0,
        hold_on_retry=False,
        cooldown=0.0,
        window=None,
        arguments="first",
        debounce=None,
        debounce_max=None,
        queue_ttl=3600.0,
        on_lost="warn",
        on_outage="retry",
        fence=False,
        limit=1,
        rate=None,
    )
    assert vars(resolve_settings({})) == {
        "url": None,
        "client_options": {},
        "prefix": "redislock",
        "enabled": True,
        "waiting_limit": 20_000,
    }
    assert LockSettings.__annotations__.keys() == SETTINGS.keys()


@pytest.mark.parametrize(
    ("own", "policy"),
    [
        ({}, "skip"),
        ({"args": None}, "skip"),
        ({"args": ["a"]}, "wait"),
        ({"args": ()}, "wait"),
        ({"key": "stock:{a}"}, "wait"),
        ({"key": str}, "wait"),
        ({"args": ["a"], "on_conflict": "skip"}, "skip"),
        ({"on_conflict": "wait"}, "wait"),
    ],
    ids=str,
)
def test_the_default_policy_skips_the_same_work_and_lets_other_work_wait(own: dict[str, Any], policy: str) -> None:
    assert options(own).on_conflict == policy


def test_the_task_comes_before_the_app_and_the_app_before_the_default() -> None:
    resolved = options({"lease": 12}, lease=60, block_for=5)
    assert (resolved.lease, resolved.block_for, resolved.queue_ttl) == (12, 5, 3600.0)


@pytest.mark.parametrize("name", ["max_hold", "wait_for"])
def test_none_on_the_task_is_a_value_and_not_unset(name: str) -> None:
    assert getattr(options({name: None}, **{name: 60}), name) is None
    assert getattr(options(**{name: 60}), name) == 60


def test_none_as_the_tasks_policy_is_the_default_by_key_whatever_the_app_says() -> None:
    assert options({"on_conflict": None}, on_conflict="wait").on_conflict == "skip"


@pytest.mark.parametrize("given", [["a", "b"], ("a", "b")])
def test_lock_args_become_a_tuple(given: Any) -> None:
    assert options({"args": given}).args == ("a", "b")


@pytest.mark.parametrize("value", NO_DURATIONS, ids=repr)
@pytest.mark.parametrize("name", DURATIONS)
def test_what_is_no_duration_is_refused_by_task_option_and_what_is_allowed(name: str, value: Any) -> None:
    message = refusal({name: value})
    assert message.startswith(f"shop.bill: lock_{name} = ")
    assert "allowed: seconds greater than 0" in message


def test_a_duration_beyond_all_floats_is_refused() -> None:
    assert "allowed: seconds greater than 0" in refusal({"lease": 10**400})


@pytest.mark.parametrize("value", [1, 0.5, 86400])
@pytest.mark.parametrize("name", DURATIONS)
def test_a_duration_is_any_number_of_seconds(name: str, value: float) -> None:
    assert getattr(options({name: value}), name) == value


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("on_conflict", "skipp", "'skip', 'wait', 'raise', 'join' or 'replace'; did you mean 'skip'?"),
        ("on_conflict", "wai", "'skip', 'wait', 'raise', 'join' or 'replace'; did you mean 'wait'?"),
        ("on_conflict", "retry", "'skip', 'wait', 'raise', 'join' or 'replace'"),
        ("on_conflict", ["skip"], "'skip', 'wait', 'raise', 'join' or 'replace'"),
        ("on_outage", "rais", "'retry' or 'raise' or 'run'; did you mean 'raise'?"),
        ("on_outage", None, "'retry' or 'raise' or 'run'"),
        ("args", "account", "a list or tuple of parameter names, or None for all"),
        ("args", [1], "a list or tuple of parameter names, or None for all"),
        ("args", 1, "a list or tuple of parameter names, or None for all"),
        ("key", 7, "a template, a list of templates, a callable, or None"),
        ("fence", 0, "True or False"),
        ("fence", "no", "True or False"),
        ("hold_on_retry", None, "True or False"),
        ("scope", "jobs", "'run' or 'job' or 'queue'; did you mean 'job'?"),
        ("scope", None, "'run' or 'job' or 'queue'"),
        ("arguments", "lates", "'first' or 'latest' or 'all'; did you mean 'latest'?"),
        ("arguments", None, "'first' or 'latest' or 'all'"),
        ("debounce", 0, "seconds greater than 0"),
        ("debounce_max", "60", "seconds greater than 0"),
        ("cooldown", -1, "seconds, 0 or greater"),
        ("cooldown", False, "seconds, 0 or greater"),
        ("cooldown", None, "seconds, 0 or greater"),
        ("block_for", -1, "seconds, 0 or greater"),
        ("block_for", None, "seconds, 0 or greater"),
        ("queue_ttl", 0, "seconds greater than 0"),
        ("lease", None, "seconds greater than 0"),
    ],
    ids=repr,
)
def test_a_wrong_value_is_refused_with_what_is_allowed(option: str, value: Any, allowed: str) -> None:
    message = refusal({option: value})
    assert message.startswith(f"shop.bill: lock_{option} = {value!r} is not allowed; allowed: {allowed}")


@pytest.mark.parametrize("value", [0, 0.0, 5, 2.5])
@pytest.mark.parametrize("name", ["cooldown", "block_for"])
def test_a_cooldown_and_the_time_to_block_may_be_zero(name: str, value: float) -> None:
    """Durations are seconds, int or float."""
    assert getattr(options({name: value}), name) == value


@pytest.mark.parametrize("policy", ["skip", "raise", "join"])
def test_scope_queue_refuses_a_policy_that_would_drop_the_one_that_waits(policy: str) -> None:
    message = refusal({"scope": "queue", "on_conflict": policy})
    assert message.startswith(f"shop.bill: lock_scope = 'queue' with lock_on_conflict = {policy!r} is not allowed")
    assert message.endswith("allowed: 'wait' or 'replace'")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({}, "lock_scope = 'run'|the default lock_scope = 'run'"),
        ({"scope": "job"}, "lock_scope = 'job'"),
        ({"scope": "queue"}, "the default lock_arguments = 'first'"),
        ({"scope": "queue", "arguments": "all"}, "lock_arguments = 'all'"),
    ],
)
def test_replace_is_refused_where_no_call_is_the_newest(given: dict[str, Any], what: str) -> None:
    message = refusal({"on_conflict": "replace", "args": ["a"], **given})
    assert re.search(rf"lock_on_conflict = 'replace' is not allowed with ({what}): set lock_scope='queue'", message)


@pytest.mark.parametrize("key", [{}, {"args": ("a",)}, {"key": "stock:{a}"}], ids=str)
def test_the_policy_of_scope_queue_is_wait(key: dict[str, Any]) -> None:
    assert options({"scope": "queue", **key}).on_conflict == "wait"
    assert options({"scope": "queue", "on_conflict": "wait", **key}).on_conflict == "wait"


@pytest.mark.parametrize(
    ("name", "meant"), [("leas", "lock_lease"), ("on_conflicts", "lock_on_conflict"), ("arg", "lock_args")]
)
def test_a_misspelled_option_is_refused_with_the_nearest_name(name: str, meant: str) -> None:
    assert refusal({name: 5}) == f"shop.bill: lock_{name} is not known; did you mean {meant}?"


@pytest.mark.parametrize("name", ["timeout", "ttl", "expire", "expires"])
def test_a_name_for_a_duration_is_refused_with_the_two_that_there_are(name: str) -> None:
    meant = "lease, how long the lock outlives a dead holder, or {}max_hold, the longest that a run may hold it?"
    assert refusal({name: 5}) == f"shop.bill: lock_{name} is not known; did you mean lock_{meant.format('lock_')}"
    told = f"redislock_{name} is not known; did you mean redislock_{meant.format('redislock_')}"
    assert setting_refusal(**{name: 5}) == told


def test_an_option_like_no_other_is_refused_with_all_names() -> None:
    message = refusal({"xyzzy": 5})
    assert message.startswith("shop.bill: lock_xyzzy is not known; known: lock_args, lock_key, ")
    assert "lock_on_outage" in message


def test_an_option_named_as_a_setting_of_the_app_alone_is_refused_on_a_task() -> None:
    assert "lock_prefix is not known" in refusal({"prefix": "x"})


def test_what_is_refused_is_named_as_it_was_set() -> None:
    """On the task or for the app."""
    said = "redislock_scope = 'queue' with lock_on_conflict = 'skip' is not allowed"
    assert refusal({"on_conflict": "skip"}, scope="queue").startswith(f"shop.bill: {said}")
    said = "lock_scope = 'queue' with redislock_on_conflict = 'join' is not allowed"
    assert refusal({"scope": "queue"}, on_conflict="join").startswith(f"shop.bill: {said}")


@pytest.mark.parametrize(("lease", "command_time"), [(4.5, 3.0), (30.0, 3.0), (30.0, 20.0), (3.3, 2.2)])
def test_a_lease_with_room_for_a_failed_renewal_and_another_is_allowed(lease: float, command_time: float) -> None:
    check_lease("shop.bill", "lock_lease", lease, command_time)


@pytest.mark.parametrize(("lease", "command_time"), [(4.4, 3.0), (3.0, 3.0), (30.0, 20.1), (30.0, 60.0)])
def test_a_lease_that_the_worst_command_time_could_outlast_is_refused(lease: float, command_time: float) -> None:
    with pytest.raises(LockConfigError) as refused:
        check_lease("shop.bill", "redislock_lease", lease, command_time)
    message = str(refused.value)
    assert message.startswith(f"shop.bill: redislock_lease = {lease} is too short")
    assert f"at least {command_time * 1.5:g}" in message
    assert "redislock_client_options" in message


def test_a_misspelled_setting_is_refused_with_the_nearest_name() -> None:
    assert setting_refusal(leas=5) == "redislock_leas is not known; did you mean redislock_lease?"
    assert setting_refusal(urll="x") == "redislock_urll is not known; did you mean redislock_url?"


@pytest.mark.parametrize("name", ["args", "key"])
def test_the_options_that_make_the_key_are_no_settings(name: str) -> None:
    assert setting_refusal(**{name: None}) == f"redislock_{name} is not a setting: set lock_{name} on the task"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("enabled", 1, "True or False"),
        ("enabled", "true", "True or False"),
        ("enabled", None, "True or False"),
        ("prefix", "", "text without braces"),
        ("prefix", "a{b}", "text without braces"),
        ("prefix", None, "text without braces"),
        ("prefix", b"redislock", "text without braces"),
        ("lease", "30", "seconds greater than 0"),
        ("on_conflict", "skipp", "'skip', 'wait', 'raise', 'join' or 'replace'; did you mean 'skip'?"),
        ("waiting_limit", -1, "a whole number, 0 or greater"),
        ("waiting_limit", 1000.0, "a whole number, 0 or greater"),
        ("waiting_limit", True, "a whole number, 0 or greater"),
        ("waiting_limit", "1000", "a whole number, 0 or greater"),
        ("waiting_limit", None, "a whole number, 0 or greater"),
    ],
    ids=repr,
)
def test_a_wrong_setting_is_refused_with_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    assert setting_refusal(**{name: value}).startswith(
        f"redislock_{name} = {value!r} is not allowed; allowed: {allowed}"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("url", 7),
        ("url", ""),
        ("url", [f"redis://:{SECRET}@host"]),
        ("client_options", f"redis://:{SECRET}@host"),
        ("client_options", [("password", SECRET)]),
    ],
)
def test_a_setting_that_may_hold_a_password_is_refused_without_its_value(name: str, value: Any) -> None:
    message = setting_refusal(**{name: value})
    assert message.startswith(f"redislock_{name} = (a {type(value).__name__}, not shown) is not allowed; allowed: a ")
    assert SECRET not in message


@pytest.mark.parametrize("scope", ["run", "queue"])
def test_a_window_is_for_jobs(scope: str) -> None:
    assert refusal({"window": 60, "scope": scope}) == (
        f"shop.bill: lock_window = 60 is not allowed with lock_scope = {scope!r}: it limits how often a job is sent; "
        "allowed: 'job'"
    )


def test_a_window_is_not_shorter_than_the_lease() -> None:
    message = refusal({"window": 29.5, "scope": "job"})
    assert message.endswith(
        "lock_window = 29.5 is not allowed with the default lock_lease = 30: a window must be at "
        "least as long as the lease"
    )
    assert resolve_options("shop.bill", {"window": 30, "scope": "job"}, {}).window == 30


@pytest.mark.parametrize("value", [0, -1, "60", True, math.inf, math.nan])
def test_a_window_is_a_number_of_seconds(value: Any) -> None:
    assert "seconds greater than 0" in refusal({"window": value, "scope": "job"})


MERGES: dict[str, Any] = {"args": ["a"], "scope": "queue", "arguments": "latest"}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {**MERGES, "scope": "job"},
            (
                "lock_arguments = 'latest' is not allowed with lock_scope = 'job', where no message waits that "
                "calls could join; allowed: 'queue'"
            ),
        ),
        (
            {"arguments": "all"},
            (
                "lock_arguments = 'all' is not allowed with the default lock_scope = 'run', where no message "
                "waits that calls could join; allowed: 'queue'"
            ),
        ),
        (
            {**MERGES, "hold_on_retry": True},
            (
                "lock_arguments = 'latest' is not allowed with lock_hold_on_retry: a retry takes the queue slot,"
                " not the key"
            ),
        ),
        (
            {**MERGES, "args": None},
            (
                "lock_arguments = 'latest' is not allowed with a key of all arguments: only equal calls would be"
                " merged; set lock_args or lock_key"
            ),
        ),
        (
            {"scope": "queue", "debounce": 5},
            (
                "lock_debounce = 5 is not allowed with the default lock_arguments = 'first', where a later call "
                "does not change the message that waits; allowed: 'latest' or 'all'"
            ),
        ),
        (
            {**MERGES, "debounce_max": 60},
            (
                "lock_debounce_max = 60 is not allowed without a debounce: it limits how long new calls can put "
                "a run off; set lock_debounce"
            ),
        ),
        (
            {**MERGES, "debounce": 5, "debounce_max": 4.5},
            (
                "lock_debounce_max = 4.5 is not allowed with lock_debounce = 5: the maximum must be at least as "
                "long as the debounce"
            ),
        ),
    ],
    ids=repr,
)
def test_calls_are_merged_only_where_a_message_waits_that_they_can_change(own: dict[str, Any], message: str) -> None:
    assert refusal(own) == f"shop.bill: {message}"


@pytest.mark.parametrize("key", [{"args": ()}, {"args": ["a"]}, {"args": None, "key": "shop:{a}"}], ids=repr)
def test_calls_are_merged_with_a_key_of_some_arguments(key: dict[str, Any]) -> None:
    resolved = options({**MERGES, **key, "debounce": 5, "debounce_max": 5})
    assert (resolved.arguments, resolved.debounce, resolved.debounce_max) == ("latest", 5, 5)
    assert resolved.on_conflict == "wait"


def test_settings_of_the_app_are_taken_as_they_are() -> None:
    given: dict[str, Any] = {"url": "redis://h", "client_options": {"db": 1}, "prefix": "shop", "enabled": False}
    given["waiting_limit"] = 0
    assert vars(resolve_settings({**given, "lease": 12})) == given


def test_a_long_value_is_shortened_in_the_message() -> None:
    assert len(refusal({"lease": "x" * 10_000})) < 300


# Options of a call.


@pytest.mark.parametrize("name", [*KEY_OPTIONS, *OPTIONS])
def test_a_call_may_set_some_options_and_the_refusal_of_the_others_names_these(name: str) -> None:
    default = {**KEY_OPTIONS, **OPTIONS}[name].default
    if name in PER_CALL:
        check_of_call("shop.bill", name, default)
        return
    with pytest.raises(LockConfigError) as refused:
        check_of_call("shop.bill", name, default)
    message = str(refused.value)
    assert message.startswith(
        f"shop.bill: lock_{name} is an option of the task, not of a call: set it in the decorator"
    )
    assert all(f"lock_{one}" in message.partition("a call may set ")[2] for one in PER_CALL)


@pytest.mark.parametrize(("name", "hint"), [("scop", "did you mean lock_scope?"), ("ttl", "did you mean lock_lease")])
def test_a_misspelt_option_of_a_call_is_refused(name: str, hint: str) -> None:
    with pytest.raises(LockConfigError, match=re.escape(hint)) as refused:
        check_of_call("shop.bill", name, 1)
    assert str(refused.value).endswith(
        "; a call may set lock_scope, lock_on_conflict, lock_wait_for, lock_cooldown or lock_window"
    )


def test_the_name_of_an_option_of_a_call_cannot_forge_or_flood_the_log() -> None:
    with pytest.raises(LockConfigError) as refused:
        check_of_call("shop.bill", "x\n" * 10_000, 1)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1500


WRONG_OF_CALLS: list[tuple[str, Any]] = [
    *(("scope", value) for value in ("jobs", "", None, 1, True, b"job", ["job"], {"job"})),
    *(("on_conflict", value) for value in ("skipp", "", 1, False, b"skip", ["skip"], {})),
    *(("wait_for", value) for value in (*NO_DURATIONS, 10**400, {}, b"1")),
    *(("cooldown", value) for value in (-1, -0.1, math.nan, math.inf, "10", True, False, None, [10], 10**400)),
]


@pytest.mark.parametrize(("name", "value"), WRONG_OF_CALLS, ids=lambda value: repr(value)[:20])
def test_a_call_refuses_the_values_that_a_task_refuses_and_a_header_passes_them_over(name: str, value: Any) -> None:
    with pytest.raises(LockConfigError, match=f"shop.bill: lock_{name} = .* is not allowed; allowed: "):
        check_of_call("shop.bill", name, value)
    with pytest.raises(LockConfigError):
        options({name: value})
    assert allowed_of_call({name: value}) is None
    other = "cooldown" if name != "cooldown" else "wait_for"
    assert allowed_of_call({name: value, other: 5}) == {other: 5}


def test_a_header_keeps_what_a_call_may_set_and_passes_over_all_else() -> None:
    assert allowed_of_call({name: OPTIONS[name].default for name in OPTIONS}).keys() == set(PER_CALL)  # type: ignore[union-attr]
    assert allowed_of_call({"lease": 5, "colour": "red", 1: 2, None: None}) is None


def described() -> dict[str, str]:
    """The attributes that type checkers and editors know, each with its description."""
    (cls,) = (node for node in parse(getsource(LockAttributes)).body if isinstance(node, ClassDef))
    pairs = zip(cls.body, [*cls.body[1:], None], strict=True)
    return {
        node.target.id: " ".join(text.value.value.split())
        for node, text in pairs
        if isinstance(node, AnnAssign) and isinstance(text, Expr)
    }


def test_every_option_is_typed_and_described_for_editors() -> None:
    assert described().keys() == LockAttributes.__annotations__.keys() == ATTRIBUTES
    assert not [name for name in vars(LockAttributes) if name.startswith("lock_")]  # it sets nothing


def test_the_descriptions_have_the_defaults() -> None:
    texts = described()
    for name, rule in OPTIONS.items():
        default, text = rule.default, texts[f"lock_{name}"]
        if name == "on_conflict":
            assert all(f'"{policy}"' in text for policy in CONFLICT_POLICIES)
        elif isinstance(default, str):
            assert re.search(rf'``"{default}"``[^"]*the default', text)
        else:
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            assert f"{shown} by default" in text or f"{shown}, the default" in text


@pytest.mark.parametrize("arguments", ["latest", "all"])
def test_merged_calls_may_be_debounced(arguments: str) -> None:
    own = {**MERGING, "arguments": arguments, "debounce": 5, "debounce_max": 5}
    resolved = options(own)
    assert (resolved.arguments, resolved.debounce, resolved.debounce_max) == (arguments, 5, 5)
    assert options({**own, "debounce": None, "debounce_max": None}).debounce is None


@pytest.mark.parametrize("value", NO_DURATIONS, ids=repr)
@pytest.mark.parametrize("name", ["debounce", "debounce_max"])
def test_what_is_no_duration_is_no_debounce(name: str, value: Any) -> None:
    message = refusal({**MERGING, "debounce": 5, name: value})
    assert message.startswith(f"shop.bill: lock_{name} = ")
    assert "allowed: seconds greater than 0" in message


@pytest.mark.parametrize("value", [None, "", "last", "Latest", 1, True, ["latest"], b"latest"])
def test_other_arguments_than_the_first_the_latest_or_all_are_refused(value: Any) -> None:
    assert "'first'" in refusal({**MERGING, "arguments": value})


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"scope": "run"}, "'queue'"),
        ({"scope": "job"}, "'queue'"),
        ({"args": None}, "set lock_args"),
        ({"hold_on_retry": True}, "lock_hold_on_retry"),
        ({"limit": 2}, "lock_limit"),
        ({"window": 60}, "lock_window"),
        ({"on_conflict": "skip"}, "lock_on_conflict"),
        ({"on_conflict": "join"}, "lock_on_conflict"),
        ({"debounce_max": 5}, "lock_debounce"),
        ({"debounce": 5, "debounce_max": 4.9}, "lock_debounce"),
        ({"arguments": "first", "debounce": 5}, "lock_arguments"),
        ({"arguments": "first", "debounce_max": 5}, "lock_debounce"),
    ],
    ids=str,
)
def test_what_cannot_go_with_merged_calls_is_refused(own: dict[str, Any], told: str) -> None:
    assert told in refusal({**MERGING, **own})


@pytest.mark.parametrize("name", ["arguments", "debounce", "debounce_max"])
def test_a_refusal_of_merged_calls_names_the_setting_where_the_app_has_set_it(name: str) -> None:
    values = {"arguments": "latest", "debounce": 5.0, "debounce_max": 4.0}
    assert f"redislock_{name}" in refusal({"scope": "run" if name == "arguments" else "queue"}, **{name: values[name]})


RATED: dict[str, Any] = {"args": (), "rate": "100/m"}


@pytest.mark.parametrize(
    ("rate", "shares"),
    [
        ("100/m", (50, 60.0, 100)),
        ("5/h", (5, 3600.0, 5)),
        ("1/s", (1, 1.0, 1)),
        ("51/s", (50, 1.0, 51)),
        ((90, 10), (50, 10.0, 90)),
        ([1, 0.0015], (1, 0.002, 1)),
        (lambda arguments: "1/s", None),
    ],
)
def test_a_rate_is_kept_by_at_most_fifty_permits(rate: Any, shares: Any) -> None:
    assert resolve_options("shop.bill", {**RATED, "rate": rate}, {}).rate is rate
    assert shares_of(rate) == shares


@pytest.mark.parametrize(
    "rate",
    [
        *("0/m", "x", "", "1/d", "-1/s", "1/s ", "1.5/s", "1/", "\u0661/s", "9999999999/s", 100, 100.0, True),
        {"100/m"},
        *((0, 1), (-1, 1), (1.0, 1), (True, 1), (1, 0), (1, -1), (1, True), (1, "1"), (1,), (1, 1, 1), ("1", 1)),
        *((51, 0.001), (51, 1e-6), (1, math.inf), (1, math.nan), (1, 4e7), (10**400, 1), "60000/s"),
    ],
    ids=repr,
)
def test_what_is_no_rate_is_refused(rate: Any) -> None:
    assert 'allowed: "100/m" (s, m or h), or (number, seconds)' in refusal({**RATED, "rate": rate})


@pytest.mark.parametrize(
    "other",
    [{"scope": "job"}, {"scope": "queue"}, {"limit": 2}, {"fence": True}, {"cooldown": 1}, {"hold_on_retry": True}],
    ids=str,
)
def test_a_rate_holds_nothing(other: dict[str, Any]) -> None:
    (option,) = other
    assert refusal({**RATED, **other}) == (
        f"shop.bill: lock_rate = '100/m' is not allowed with lock_{option}: it limits how often runs begin, and "
        "nothing is held while they run"
    )


def test_a_rate_has_no_run_to_join_and_needs_a_key() -> None:
    assert "lock_on_conflict = 'join': no run holds the key" in refusal({**RATED, "on_conflict": "join"})
    assert "a key of all arguments: set lock_args or lock_key" in refusal({"rate": lambda arguments: "1/s"})


FAIR = {"key": "imports", "fair": "customer"}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {**FAIR, "scope": "job"},
            (
                "lock_fair = 'customer' is not allowed with lock_scope = 'job', where only one message may wait; "
                "allowed: 'run'"
            ),
        ),
        (
            {**FAIR, "scope": "queue"},
            (
                "lock_fair = 'customer' is not allowed with lock_scope = 'queue', where only one message may wait; "
                "allowed: 'run'"
            ),
        ),
        *(
            (
                {**FAIR, "on_conflict": policy},
                (
                    f"lock_fair = 'customer' is not allowed with lock_on_conflict = '{policy}': groups take turns in "
                    "line; allowed: 'wait'"
                ),
            )
            for policy in ("skip", "raise", "join")
        ),
        (
            {**FAIR, "rate": "100/m"},
            (
                "lock_fair = 'customer' is not allowed with lock_rate: a rate has no holders that groups could take "
                "turns with"
            ),
        ),
        (
            {"key": "imports", "weight": 3},
            "lock_weight is not allowed without groups: it says how large a group's share is; set lock_fair",
        ),
    ],
    ids=repr,
)
def test_groups_take_turns_only_where_messages_wait_in_line(own: dict[str, Any], message: str) -> None:
    assert refusal(own) == f"shop.bill: {message}"


@pytest.mark.parametrize("weight", [0, 0.09, 100.1, -1, True, "3", None, float("nan"), float("inf")], ids=repr)
def test_a_weight_is_a_number_from_a_tenth_to_a_hundred(weight: Any) -> None:
    assert "allowed: a number from 0.1 to 100, or a callable" in refusal({**FAIR, "weight": weight})


@pytest.mark.parametrize("weight", [0.1, 1, 2.5, 100, len], ids=str)
def test_groups_wait_in_line_with_any_such_weight_whatever_the_limit(weight: Any) -> None:
    resolved = options({**FAIR, "weight": weight, "limit": 3})
    assert (resolved.fair, resolved.weight, resolved.on_conflict) == ("customer", weight, "wait")


@pytest.mark.parametrize("name", ["fair", "weight"])
def test_groups_are_those_of_a_task_and_not_of_an_app(name: str) -> None:
    assert setting_refusal(**{name: "a"}) == f"redislock_{name} is not a setting: set lock_{name} on the task"


# Several keys, and limits.

SEVERAL = {"key": ["stock:{a}", "shelf:{b}"]}
ALSO = {"args": ["a"], "also": [Also("farm", limit=20)]}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {**SEVERAL, "scope": "job"},
            "lock_scope = 'job' is not allowed with lock_key = a list: a publish can reserve",
        ),
        ({**ALSO, "scope": "queue"}, "lock_scope = 'queue' is not allowed with lock_also: a publish can reserve only"),
        (
            {**SEVERAL, "on_conflict": "join"},
            "lock_on_conflict = 'join' is not allowed with lock_key = a list: each key",
        ),
        ({**ALSO, "hold_on_retry": True}, "lock_hold_on_retry = True is not allowed with lock_also: a retry releases"),
        (
            {**SEVERAL, "rate": "1/s"},
            "lock_rate = '1/s' is not allowed with lock_key = a list: name the rate in lock_also",
        ),
        ({**ALSO, "rate": lambda _: "1/s"}, "lock_rate is not allowed with lock_also: name the rate in lock_also"),
        ({**SEVERAL, "fair": "a"}, "lock_fair = 'a' is not allowed with lock_key = a list: groups take turns at one"),
        ({"key": []}, "lock_key and lock_also name 0 keys; a run has from 1 to 8"),
        ({"key": ["a"] * 9}, "lock_key and lock_also name 9 keys; a run has from 1 to 8"),
        ({"key": "a", "also": [Also(f"k{n}") for n in range(8)]}, "lock_key and lock_also name 9 keys; a run has"),
        ({"key": ["a", 7]}, "lock_key = ['a', 7] is not allowed; allowed: a template, a list of templates, a callable"),
        ({"key": 7}, "lock_key = 7 is not allowed; allowed: a template, a list of templates, a callable, or None"),
        ({"also": "farm"}, "lock_also = 'farm' is not allowed; allowed: a list of Also(key, limit=...)"),
        ({"also": [Also("farm"), "api"]}, "lock_also = [Also("),
        (
            {"also": [Also("farm"), Also("")]},
            "lock_also[1].key = '' is not allowed; allowed: a template, or a callable",
        ),
        ({"also": [Also(7)]}, "lock_also[0].key = 7 is not allowed"),
        ({"also": [Also("farm", limit=0)]}, "lock_also[0].limit = 0 is not allowed; allowed: a whole number from 1"),
        ({"also": [Also("api", rate="often")]}, "lock_also[0].rate = 'often' is not allowed"),
        ({"also": [Also("api", 2, "1/s")]}, "lock_also[0]: a rate with a limit is not allowed: use an Also for each"),
        (
            {"args": ["a"], "limit": 2, "scope": "job"},
            "lock_limit = 2 is not allowed with lock_scope = 'job', where only",
        ),
        (
            {"args": ["a"], "limit": lambda _: 2, "fence": True},
            "lock_limit = a callable is not allowed with lock_fence: a",
        ),
        ({"args": ["a"], "limit": 3, "cooldown": 5}, "lock_limit = 3 is not allowed with lock_cooldown: the key would"),
        ({"limit": 2.0}, "lock_limit = 2.0 is not allowed; allowed: a whole number from 1 to 50, or a callable"),
    ],
)
def test_what_cannot_go_with_several_keys_or_holders_is_refused(own: dict[str, Any], message: str) -> None:
    assert refusal(own).startswith(f"shop.bill: {message}")


def test_eight_keys_are_allowed_and_lists_of_them_become_tuples() -> None:
    resolved = options({"key": ["a"], "also": [Also(f"k{n}", rate="1/s") for n in range(7)]})
    assert (resolved.key, len(resolved.also), type(resolved.also)) == (("a",), 7, tuple)


@pytest.mark.parametrize(
    ("own", "several"),
    [
        ({}, False),
        ({"key": "stock"}, False),
        ({"key": ["stock"]}, True),
        (ALSO, True),
        ({"key": lambda _: "stock"}, True),
        ({"key": lambda _: "stock", "scope": "job"}, False),
        ({"key": lambda _: "stock", "hold_on_retry": True}, False),
    ],
)
def test_a_run_may_have_several_keys_where_nothing_rules_them_out(own: dict[str, Any], several: bool) -> None:
    assert may_have_several(options(own)) is several


def test_a_lock_has_from_one_to_fifty_holders_and_a_fence_only_with_one() -> None:
    assert [check_limit("lock k", limit, fence=False) for limit in (1, 2, 50)] == [1, 2, 50]
    assert check_limit("lock k", 1, fence=True) == 1
    for limit in (0, 51, 2.0, True, "2", None):
        with pytest.raises(LockConfigError, match=rf"^lock k: limit = {limit!r} is not allowed; allowed: a whole"):
            check_limit("lock k", limit, fence=False)
    with pytest.raises(LockConfigError, match=r"^lock k: limit = 2 is not allowed with fence=True: several holders"):
        check_limit("lock k", 2, fence=True)


def test_a_rate_is_over_at_most_a_year_and_grants_at_most_fifty_a_millisecond() -> None:
    year = 366 * 86_400
    assert shares_of((1, year)) == (1, year, 1)
    assert shares_of((1, year + 1)) is None
    assert shares_of((50, 0.001)) == (50, 0.001, 50)
    assert shares_of((51, 0.001)) is None
    assert shares_of((100, 0.002)) == (50, 0.002, 100)
    assert shares_of((100_000, 2)) == (50, 2, 100_000)
    assert shares_of((100_001, 2)) is None
