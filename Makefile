# `make demo` and `make test` do all their set-up on a fresh machine: a virtual environment in the tree, an install, a run.
PYTHON ?= python3
VENV := .venv
JOBS ?= 2
OLDEST := 5.15.0
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-transformers clean

demo: $(INSTALLED)
	$(VENV)/bin/python examples/generate.py --model examples/checkpoints/kjv --temperature 0.8 \
		--prompt "And it came to pass" --prompt "Blessed is the man that"

# Triton compiles nothing in a process that interprets its kernels, so those tests run in one of their own.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n $(JOBS)
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(VENV)/bin/python -m pytest -q -n $(JOBS)

# The adapter of transformers again, with the oldest version that it takes, kept in a folder of its own.
test-transformers: $(INSTALLED)
	$(VENV)/bin/python -m pip install -q --upgrade --target $(VENV)/transformers-$(OLDEST) transformers==$(OLDEST)
	OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/transformers-$(OLDEST) $(VENV)/bin/python -m pytest -q -n $(JOBS) \
		tests/test_transformers.py tests/test_transformers_use.py tests/test_transformers_errors.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q setuptools torch -c constraints.txt
	$(VENV)/bin/python -m pip install -q --no-build-isolation -e '.[transformers,dev]' -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV)
