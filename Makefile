# Each target sets up .venv by itself; it needs Python 3.11 or newer and make, `oldest` Python 3.11, `versions` each Python of noxfile.py.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: demo test compat topologies oldest versions matrix wheel check docs chaos format bench bench-full clean

# These run in every pool too, and are part of make compat.
IN_POOLS := $(patsubst %,tests/acceptance/test_%.py,line_pools line_rate_limit line_quorum)

# Of make chaos, in all; SEED=7 repeats the faults of a run, BROKER is redis, rabbitmq or both, LOCKS one or cluster.
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

test: $(STAMP)  ## The tests on real servers and workers, but for those of make compat and make topologies
	@$(BIN)/python -m pytest -n 3 --dist loadfile $(IN_POOLS:%=--ignore=%)  # they mostly wait for servers and workers

topologies: $(STAMP)  ## What is different where the lock server is a Cluster, or is behind Sentinels
	@$(BIN)/python -m pytest -n 3 --dist loadfile tests/topologies

compat: $(STAMP)  ## About ten tests for each pool, and for each small broker: docs/compatibility.md; and with frameworks
	@$(BIN)/python -m pytest -n 3 tests/compatibility tests/frameworks $(IN_POOLS)

oldest: $(STAMP)  ## The tests of make test but the slow ones, with the oldest supported Python, Celery, kombu and redis-py
	@$(BIN)/python -m nox --reuse-venv yes --session 'tests(oldest-3.11)'

versions: $(STAMP)  ## The same with each Python and with what lies between oldest and newest; it needs each of the Pythons
	@$(BIN)/python -m nox

matrix: $(STAMP)  ## Every pool on every broker; the acceptance tests without wake-ups, and on a Cluster: more than an hour
	@LAB_EVERY_BROKER=1 $(BIN)/python -m pytest -n 3 tests/compatibility
	@LAB_DROPS_PUBLISH=1 $(BIN)/python -m pytest -n 3 --dist loadfile tests/acceptance
	@LAB_LOCKS=cluster $(BIN)/python -m pytest -n 3 --dist loadfile tests/acceptance

wheel: $(STAMP)  ## Install the wheel alone, as a user does, with the oldest and the newest versions, and try it
	@$(BIN)/python -m pytest -n 2 -m network tests/packaging

check: $(STAMP)  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(STAMP)  ## The site of docs/, in docs/_build; a warning is an error
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@$(BIN)/python docs/write_options.py
	@$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

chaos: $(STAMP)  ## Random faults under load, on both brokers, and what came of it
	@$(BIN)/python -m chaos --seconds $(SECONDS) --broker $(BROKER) --locks $(LOCKS) $(if $(SEED),--seed $(SEED))

format: $(STAMP)
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: $(STAMP)  ## The figures that have a bound, in five minutes, side by side with bare calls and others
	@$(BIN)/python -m benchmarks

bench-full: $(STAMP)  ## Everything, in less than an hour on an idle machine; writes docs/benchmarks.md and its plots
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@$(BIN)/python -m benchmarks --full

clean:
	rm -rf $(VENV) .nox dist build docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
