# `make demo` and `make test` need only Python. CI (.ci/run) runs `make check`, two recipes at a time, and `make system`.
PYTHON ?= python3
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
RUN := $(UV) run --locked --no-sync
export UV_COMPILE_BYTECODE := 1
# Python writes bytecode, because without it each process compiles our modules again.
export PYTHONDONTWRITEBYTECODE :=

# The number of test processes (pytest-xdist), each with separate hosts, servers and folders. Most tests wait more than they compute.
AT_ONCE ?= 5
PARALLEL = -q -n $(AT_ONCE) --dist loadfile --no-loadscope-reorder
TESTS = $(RUN) pytest $(PARALLEL)

# Most of the 18,000 modules of the frameworks are never imported: Python compiles the others when it imports them first.
IN_FRAMEWORKS := UV_PROJECT_ENVIRONMENT=.frameworks/venv UV_COMPILE_BYTECODE=0 $(UV) run --locked --no-default-groups --group frameworks

.PHONY: help demo test unit system nightly long frameworks check lint format kill refusals soak mutate live gpu bench versions constraints screenshots site stack stack-down release clean
help: ## list these commands
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-11s %s\n", $$1, $$2}' Makefile

demo: .venv/ready ## run the same real job on Prefect, Airflow and Dagster, and print a table of the results
	$(RUN) python tests/demo.py

test: unit system ## run the tests of the gate: real pools, hosts, orchestrators, the built wheel

unit: .venv/ready ## run the tests that start no process and no thread, and do not sleep
	$(RUN) pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests/unit

system: .venv/ready ## run the other tests of the gate; those that fail run once more, alone
	$(RUN) python -m tests.two_passes $(PARALLEL) -m "not nightly" --durations=25 tests/system

nightly: .venv/ready ## run what is too long for the gate, one recipe after the other: long, kill, refusals, versions, frameworks, demo
	.ci/nightly

# Servers of three orchestrators run at once: with five processes of tests they do not answer in time.
long: AT_ONCE := 3
long: .venv/ready ## run the tests of tests/nightly, and all cases of the tests that generate cases
	$(TESTS) -m "not frameworks" --durations=25 tests/nightly; code=$$?; \
	EXAMPLES=all $(TESTS) -m "nightly or generated" tests/unit tests/system && exit $$code

frameworks: .uv-ready ## distributed training with PyTorch, JAX, TensorFlow and Keras themselves, in a separate environment (7 GB)
	$(IN_FRAMEWORKS) pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m frameworks --durations=5 tests/nightly/distributed tests/nightly/serialization/test_tensors.py tests/nightly/test_example_programs.py

check: lint unit ## run the checks that must pass before a commit

lint: .venv/ready ## check format, lint, types, layers and the Dockerfile
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) pyright
	$(RUN) lint-imports --no-cache
	$(RUN) hadolint Dockerfile

format: .venv/ready ## format the code, and fix what ruff can fix
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

kill: .venv/ready ## test kill -9 at 5,000 generated points, and print a table of what was alive after each; at each boundary of a pool with a name; test 100,000 histories of calls
	$(RUN) python -m tests.kill --points 5000
	$(RUN) python -m tests.engine.simulation --histories 100000 --from 0
	EVERY=1 $(RUN) pytest -q -n 2 tests/nightly/kill/test_points.py -k boundary

refusals: .venv/ready ## let each call to the system that real pools make (thread, fork, open, socket, write, COMMIT, ...) say no once, and print a table
	$(RUN) python -m tests.refusals

soak: .venv/ready ## make 1,000,000 calls on one pool, and print how much the memory of each process has grown
	$(RUN) python -m tests.soak

mutate: .venv/ready ## list faults that the tests of a module do not notice: make mutate MODULE=skyward_core/engine/placement.py [SAMPLE=50] [SEED=1] [ONLY=decide]
	$(RUN) python -m tests.mutation $(MODULE) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

live: .venv/ready ## check a real cloud with your account: make live PROVIDER=aws; with SPEND=0.50 it also rents two machines in turn, for at most 0.50 USD each
	$(RUN) python -m tests.live $(PROVIDER) $(if $(SPEND),--spend $(SPEND)) $(if $(ACCELERATOR),--accelerator $(ACCELERATOR))

gpu: .venv/ready ## check pools on the NVIDIA GPU of this machine; needs PyTorch, JAX and CuPy in the environment
	$(RUN) python -m tests.gpu

bench: .uv-ready ## side by side with bare Dask and Ray, and with torchrun; writes benchmarks/RESULTS.md
	UV_PROJECT_ENVIRONMENT=.bench/venv $(UV) run --locked --no-default-groups --group bench python benchmarks/bench.py
	UV_PROJECT_ENVIRONMENT=.bench/venv $(UV) run --locked --no-default-groups --group bench python benchmarks/data.py
	$(UV) run --locked python benchmarks/grid_search.py
	$(IN_FRAMEWORKS) python benchmarks/training.py

versions: .venv/ready ## test the core and each plugin with the lowest allowed versions, each minor version of Prefect, and the newest versions (failures of the newest are only reported)
	$(RUN) python -m tests.versions lowest minors newest

constraints: .venv/ready ## write constraints-3.12.txt and constraints-3.13.txt from uv.lock
	$(RUN) python -m tests.versions constraints

screenshots: .venv/ready ## write the pictures of `skyward ui` and of the pages of Prefect, Airflow and Dagster in docs/images (needs Chromium)
	SCREENSHOTS=docs/images/commands $(RUN) pytest -q tests/nightly/cli/test_ui_browser.py
	SCREENSHOTS=docs/images/prefect $(RUN) pytest -q tests/nightly/integrations/test_prefect_browser.py
	SCREENSHOTS=docs/images/airflow $(RUN) pytest -q tests/nightly/integrations/test_airflow_browser.py
	SCREENSHOTS=docs/images/dagster $(RUN) pytest -q tests/nightly/integrations/test_dagster_browser.py

site: .venv/ready ## build the documentation site into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

stack: .venv/ready ## run PostgreSQL, Prefect, Airflow, Dagster and two nodes as docker-compose.yml describes them, until Ctrl-C; settings in ENV=development.env
	$(RUN) python -m tests.stack $(ENV)

stack-down: .venv/ready ## end the services of `make stack` from another shell, and what a killed one has left
	$(RUN) python -m tests.stack down

release: .uv-ready ## build HEAD into dist/: wheel, sdist, bill of materials, constraints, checked; the version is that of the git tag
	UV_PROJECT_ENVIRONMENT=.release/venv UV_COMPILE_BYTECODE=0 $(UV) run --locked --exact --only-group release python -m tests.release

clean: ## remove environments and caches of this folder
	rm -rf .venv .uv .bench .frameworks .release .sdks .pytest_cache .ruff_cache .hypothesis dist

.venv/ready: uv.lock pyproject.toml | .uv-ready
	$(UV) sync --locked --quiet
	@touch $@

# If uv is not on the PATH, pip installs it into the folder .uv.
.PHONY: .uv-ready
.uv-ready:
	@command -v $(UV) >/dev/null 2>&1 || $(PYTHON) -m pip install --quiet --disable-pip-version-check --target .uv uv
