# Each target sets up .venv when it is first used. It needs Python 3.11 or newer; `oldest` needs 3.11, and `versions` each Python of noxfile.py.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
TEXTLINT := $(VENV)/node_modules/.package-lock.json

.PHONY: demo test rabbitmq model web proof compat topologies coverage oldest versions matrix twins celery-suite wheel check prose contracts house docs chaos fuzz drills mutants everywhere format bench bench-full clean

# These also run in every pool, so they are part of make compat.
IN_POOLS := $(patsubst %,tests/acceptance/test_%.py,line_pools line_rate_limit line_quorum)

# make matrix runs these with every pool on every broker, and their cases that differ little from others; make test has one case of each.
PRODUCTS := $(patsubst %,tests/acceptance/test_%.py,handover line_backlog one_job deaths jobs_that_never_start limits_ways_out \
	worker_start complaints lost_locks migrating)

# These wait for servers and workers. Unit tests need a processor all the time, so make test does not run them beside these.
WAITING := $(addprefix tests/,integration acceptance)
NOT_IN_POOLS := $(WAITING) $(IN_POOLS:%=--ignore=%)

# Python keeps what it has compiled, even where the environment says not to: else each process, and each that it starts, compiles it anew.
test rabbitmq model web compat topologies: export PYTHONDONTWRITEBYTECODE :=

# What make coverage runs. Not the model: it is not part of the package, and takes minutes under coverage.
MEASURED := $(addprefix tests/,unit integration acceptance packaging compatibility frameworks topologies)

# What make prose reads.
PROSE := *.md docs/*.md 'celery_redislock/**/*.py' 'celery_redislock/**/*.lua'

# How long make chaos, make fuzz and make twins take in all. SEED=7 repeats a run; BROKER is redis, rabbitmq or both, LOCKS one, sentinel, cluster, acl or tls.
# With CROWD=5000, that many messages wait for one key at the end of make chaos.
SECONDS ?= 60
BROKER ?= both
LOCKS ?= one

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## Run the example app on its own server
	@$(BIN)/python -m example_worker

test: $(STAMP)  ## The tests on real servers and workers, except those of make check, rabbitmq, model, web, compat, topologies, twins and wheel
	@$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit
	@for one in $(WAITING); do $(BIN)/python -m pytest --collect-only -qq $$one >/dev/null & done; wait  # compiles them, once
	@$(BIN)/python -m pytest -n 10 --dist loadfile $(NOT_IN_POOLS) -m 'not network and not rabbitmq'

rabbitmq: $(STAMP)  ## The tests of the same folders that are on RabbitMQ
	@$(BIN)/python -m pytest -n 8 --dist loadfile $(NOT_IN_POOLS) -m rabbitmq

model: $(STAMP)  ## The protocol on paper: every interleaving, the known mistakes, and the scripts compared with it; and random steps on a server
	@$(BIN)/python -m pytest -n 2 --dist loadfile tests/model tests/properties

web: $(STAMP)  ## The web page, in the system's Chromium
	@$(BIN)/python -m pytest -n 3 --dist loadfile tests/web

proof: $(STAMP)  ## The property tests with ten times as many steps, new ones each time; SEED=7 repeats them
	@PROPERTIES=proof SEED=$(or $(SEED),$(shell date +%s)) $(BIN)/python -m pytest -n 3 --dist worksteal tests/properties

topologies: $(STAMP)  ## What differs if the lock server is a Cluster or behind Sentinels
	@$(BIN)/python -m pytest -n 3 --dist loadfile tests/topologies

compat: $(STAMP)  ## About ten tests for each pool and each small broker (docs/compatibility.md), the frameworks, and the contracts of the ports
	@$(BIN)/python -m pytest -n 3 tests/compatibility tests/frameworks tests/contracts $(IN_POOLS)

coverage: $(STAMP)  ## Branch coverage, in worker processes too: more than an hour
	@rm -f .coverage .coverage.*
	-@$(BIN)/python -m coverage run -m pytest -n 3 --dist loadfile $(MEASURED)  # a failing test must not prevent the report
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report

oldest: $(STAMP)  ## make test without the slow tests, with the oldest supported Python, Celery, kombu and redis-py
	@$(BIN)/python -m nox --reuse-venv yes --session 'tests(oldest-3.11)'

versions: $(STAMP)  ## The same with each Python, and with the versions in between; it needs each of the Pythons
	@$(BIN)/python -m nox

matrix: $(STAMP)  ## Every pool on every broker; the acceptance tests without wake-ups and with each lock server; the fuzz: hours
	@LAB_EVERY_BROKER=1 $(BIN)/python -m pytest -n 3 tests/compatibility $(PRODUCTS)
	@LAB_DROPS_PUBLISH=1 $(BIN)/python -m pytest -n 3 --dist loadfile tests/acceptance
	@LAB_LOCKS=cluster $(BIN)/python -m pytest -n 3 --dist loadfile tests/acceptance
	@LAB_LOCKS=sentinel $(BIN)/python -m pytest -n 3 --dist loadfile tests/acceptance
	@LAB_LOCKS=acl $(BIN)/python -m pytest -n 3 --dist loadfile tests/acceptance
	@LAB_LOCKS=tls $(BIN)/python -m pytest -n 3 --dist loadfile tests/acceptance
	@$(BIN)/python -m fuzz --seconds 1200 --broker redis
	@$(BIN)/python -m fuzz --seconds 1200 --broker rabbitmq

twins: $(STAMP)  ## Twenty random workflows and their plain twins; with SECONDS=3600 others for that long, starting at SEED=7, also with BROKER=rabbitmq
ifeq ($(origin SECONDS),command line)
	@$(BIN)/python -m tests.twins --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) --broker $(BROKER:both=redis)
else
	@$(BIN)/python -m pytest tests/twins
endif

celery-suite: $(STAMP)  ## Celery's own integration suite, plain and with every task locked; CELERY=../celery is a checkout of Celery
	@$(BIN)/python -m tests.celery_suite $(or $(CELERY),$(error CELERY=../celery must be a checkout of Celery))

wheel: $(STAMP)  ## Install only the wheel, with the oldest and the newest versions, and try it
	@$(BIN)/python -m pytest -n 2 -m '' tests/packaging

check: $(STAMP) prose  ## ruff, the prose linter, and mypy and pyright, also over code as users write it
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q -n 2 tests/typing

# pip brings Node, and its npm installs textlint next to it.
$(TEXTLINT): prose/package.json | $(STAMP)
	@echo "installing textlint into $(VENV) ..."
	@cp $< $(VENV)
	@PATH="$(abspath $(BIN)):$$PATH" npm install --prefix $(VENV) --silent --no-audit --no-fund
	@touch $@

prose: $(TEXTLINT)  ## The words of prose/words.yml in the documents and the code; FILES="README.md docs/lock.md" checks only these
	@$(BIN)/node $(VENV)/node_modules/textlint/bin/textlint.js --config prose/textlint.json \
		--rules-base-directory $(abspath $(VENV))/node_modules --format unix --no-color \
		$(or $(FILES),$(PROSE))

contracts: $(STAMP)  ## What the ports need of Celery, kombu, billiard and redis-py, with the newest releases and pre-releases
	@$(BIN)/python -m nox --session contracts

house: $(STAMP)  ## The size of the package, the depth of its imports, and where it reaches into other packages
	@$(BIN)/python -m tests.house

docs: $(STAMP)  ## The site of docs/, in docs/_build; a warning or a dead link is an error
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@$(BIN)/python docs/write_options.py
	@rm -rf docs/_build/html  # an old page would hide a dead link
	@$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build/html
	@$(BIN)/python docs/check_links.py docs/_build/html
	@echo "open docs/_build/html/index.html"

chaos: $(STAMP)  ## Random faults under load, on both brokers, and the result
	@$(BIN)/python -m chaos --seconds $(SECONDS) --broker $(BROKER) --locks $(LOCKS) $(if $(SEED),--seed $(SEED)) $(if $(CROWD),--crowd $(CROWD))

fuzz: $(STAMP)  ## Lives of random apps: tasks, calls, deploys and faults, held against the docs; SEED=7 repeats them, BROKER=rabbitmq
	@$(BIN)/python -m fuzz --seconds $(SECONDS) --broker $(BROKER:both=redis) $(if $(SEED),--seed $(SEED))

drills: $(STAMP)  ## What `why`, `list` and the alerts say of nine faults, and how soon; DRILL=host_paused does one of them
	@$(BIN)/python -m drills $(DRILL)

mutants: $(STAMP)  ## Each mistake of mutants/, in a copy of the code: the test that is named for it must fail
	@$(BIN)/python -m mutants --table
	@$(BIN)/python -m mutants

everywhere: $(STAMP)  ## Small changes everywhere in the modules without I/O; MODULE=protocol/names.py changes one. Prints what no test finds
	@$(BIN)/python -m mutants.everywhere $(MODULE)

format: $(STAMP)
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: $(STAMP)  ## The figures that have a bound, in five minutes, compared with bare calls and other locks
	@$(BIN)/python -m benchmarks

bench-full: $(STAMP)  ## All figures, in less than an hour on an idle machine; writes docs/benchmarks.md and its plots
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@$(BIN)/python -m benchmarks --full

clean:
	rm -rf $(VENV) .coverage .coverage.* .nox dist build docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
