# Each target sets up its own virtual environment on a fresh clone; no other step is needed.
VENV ?= .venv
PYTHON ?= python3
# Installed first where there is no GPU, so that a CPU build is taken when pip has one at hand.
# Any pip arguments do: make test TORCH='/path/to/torch-cpu.whl'
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check format tiny install

install: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	command -v nvidia-smi >/dev/null 2>&1 || $(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e '.[dev]'
	touch $@

# Hand a context from one embedded model to another: the text, how good, how fast.
demo: $(READY)
	PATH="$(abspath $(BIN)):$$PATH" bash examples/demo.sh

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python examples/readme.py

# Train the embedded models anew (hours).
tiny: $(READY)
	$(BIN)/python examples/train_tiny.py
