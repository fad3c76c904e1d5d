# `make demo` and `make test` do all the set-up: they make .venv once and reuse it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With the newest pip: the one that comes with Python 3.11 takes twice as long.
MAKE_VENV := $(PYTHON) -m venv --upgrade-deps
# Python compiles what it imports, once. pip would compile all there is, which takes twice as long as
# the rest of installing it.
export PIP_COMPILE := 0
export PYTHONDONTWRITEBYTECODE :=
SOURCES := extract_activations.py qwen2_jax.py qwen2_jax_with_hooks.py activation_extraction tests benchmarks

# On two cores: while two processes compute, the third one waits for hosts, buckets or a scheduler.
# One of them runs all tests of a model family (see tests/conftest.py). Without the last flag, the
# others would wait for ever when one has crashed.
PYTEST := JAX_PLATFORMS=cpu PYTHONPATH=$(VENV)/libtpu $(BIN)/python -m pytest -n 3 --dist loadgroup \
	--max-worker-restart 0

.PHONY: demo test test-all test-quick lint bench clean

demo: $(VENV)/.runtime
	JAX_PLATFORMS=cpu $(BIN)/python extract_activations.py --demo --output_dir demo_activations --overwrite

# What protects numbers, every sample stored once, formats and messages.
test: $(VENV)/.dev $(VENV)/.libtpu
	$(PYTEST) -m "not rare and not slow"

# Also full-size shapes, TPU programs of large models, Slurm, SkyPilot, the real trainers of
# autoencoders, servers of every store, the package, the image and the benchmarks.
test-all: $(VENV)/.dev $(VENV)/.libtpu $(VENV)/.slurm $(VENV)/skypilot/.done $(VENV)/trainers/.done \
		$(VENV)/moto/.done $(VENV)/azurite/.done
	$(PYTEST)

# For the loop of daily work: one tiny model, packing, storage, resuming, bad input.
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

# The TPU compiler, for tests only and out of the way: JAX would look for a TPU wherever it is found.
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

# Validates deploy/skypilot.yaml; its versions need not be ours.
$(VENV)/skypilot/.done: tests/requirements-skypilot.txt | $(VENV)/bin/python
	$(MAKE_VENV) $(VENV)/skypilot
	$(VENV)/skypilot/bin/python -m pip install --quiet --requirement tests/requirements-skypilot.txt
	touch $@

# What the benchmark compares with; its versions need not be ours.
$(VENV)/competitors/.done: benchmarks/requirements.txt | $(VENV)/bin/python
	$(MAKE_VENV) $(VENV)/competitors
	$(VENV)/competitors/bin/python -m pip install --quiet --requirement benchmarks/requirements.txt
	touch $@

# The real trainers of autoencoders; their versions need not be ours.
$(VENV)/trainers/.done: tests/requirements-trainers.txt tests/requirements-trainers-alone.txt | $(VENV)/bin/python
	$(MAKE_VENV) $(VENV)/trainers
	$(VENV)/trainers/bin/python -m pip install --quiet --requirement tests/requirements-trainers.txt
	$(VENV)/trainers/bin/python -m pip install --quiet --no-deps --requirement tests/requirements-trainers-alone.txt
	touch $@

# A server of S3; its versions need not be ours.
$(VENV)/moto/.done: tests/requirements-moto.txt | $(VENV)/bin/python
	$(MAKE_VENV) $(VENV)/moto
	$(VENV)/moto/bin/python -m pip install --quiet --requirement tests/requirements-moto.txt
	touch $@

# A server of Azure's storage, which runs on Node.
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
