# On a machine with only Python: `make demo`, `make test`. The very recipes that CI runs (.ci/run).
PYTHON ?= python3
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
RUN := $(UV) run --locked --no-sync
export UV_COMPILE_BYTECODE := 1
# Each of many processes would compile our own modules again.
export PYTHONDONTWRITEBYTECODE :=

# Several test processes (pytest-xdist), each with hosts, servers and folders of its own: most tests wait more than they compute.
AT_ONCE ?= 4
TESTS := $(RUN) pytest -q -n $(AT_ONCE) --dist loadfile --no-loadscope-reorder

# Most of the 18,000 modules of the frameworks are never imported: Python compiles the others when it imports them first.
IN_FRAMEWORKS := UV_PROJECT_ENVIRONMENT=.frameworks/venv UV_COMPILE_BYTECODE=0 $(UV) run --locked --no-default-groups --group frameworks

.PHONY: help demo test quick long frameworks check lint format kill soak mutate live bench versions constraints clean
help: ## what there is
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "make %-11s %s\n", $$1, $$2}' Makefile

demo: .venv/ready ## the same real job on Prefect, Airflow and Dagster, and a table of what came out
	$(RUN) python tests/demo.py

test: .venv/ready ## real pools, real orchestrators, built wheels: all tests but the long ones
	$(TESTS) -m "not long and not frameworks" --durations=5

quick: .venv/ready ## the tests without those that install packages or start servers
	$(TESTS) -m "not slow and not long and not frameworks"

long: .venv/ready ## the tests that take long, and all generated cases of those that generate them
	EXAMPLES=all $(TESTS) -m "long or generated" --durations=5

frameworks: .uv-ready ## distributed training with PyTorch, JAX, TensorFlow and Keras themselves, in a separate environment (7 GB)
	$(IN_FRAMEWORKS) pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m frameworks --durations=5 tests/distributed tests/test_example_programs.py tests/test_seed_blocks.py

check: lint quick ## what must be green before a commit

lint: .venv/ready ## format, lint, types, layers
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) pyright
	$(RUN) lint-imports --no-cache

format: .venv/ready ## mend format and whatever ruff can mend by itself
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

kill: .venv/ready ## kill -9 at 5,000 generated points, and the matrix of what was found alive after each; 100,000 histories of calls
	$(RUN) python -m tests.kill --points 5000
	$(RUN) python -m tests.engine.simulation --histories 100000 --from 0

soak: .venv/ready ## 1,000,000 calls on one pool, and by how much each of its processes has grown
	$(RUN) python -m tests.soak

mutate: .venv/ready ## faults that the tests of a module do not notice: make mutate MODULE=skyward_core/engine/placement.py [SAMPLE=50] [SEED=1] [ONLY=decide]
	$(RUN) python -m tests.mutation $(MODULE) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

live: .venv/ready ## look at a real cloud with your account: make live PROVIDER=aws; with SPEND=0.50 rent one machine for at most so many USD
	$(RUN) python -m tests.live $(PROVIDER) $(if $(SPEND),--spend $(SPEND)) $(if $(ACCELERATOR),--accelerator $(ACCELERATOR))

bench: .uv-ready ## side by side with bare Dask and Ray, and with torchrun; writes benchmarks/RESULTS.md
	UV_PROJECT_ENVIRONMENT=.bench/venv $(UV) run --locked --no-default-groups --group bench python benchmarks/bench.py
	UV_PROJECT_ENVIRONMENT=.bench/venv $(UV) run --locked --no-default-groups --group bench python benchmarks/data.py
	$(UV) run --locked python benchmarks/grid_search.py
	$(IN_FRAMEWORKS) python benchmarks/training.py

versions: .venv/ready ## the core and every plugin with the lowest versions that are allowed, and with the newest there are (those are reported only)
	$(RUN) python -m tests.versions lowest newest

constraints: .venv/ready ## write constraints-3.12.txt and constraints-3.13.txt anew from uv.lock
	$(RUN) python -m tests.versions constraints

clean: ## remove environments and caches of this folder
	rm -rf .venv .uv .bench .frameworks .pytest_cache .ruff_cache .hypothesis dist

.venv/ready: uv.lock pyproject.toml | .uv-ready
	$(UV) sync --locked --quiet
	@touch $@

# uv, if it is not on the PATH, is installed by pip into a folder of its own.
.PHONY: .uv-ready
.uv-ready:
	@command -v $(UV) >/dev/null 2>&1 || $(PYTHON) -m pip install --quiet --disable-pip-version-check --target .uv uv
