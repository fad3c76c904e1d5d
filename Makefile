# `make demo` and `make test` need no other set-up: they create .venv once and reuse it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Upgrades pip, because the version that comes with Python 3.11 takes twice as long to install packages.
MAKE_VENV := $(PYTHON) -m venv --upgrade-deps
# Python compiles modules when it first imports them. pip would compile all modules, which takes twice
# as long as the remaining installation.
export PIP_COMPILE := 0
export PYTHONDONTWRITEBYTECODE :=
SOURCES := extract_activations.py qwen2_jax.py qwen2_jax_with_hooks.py activation_extraction tests benchmarks

# Three workers are right for two cores, because one of them usually waits for other processes, a
# bucket or a scheduler. All tests of a group run in one worker (see tests/conftest.py). Without
# --max-worker-restart, the other workers would wait forever after a worker has crashed.
PYTEST := JAX_PLATFORMS=cpu PYTHONPATH=$(VENV)/libtpu $(BIN)/python -m pytest -n 3 --dist loadgroup \
	--max-worker-restart 0

.PHONY: demo test test-all test-quick lint bench clean

demo: $(VENV)/.runtime
	JAX_PLATFORMS=cpu $(BIN)/python extract_activations.py --demo --output_dir demo_activations --overwrite

# The tests of the most important promises: correct values, each sample stored exactly once, file
# formats and messages.
test: $(VENV)/.dev $(VENV)/.libtpu
	$(PYTEST) -m "not rare and not slow"

# All tests. In addition, these test full-size models, TPU programs of large models, Slurm, SkyPilot,
# the trainers that read runs and exports, servers of each kind of store, the package, the image and the
# benchmarks.
test-all: $(VENV)/.dev $(VENV)/.libtpu $(VENV)/.slurm $(VENV)/skypilot/.done $(VENV)/trainers/.done \
		$(VENV)/moto/.done $(VENV)/azurite/.done
	$(PYTEST)

# A quick check while editing: one tiny model, packing, storage, resuming and bad input.
test-quick: $(VENV)/.dev
	$(PYTEST) -m "not slow and not long and not rare"

lint: $(VENV)/.dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy $(SOURCES)
	$(BIN)/shellcheck *.sh deploy/*.sh deploy/*.sbatch
	$(BIN)/hadolint Dockerfile

bench: $(VENV)/.runtime $(VENV)/competitors/.done
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.end_to_end

clean:
	rm -rf $(VENV) demo_activations .mypy_cache .pytest_cache .ruff_cache

$(VENV)/bin/python:
	$(MAKE_VENV) $(VENV)

$(VENV)/.runtime: requirements.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	touch $@

# The TPU compiler, for tests only. It is not installed among the environment's packages, because JAX
# looks for a TPU whenever it can import libtpu.
$(VENV)/.libtpu: tests/requirements-libtpu.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/libtpu --requirement tests/requirements-libtpu.txt
	touch $@

# Some tests run on a real Slurm; they are skipped where it cannot be installed.
$(VENV)/.slurm: | $(VENV)/bin/python
	if ! command -v slurmctld >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
			apt-get install -qq --yes --no-install-recommends slurm-wlm munge >/dev/null || true; \
	fi
	touch $@

# SkyPilot, which validates deploy/skypilot.yaml. It has its own environment, because it may need other
# versions of our packages.
$(VENV)/skypilot/.done: tests/requirements-skypilot.txt | $(VENV)/bin/python
	$(MAKE_VENV) $(VENV)/skypilot
	$(VENV)/skypilot/bin/python -m pip install --quiet --requirement tests/requirements-skypilot.txt
	touch $@

# The packages that the benchmark compares with, in their own environment.
$(VENV)/competitors/.done: benchmarks/requirements.txt | $(VENV)/bin/python
	$(MAKE_VENV) $(VENV)/competitors
	$(VENV)/competitors/bin/python -m pip install --quiet --requirement benchmarks/requirements.txt
	touch $@

# The trainers that read runs and exports, in their own environment.
$(VENV)/trainers/.done: tests/requirements-trainers.txt tests/requirements-trainers-alone.txt | $(VENV)/bin/python
	$(MAKE_VENV) $(VENV)/trainers
	$(VENV)/trainers/bin/python -m pip install --quiet --requirement tests/requirements-trainers.txt
	$(VENV)/trainers/bin/python -m pip install --quiet --no-deps --requirement tests/requirements-trainers-alone.txt
	touch $@

# moto, a server of S3, in its own environment.
$(VENV)/moto/.done: tests/requirements-moto.txt | $(VENV)/bin/python
	$(MAKE_VENV) $(VENV)/moto
	$(VENV)/moto/bin/python -m pip install --quiet --requirement tests/requirements-moto.txt
	touch $@

# Azurite, a server of Azure's storage, which runs on Node.
$(VENV)/azurite/.done: tests/azurite/package.json | $(VENV)/bin/python
	if ! command -v npm >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
			apt-get install -qq --yes --no-install-recommends nodejs npm >/dev/null; \
	fi
	mkdir -p $(VENV)/azurite
	cp $< $(VENV)/azurite/
	npm install --prefix $(VENV)/azurite --no-audit --no-fund --no-update-notifier --loglevel error
	touch $@

$(VENV)/.dev: tests/requirements.txt $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --requirement tests/requirements.txt
	touch $@
