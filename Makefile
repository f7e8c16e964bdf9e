# Every target works in a fresh clone, in a folder of any name. The first target creates .venv; later ones use it.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
GPU := .venv-gpu
PRODUCT := proto router workers cluster __init__.py
TESTS_WITHOUT_RAY := tests/workers/model tests/workers/transfer tests/workers/tp

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Each test process imports 2,000 modules. Without the byte code of an earlier run, it compiles them for 2 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo demo-kill quick test test-gpu-versions gpu gpu-tree soak matrix pods check audit fuzz breaking format proto wheel clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 27

venv: .venv/.installed  ## create .venv with the pinned versions; again when they change

demo: .venv/.installed  ## serve the demo model on this machine, send it four prompts at once, stop
	@$(BIN)/tandem demo

demo-kill: .venv/.installed  ## kill processes while 16 streams of the demo model run, and compare every token; OPTIONS="--tokens 400"
	@$(BIN)/tandem demo --kill $(OPTIONS)

quick: .venv/.installed  ## run the tests that need no network, no process and no model
	$(BIN)/pytest --quick -q -p no:schemathesis -n 2

test: .venv/.installed  ## run every test except the soak, matrix and pods tests below; RERUN=1 runs failed tests a second time, alone
	$(BIN)/python -m tandem.tests.suite $(if $(RERUN),--rerun)

test-gpu-versions: $(GPU)/.installed  ## run the tests of models, transfers and ranks with a GPU machine's versions of torch, Triton and Python
	OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)/$(GPU)/tree" $(GPU)/bin/python -m pytest -q -n 2 $(TESTS_WITHOUT_RAY)

gpu: .venv/.installed  ## test and measure this machine's GPU; PARTS=A (results), B (speed), C (prefill to decode); OUT=FOLDER SECONDS=N DEVICE=cuda SHAPE=NAME
	$(BIN)/python -m tandem.tests.bench.gpu --out "$(or $(OUT),build/gpu)" $(if $(PARTS),--parts $(PARTS)) \
	  $(if $(SECONDS),--seconds $(SECONDS)) $(if $(DEVICE),--device $(DEVICE)) $(if $(SHAPE),--shape $(SHAPE))

gpu-tree: .venv/.installed  ## copy the repository, and the packages that a GPU machine without network lacks, to the folder OUT; at most 64 MiB
	$(BIN)/python -m tandem.tests.bench.gpu.tree "$(or $(OUT),$(error OUT=FOLDER is missing))"

soak: .venv/.installed  ## run only the long soak tests
	$(BIN)/pytest -m soak

matrix: .venv/.installed  ## run only the whole fault matrix; `make test` runs each pair of its factors
	$(BIN)/pytest -m matrix

pods: .venv/.installed  ## run only the tests of k8s/, with pods as network namespaces, as root; ends each pod while streams run
	$(BIN)/pytest -m pods tests/k8s

check: .venv/.installed  ## check lint, format, types, security rules, architecture, language, generated code, protobuf style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=.venv/typing $(BIN)/mypy -p tandem
	$(BIN)/bandit -q -r -c pyproject.toml $(PRODUCT)
	$(BIN)/pytest -q tests/test_architecture.py tests/test_names.py tests/test_language.py \
	  tests/test_security_rules.py
	$(BIN)/python proto/generate.py --check
	$(BIN)/buf lint

fuzz: .venv/.installed  ## test each parser of bytes from outside with 2,000 damaged inputs, each HTTP operation with 2,000 requests, the engine with 2,000 orders of events
	$(BIN)/pytest --hypothesis-profile=fuzz -q tests/fuzz tests/router/api/test_schemathesis.py \
	  tests/workers/engine/test_engine_properties.py tests/workers/engine/test_suspend.py

audit: .venv/.installed  ## look up each pinned version in PyPI's list of known vulnerabilities; needs PyPI itself, not a mirror
	$(BIN)/pip-audit --strict --no-deps --disable-pip -r constraints.txt

breaking: .venv/.installed  ## check that the .proto files are compatible with those of the branch BASE (main)
	$(BIN)/buf breaking --against '.git#ref=$(or $(BASE),main)'

format: .venv/.installed  ## format the code, and apply the automatic fixes of ruff
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: .venv/.installed  ## generate the modules in proto/ from the .proto files
	$(BIN)/python proto/generate.py

wheel: .venv/.installed  ## build the wheel and the sdist in dist/; the C kernels are compiled at their first use
	rm -rf build dist
	$(BIN)/python -c 'import setuptools.build_meta as backend; backend.build_wheel("dist"); backend.build_sdist("dist")'
	rm -rf build *.egg-info
	@ls dist

clean:  ## remove caches and build output; keeps .venv and downloaded models
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name .venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

# mypy needs a folder named tandem: .venv/typing/tandem is a link to the repository.
.venv/.installed: pyproject.toml constraints.txt
	@python=; \
	for candidate in $${PYTHON:-$$(readlink -e .venv/bin/python || true) python3.11 python3.12 python3.13 python3}; do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "error: no Python 3.11 or newer with venv found; install one, or name it: make PYTHON=/path/to/python" >&2; \
	  exit 1; \
	fi; \
	echo "installing into .venv with $$python (minutes at the first time)"; \
	if [ -x .venv/bin/python ] && [ "$$(.venv/bin/python -V)" != "$$("$$python" -V)" ]; then rm -rf .venv; fi; \
	"$$python" -m venv .venv
	@$(BIN)/python -m pip -qq install --constraint constraints.txt --editable '.[dev]'
	@mkdir -p .venv/typing && ln -sfn ../.. .venv/typing/tandem
	@touch $@

# The versions of a GPU machine. Tandem is a link in this environment, as on that machine. PyPI has only torch's build for GPUs (5 GB).
$(GPU)/.installed: tests/gpu/requirements.txt constraints.txt
	@python=; \
	for candidate in $${PYTHON:-} python3.12 "$$HOME"/.pyenv/versions/3.12*/bin/python; do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then \
	    python=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "error: no Python 3.12 with venv found; install it, or name it: make PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi; \
	echo "installing into $(GPU) with $$python (minutes, 5 GB)"; \
	"$$python" -m venv $(GPU)
	@awk -F== 'NR == FNR {if (NF == 2) replaced[$$1]; next} !($$1 in replaced)' \
	  tests/gpu/requirements.txt constraints.txt >$(GPU)/constraints.txt
	@$(GPU)/bin/python -m pip -qq install --constraint $(GPU)/constraints.txt --requirement tests/gpu/requirements.txt
	@mkdir -p $(GPU)/tree && ln -sfn ../.. $(GPU)/tree/tandem
	@touch $@
