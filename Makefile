# Each target sets up .venv by itself; it needs Python 3.11 or newer and make, `oldest` Python 3.11, `versions` each Python of noxfile.py.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: demo test proof compat topologies coverage oldest versions matrix twins wheel check contracts house docs chaos mutants format bench bench-full clean

# These run in every pool too, and are part of make compat.
IN_POOLS := $(patsubst %,tests/acceptance/test_%.py,line_pools line_rate_limit line_quorum)

# Of these, make matrix runs every pool on every broker, or what else is only like another case; make test has a case of each.
PRODUCTS := $(patsubst %,tests/acceptance/test_%.py,handover line_backlog one_job deaths jobs_that_never_start limits_ways_out \
	worker_start complaints lost_locks migrating)

# What make coverage runs: the model is no part of the package, and takes minutes where each line is noted.
MEASURED := $(addprefix tests/,unit integration acceptance packaging compatibility frameworks topologies)

# Of make chaos and make twins, in all; SEED=7 repeats a run, BROKER is redis, rabbitmq or both, LOCKS one or cluster.
# With CROWD=5000 so many messages wait for one key at the end of make chaos.
SECONDS ?= 60
BROKER ?= both
LOCKS ?= one

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## Run the example app on a server of its own
	@$(BIN)/python -m example_worker

test: $(STAMP)  ## The tests on real servers and workers, but for those of make compat, topologies and twins
	@$(BIN)/python -m pytest -n 5 --dist loadfile $(IN_POOLS:%=--ignore=%)  # they mostly wait for servers and workers

proof: $(STAMP)  ## The properties of tests/properties with ten times as many steps, other ones each time; SEED=7 repeats them
	@PROPERTIES=proof SEED=$(or $(SEED),$(shell date +%s)) $(BIN)/python -m pytest -n 3 --dist worksteal tests/properties

topologies: $(STAMP)  ## What is different where the lock server is a Cluster, or is behind Sentinels
	@$(BIN)/python -m pytest -n 3 --dist loadfile tests/topologies

compat: $(STAMP)  ## About ten tests for each pool, and for each small broker: docs/compatibility.md; and with frameworks
	@$(BIN)/python -m pytest -n 3 tests/compatibility tests/frameworks $(IN_POOLS)

coverage: $(STAMP)  ## Branch coverage of all these tests, in workers' processes too, and what they miss: an hour and more
	@rm -f .coverage .coverage.*
	-@$(BIN)/python -m coverage run -m pytest -n 3 --dist loadfile $(MEASURED)  # a failure spoils no report
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report

oldest: $(STAMP)  ## The tests of make test but the slow ones, with the oldest supported Python, Celery, kombu and redis-py
	@$(BIN)/python -m nox --reuse-venv yes --session 'tests(oldest-3.11)'

versions: $(STAMP)  ## The same with each Python and with what lies between oldest and newest; it needs each of the Pythons
	@$(BIN)/python -m nox

matrix: $(STAMP)  ## Every pool on every broker; the acceptance tests without wake-ups, and with each lock server: hours
	@LAB_EVERY_BROKER=1 $(BIN)/python -m pytest -n 3 tests/compatibility $(PRODUCTS)
	@LAB_DROPS_PUBLISH=1 $(BIN)/python -m pytest -n 3 --dist loadfile tests/acceptance
	@LAB_LOCKS=cluster $(BIN)/python -m pytest -n 3 --dist loadfile tests/acceptance
	@LAB_LOCKS=sentinel $(BIN)/python -m pytest -n 3 --dist loadfile tests/acceptance
	@LAB_LOCKS=acl $(BIN)/python -m pytest -n 3 --dist loadfile tests/acceptance
	@LAB_LOCKS=tls $(BIN)/python -m pytest -n 3 --dist loadfile tests/acceptance

twins: $(STAMP)  ## Twenty random workflows beside plain twins; with SECONDS=3600 others for so long, from SEED=7 on, also with BROKER=rabbitmq
ifeq ($(origin SECONDS),command line)
	@$(BIN)/python -m tests.twins --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) --broker $(BROKER:both=redis)
else
	@$(BIN)/python -m pytest tests/twins
endif

wheel: $(STAMP)  ## Install the wheel alone, as a user does, with the oldest and the newest versions, and try it
	@$(BIN)/python -m pytest -n 2 -m network tests/packaging

check: $(STAMP)  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

contracts: $(STAMP)  ## What the ports need of Celery, kombu, billiard and redis-py, with their newest releases and pre-releases
	@$(BIN)/python -m nox --session contracts

house: $(STAMP)  ## How large the package is, how deep its imports go, and where it reaches into other packages
	@$(BIN)/python -m tests.house

docs: $(STAMP)  ## The site of docs/, in docs/_build; a warning or a dead link is an error
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@$(BIN)/python docs/write_options.py
	@rm -rf docs/_build/html  # an older site may have the page that a dead link leads to
	@$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build/html
	@$(BIN)/python docs/check_links.py docs/_build/html
	@echo "open docs/_build/html/index.html"

chaos: $(STAMP)  ## Random faults under load, on both brokers, and what came of it
	@$(BIN)/python -m chaos --seconds $(SECONDS) --broker $(BROKER) --locks $(LOCKS) $(if $(SEED),--seed $(SEED)) $(if $(CROWD),--crowd $(CROWD))

mutants: $(STAMP)  ## Each mistake of mutants/ in a copy of the code: the test that is named for it must fail
	@$(BIN)/python -m mutants --table
	@$(BIN)/python -m mutants

format: $(STAMP)
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: $(STAMP)  ## The figures that have a bound, in five minutes, side by side with bare calls and others
	@$(BIN)/python -m benchmarks

bench-full: $(STAMP)  ## Everything, in less than an hour on an idle machine; writes docs/benchmarks.md and its plots
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@$(BIN)/python -m benchmarks --full

clean:
	rm -rf $(VENV) .coverage .coverage.* .nox dist build docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
