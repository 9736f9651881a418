"""How many steps the properties are tried for: `make test` sends 1,000 commands, `make proof` 10,000.

Half of the steps send a command; in the others time passes, a key is stolen, or there is nothing to do.
"""

from __future__ import annotations

import os
import random

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

#: A state machine is started so many times, and takes this many steps each time.
STEPS_EACH = 25
_PLAIN = settings(
    stateful_step_count=STEPS_EACH,
    deadline=None,  # the machine may be busy
    print_blob=True,
    database=None,  # a failure is repeated by its blob; nothing is left in the checkout
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
#: In seconds: a failure is made smaller for some minutes before it is shown.
TIME_LIMIT = 1800
#: `make test` takes the same steps each time, as `make chaos SEED=1` in `.ci/run` strikes with the same faults: a
#: change is judged by what it changes, not by luck. `make proof` takes other steps each time: it is for who looks for
#: luck, and it prints the blob that repeats a failure.
PROFILES = {
    "check": settings(_PLAIN, max_examples=80, derandomize=True, phases=(Phase.explicit, Phase.generate, Phase.shrink)),
    "proof": settings(_PLAIN, max_examples=800),
}
_NAME = os.environ.get("PROPERTIES", "check")
CHOSEN = PROFILES[_NAME]


def is_proof() -> bool:
    return _NAME == "proof"


#: `make proof` takes the steps in so many tests, of which several run at a time.
PARTS = range(4 if is_proof() else 1)
#: The seed of the first part of `make proof`; each other has the next one.
SEED = int(os.environ.get("SEED") or random.randrange(1_000_000))
#: The name under which a test reports how many commands its clients have sent, and by which seed.
COMMANDS = "commands of clients"


def play(machine: type[RuleBasedStateMachine], part: int) -> int | None:
    """Take the steps of a part.

    Returns:
        The seed that makes the same steps again, as far as a real server answers the same; None where they are always
        the same.
    """
    number = SEED + part if is_proof() else None
    chosen = settings(CHOSEN, max_examples=CHOSEN.max_examples // len(PARTS))
    run_state_machine_as_test(machine if number is None else seed(number)(machine), settings=chosen)
    return number
